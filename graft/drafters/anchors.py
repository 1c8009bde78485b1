"""Drafts at every position of a finished answer, without decoding it again.

The target reads the text once, then blocks are drafted a chunk of anchors at a time. What comes out
is what `DFlash.propose` would have given with the same text committed.
"""

from __future__ import annotations

from typing import Protocol

import torch

from graft.core.interfaces import Backbone
from graft.core.types import Draft
from graft.drafters.blocks import draft_blocks
from graft.drafters.dflash_net import DFlashNet

CHUNK = 32  # anchors drafted together: attention within a chunk grows with its square


class Reader(Backbone, Protocol):
    """A target that reads finished texts."""

    def read(self, texts: list[torch.Tensor]) -> list[torch.Tensor]: ...


@torch.inference_mode()
def drafts_along(
    net: DFlashNet, target: Reader, tokens: torch.Tensor, *, start: int, candidates: int = 16
) -> list[Draft]:
    """One draft for every root in tokens [L] from position `start` on, in text order."""
    tokens = tokens.to(target.device)
    target.tap(net.config.target_layer_ids)
    taps = target.read([tokens])[0]
    vocabulary = None if net.draft_tokens is None else net.draft_tokens.to(target.device)
    head = target.head_rows(vocabulary)
    drafts: list[Draft] = []
    for anchors in torch.arange(start, len(tokens), device=target.device).split(CHUNK):
        hidden = draft_blocks(
            net,
            target.embed,
            taps=taps[None],
            roots=tokens[anchors][None],
            anchors=anchors[None],
        )[0, :, 1:]
        hidden = hidden.to(head.dtype)
        drafts += Draft.batch(
            tokens[anchors].tolist(),
            hidden @ head.T,
            hidden,
            candidates=candidates,
            vocabulary=vocabulary,
        )
    return drafts
