"""Check that every method reproduces plain decoding, on real prompts.

    python scripts/lossless.py
    python scripts/lossless.py drafter=noisy prompts=path/to/prompts target.dtype=bfloat16
    python scripts/lossless.py +experiment=qwen3_8b target.dtype=float32

Exit code 1 if any response differs in fp32. Interrupt it at any time: run again, it goes on where
it was.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

from hydra.utils import instantiate
from launch import stage
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from graft.core.runlog import RunLog
from graft.core.types import Request
from graft.data.prompts import read_prompts
from graft.decode import autoregressive
from graft.eval.lossless import compare

SAMPLING = ("max_new_tokens", "temperature", "top_p", "top_k", "seed")


@stage("lossless", literal=("prompts",))
def main(cfg: DictConfig) -> None:
    console = Console(highlight=False)
    prompts = read_prompts(Path(cfg.prompts), cfg.per_set)
    config: Any = OmegaConf.to_container(cfg, resolve=True)
    methods = {name: instantiate(method) for name, method in cfg.methods.items()}
    target = instantiate(cfg.target)
    drafter = instantiate(cfg.drafter, target=target)

    made_by = {key: config[key] for key in ("target", "drafter", "methods", *SAMPLING)}
    digest = hashlib.sha256(json.dumps(made_by).encode()).hexdigest()[:12]
    folder = Path(cfg.paths.outputs) / "lossless" / digest
    log = RunLog(folder, config, stage=cfg.stage, wandb=cfg.logger.wandb)
    done = {(row["prompt"], row["method"]) for row in log.rows()}
    header = f"{target.name}, {target.dtype}; {drafter.name}; rows in {folder}"
    console.print(header.replace("torch.", ""), style="dim", soft_wrap=True)
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress("prompts", *columns, console=console) as progress:
        for prompt in progress.track(prompts):
            if missing := [name for name in methods if (prompt.id, name) not in done]:
                request = Request(
                    prompt=target.encode_chat([{"role": "user", "content": prompt.turns[0]}]),
                    stop_tokens=target.stop_tokens,
                    **{key: cfg[key] for key in SAMPLING},
                )
                oracle = autoregressive.generate(request, target=target)
                for name in missing:
                    decode = partial(methods[name], target=target, drafter=drafter)
                    row = compare(request, oracle, decode, target)
                    log.log({"prompt": prompt.id, "source": prompt.source, "method": name, **row})
    log.close()
    wanted = {prompt.id for prompt in prompts}
    rows = [row for row in log.rows() if row["prompt"] in wanted and row["method"] in methods]
    console.print(table(rows))
    if cfg.target.dtype == "float32" and not all(row["identical"] for row in rows):
        sys.exit(1)


def table(rows: list[dict[str, Any]]) -> Table:
    """One line a method: prompts, how many diverge, where and at what logit gap, MAT."""
    by_method = defaultdict(list)
    for row in rows:
        by_method[row["method"]].append(row)
    out = Table(box=None, pad_edge=False)
    for heading in (
        "method",
        "prompts",
        "tokens",
        "diverging",
        "first at token",
        "logit gap",
        "MAT",
    ):
        out.add_column(heading, justify="left" if heading == "method" else "right")
    for method, mine in by_method.items():
        diverging = [row for row in mine if not row["identical"]]
        out.add_row(
            method,
            str(len(mine)),
            str(sum(row["tokens"] for row in mine)),
            str(len(diverging)),
            _range([row["first_divergence"] for row in diverging], "{:.0f}"),
            _range([row["logit_gap"] for row in diverging if "logit_gap" in row], "{:.3g}"),
            f"{sum(row['mat'] for row in mine) / len(mine):.2f}",
        )
    return out


def _range(values: list[Any], form: str) -> str:
    known = [value for value in values if value is not None]
    return f"{form.format(min(known))} .. {form.format(max(known))}" if known else ""


if __name__ == "__main__":
    main()
