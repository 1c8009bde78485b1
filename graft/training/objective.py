"""How much each slot of a block counts.

decay    w_k = exp(-(k - 1) / gamma)                                   (DFlash, appendix A.1)
dpace    q_k = (1 - alpha) p_k + alpha,  c_k = q_1 ... q_k,  w_k = c_k + ... + c_D     (SpecForge)

p_k is the probability the drafter gives to slot k's label, detached. Decay is a guess at how often
a slot is reached; D-PACE weighs it by what reaching it is worth under the drafter of the moment.
"""

from __future__ import annotations

import math

import torch

GAMMA = {16: 7.0, 10: 5.0, 8: 4.0}  # by block size, as published


def default_gamma(block_size: int) -> float:
    """The published gamma, between and beyond them on the straight line through 8 and 16."""
    return GAMMA.get(block_size, max(1.0, 4 + (block_size - 8) * 3 / 8))


def decay_weights(depth: int, gamma: float) -> torch.Tensor:
    """[D]."""
    return torch.tensor([math.exp(-k / gamma) for k in range(depth)])


def dpace_weights(losses: torch.Tensor, counts: torch.Tensor, alpha: float) -> torch.Tensor:
    """[..., D] from the slots' cross-entropies and whether they count, both [..., D].

    A slot that does not count, as its token is not one the drafter may propose, ends a chain as
    surely as a wrong one: p = 0.
    """
    p = (-losses.detach()).exp() * counts
    reached = ((1 - alpha) * p + alpha).cumprod(-1) * counts
    return reached.flip(-1).cumsum(-1).flip(-1) * counts
