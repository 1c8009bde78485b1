"""What a target architecture must be, and how its file is found.

A family file is named after the `model_type` of the checkpoints it covers and holds one `FAMILY`.
Refused are architectures on which a tree cannot be verified exactly, each with the reason.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import graft.targets
from graft.core.errors import InputError
from graft.core.linear import FusedLinear

FeedForward = Callable[[torch.Tensor], torch.Tensor]
Fuse = Callable[[Sequence[nn.Linear]], FusedLinear]  # how layers are fused and packed


@dataclass(frozen=True)
class Family:
    """What sets one architecture apart from the others that share `decoder.Decoder`."""

    feed_forward: Callable[[Any, Fuse], FeedForward]  # from the block's `mlp` module to what runs
    qk_norm: bool = False  # per-head RMSNorm on queries and keys before RoPE
    chat_options: dict[str, Any] = field(default_factory=dict)  # handed to the chat template


def family_of(config: Any) -> Family:
    """The family of a transformers config. Raises InputError for one that cannot be served."""
    kind = config.model_type
    if reason := refusal(config):
        raise InputError(f"{kind} cannot be verified exactly: {reason}")
    known = [module.name for module in pkgutil.iter_modules(graft.targets.__path__)]
    module = importlib.import_module(f"graft.targets.{kind}") if kind in known else None
    family = getattr(module, "FAMILY", None)
    if not isinstance(family, Family):
        raise InputError(
            f"model_type {kind} has no family file; see graft/targets/llama.py for one"
        )
    return family


def refusal(config: Any) -> str | None:
    """Why trees cannot be verified on this architecture, or None."""
    windowed = getattr(config, "sliding_window", None)  # all that Qwen3-MoE says of its layers
    kinds = getattr(config, "layer_types", None)
    layers = set(kinds or ["sliding_attention" if windowed else "full_attention"])
    windows = {"sliding_attention", "chunked_attention"}
    if recurrent := sorted(layers - windows - {"full_attention"}):
        return (
            f"its {', '.join(recurrent)} layers fold the past into a state that cannot be rolled "
            "back to the accepted path or split over the branches of a tree"
        )
    if layers & windows:
        return (
            f"its {', '.join(sorted(layers & windows))} layers overwrite cache rows that a "
            "rejected branch still needs"
        )
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    rope_type = rope.get("rope_type") or rope.get("type")
    if rope_type in ("dynamic", "longrope"):
        return (
            f"its {rope_type} RoPE changes angles as the context grows, so keys in the cache would "
            "no longer be those of a fresh pass"
        )
    return None
