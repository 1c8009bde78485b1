"""Check that every method reproduces plain decoding, on real prompts.

    python scripts/lossless.py drafter=noisy
    python scripts/lossless.py drafter=noisy prompts=path/to/prompts target.dtype=bfloat16
    python scripts/lossless.py +experiment=qwen3_8b target.dtype=float32
    python scripts/lossless.py eager=true    # compiled passes against torch's, on this machine

Exit code 1 if any response differs where none may: in fp32, and in bf16 where passes are compiled
on a CPU, since a row's bits do not depend there on the rows beside it. Interrupt it at any time:
run again, it goes on where it was.
"""

from __future__ import annotations

import hashlib
import json
import statistics
import sys
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from hydra.utils import instantiate
from launch import open_log, progress_bar, prompts_of, stage
from methods import bind, drafts, method_of
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.table import Table

from graft.collect.asking import SAMPLING
from graft.core.runlog import revision, versions
from graft.core.types import Request
from graft.data.prompts import Prompt
from graft.decode import autoregressive
from graft.eval.lossless import compare

SETTINGS = (*SAMPLING, "seed")


@stage("lossless", literal=("prompts",))
def main(cfg: DictConfig) -> None:
    console = Console(highlight=False)
    prompts = prompts_of(cfg)
    config: Any = OmegaConf.to_container(cfg, resolve=True)
    methods = {name: method_of(method) for name, method in cfg.methods.items() if drafts(method)}
    target = instantiate(cfg.target)
    drafter = instantiate(cfg.drafter, target=target)
    reference = instantiate(cfg.target, passes="eager") if cfg.eager else target
    if cfg.eager:
        methods["ar"] = partial(autoregressive.generate)

    # Rows are kept only for the very same code, versions, models and settings.
    made_by = {key: config[key] for key in ("target", "drafter", "methods", "eager", *SETTINGS)}
    made_by |= {"device": str(target.device), "git": revision(), "versions": versions()}
    digest = hashlib.sha256(json.dumps(made_by).encode()).hexdigest()[:12]
    folder = Path(cfg.paths.outputs) / "lossless" / digest
    log = open_log(cfg, folder)
    done = {(row["prompt"], row["method"]) for row in log.rows()}
    header = f"{target.name}, {target.dtype}; {drafter.name}; rows in {folder}"
    console.print(header.replace("torch.", ""), style="dim", soft_wrap=True)
    if done:
        console.print(f"going on after {len(done)} rows of an earlier run", style="dim")
    with progress_bar(console, "prompts") as progress:
        for prompt in progress.track(prompts):
            missing = [name for name in methods if (key_of(prompt), name) not in done]
            if not missing:
                continue
            request = Request(
                prompt=target.encode_chat([{"role": "user", "content": prompt.turns[0]}]),
                stop_tokens=target.stop_tokens,
                **{key: cfg[key] for key in SETTINGS},
            )
            oracle = autoregressive.generate(request, target=reference)
            for name in missing:
                drafting = drafter if name in cfg.methods else None
                decode = bind(methods[name], target=target, drafter=drafting)
                row = compare(request, oracle=oracle, decode=decode, target=reference)
                log.log({"prompt": key_of(prompt), "source": prompt.source, "method": name, **row})
    log.close()
    wanted = {key_of(prompt) for prompt in prompts}
    rows = [row for row in log.rows() if row["prompt"] in wanted]
    console.print(table(rows))
    exact = target.dtype == torch.float32 or (target.invariant and not cfg.eager)
    if exact and not all(row["identical"] for row in rows):
        sys.exit(1)


def key_of(prompt: Prompt) -> str:
    """A prompt's id and what it says: ids alone repeat across files."""
    return f"{prompt.id}-{hashlib.sha256(prompt.turns[0].encode()).hexdigest()[:8]}"


def table(rows: list[dict[str, Any]]) -> Table:
    """One line a method; of divergences, smallest / median / largest index and logit gap."""
    by_method = defaultdict(list)
    for row in rows:
        by_method[row["method"]].append(row)
    out = Table(box=None, pad_edge=False)
    out.add_column("method")
    for heading in ("prompts", "tokens", "diverging", "first at token", "logit gap", "MAT"):
        out.add_column(heading, justify="right")
    for method, mine in by_method.items():
        diverging = [row for row in mine if not row["identical"]]
        out.add_row(
            method,
            str(len(mine)),
            str(sum(row["tokens"] for row in mine)),
            str(len(diverging)),
            spread([row["first_divergence"] for row in diverging], "{:.0f}"),
            spread(
                [row["logit_gap"] for row in diverging if row["logit_gap"] is not None], "{:.3g}"
            ),
            f"{statistics.mean(row['mat'] for row in mine if row['mat'] is not None):.2f}",
        )
    return out


def spread(values: list[float], form: str) -> str:
    """Smallest, median and largest."""
    if not values:
        return ""
    numbers = (min(values), statistics.median(values), max(values))
    return " / ".join(form.format(number) for number in numbers)


if __name__ == "__main__":
    main()
