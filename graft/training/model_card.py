"""The README.md beside a trained drafter: what it is for, what made it, how good it is."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

TEMPLATE = """\
---
license: apache-2.0
tags: [speculative-decoding, dflash, draft-model]
---
# {name}

A DFlash drafter (arXiv 2602.06036) for **{target}**: in one pass it proposes the next {depth}
tokens, which the target verifies. {layers} layers in the target's shape, {parameters:.1f} M
parameters, taps after blocks {taps} (0-based), mask token {mask}. It uses the target's embedding
and head.{draft_vocab}

```
python scripts/generate.py drafter=dflash drafter.checkpoint=<this folder> compare=true
```

## How it was made

`{command}` at git revision `{git}`: {steps} optimiser steps, {seconds}.
It saw {tokens:,} answer tokens, each written by the target itself, {visits:.1f} times on average:

| prompts | answer tokens | licence of the prompts |
|---|---|---|
{sources}

The best state on held-out prompts of the same sources was kept. Tokens a round there, bonus
included, by replay:

{curve}

The recipe:

```json
{recipe}
```
"""


@dataclass(frozen=True)
class Facts:
    """What a card is written from."""

    name: str
    target: str
    net: Any  # DFlashNet
    config: Mapping[str, Any]  # of the run, resolved
    texts: int  # trained on
    answer_tokens: Mapping[str, int]  # of them, by source
    licences: Mapping[str, str]  # by source
    steps: int
    seconds: float
    curve: Sequence[Mapping[str, Any]]  # validation rows of the log
    git: str
    command: str  # that made it


def model_card(facts: Facts) -> str:
    """Markdown with the hub's front matter."""
    config, net = facts.config, facts.net
    tokens = sum(facts.answer_tokens.values())
    drafts = ""
    if net.draft_tokens is not None:
        drafts = (
            f" It proposes the {len(net.draft_tokens):,} commonest tokens only\n"
            "(`draft_tokens.npy`; an engine that does not know the file reads the whole head)."
        )
    data = config["data"]
    visited = facts.steps * config["trainer"]["accumulate_grad_batches"] * data["batch_size"]
    sources = [
        f"| {source} | {count:,} | {facts.licences.get(source, 'not stated')} |"
        for source, count in facts.answer_tokens.items()
    ]
    recipe = {key: config[key] for key in ("data", "model", "trainer", "seed")}
    return TEMPLATE.format(
        name=facts.name,
        target=facts.target,
        depth=net.config.block_size - 1,
        layers=net.config.num_layers,
        parameters=sum(p.numel() for p in net.parameters()) / 1e6,
        taps=", ".join(map(str, net.config.target_layer_ids)),
        mask=net.config.mask_token_id,
        draft_vocab=drafts,
        command=facts.command,
        git=facts.git,
        steps=facts.steps,
        seconds=_duration(facts.seconds),
        tokens=tokens,
        visits=visited / facts.texts,
        sources="\n".join(sources),
        curve=_curve(facts.curve),
        recipe=json.dumps(recipe, indent=2),
    )


def _curve(rows: Sequence[Mapping[str, Any]]) -> str:
    """The validations as a table, thinned to a dozen."""
    if not rows:
        return "(it was not validated)"
    methods = [key for key in rows[0] if key.startswith("mat/")]
    head = "| step | " + " | ".join(key.removeprefix("mat/") for key in methods) + " |"
    lines = [head, "|---" * (len(methods) + 1) + "|"]
    stride = -(-len(rows) // 12)
    for row in [*rows[:-1:stride], rows[-1]]:
        lines.append(
            f"| {row['step'] + 1} | " + " | ".join(f"{row[m]:.2f}" for m in methods) + " |"
        )
    return "\n".join(lines)


def _duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min"
