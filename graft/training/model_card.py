"""The README.md beside a trained drafter: what it is for, what made it, how good it is."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from graft.drafters.dflash_net import DFlashNet
from graft.training.run import RunFacts

TEMPLATE = """\
---
license: {license}
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

`{command}` at git revision `{git}`: {steps} optimiser steps, {duration}.
It was trained on {tokens:,} answer tokens, all written by the target itself; each text was visited
{visits:.1f} times, at fresh anchors. Beside the sources stands MAT (tokens a round, bonus included,
by replay) on their held-out prompts, empty where none was held out:

{sources}

The best state on held-out prompts was kept. MAT over all of them as training went on:

{curve}

The recipe:

```json
{recipe}
```
"""


def model_card(
    name: str, net: DFlashNet, facts: RunFacts, *, texts: int, answer_tokens: Mapping[str, int]
) -> str:
    """Markdown with the hub's front matter.

    The log of `facts` holds the validations among its rows; `texts` were trained on, with so many
    `answer_tokens` by source.
    """
    config, steps = facts.config, facts.steps
    visits = facts.batches * config["data"]["batch_size"]
    drafts = ""
    if net.draft_tokens is not None:
        drafts = (
            f" It proposes the {len(net.draft_tokens):,} commonest tokens only\n"
            "(`draft_tokens.npy`; an engine that does not know the file reads the whole head)."
        )
    root = config["paths"]["root"] + "/"  # whose machine it was made on is nobody's business
    recipe = {key: config[key] for key in ("data", "model", "trainer", "seed")}
    validations = {row["step"]: row for row in facts.rows if config["monitor"] in row}
    curve = [validations[step] for step in sorted(validations)]
    best = max(curve, key=lambda row: row[config["monitor"]], default={})
    return TEMPLATE.format(
        license=config["license"],
        name=name,
        target=facts.target.replace(root, ""),
        depth=net.config.block_size - 1,
        layers=net.config.num_layers,
        parameters=sum(p.numel() for p in net.parameters()) / 1e6,
        taps=", ".join(map(str, net.config.target_layer_ids)),
        mask=net.config.mask_token_id,
        draft_vocab=drafts,
        command=facts.command.replace(root, ""),
        git=facts.git,
        steps=steps,
        duration=_duration(facts.seconds),
        tokens=sum(answer_tokens.values()),
        visits=visits / texts,
        sources=_sources(answer_tokens, config["licences"], best),
        curve=_curve(curve, visits // steps * config["data"]["anchors"]),
        recipe=json.dumps(recipe, indent=2).replace(root, ""),
    )


def _sources(
    answer_tokens: Mapping[str, int], licences: Mapping[str, str], best: Mapping[str, Any]
) -> str:
    """One row a source: tokens, licence, and tokens a round on its held-out prompts."""
    methods = _methods(best)
    lines = [
        "| prompts | answer tokens | licence of the prompts | " + " | ".join(methods) + " |",
        "|---" * (3 + len(methods)) + "|",
    ]
    for source, count in answer_tokens.items():
        mats = (best.get(f"mat_{source}/{method}") for method in methods)
        cells = ["" if mat is None else f"{mat:.2f}" for mat in mats]
        licence = licences.get(source, "not stated")
        lines.append(f"| {source} | {count:,} | {licence} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _curve(rows: Sequence[Mapping[str, Any]], blocks: int) -> str:
    """The validations as a table, thinned to a dozen; `blocks` were trained on a step."""
    if not rows:
        return "(it was not validated)"
    methods = _methods(rows[0])
    lines = ["| step | blocks | " + " | ".join(methods) + " |", "|---" * (len(methods) + 2) + "|"]
    stride = -(-len(rows) // 12)
    for row in [*rows[:-1:stride], rows[-1]]:
        mats = " | ".join(f"{row[f'mat/{method}']:.2f}" for method in methods)
        step = row["step"] + 1
        lines.append(f"| {step} | {step * blocks:,} | {mats} |")
    return "\n".join(lines)


def _methods(row: Mapping[str, Any]) -> list[str]:
    return [key.removeprefix("mat/") for key in row if key.startswith("mat/")]


def _duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min"
