"""What differs on a GPU: chains run without a mask, and kernels are others. Needs CUDA."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from conftest import PROMPT, composed
from hydra.utils import instantiate
from test_dflash import VARIANTS, network

from graft.core.tree import chain_tree
from graft.core.types import Request
from graft.decode import autoregressive
from graft.drafters.blocks import context_of, draft_blocks
from graft.targets import tiny

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
