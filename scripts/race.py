"""One table of a race against what users would pick, out of the results of scripts/eval.py.

    python scripts/eval.py methods=race out=data/results/race
    python scripts/race.py results=data/results/race

`make race` does both, and what they need. docs/race.md says how to read the table.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launch import WIDTH, open_log, stage
from launch import table as columns
from omegaconf import DictConfig
from rich.console import Console

from graft.core.runlog import write_atomically
from graft.data.results import read
from graft.eval.race import race_of, sentences, table
from graft.eval.tables import markdown, short


@stage("race")
def main(cfg: DictConfig) -> None:
    console = Console(highlight=False)
    console.width = max(console.width, WIDTH)
    made_by, rows = read(Path(cfg.results))
    race = race_of(made_by, rows)
    mine = [cfg.focus] if any(e.name == cfg.focus for e in race.entries) else []
    said = sentences(race, *mine) if mine else sentences(race, race.baseline)
    shown = table(race, caption(made_by, len(race.prompts)))
    log = open_log(cfg)
    out = Path(cfg.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out, "\n".join([markdown(shown), *said, "", about(made_by), ""]))
    log.table("race", shown.headings, shown.rows)
    log.close()
    console.print(shown.caption, style="bold", soft_wrap=True)
    console.print(columns(shown.headings, shown.rows), end="\n\n")
    console.print("\n".join(said), soft_wrap=True)
    console.print(about(made_by), style="dim", soft_wrap=True)
    console.print(f"the table: {out}", soft_wrap=True)


def caption(made_by: Mapping[str, Any], responses: int) -> str:
    """What was raced, and where."""
    models, settings = made_by["models"], made_by["settings"]
    target, threads = short(made_by["names"]["target"]), models["threads"]
    on = f"{models['device']}, {threads} thread{'s' * (threads > 1)}"
    return (
        f"{target}: {responses} responses of at most {settings['max_new_tokens']} tokens, one at a "
        f"time, T = {settings['temperature']:g}, {on}; ratios over the fastest plain decoding of "
        "the same precision"
    )


def about(made_by: Mapping[str, Any]) -> str:
    """Versions and revision, in a line."""
    versions = ", ".join(f"{name} {number}" for name, number in made_by["versions"].items())
    return f"Versions: {versions}; revision {made_by['git'][:7]}."


if __name__ == "__main__":
    main()
