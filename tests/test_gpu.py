"""What differs on a GPU: chains run without a mask, and kernels are others. Needs CUDA."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from conftest import PROMPT, composed
from hydra.utils import instantiate

from graft.core.tree import chain_tree
from graft.core.types import Request
from graft.decode import autoregressive
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


def test_a_chain_needs_no_mask_on_cuda(family):
    target, reference = tiny.load(family, device="cuda"), tiny.load(family, device="cpu")
    chain = chain_tree(7, np.arange(30, 40), np.zeros(10, np.float32))
    assert target.mask(chain) is None
    target.prefill(PROMPT)
    reference.prefill(PROMPT)
    logits = target.verify(chain).logits.cpu()
    torch.testing.assert_close(logits, reference.verify(chain).logits, rtol=1e-3, atol=1e-3)
