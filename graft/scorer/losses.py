"""What a scorer learns from: the target's distribution behind the parent, over the same candidates.

    kl         KL(target over the candidates and none of them || the scorer's); without a none
               class, over the candidates alone (the paper's)
    nll        minus the log-probability of what the target took: its argmax, or none of these
    pairwise   softplus(margin - f(taken) + f(rival)): rivals are the best other child under the
               parent, and the same child under another candidate for parent, drawn at random
    bce        of sigma(f) against "taken", taken and not taken weighing alike

f alone, without log q, is what the last two shape (the paper's); they make sense for raw scores.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F


def target_distribution(over: torch.Tensor, log_norm: torch.Tensor) -> torch.Tensor:
    """Probabilities [n, K + 1], none last, from logits [n, K] and log-normalisers [n]."""
    probs = (over - log_norm[:, None]).exp()
    return torch.cat((probs, (1 - probs.sum(-1, keepdim=True)).clamp_min(0)), -1)


def scorer_losses(
    logits: torch.Tensor,
    f: torch.Tensor,
    wrong: torch.Tensor | None = None,
    known: torch.Tensor | None = None,
    *,
    target: torch.Tensor,
    taken: torch.Tensor,
    weights: Mapping[str, float],
    margin: float,
) -> dict[str, torch.Tensor]:
    """Every loss with a weight, as means.

    `logits` [n, K + 1] (raw: [n, K]) and f [n, K] under the true parents, `wrong` [n, K] f under
    another candidate for parent, where one is `known` [n]; `target` [n, K + 1], `taken` [n] the
    class, K for none of these.
    """
    found: dict[str, torch.Tensor] = {}
    K = f.shape[1]
    raw = logits.shape[1] == K
    inside = taken < K
    at = taken.clamp_max(K - 1)[:, None]
    if weights.get("kl"):
        if raw:
            aim = target[:, :K] / target[:, :K].sum(-1, keepdim=True).clamp_min(1e-6)
        else:
            aim = target
        found["kl"] = F.kl_div(logits.log_softmax(-1), aim, reduction="batchmean")
    if weights.get("nll"):
        kept = inside if raw else torch.ones_like(inside)
        losses = F.cross_entropy(logits[kept], taken[kept], reduction="none")
        found["nll"] = losses.sum() / max(1, len(losses))
    if weights.get("pairwise"):
        positive = f.gather(1, at)
        rival = logits[:, :K].scatter(1, at, -torch.inf).argmax(-1, keepdim=True)
        losses = F.softplus(margin - positive + f.gather(1, rival))[inside]
        if wrong is not None and known is not None:
            others = F.softplus(margin - positive + wrong.gather(1, at))[inside & known]
            losses = torch.cat((losses, others))
        found["pairwise"] = losses.sum() / max(1, losses.numel())
    if weights.get("bce"):
        labels = F.one_hot(taken, K + 1)[:, :K].to(f.dtype)
        balance = (1 - labels).sum() / labels.sum().clamp_min(1)
        found["bce"] = F.binary_cross_entropy_with_logits(f, labels, pos_weight=balance)
    return found
