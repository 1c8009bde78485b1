"""What differs on a GPU: passes are captured, eager chains run without a mask, and kernels are
others. Needs CUDA.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from conftest import PROMPT, composed
from hydra.utils import instantiate
from test_dflash import VARIANTS, network
from test_targets import path_to, random_tree

from graft.core.graphs import Graphs
from graft.core.tree import chain_tree
from graft.core.types import Request
from graft.decode import autoregressive
from graft.drafters.blocks import context_of, draft_blocks
from graft.drafters.dflash import DFlash
from graft.targets import tiny
from graft.targets.captured import CapturedPasses
from graft.targets.hf import HFTarget

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.mark.parametrize("method", ["dflash", "ddtree"])
@pytest.mark.parametrize("drafter", ["tiny", "noisy"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_lossless_on_cuda(family, method, drafter, temperature):
    target = tiny.load(family, device="cuda")
    request = Request(PROMPT, 60, temperature=temperature)
    cfg = composed("generate", "+experiment=tiny", f"method={method}", f"drafter={drafter}")
    parts = {"target": target, "drafter": instantiate(cfg.drafter, target=target)}
    result = instantiate(cfg.method)(request, **parts)
    assert result.tokens == autoregressive.generate(request, target=target).tokens


def test_chains_agree_with_the_cpu(family):
    target, reference = tiny.load(family, device="cuda"), tiny.load(family, device="cpu")
    chain = chain_tree(7, np.arange(30, 40), np.zeros(10, np.float32))
    target.prefill(PROMPT)
    reference.prefill(PROMPT)
    logits = target.verify(chain).logits.cpu()
    torch.testing.assert_close(logits, reference.verify(chain).logits, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("method", ["dflash", "ddtree"])
def test_bf16_on_cuda_is_close_to_fp32_on_cpu(family, method):
    """The production path: flash without a mask, masked kernels at odd lengths, a bf16 drafter."""
    target = tiny.load(family, dtype="bfloat16", device="cuda")
    reference = tiny.load(family, device="cpu")
    cfg = composed("generate", "+experiment=tiny", f"method={method}")
    drafter = instantiate(cfg.drafter, target=target)
    draft = drafter.propose(65, target.prefill(PROMPT).taps)
    tree = instantiate(cfg.method).keywords["builder"].build(draft, 13)
    assert (target.mask(tree) is None) == (method == "dflash")
    reference.prefill(PROMPT)
    exact = reference.verify(tree).logits
    error = (target.verify(tree).logits.float().cpu() - exact).abs().max()
    assert error < 0.5 * exact.std()
    request = Request(PROMPT, 40)
    parts = {"target": target, "drafter": drafter}
    assert len(instantiate(cfg.method)(request, **parts).tokens) == 40


def on_cuda(family: str, dtype: str = "float32") -> tuple[HFTarget, HFTarget]:
    """The target with captured passes, and the eager one."""
    ways = ("auto", "eager")
    return tuple(tiny.load(family, device="cuda", dtype=dtype, passes=way) for way in ways)


def was_captured(target: HFTarget) -> bool:
    return bool(target._captured._graphs._ready) and not target._captured._graphs.refused


@pytest.mark.parametrize("method", ["dflash", "ddtree"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_captured_passes_decode_what_eager_ones_do(family, method, temperature):
    """In fp32, with the captured drafter too; from a cache that outgrows its program's rows."""
    request = Request((PROMPT * 20)[:480], 80, temperature=temperature)
    cfg = composed("generate", "+experiment=tiny", f"method={method}")
    texts = []
    for target in on_cuda(family):
        drafter = instantiate(cfg.drafter, target=target)
        decode = instantiate(cfg.method)
        texts.append(decode(request, target=target, drafter=drafter).tokens)
        texts.append(autoregressive.generate(request, target=target).tokens)
        if target.captures and family != "qwen3_moe":  # whose routing may wait for the device
            assert was_captured(target)
            assert 1024 in {context for _, context, _ in target._captured._graphs._ready}
    assert all(text == texts[0] for text in texts)


def test_captured_verifications_agree_with_eager_ones(family):
    captured, eager = on_cuda(family)
    for target in (captured, eager):
        target.tap([1, 0])
        target.prefill(PROMPT)
    for seed, n in enumerate((1, 17, 1, 30, 100, 17, 200)):
        tree = (
            random_tree(min(n, 200) - 1, seed)
            if n < 512
            else chain_tree(7, np.arange(n - 1) % 200, np.zeros(n - 1, np.float32))
        )
        one, other = captured.verify(tree), eager.verify(tree)
        held = one.logits.clone(), one.taps.clone()
        captured.verify(random_tree(n % 7, seed))  # must not write over what is held
        assert torch.equal(one.logits, held[0])
        assert torch.equal(one.taps, held[1])
        torch.testing.assert_close(one.logits, other.logits, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(one.taps, other.taps, rtol=1e-3, atol=1e-3)
        for target in (captured, eager):
            target.verify(tree)
            target.commit(path_to(tree, min(len(tree), 17) - 1))
        assert torch.equal(torch.tensor(one.best), one.logits.argmax(-1).cpu())
    torch.testing.assert_close(captured.cache.rows(), eager.cache.rows(), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", VARIANTS)
def test_the_captured_drafter_drafts_as_the_eager_one(kind):
    drafters = [
        DFlash(network(VARIANTS[kind]), target, candidates=20, name="net")
        for target in on_cuda("qwen3")
    ]
    for new in (14, 1, 3, 6, 500, 7, 2):  # 500: more rows than the first program has
        taps = torch.randn(new, 128, device="cuda")
        one, other = (drafter.propose(65, taps) for drafter in drafters)
        np.testing.assert_allclose(one.log_probs, other.log_probs, rtol=1e-3, atol=1e-3)
        np.testing.assert_allclose(one.cosines, other.cosines, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(one.hidden, other.hidden, rtol=1e-3, atol=1e-3)
    assert not drafters[0]._compiled._graphs.refused


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_compiled_programs_agree_with_eager_passes(family):
    _, target = on_cuda(family)
    target.prefill(PROMPT)
    programs = CapturedPasses(target.decoder, target.cache, compile=True)
    for n in (1, 17, 1, 20):
        tree = random_tree(n - 1, n)
        with torch.inference_mode():
            logits = programs.verify(tree).logits
        torch.testing.assert_close(logits, target.verify(tree).logits, rtol=1e-3, atol=1e-3)


def test_a_wait_for_the_device_is_refused_and_leaves_cuda_as_it_was(caplog):
    """What cannot be captured runs as it is, and other programs can still be captured."""
    numbers, device = torch.arange(6, device="cuda"), torch.device("cuda", 0)
    stream = torch.cuda.current_stream()
    graphs = Graphs(device)
    for _ in range(2):
        (found,) = graphs.run("waits", lambda: (numbers[numbers > 2].nonzero(),))
        assert len(found) == 3
    assert graphs.refused
    assert len(caplog.records) == 1
    assert torch.cuda.current_stream() == stream
    assert torch.cuda.get_sync_debug_mode() == 0
    other = Graphs(device)
    for _ in range(2):
        (doubled,) = other.run("doubles", lambda: (numbers * 2,))
        assert torch.equal(doubled, numbers * 2)
        numbers.add_(1)  # where it lies: the replay must see it
    assert not other.refused


@pytest.mark.parametrize("kind", ["full", "sliding"])
def test_flex_attention_trains_as_the_split_kernel_does(kind):
    """In bf16 under autocast, forward and backward, compiled."""
    target = tiny.load("qwen3", device="cuda", dtype="bfloat16")
    net = network(VARIANTS[kind]).cuda().requires_grad_(True)
    tokens = torch.randint(0, 250, (2, 128), device="cuda")
    anchors = torch.arange(16, 112, 8, device="cuda").expand(2, -1)
    target.tap(net.config.target_layer_ids)
    taps = torch.stack(target.read(list(tokens)))
    results = []
    for flex in (False, True):
        net.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            hidden = draft_blocks(
                net,
                target.embed,
                context=context_of(net, taps),
                roots=tokens.gather(1, anchors),
                anchors=anchors,
                flex=flex,
            )
        hidden.float().pow(2).mean().backward()
        results.append((hidden.detach().float(), net.fc.weight.grad.clone()))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=0.05, atol=0.05 * one.abs().max().item())
