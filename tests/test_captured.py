"""Programs of static shape against the eager passes, on a CPU.

`traced` stands in for a captured graph: torch's operations as one run of the program gave them, on
the same tensors, with every number of Python's baked in.
"""

from __future__ import annotations

import json
import sys

import gpu_passes
import numpy as np
import pytest
import torch
from conftest import FAMILIES, PROMPT
from test_dflash import VARIANTS, network
from test_targets import path_to, random_tree
from torch.fx.experimental.proxy_tensor import make_fx

from graft.budgets.fixed import Fixed
from graft.core import graphs, linear
from graft.core.graphs import Graphs, context_bucket
from graft.core.tree import chain_tree
from graft.core.types import DraftTree, Request
from graft.decode import autoregressive, loop
from graft.drafters import dflash
from graft.drafters.captured import CapturedDFlash
from graft.drafters.dflash import DFlash
from graft.targets import tiny
from graft.targets.captured import CapturedPasses
from graft.targets.hf import HFTarget
from graft.trees.ddtree import DDTree

TIGHT = {"rtol": 1e-4, "atol": 2e-5}


class Traced(Graphs):
    """Replays traced operations into the outputs of the first run, as a captured graph would."""

    def _prepare(self, program):
        trace = make_fx(program)()
        outputs = program()

        def replay():
            for output, value in zip(outputs, trace(), strict=True):
                output.copy_(value)
            return outputs

        return replay


@pytest.fixture
def traced(monkeypatch):
    """Every program is traced; weights stay plain, as on a GPU."""
    monkeypatch.setattr("graft.targets.captured.Graphs", Traced)
    monkeypatch.setattr("graft.drafters.captured.Graphs", Traced)
    for module in (linear, dflash):
        monkeypatch.setattr(module, "can_pack", lambda weight: False)


def pair(family: str) -> tuple[HFTarget, HFTarget]:
    """A target whose verifications are programs, and the eager one."""
    static, eager = (tiny.load(family, device="cpu", passes="eager") for _ in range(2))
    static._captured = CapturedPasses(static.decoder, static.cache)
    static.captures = True  # drafters follow
    return static, eager


def chain(length: int) -> DraftTree:
    tokens = np.random.default_rng(length).integers(0, 200, length)
    return chain_tree(7, tokens, np.zeros(length, np.float32))


def agree(static: HFTarget, eager: HFTarget, tree: DraftTree) -> None:
    one, other = static.verify(tree), eager.verify(tree)
    torch.testing.assert_close(one.logits, other.logits, **TIGHT)
    torch.testing.assert_close(one.taps, other.taps, **TIGHT)
    assert one.best.tolist() == other.logits.argmax(-1).tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_programs_are_the_eager_pass(family):
    static, eager = pair(family)
    for target in (static, eager):
        target.tap([1, 0])
        target.prefill(PROMPT)
    for n in (1, 2, 3, 16, 17, 33, 70):
        agree(static, eager, random_tree(n - 1, n))
        agree(static, eager, chain(n - 1))


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_replay_reads_its_inputs_alone(traced, family):
    """Other trees, lengths and texts through programs that were traced with the first."""
    static, eager = pair(family)
    for start in (2, 0):
        for target in (static, eager):
            target.prefill(PROMPT[start:])
        for seed in range(6):
            tree = random_tree(16 + seed, seed) if seed % 2 else random_tree(0, seed)
            agree(static, eager, tree)
            path = path_to(tree, len(tree) - 1)
            for target in (static, eager):
                target.commit(path)
            torch.testing.assert_close(static.cache.rows(), eager.cache.rows(), **TIGHT)
    assert len(static._captured._graphs._ready) == 2  # of one row and of 32, at one context


def test_a_longer_context_and_a_grown_cache_make_programs_anew(traced):
    static, eager = pair("qwen3")
    for target in (static, eager):
        target.prefill((PROMPT * 30)[:490])
    for length in (490, 506, 522):
        assert static.cache.length == length
        agree(static, eager, random_tree(15, length))
        for target in (static, eager):
            target.verify(chain(15))
            target.commit(range(16))
    assert static.cache.capacity == 1024
    assert [key[1] for key in static._captured._graphs._ready] == [1024]


def test_taps_that_change_and_trees_beyond_the_largest_program(traced):
    static, eager = pair("qwen3")
    for taps in ([0], [1], [0, 1]):
        for target in (static, eager):
            target.tap(taps)
            target.prefill(PROMPT)
        agree(static, eager, random_tree(9, 0))
    assert not static._captured.take(513)
    tall = chain(519)
    torch.testing.assert_close(static.verify(tall).logits, eager.verify(tall).logits, **TIGHT)


def test_what_a_step_holds_outlives_the_next_pass(traced):
    static, _ = pair("qwen3")
    static.tap([0, 1])
    static.prefill(PROMPT)
    first = static.verify(random_tree(12, 0))
    kept = first.logits.clone(), first.taps.clone(), first.best.copy()
    static.verify(random_tree(12, 1))
    for held, copy in zip((first.logits, first.taps, first.best), kept, strict=True):
        assert (held == copy).all()


def test_masked_rows_are_numbers():
    """Rows of a cache that nobody has written yet are read and masked: NaN would come through."""
    static, _ = pair("qwen3")
    static.prefill(PROMPT)
    static.verify(random_tree(3, 0))
    assert static.cache.capacity == context_bucket(len(PROMPT))
    assert static.cache.buffer.isfinite().all()


@pytest.mark.parametrize("variant", VARIANTS)
@torch.inference_mode()
def test_the_drafters_program_is_the_eager_pass(traced, variant):
    static, eager = pair("qwen3")
    torch.manual_seed(0)
    net = network(VARIANTS[variant])
    drafters = [DFlash(net, target, candidates=20, name="net") for target in (static, eager)]
    assert isinstance(drafters[0]._compiled, CapturedDFlash)
    for _ in range(2):  # two responses; the second through what the first has traced
        for new in (14, 1, 3, 6, 7, 2):
            taps, root = torch.randn(new, 128), int(torch.randint(0, 250, ()))
            one, other = (drafter.propose(root, taps) for drafter in drafters)
            assert one.root == root
            assert one.tokens.tolist() == other.tokens.tolist()
            np.testing.assert_allclose(one.log_probs, other.log_probs, **TIGHT)
            np.testing.assert_allclose(one.cosines, other.cosines, **TIGHT)
            torch.testing.assert_close(one.hidden, other.hidden, **TIGHT)
            caches = [drafter._cache.rows() for drafter in drafters]
            torch.testing.assert_close(*caches, **TIGHT)
        for drafter in drafters:
            drafter.reset()
    assert len(drafters[0]._compiled._graphs._ready) == 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_decoding_through_programs_gives_the_eager_text(traced, temperature):
    static, eager = pair("qwen3")
    request = Request(PROMPT, 40, temperature=temperature)
    drafter = DFlash(network(), static, candidates=20, name="net")
    parts = {"drafter": drafter, "builder": DDTree(), "budget": Fixed(12)}
    decoded = loop.generate(request, target=static, **parts)
    assert decoded.tokens == autoregressive.generate(request, target=eager).tokens
    assert decoded.tokens == autoregressive.generate(request, target=static).tokens


def test_a_refused_capture_is_said_once_and_eager_passes_follow(caplog, monkeypatch):
    """What happens on a GPU where something waits for the device."""

    def capture(self, program):
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    class Device:
        type = "cuda"

    class Nothing:
        def __init__(self, *_):
            pass

        def __enter__(self):
            pass

        def __exit__(self, *_):
            pass

    monkeypatch.setattr(Graphs, "_capture", capture)
    for name in ("device", "stream"):
        monkeypatch.setattr(graphs.torch.cuda, name, Nothing)
    monkeypatch.setattr(graphs.torch.cuda, "current_stream", lambda: None)
    static, eager = pair("qwen3")
    static._captured._graphs._device = Device()
    for target in (static, eager):
        target.prefill(PROMPT)
    for seed in range(3):
        tree = random_tree(9, seed)
        torch.testing.assert_close(static.verify(tree).logits, eager.verify(tree).logits, **TIGHT)
        assert not static._captured.take(1)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.endswith("which is slower: operation not permitted when stream is capturing")


def test_the_pass_table_is_rehearsed_without_a_gpu(tmp_path, monkeypatch, capsys):
    shape = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "vocab_size": 300}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    settings = [f"shape.{key}={value}" for key, value in shape.items()]
    settings += ["draft.layers=2", "draft.taps=1", "dtype=float32", "device=cpu", "read=100000"]
    settings += ["rows=[1,8]", "contexts=[40,600]", "compiled_rows=[]", "repeats=2"]
    settings += [f"paths.outputs={tmp_path}", "logger.wandb=null"]
    monkeypatch.setattr(sys, "argv", [gpu_passes.__file__, *settings])
    gpu_passes.main()
    out = capsys.readouterr().out
    for text in ("no GPU: a rehearsal", "plain step", "verify, 8 rows", "drafter", "captured"):
        assert text in out
    (file,) = tmp_path.glob("gpu_passes/*/passes.json")
    found = json.loads(file.read_text())["passes"]
    assert [(row["name"], row["context"]) for row in found] == [
        (name, context)
        for context in (40, 600)
        for name in ("plain step", "verify, 8 rows", "drafter")
    ]
    assert all(row["ms"]["eager"] > 0 and row["ms"]["captured"] > 0 for row in found)

    monkeypatch.setattr(sys, "argv", [gpu_passes.__file__, *settings, "seconds=0"])
    gpu_passes.main()
    assert "passes are missing" in capsys.readouterr().out
