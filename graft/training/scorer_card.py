"""The README.md beside a trained scorer: what it is for, what made it, how good it is."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from graft.training.run import RunFacts

TEMPLATE = """\
# {name}

An edge scorer (TDES) for **{target}** and the drafter it was collected with: {depth} depths,
{candidates} candidates each.

```
python scripts/generate.py method=graft_tdes paths.scorer=<this folder>
```

Tokens a round over DDTree's at equal budget, on held-out prompts (which also chose this state and
the weight of the learned term): {gains}.

`{command}` at git revision `{git}`: {steps} steps, {seconds:.0f} s.

```json
{recipe}
```
"""


def scorer_card(name: str, scorer: Mapping[str, Any], facts: RunFacts) -> str:
    """Markdown; the log of `facts` holds the validations among its rows."""
    validated = [row for row in facts.rows if "gain" in row]
    best = max(validated, key=lambda row: row["gain"], default={})
    budgets = [key.removeprefix("gain/") for key in best if key.startswith("gain/")]
    root = facts.config["paths"]["root"] + "/"  # whose machine it was is nobody's business
    recipe = {key: facts.config[key] for key in ("data", "model", "trainer", "seed")}
    return TEMPLATE.format(
        name=name,
        target=facts.target,
        depth=scorer["depth"],
        candidates=scorer["candidates"],
        gains=", ".join(f"{100 * best[f'gain/{b}']:+.1f} % at {b}" for b in budgets) or "none yet",
        command=facts.command,
        git=facts.git,
        steps=facts.steps,
        seconds=facts.seconds,
        recipe=json.dumps(recipe, indent=2),
    ).replace(root, "")
