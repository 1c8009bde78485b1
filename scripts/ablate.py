"""Train every rung of the scorer ladder on one collection, and compare them on another.

    python scripts/ablate.py data.collected=data/collected/mine evaluate=data/collected/held_out
    python scripts/ablate.py rungs=[r1,r4,r5] trainer.max_steps=1000

r0 is DDTree, the drafter's marginals. Interrupted rungs go on, finished ones are taken as they are;
other settings want another out=. Judge a scorer by tokens a round at
equal budget, not by its mismatch rate: a bad scorer can bring that to nothing.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from launch import ROOT, open_log, progress_bar, stage, table
from omegaconf import DictConfig
from rich.console import Console

from graft.budgets.fixed import Fixed
from graft.core.errors import InputError
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
    check_apart(anchors, cfg.data.collected)
    log = open_log(cfg)
    out = Path(cfg.out)
    for rung in cfg.rungs:  # one that is finished ends at once
        train(rung, out / rung, cfg, console)
    models = {key: anchors.made_by[key]["fingerprint"] for key in ("target", "drafter")}
    builders: dict[str, Any] = {"r0": DDTree()}
    builders |= {rung: tdes.load(str(out / rung)) for rung in cfg.rungs}
    for rung in cfg.rungs:
        builders[rung].scorer.check_fits(**models)
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
    headings += [f"MAT, % at {budget} [95 %]" for budget in cfg.budgets]
    headings += [f"mismatch {budget}" for budget in cfg.budgets] + ["ECE", "us"]
    console.print(f"tokens a round over r0 (DDTree) at equal budget, {len(anchors)} responses")
    console.width = max(console.width, 40 + 34 * len(cfg.budgets))
    console.print(table(headings, lines))


def check_apart(anchors: Anchors, collected: Any) -> None:
    """Refuse to judge a scorer on prompts that it may have learned from (InputError)."""
    folders = [collected] if isinstance(collected, str) else list(collected)
    if both := anchors.sources().keys() & Anchors([Path(f) for f in folders]).sources().keys():
        raise InputError(
            f"evaluate and data.collected share {len(both)} prompts, {min(both)} among them; "
            "collect others to judge on"
        )


def train(rung: str, out: Path, cfg: DictConfig, console: Console) -> None:
    """Run the training stage for a rung, with this stage's data and trainer."""
    console.print(f"training {rung}", style="dim")
    changes = [a for a in sys.argv[1:] if a.lstrip("+~").split("=")[0].split(".")[0] in PASSED_ON]
    changes += [a for a in sys.argv[1:] if a.startswith(("+experiment=", "paths."))]
    command = [sys.executable, str(ROOT / "train.py"), f"scorer={rung}", f"out={out}", *changes]
    command += [f"run_folder={out}.run", f"name={cfg.name}", f"seed={cfg.seed}"]
    done = subprocess.run(command)
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
    gains = []
    for summary in mine.values():
        numbers = (100 * x for x in (summary.gain, *summary.gain_interval))
        over = " {:.1f} [{:.1f}, {:.1f}]".format(*numbers) if facts else ""
        gains.append(f"{summary.mat:.3f}{over}")
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
