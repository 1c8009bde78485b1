"""Drafts at every position of a finished answer, without decoding it again.

The target reads the text once, then blocks are drafted a chunk of anchors at a time. What comes out
is what `DFlash.propose` would have given with the same text committed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F

from graft.core.interfaces import Backbone
from graft.core.types import Drafts
from graft.drafters.blocks import context_of, draft_blocks
from graft.drafters.dflash_net import DFlashNet

CHUNK = 32  # anchors drafted together: attention within a chunk grows with its square
ROWS = 64  # positions whose logits over the whole vocabulary exist at once


class Reader(Backbone, Protocol):
    """A target that reads finished texts."""

    def read(self, texts: Sequence[torch.Tensor]) -> list[torch.Tensor]: ...

    def read_through(self, text: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]: ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor: ...


@torch.inference_mode()
def drafts_along(
    net: DFlashNet, target: Reader, tokens: torch.Tensor, *, start: int, candidates: int = 16
) -> Drafts:
    """One draft for every root in tokens [L] from position `start` on, in text order."""
    tokens = tokens.to(target.device)
    target.tap(net.config.target_layer_ids)
    (taps,) = target.read([tokens])
    anchors = torch.arange(start, len(tokens), device=target.device)
    return _draft(net, target, tokens, taps, anchors, candidates)


@torch.inference_mode()
def judged_drafts(
    net: DFlashNet, target: Reader, tokens: torch.Tensor, *, start: int, candidates: int
) -> tuple[Drafts, np.ndarray, np.ndarray, np.ndarray]:
    """Drafts along tokens [L] and what the target makes of their candidates.

    The roots are the A = L - D - start (at least one) positions from `start` on whose drafts end
    inside the text. Returns the drafts; the target's logits [A, D, K] over the candidates of depth
    d after the text's own d - 1 tokens behind the root; and behind each of the positions start,
    start + 1, ... [A + D - 1] the log-normaliser and the argmax of its logits.
    """
    tokens = tokens.to(target.device)
    depth = net.config.block_size - 1
    roots = len(tokens) - depth - start
    target.tap(net.config.target_layer_ids)
    hidden, taps = target.read_through(tokens)
    anchors = torch.arange(start, start + roots, device=target.device)
    drafts = _draft(net, target, tokens, taps, anchors, candidates)

    wanted = torch.from_numpy(drafts.tokens).to(target.device)  # [A, D, K]
    over = torch.zeros(wanted.shape, device=target.device)
    norms, best = [], []
    hidden = hidden[start : start + roots + depth - 1]
    for first, states in zip(range(0, len(hidden), ROWS), hidden.split(ROWS), strict=True):
        logits = target.logits(states).float()  # [rows, V]
        norms.append(logits.logsumexp(-1))
        best.append(logits.argmax(-1))
        for d in range(depth):  # row r judges depth d + 1 of the root d positions before it
            low, high = max(0, first - d), min(roots, first + len(states) - d)
            if low < high:
                rows = logits[low + d - first : high + d - first]
                over[low:high, d] = rows.gather(1, wanted[low:high, d])
    norm, argmax = torch.cat(norms), torch.cat(best)
    return drafts, over.cpu().numpy(), norm.cpu().numpy(), argmax.cpu().numpy()


def _draft(
    net: DFlashNet,
    target: Reader,
    tokens: torch.Tensor,
    taps: torch.Tensor,
    anchors: torch.Tensor,
    candidates: int,
) -> Drafts:
    vocabulary = None if net.draft_tokens is None else net.draft_tokens.to(target.device)
    head, context = target.head_rows(vocabulary), context_of(net, taps[None])
    parts: list[Drafts] = []
    for some in anchors.split(CHUNK):
        hidden = draft_blocks(
            net, target.embed, context=context, roots=tokens[some][None], anchors=some[None]
        )[0, :, 1:]
        # Contiguous, or the product would copy the whole head for every anchor.
        hidden = hidden.to(head.dtype).contiguous()
        parts.append(
            Drafts.from_logits(
                tokens[some].tolist(),
                F.linear(hidden, head),
                hidden,
                candidates=candidates,
                vocabulary=vocabulary,
            )
        )
    return Drafts.concatenate(parts)
