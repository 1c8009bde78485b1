"""Passes beside what the machine allows: the counting, the measuring, and the file between."""

from __future__ import annotations

import time

import pytest
from conftest import FAMILIES
from torch import nn

from graft.drafters.dflash import untrained
from graft.drafters.noisy import Noisy
from graft.eval import limits, tables
from graft.eval.limits import Pass, Passes, Work
from graft.targets import tiny


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """A machine measured in no time."""
    monkeypatch.setattr(limits, "READ", {"cpu": 2**20})
    monkeypatch.setattr(limits, "SIDE", {"cpu": 128})
    monkeypatch.setattr(limits, "ROWS", (1, 4, 16))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_verify_pass_reads_the_weights_of_the_model(family):
    model = tiny.model(family)
    dense = [layer.weight for layer in model.modules() if isinstance(layer, nn.Linear)]
    read = sum(weight.numel() for weight in dense)
    if "moe" in family:  # two of eight experts, however a version of transformers keeps them
        H, width, layers = 64, 64, 2
        names = dict(model.named_parameters())
        rest = ("experts", "embed_tokens", "norm")
        read = sum(w.numel() for n, w in names.items() if not any(part in n for part in rest))
        read += layers * 2 * 3 * H * width
    target = tiny.load(family, device="cpu")
    assert limits.verify_work(target, 1) == Work(4 * read, 2 * read)
    assert limits.verify_work(target, 9) == Work(4 * read, 18 * read), "weights are read once"


def test_a_draft_reads_the_weights_of_the_network_and_the_head():
    target = tiny.load(device="cpu", dtype="bfloat16")
    made = untrained(target, layers=3, block_size=8, mask_token_id=258, taps=1)
    H, kv = 64, 32
    layer = 2 * H * 64 + 2 * H * kv + 3 * H * made.config.intermediate_size
    head = target.vocab_size * H
    found = limits.draft_work(target, made)
    assert found.bytes == 2 * (3 * layer + H * H + head)
    keys = 3 * 2 * H * kv
    assert found.flops == 2 * (3 * layer * 8 + keys * limits.NEW + H * H * limits.NEW + head * 7)
    assert limits.draft_work(target, Noisy(target)) is None


def test_measured_passes_are_consistent(tmp_path):
    target, other = tiny.load(device="cpu"), tiny.load(device="cpu", passes="eager")
    drafters = [
        untrained(one, layers=2, block_size=8, mask_token_id=258, taps=1) for one in (target, other)
    ]
    models = {"target": "t", "drafter": "d", "dtype": "float32", "device": "x", "threads": 1}
    found = limits.measure(
        target,
        drafters[0],
        eager=(other, drafters[1]),
        context=20,
        repeats=3,
        made_by=models | {"git": "abc"},
    )
    assert [(one.kind, one.rows) for one in found.passes] == [
        *(("verify", rows) for rows in (1, 4, 16)),
        ("draft", 8),
    ]
    for one in found.passes:
        limit = max(one.work.bytes / found.bandwidth, one.work.flops / found.rate)
        assert found.limit(one.work) == limit > 0
        assert min(one.seconds, one.eager) > 0
    assert found.step == found.passes[0].seconds
    assert found.fits(models)
    assert not found.fits(models | {"dtype": "bfloat16"})
    found.save(tmp_path / "passes.json")
    again = Passes.load(tmp_path / "passes.json")
    assert again.passes == found.passes
    assert tables.passes(again).rows == tables.passes(found).rows


def test_the_slower_bound_is_the_limit():
    few, many = Work(10**9, 10**9), Work(10**9, 100 * 10**9)
    passes = [Pass("verify", 1, 0.2, None, few), Pass("verify", 64, 4.0, None, many)]
    found = Passes(8, 1e10, 5e10, passes)
    assert (found.limit(few), found.reads(few)) == (0.1, True)
    assert (found.limit(many), found.reads(many)) == (2.0, False)
    table = tables.passes(found)
    assert "through torch, ms" not in table.headings
    assert table.rows[0] == ["plain step", "100", "reading", "200", "2.00x", "1.00"]
    assert table.rows[1][1:] == ["2000", "arithmetic", "4000", "2.00x", "20.00"]


def test_everything_measured_takes_its_turn():
    runs: list[str] = []

    def run(name: str) -> None:
        runs.append(name)
        time.sleep(0.004 if name == "slow" else 0.0)

    took = limits.medians({name: lambda n=name: run(n) for name in ("fast", "slow")}, 20)
    assert took["slow"] > 0.004 > took["fast"]
    turns = [tuple(runs[i : i + 2]) for i in range(2, 42, 2)]
    assert all(set(turn) == {"fast", "slow"} for turn in turns)
    assert len(set(turns)) == 2, "in either order"
