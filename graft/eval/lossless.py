"""Is a method's output the target's own? Compare it with plain decoding, and explain the first
difference.

In fp32 at T = 0 the answer must be yes. In bf16 a pass over 17 rows rounds differently from a pass
over one, and a near-tie may flip; the gap between the two tokens' logits in a plain pass over the
same prefix says whether it was one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from graft.core.interfaces import Target
from graft.core.types import Generation, Request


def compare(
    request: Request, oracle: Generation, decode: Callable[[Request], Generation], target: Target
) -> dict[str, Any]:
    """Decode a request and compare it with the oracle's response.

    Returns the method's MAT and, where the tokens differ, `first_divergence` (index in the
    response) and `logit_gap`: |logit of the oracle's token - logit of the method's| after their
    common prefix, in one causal pass.
    """
    result = decode(request)
    row: dict[str, Any] = {
        "tokens": len(result.tokens),
        "mat": result.mat,
        "identical": result.tokens == oracle.tokens,
    }
    if not row["identical"]:
        pairs = zip(oracle.tokens, result.tokens, strict=False)
        first = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        row["first_divergence"] = first
        if first is not None:
            logits = target.prefill([*request.prompt, *oracle.tokens[:first]]).logits[0].float()
            row["logit_gap"] = abs(
                float(logits[oracle.tokens[first]] - logits[result.tokens[first]])
            )
    return row
