"""Train every rung of the scorer ladder on one collection, and compare them on another.

    python scripts/ablate.py data.collected=data/collected/mine evaluate=data/collected/held_out
    python scripts/ablate.py rungs=[r1,r4,r5] trainer.max_steps=1000

r0 is DDTree, the drafter's marginals. A rung that was trained before is taken as it is (delete its
folder under OUT to train it again); interrupted ones go on. Judge a scorer by tokens a round at
equal budget, not by its mismatch rate: a bad scorer can bring that to nothing.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from launch import ROOT, progress_bar, stage
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.table import Table

from graft.budgets.fixed import Fixed
from graft.core.errors import InputError
from graft.core.runlog import RunLog
from graft.data.anchors import Anchors
from graft.decode.replay import Replay
from graft.eval.replay import Summary, replay_all, summarise
from graft.trees import tdes
from graft.trees.ddtree import DDTree

PASSED_ON = ("target", "drafter", "data", "trainer", "logger")  # what train.py is told as well
TIMED = 200  # rounds


@stage("ablate")
def main(cfg: DictConfig) -> None:
    console = Console(highlight=False)
    anchors = Anchors([Path(cfg.evaluate)])
    config: Any = OmegaConf.to_container(cfg, resolve=True)
    log = RunLog(
        Path(HydraConfig.get().runtime.output_dir), config, stage=cfg.stage, wandb=cfg.logger.wandb
    )
    out = Path(cfg.out)
    for rung in cfg.rungs:
        if not (out / rung / "config.json").exists():
            train(rung, out / rung, cfg, console)
    builders: dict[str, Any] = {"r0": DDTree()}
    builders |= {rung: tdes.load(str(out / rung)) for rung in cfg.rungs}
    methods = {
        f"{rung}_{budget}": Replay(builder, Fixed(budget))
        for rung, builder in builders.items()
        for budget in cfg.budgets
    }
    with progress_bar(console, "responses") as progress:
        found = replay_all(progress.track(anchors, total=len(anchors)), methods)
    baselines = {name: f"r0_{name.rpartition('_')[2]}" for name in methods}
    summaries = {s.name: s for s in summarise(found, baselines=baselines, seed=cfg.seed)}

    lines = []
    for rung, builder in builders.items():
        facts = facts_of(out / rung) if rung != "r0" else {}
        microseconds = build_time(builder, anchors, max(cfg.budgets))
        mine = {budget: summaries[f"{rung}_{budget}"] for budget in cfg.budgets}
        lines.append(line(rung, mine, facts, microseconds))
        for budget, summary in mine.items():
            log.log(
                {
                    "rung": rung,
                    "budget": budget,
                    "mat": summary.mat,
                    "gain": summary.gain,
                    "gain_interval": summary.gain_interval,
                    "mismatch": summary.mismatch,
                    "loss": summary.loss,
                    "microseconds": microseconds,
                    **facts,
                }
            )
    log.close()
    headings = ["", "numbers", "train s"]
    headings += [f"% at {budget} [95 %]" for budget in cfg.budgets]
    headings += [f"mismatch {budget}" for budget in cfg.budgets] + ["ECE", "us"]
    table = Table(box=None, pad_edge=False)
    for place, heading in enumerate(headings):
        table.add_column(heading, justify="right" if place else "left", no_wrap=True)
    for one in lines:
        table.add_row(*one)
    console.print(f"tokens a round over r0 (DDTree) at equal budget, {len(anchors)} responses")
    console.width = max(console.width, 40 + 34 * len(cfg.budgets))
    console.print(table)


def train(rung: str, out: Path, cfg: DictConfig, console: Console) -> None:
    """Run the training stage for a rung, with this stage's data and trainer."""
    console.print(f"training {rung}", style="dim")
    changes = [a for a in sys.argv[1:] if a.lstrip("+~").split("=")[0].split(".")[0] in PASSED_ON]
    changes += [a for a in sys.argv[1:] if a.startswith(("+experiment=", "paths.outputs="))]
    command = [sys.executable, str(ROOT / "train.py"), f"scorer={rung}", f"out={out}", *changes]
    done = subprocess.run([*command, f"name=ablate/{rung}", f"seed={cfg.seed}"])
    if done.returncode:
        raise InputError(f"training {rung} failed; run it alone: {' '.join(command[1:])}")


def facts_of(folder: Path) -> dict[str, Any]:
    """What the training of a rung left in its config."""
    return json.loads((folder / "config.json").read_text())["trained"]


def build_time(builder: Any, anchors: Anchors, budget: int) -> float:
    """Median microseconds of scoring and building a tree."""
    drafts = anchors[0].drafts
    times = []
    for i in range(TIMED):
        draft = drafts[i % len(drafts)]
        started = time.perf_counter()
        builder.build(draft, budget)
        times.append(time.perf_counter() - started)
    return 1e6 * sorted(times)[TIMED // 2]


def line(
    rung: str, mine: dict[int, Summary], facts: dict[str, Any], microseconds: float
) -> list[str]:
    """Of the table."""
    gains = [
        "{:.1f} [{:.1f}, {:.1f}]".format(*(100 * x for x in (s.gain, *s.gain_interval)))
        if facts
        else f"MAT {s.mat:.3f}"
        for s in mine.values()
    ]
    return [
        rung,
        f"{facts['parameters']:,}" if facts else "0",
        f"{facts['seconds']:.0f}" if facts else "",
        *gains,
        *(f"{100 * s.mismatch:.1f}" for s in mine.values()),
        f"{facts['ece']:.3f}" if facts and facts["ece"] is not None else "",
        f"{microseconds:.0f}",
    ]


if __name__ == "__main__":
    main()
