"""Is a method's output the target's own? Compare it with plain decoding, and explain a difference.

In fp32 at T = 0 the answer must be yes, and in any dtype where a row's bits do not depend on the
rows beside it (compiled passes on a CPU). Elsewhere a bf16 pass over 17 rows rounds differently
from a pass over one, and a near-tie may flip; the gap between the two tokens' logits in a plain
pass over the same prefix says whether it was one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from graft.core.interfaces import Target
from graft.core.types import Generation, Request


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Where two responses begin to differ (at the latest at the shorter's end), or None."""
    if a == b:
        return None
    pairs = zip(a, b, strict=False)
    return next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b)))


def compare(
    request: Request,
    *,
    oracle: Generation,
    decode: Callable[[Request], Generation],
    target: Target,
) -> dict[str, Any]:
    """Decode a request and compare it with the oracle's response.

    Returns the response's length, its MAT (None without rounds), `first_divergence` (None where the
    tokens are identical) and there `logit_gap`: how far the method's token lies behind the oracle's
    after their common prefix, in one causal pass.
    """
    result = decode(request)
    first = first_difference(oracle.tokens, result.tokens)
    row: dict[str, Any] = {
        "tokens": len(result.tokens),
        "mat": result.mat if result.committed else None,
        "identical": first is None,
        "first_divergence": first,
    }
    if first is not None:
        row["logit_gap"] = logit_gap(request, oracle.tokens, result.tokens, target)
    return row


def logit_gap(
    request: Request, oracle: Sequence[int], tokens: Sequence[int], target: Target
) -> float | None:
    """How far a response's token lies behind the oracle's where they part, in one causal pass.

    None where they do not, or where one ends.
    """
    first = first_difference(oracle, tokens)
    if first is None or first >= min(len(oracle), len(tokens)):
        return None
    logits = target.prefill([*request.prompt, *oracle[:first]]).logits[0].float()
    return float(logits[oracle[first]] - logits[tokens[first]])
