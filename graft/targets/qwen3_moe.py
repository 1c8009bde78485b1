"""Qwen3 mixture of experts (Qwen3-Coder-30B-A3B): Qwen3 whose feed-forward routes. The routing is
transformers' own.
"""

from __future__ import annotations

from typing import Any

import torch

from graft.core.linear import pack_linears
from graft.targets.decoder import SwiGLU
from graft.targets.family import Family, FeedForward, Fuse


def feed_forward(mlp: Any, fuse: Fuse) -> FeedForward:
    """The block's expert mixture as it is, or a plain SwiGLU in the layers that have no experts."""
    if not hasattr(mlp, "experts"):
        return SwiGLU(mlp, fuse)
    pack_linears(mlp, native=False)  # experts see a row or two each

    def forward(x: torch.Tensor) -> torch.Tensor:
        mixed = mlp(x)
        return (
            mixed[0] if isinstance(mixed, tuple) else mixed
        )  # transformers 4 returns the router's logits too

    return forward


FAMILY = Family(feed_forward=feed_forward, qk_norm=True, chat_options={"enable_thinking": False})
