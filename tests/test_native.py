"""Compiled passes on a CPU: against torch's, bit by bit against themselves whatever stands beside a
row, and what happens where they cannot be compiled.
"""

from __future__ import annotations

import logging
import os
import platform
import stat
import subprocess
import sys
import time
from pathlib import Path

import launch
import numpy as np
import pytest
import torch
from conftest import PROMPT
from hypothesis import given, settings
from hypothesis import strategies as st
from test_targets import path_to, random_tree

from graft.budgets.fixed import Fixed
from graft.core.tree import chain_tree
from graft.core.types import Draft, Request
from graft.decode import autoregressive, loop
from graft.drafters.dflash import untrained
from graft.drafters.noisy import Noisy
from graft.native import build, calls
from graft.scorer import checkpoint
from graft.scorer.checkpoint import EdgeScorer
from graft.targets import tiny
from graft.trees.ddtree import DDTree

pytestmark = pytest.mark.skipif(build.library() is None, reason="no compiler")
DTYPES = ["float32", "bfloat16"]
DENSE = ["llama", "qwen3"]  # the kernels know no experts


def close(one: torch.Tensor, other: torch.Tensor, dtype: str) -> None:
    """To rounding: bf16 rounds every activation to 8 bits, in one order or another."""
    scale = float(other.float().std())
    atol = 2e-5 * scale if dtype == "float32" else 0.12 * scale
    torch.testing.assert_close(one.float(), other.float(), rtol=1e-3, atol=atol)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", DENSE)
@pytest.mark.parametrize("threads", [1, 2])
def test_compiled_passes_are_those_of_torch(family, dtype, threads):
    targets = [tiny.load(family, dtype=dtype, device="cpu", passes=p) for p in ("auto", "eager")]
    torch.set_num_threads(threads)
    steps = []
    for target in targets:
        target.tap([1, 0])
        steps.append([target.prefill(PROMPT * 8), target.verify(random_tree(40, 0))])
    torch.set_num_threads(1)
    for ours, theirs in zip(*steps, strict=True):
        close(ours.logits, theirs.logits, dtype)
        close(ours.taps, theirs.taps, dtype)
        assert ours.best.tolist() == ours.logits.float().argmax(-1).tolist()
    close(targets[0].cache.rows(), targets[1].cache.rows(), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_compiled_drafts_are_those_of_torch(dtype):
    drafts = []
    for passes in ("auto", "eager"):
        target = tiny.load("qwen3", dtype=dtype, device="cpu", passes=passes)
        drafter = untrained(target, layers=2, block_size=8, mask_token_id=258, taps=1, seed=3)
        assert (drafter._compiled is not None) == (passes == "auto")
        taps = torch.randn(300, 64, generator=torch.Generator().manual_seed(0)).to(target.dtype)
        drafts += [drafter.propose(7, taps[:290]), drafter.propose(9, taps[290:])]
    for ours, theirs in zip(drafts[:2], drafts[2:], strict=True):
        if dtype == "float32":
            assert np.array_equal(ours.tokens[:, :8], theirs.tokens[:, :8])
        close(torch.from_numpy(ours.log_probs), torch.from_numpy(theirs.log_probs), dtype)
        close(torch.from_numpy(ours.cosines), torch.from_numpy(theirs.cosines), dtype)
        close(ours.hidden, theirs.hidden, dtype)


def rows_alone(target, tree) -> list[torch.Tensor]:
    """The logits of every node, its path decoded one token a pass."""
    alone = []
    length = target.cache.length
    for node in range(len(tree)):
        for at in path_to(tree, node):
            one = chain_tree(int(tree.tokens[at]), np.empty(0, np.int64), np.empty(0, np.float32))
            logits = target.verify(one).logits[0]
            target.commit([0])
        alone.append(logits)
        target.cache.length = length
    return alone


@given(nodes=st.integers(1, 40), context=st.integers(1, 70), seed=st.integers(0, 99))
@settings(max_examples=12, deadline=None)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_is_the_same_bits_whatever_stands_beside_it(dtype, nodes, context, seed):
    target = tiny.load("qwen3", dtype=dtype, device="cpu")
    target.prefill((PROMPT * 3)[:context])
    tree = random_tree(nodes, seed)
    together = target.verify(tree).logits
    for row, alone in zip(together, rows_alone(target, tree), strict=True):
        assert torch.equal(row, alone)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_several_sequences_share_a_pass(dtype):
    target = tiny.load("llama", dtype=dtype, device="cpu")
    network, trees, alone, caches = target._network, [], [], []
    for seed, text in enumerate((PROMPT, PROMPT * 3, PROMPT[:4])):
        target.cache = target.decoder.new_cache()
        target.prefill(text)
        trees.append(random_tree(3 + 5 * seed, seed))
        alone.append(target.verify(trees[-1]).logits)
        caches.append(target.cache)
    positions = [tree.depths + cache.length for tree, cache in zip(trees, caches, strict=True)]
    together, best, _ = network.decode(
        np.concatenate([tree.tokens for tree in trees]),
        np.concatenate(positions),
        [calls.Rows(c.buffer, c.length, t.visible) for c, t in zip(caches, trees, strict=True)],
        tapped=[],
    )
    assert torch.equal(together, torch.cat(alone))
    assert best.tolist() == together.float().argmax(-1).tolist()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("seed", range(4))
def test_bf16_is_as_lossless_as_fp32(temperature, seed):
    """Plain rows round as tree rows do, so nothing parts, not even at ties."""
    target = tiny.load("qwen3", dtype="bfloat16", device="cpu", seed=seed)
    parts = {"drafter": Noisy(target, depth=7, candidates=16, noise=1.0, seed=0)}
    parts |= {"builder": DDTree(), "budget": Fixed(13)}
    request = Request(PROMPT, 120, temperature=temperature, seed=seed)
    plain = autoregressive.generate(request, target=target)
    assert loop.generate(request, target=target, **parts).tokens == plain.tokens


def test_ties_go_to_the_first_token():
    target = tiny.load("llama", device="cpu")
    weight = target.decoder.head_weight
    weight[:] = 0  # all logits are equal
    weight[100:] = -1e-30
    network = target._network
    head = calls.Packed(weight, None)
    network._model.head, network._head = head.struct, head
    assert target.prefill(PROMPT).best.tolist() == [0]


@pytest.mark.parametrize("two_parents", [False, True])
@pytest.mark.parametrize("candidates", [5, 16, 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@torch.no_grad()
def test_compiled_scores_are_those_of_torch(two_parents, candidates, dtype):
    torch.manual_seed(0)
    sizes = {"depth": 7, "hidden_size": 48, "state_size": 64, "width": 32, "dropout": 0.0}
    term = {"term": "bilinear", "mode": "normalised", "two_parents": two_parents}
    net = checkpoint.build(term | sizes)
    for parameter in net.parameters():
        parameter.copy_(torch.randn_like(parameter) * 0.3)
    config = {"depth": 7, "candidates": candidates}
    scorer = EdgeScorer(net, net.tables(torch.randn(300, 48)), config)
    scorer.shrink(0.7)
    logits = torch.randn(7, 300) * 3
    draft = Draft.from_logits(5, logits, torch.randn(7, 64).to(dtype), candidates=20)
    (tokens, reference), (again, ours) = (
        scorer.edge_logits(draft),
        scorer.compile().edge_logits(draft),
    )
    assert scorer._compiled is not None
    assert np.array_equal(tokens, again)
    np.testing.assert_allclose(ours, reference, rtol=2e-4, atol=2e-4)


# ------------------------------------------------------------------------------------- building it


@pytest.fixture
def fresh(tmp_path, monkeypatch):
    """An empty cache folder."""
    monkeypatch.setenv("GRAFT_CACHE", str(tmp_path / "cache"))
    build.library.cache_clear()
    yield tmp_path / "cache"
    build.library.cache_clear()


def one_line(caplog) -> str:
    lines = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert len(lines) == 1, lines
    return lines[0]


def no_compiler(*_):
    raise AssertionError("compiled again")


def test_a_kept_library_is_not_compiled_again(fresh, monkeypatch):
    assert build.library() is not None
    (made,) = fresh.glob("*.so")
    build.library.cache_clear()
    monkeypatch.setattr(build, "_compile", no_compiler)
    assert build.library() is not None
    monkeypatch.setattr(build, "_processor", lambda: "another machine")
    build.library.cache_clear()
    with pytest.raises(AssertionError):
        build.library()
    assert list(fresh.glob("*.so")) == [made]


def test_without_a_compiler_one_line_says_so_and_torch_decodes(fresh, monkeypatch, caplog):
    monkeypatch.setattr(build, "get_cxx_compiler", lambda: "no-such-compiler")
    target = tiny.load("qwen3", device="cpu")
    assert "no-such-compiler is not there" in one_line(caplog)
    assert target._network is None
    drafter = untrained(target, layers=2, block_size=8, mask_token_id=258, taps=1)
    assert drafter.propose(7, target.prefill(PROMPT).taps).tokens.shape == (7, 64)


def test_a_compiler_that_fails_says_why(fresh, monkeypatch, caplog):
    monkeypatch.setattr(build, "FLAGS", ("-fno-such-flag", *build.FLAGS))
    assert build.library() is None
    assert "no-such-flag" in one_line(caplog)
    assert [path.suffix for path in fresh.iterdir()] == [".lock"]


@pytest.mark.skipif(sys.platform != "linux", reason="uses /dev/full and permissions")
def test_a_place_that_cannot_be_written_says_so(fresh, monkeypatch, caplog):
    fresh.parent.joinpath("file").write_text("")
    monkeypatch.setenv("GRAFT_CACHE", str(fresh.parent / "file"))
    assert build.library() is None
    assert "file" in one_line(caplog)


@pytest.mark.slow
def test_a_damaged_library_is_made_anew(fresh):
    build.library()
    (made,) = fresh.glob("*.so")
    made.unlink()  # it is mapped: a file of its own takes its place
    made.write_bytes(b"not a library")
    assert start(fresh).wait(timeout=120) == 0
    assert made.stat().st_size > 1000


def start(folder: Path, **environment: str) -> subprocess.Popen:
    """Another process that wants the kernels."""
    script = "import sys; from graft.native import build; sys.exit(build.library() is None)"
    environment = os.environ | {"GRAFT_CACHE": str(folder)} | environment
    return subprocess.Popen([sys.executable, "-c", script], cwd=launch.ROOT, env=environment)


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="flags of x86")
@pytest.mark.parametrize("flags", [("-march=x86-64-v3",), ("-march=native", "-mno-avx512bf16")])
def test_processors_without_the_newest_instructions_compute_the_same(fresh, monkeypatch, flags):
    """AVX2, and AVX-512 without dot products of bf16: other code for the same results."""
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, *flags))
    for dtype in DTYPES:
        test_compiled_passes_are_those_of_torch("qwen3", dtype, 2)
        test_compiled_drafts_are_those_of_torch(dtype)
        test_rows_of_several_sequences_share_a_pass(dtype)


@pytest.mark.slow
def test_two_at_once_compile_once_and_a_killed_one_is_no_obstacle(fresh):
    """A compiler that writes down its calls, and takes its time."""
    fresh.mkdir()
    slow, calls_made = fresh / "c++", fresh / "calls"
    slow.write_text(
        f"#!/bin/sh\ncase $1 in --version) ;; *) echo $$ >> {calls_made}; sleep 1;; esac\n"
        'exec c++ "$@"\n'
    )
    slow.chmod(slow.stat().st_mode | stat.S_IEXEC)
    killed = start(fresh, CXX=str(slow))
    deadline = time.monotonic() + 60
    while not (calls_made.exists() and calls_made.read_text().strip()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    killed.kill()
    killed.wait()
    subprocess.run(["kill", "-9", calls_made.read_text().strip()], check=False)
    both = [start(fresh, CXX=str(slow)) for _ in range(2)]
    assert [process.wait(timeout=120) for process in both] == [0, 0]
    assert len(calls_made.read_text().splitlines()) == 2, "the killed one's, and one more"
    assert len(list(fresh.glob("*.so"))) == 1
