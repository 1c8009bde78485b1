"""Cross-entropy behind a frozen head, a few rows at a time.

The logits of a batch are its largest tensor by far (blocks x slots x vocabulary). As the head is
not trained, the gradient of a row's loss is known as soon as its logits are, so both are made
together and the logits forgotten:

    loss_i = logsumexp(W h_i) - w_y h_i        d loss_i / d h_i = W^T (softmax(W h_i) - onehot(y))
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

ROWS = 128  # logits made at a time


class RowLosses(NamedTuple):
    """Per row [n]."""

    loss: torch.Tensor  # nats, differentiable in `hidden`
    right: torch.Tensor  # whether the label is the likeliest


def head_loss(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> RowLosses:
    """Cross-entropy of hidden [n, H] under a head [V, H] against labels [n] in 0 .. V - 1.

    The product is made in the head's dtype, the softmax in fp32.
    """
    return RowLosses(*_HeadLoss.apply(hidden, weight, labels))


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor):
        losses, right, gradients = [], [], []
        for rows, label in zip(
            hidden.detach().to(weight.dtype).split(ROWS), labels.split(ROWS), strict=True
        ):
            log_probs = F.log_softmax(rows @ weight.T, 1, dtype=torch.float32)
            mine = log_probs.gather(1, label[:, None])
            losses.append(-mine[:, 0])
            right.append(mine[:, 0] >= log_probs.amax(1))
            slope = log_probs.exp_().scatter_add_(1, label[:, None], torch.full_like(mine, -1.0))
            gradients.append(slope.to(weight.dtype) @ weight)
        hits = torch.cat(right)
        ctx.save_for_backward(torch.cat(gradients))
        ctx.mark_non_differentiable(hits)
        ctx.dtype = hidden.dtype
        return torch.cat(losses), hits

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor):
        (gradient,) = ctx.saved_tensors
        return (gradient * grads[0][:, None]).to(ctx.dtype), None, None
