"""Decode collected responses again under any tree and budget, exactly, without a model.

    python scripts/replay.py
    python scripts/replay.py collected=[data/collected/mine] cost=path/to/cost.json
    python scripts/replay.py +method@methods.mine=ddtree methods.mine.budget.nodes=24

Prints, for every method, tokens a round with an interval, its gain over the baseline on the same
prompts, where rounds end and why, and acceptance by depth and rank; with a cost table, tokens/s.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Sequence
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from launch import folders_of, open_log, progress_bar, stage, table
from methods import check_collected, method_of, models_of
from omegaconf import DictConfig, OmegaConf
from rich.console import Console, Group
from rich.text import Text

from graft.budgets.cost import CostTable
from graft.core.errors import InputError
from graft.core.runlog import write_atomically
from graft.data.anchors import Anchors
from graft.data.collected import MODELS, difference
from graft.data.rounds import Rounds
from graft.decode.replay import Replay
from graft.eval.fate import KINDS
from graft.eval.replay import RANKS, Summary, agreement, replay_all, summarise


@stage("replay")
def main(cfg: DictConfig) -> None:
    console = Console(highlight=False)
    decoders = {name: method_of(method) for name, method in cfg.methods.items()}
    methods = {name: Replay.of(decode) for name, decode in decoders.items()}
    baselines = {name: baseline_of(name, cfg.baseline, list(methods)) for name in methods}
    anchors = Anchors(folders_of(cfg.collected))
    made_by = anchors.made_by
    for decode in decoders.values():
        check_collected(decode, made_by)
    cost = None
    if cfg.cost:
        cost = CostTable.load(Path(cfg.cost))
        cost.check_fits(models_of(made_by))
    console.print(
        f"{made_by['target']['name']}; {made_by['drafter']['name']}; {len(anchors)} responses, "
        f"D = {anchors.depth}, K = {anchors.candidates}, {made_by['settings']['dtype']}, "
        f"T = {made_by['settings']['temperature']}",
        style="dim",
        soft_wrap=True,
    )
    with progress_bar(console, "responses") as progress:
        started = time.perf_counter()
        found = replay_all(progress.track(anchors, total=len(anchors)), methods)
        seconds = time.perf_counter() - started
    for folder in folders_of(cfg.check):
        if (folder / "rounds").is_dir():
            console.print(against_reality(anchors, folder), soft_wrap=True, end="\n\n")
    summaries = summarise(found, baselines=baselines, cost=cost, seed=cfg.seed)

    for part in (
        overview(summaries, cfg.baseline),
        why_rounds_end(summaries),
        by_set(summaries),
        by_depth(summaries),
        by_rank(summaries),
    ):
        console.print(part)
        console.print()
    rounds = sum(summary.rounds for summary in summaries)
    console.print(
        f"{rounds} rounds in {seconds:.1f} s: {rounds / seconds:.0f} rounds/s", style="dim"
    )
    folder = Path(HydraConfig.get().runtime.output_dir)
    log = open_log(cfg)
    rows = [dataclasses.asdict(summary) for summary in summaries]
    write_atomically(
        folder / "replay.json", json.dumps({"made_by": made_by, "methods": rows}) + "\n"
    )
    for row in rows:
        log.log({f"{row['name']}/{key}": value for key, value in row.items()})
    log.close()


def baseline_of(method: str, baseline: str, methods: Sequence[str]) -> str:
    """The method of this name, or the one of this family at the method's own budget."""
    at_budget = f"{baseline}_{method.rpartition('_')[2]}"
    found = next((name for name in (baseline, at_budget) if name in methods), None)
    if found is None:
        raise InputError(f"baseline={baseline} is no method; there are {', '.join(methods)}")
    return found


def against_reality(anchors: Anchors, folder: Path) -> str:
    """What replay says of the rounds that were recorded beside the anchors, or elsewhere."""
    rounds = Rounds([folder])
    if apart := difference(rounds.made_by, anchors.made_by, MODELS):
        raise InputError(
            f"{folder}/rounds has another {apart} than the anchors; take it from check="
        )
    method = Replay.of(method_of(OmegaConf.create(rounds.made_by["settings"]["method"])))
    found = agreement(anchors, rounds, method)
    text = (
        f"against reality ({folder}/rounds, {found.responses} responses): {found.same} of "
        f"{found.rounds} rounds accepted what replay says"
    )
    if found.parted:
        text += f"; {found.parted} responses were left where their text parts from the anchors'"
    return text


def overview(summaries: Sequence[Summary], baseline: str) -> Group:
    """What a method commits, and what that is worth."""
    headings = ["method", "nodes", "pooled", "MAT [95 %]", f"% over {baseline} [95 %]"]
    timed = summaries[0].speedup is not None
    lines = []
    for s in summaries:
        line = [
            s.name,
            f"{s.nodes:.1f}",
            f"{s.pooled:.2f}",
            "{:.2f} [{:.2f}, {:.2f}]".format(s.mat, *s.mat_interval),
            "{:.1f} [{:.1f}, {:.1f}]".format(*(100 * gain for gain in (s.gain, *s.gain_interval))),
        ]
        if s.tokens_per_second is not None and s.speedup is not None:
            line += [f"{s.tokens_per_second:.1f}", f"{s.speedup:.2f}x"]
        lines.append(line)
    return titled("tokens a round", headings + (["tok/s", "over AR"] if timed else []), lines)


def why_rounds_end(summaries: Sequence[Summary]) -> Group:
    """The loss split, and the mismatch rate that the papers quote."""
    headings = ["method", *(kind.replace("_", " ") for kind in KINDS), "mismatch rate"]
    lines = [
        [s.name, *(f"{100 * s.loss[kind]:.1f} %" for kind in KINDS), f"{100 * s.mismatch:.1f} %"]
        for s in summaries
    ]
    return titled("why rounds end: share of rounds by fate of the failing token", headings, lines)


def by_set(summaries: Sequence[Summary]) -> Group:
    sources = list(summaries[0].mat_by_source)
    lines = [[s.name, *(f"{s.mat_by_source[source]:.2f}" for source in sources)] for s in summaries]
    return titled("MAT by set", ["method", *sources], lines)


def by_depth(summaries: Sequence[Summary]) -> Group:
    depths = [str(depth) for depth in range(1, len(summaries[0].acceptance) + 1)]
    lines = [[s.name, *(f"{share:.2f}" for share in s.acceptance)] for s in summaries]
    title = "acceptance by depth: of the rounds that get to the depth before, those that get to it"
    return titled(title, ["method", *depths], lines)


def by_rank(summaries: Sequence[Summary]) -> Group:
    """Of the accepted tokens, by rank; replay.json has it by depth as well."""
    bins = [str(low) if low == high else f"{low}-{high or ''}" for low, high in RANKS]
    lines = [[s.name, *(f"{share:.1%}" for share in s.by_rank)] for s in summaries]
    return titled(
        "accepted tokens by their rank among the drafter's candidates", ["method", *bins], lines
    )


def titled(title: str, headings: Sequence[str], lines: Sequence[Sequence[str]]) -> Group:
    return Group(Text(title, "italic"), table(headings, lines))


if __name__ == "__main__":
    main()
