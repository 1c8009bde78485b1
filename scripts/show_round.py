"""Show recorded rounds: the tree, the accepted path, and what became of the token that ended it.

    python scripts/show_round.py
    python scripts/show_round.py fate=budget count=5 seed=1
    python scripts/show_round.py collected=data/collected/mine prompt=gsm8k-00002 round=7

Reads what scripts/collect.py what=[rounds] wrote; no model is loaded. The pictures go into the
run's folder. graft/eval/fate.py says what the four fates are.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from launch import stage, tokenizer_of
from omegaconf import DictConfig
from rich.console import Console
from rich.text import Text
from rich.tree import Tree

from graft.core.errors import InputError
from graft.data.rounds import RecordedRound, Rounds
from graft.eval.fate import KINDS, fate_of, in_words, visible
from graft.eval.plots import chances, draw_round, title

BEFORE = 24  # tokens of the text before the root


@stage("show_round", literal=("prompt", "collected"))
def main(cfg: DictConfig) -> None:
    console = Console(highlight=False)
    check(cfg)
    rounds = Rounds([Path(cfg.collected)])
    tokenizer = tokenizer_of(Path(cfg.collected))

    def text(token: int) -> str:
        return tokenizer.decode([token])

    for row in choose(rounds, cfg):
        round = rounds[row]
        console.rule(Text(title(round)), align="left", style="dim")
        console.print(before(rounds, row, tokenizer), style="dim", markup=False)
        console.print(as_tree(round, text))
        console.print(in_words(round, text), markup=False, soft_wrap=True)
        if cfg.pictures:
            name = re.sub(r"[^\w.-]", "_", f"{round.prompt_id}-{round.turn}-{round.index}")
            file = Path(HydraConfig.get().runtime.output_dir) / f"{name}.png"
            draw_round(round, text).savefig(file)
            console.print(f"picture: {file}", style="dim", markup=False, soft_wrap=True)
        console.print()


def check(cfg: DictConfig) -> None:
    """Raises InputError for what makes no sense."""
    if cfg.fate not in (None, *KINDS):
        raise InputError(f"fate must be one of {', '.join(KINDS)}, or null, not {cfg.fate}")
    if not isinstance(cfg.count, int) or cfg.count < 1:
        raise InputError(f"count must be a number of rounds, at least 1, not {cfg.count}")
    if cfg.round is not None and cfg.prompt is None:
        raise InputError(f"round={cfg.round} of which response? Add prompt=, a prompt_id")


def choose(rounds: Rounds, cfg: DictConfig) -> list[int]:
    """Rows of the rounds to show, in text order; drawn by `seed` where there are more than asked.

    Without a fate mismatches are drawn first. Raises InputError where there are none.
    """
    rows = among(rounds, cfg)
    drawn = random.Random(cfg.seed).sample(rows, len(rows))
    chosen: list[int] = []
    others: list[int] = []
    for row in drawn:
        right = fate_of(rounds[row]).kind == (cfg.fate or "mismatch")
        (chosen if right else others).append(row)
        if len(chosen) == cfg.count:
            break
    if cfg.fate is None:
        chosen = (chosen + others)[: cfg.count]
    if not chosen:
        raise InputError(f"fate={cfg.fate}: none of the {len(rows)} rounds looked at has this fate")
    return sorted(chosen)


def among(rounds: Rounds, cfg: DictConfig) -> range:
    """The rows that `prompt`, `turn` and `round` name. Raises InputError where there are none."""
    if cfg.prompt is None:
        return range(len(rounds))
    responses = rounds.responses()
    turns = [turn for prompt, turn in responses if prompt == cfg.prompt]
    if not turns:
        some = ", ".join(list(dict.fromkeys(prompt for prompt, _ in responses))[:5])
        raise InputError(f"no prompt {cfg.prompt} in {cfg.collected}; it holds {some}, ...")
    if cfg.turn not in turns:
        had = ", ".join(map(str, turns))
        raise InputError(f"turn={cfg.turn}: of prompt {cfg.prompt} there are turns {had}")
    rows = responses[cfg.prompt, cfg.turn]
    if cfg.round is None:
        return rows
    if not isinstance(cfg.round, int) or not 0 <= cfg.round < len(rows):
        raise InputError(
            f"round={cfg.round}: that response has {len(rows)} rounds, 0 to {len(rows) - 1}"
        )
    return rows[cfg.round : cfg.round + 1]


def before(rounds: Rounds, row: int, tokenizer: Any) -> str:
    """The end of the response before a round's root: the roots and paths of the rounds before."""
    earlier = range(row - rounds[row].index, row)
    tokens = [
        token for one in map(rounds.__getitem__, earlier) for token in one.tree.tokens[one.path]
    ]
    if not tokens:
        return "the root is the response's first token"
    cut = "... " if len(tokens) > BEFORE else ""
    return f"before it: {cut}{visible(tokenizer.decode(tokens[-BEFORE:]))}"


def as_tree(round: RecordedRound, text: Callable[[int], str]) -> Tree:
    """The accepted path green and ticked, the target's own token blue, where it hung pointed at."""
    tree, path, hung = round.tree, set(round.path), fate_of(round).nodes
    branches: list[Tree] = []
    for node, chance in enumerate(chances(tree)):
        style = "bold green" if node in path else "bold red" if node in hung else ""
        label = Text().append(f'"{visible(text(tree.tokens[node]))}"', style)
        if chance:
            label.append(f" {chance}", "dim")
        if node in path:
            label.append(" \N{CHECK MARK}", "green")
        if node in hung:
            label.append(" <- where the target's token hung", "red")
        branches.append(branches[tree.parents[node]].add(label) if node else Tree(label))
    bonus = f'"{visible(text(round.bonus))}"'
    branches[round.path[-1]].add(Text(bonus, "bold blue").append(" the target's own"))
    return branches[0]


if __name__ == "__main__":
    main()
