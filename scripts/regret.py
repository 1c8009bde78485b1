"""What the budget policies are worth on this machine, on collected text, by exact replay.

    python scripts/regret.py collected=data/collected/other
    python scripts/regret.py method=ddtree constants=data/constants/ddtree
    python scripts/regret.py line=[5.5,1.0]     # as if a round of n nodes cost 5.5 + n ms

Tokens/s under the cost table of scripts/fit.py: every policy against the best constant that fit.py
found, by set; against the best of a sweep over fixed budgets on this very text; against the
expected optimum of any policy; and, as luck, against hindsight. Then the same as if all contexts
were of a length.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from launch import WIDTH, folders_of, open_log, progress_bar, stage, table
from methods import builder_of, check_collected, method_of, models_of
from omegaconf import DictConfig, ListConfig
from rich.console import Console
from rich.table import Table

from graft.budgets.best import Best
from graft.budgets.constants import Constants
from graft.budgets.cost import FAR
from graft.budgets.fitted import Fitted
from graft.budgets.paper import Paper
from graft.budgets.ratio import Ratio
from graft.core.errors import InputError
from graft.core.interfaces import BudgetPolicy, TreeBuilder
from graft.data.anchors import AnchoredResponse, Anchors
from graft.eval.bootstrap import interval, resampled_means
from graft.eval.regret import Laid, Regret, flat, lay, regret, swept


@stage("regret")
def main(cfg: DictConfig) -> None:
    console = Console(highlight=False)
    console.width = max(console.width, WIDTH)
    decode = method_of(cfg.method)
    constants = priced(Constants.load(Path(cfg.constants)), cfg.line)
    anchors = Anchors(folders_of(cfg.collected))
    check_collected(decode, anchors.made_by)
    constants.cost.check_fits(models_of(anchors.made_by) | {"builder": builder_of(decode)})
    builder = decode.keywords["builder"]
    with progress_bar(console, "responses") as progress:
        judged = judge(progress.track(anchors, total=len(anchors)), builder, constants)
    if judged.left_out:
        console.print(f"left out: {judged.left_out} responses, longer than what was measured")
    for part in judged.tables(seed=cfg.seed):
        console.print(part)
        console.print()
    log = open_log(cfg)
    log.log(judged.row())
    log.close()


def priced(constants: Constants, line: Any) -> Constants:
    """The constants as they are, or under the costs of a straight line [c_f, c_v] in ms."""
    if line is None:
        return constants
    times = list(line) if isinstance(line, ListConfig) else []
    if len(times) != 2 or not all(isinstance(t, int | float) and t > 0 for t in times):
        raise InputError(f"line must be two times in ms, [c_f, c_v], not {line}")
    cost = constants.cost.straight(fixed=times[0] / 1e3, per_node=times[1] / 1e3)
    return dataclasses.replace(constants, cost=cost)


def policies_of(constants: Constants) -> dict[str, BudgetPolicy]:
    """Those that read the constants; the first is what the others are held against."""
    return {
        "best": Best(constants),
        "fitted": Fitted(constants),
        "ratio": Ratio(constants),
        "paper": Paper(constants.cost),
    }


@dataclasses.dataclass(frozen=True, eq=False)
class Judgement:
    """Of all policies on one collection."""

    laid: Sequence[Laid]
    left_out: int  # responses that go on beyond the contexts that were measured
    own: Regret  # at the text's own context lengths
    at: dict[int, Regret]  # as if all contexts were of a length

    def tables(self, *, seed: int) -> list[Table]:
        return [self.overview(seed), self.by_set(), self.by_context()]

    def overview(self, seed: int) -> Table:
        """Tokens/s of each policy, and over the best constant with an interval."""
        own = self.own
        paces = np.array([one.pace for one in own.policies.values()]).T
        samples = resampled_means(paces, [one.response.prompt_id for one in self.laid], seed=seed)
        lines = []
        for i, (name, one) in enumerate(own.policies.items()):
            pace = one.pace.mean()
            over = paces[:, 0].mean() / pace, *interval(samples[:, 0] / samples[:, i])
            lines.append(
                [
                    name,
                    f"{one.nodes.mean():.1f} ({one.nodes.std():.1f})",
                    f"{one.mat:.2f}",
                    f"{1 / pace:.1f}",
                    f"{own.ar / pace:.2f}x",
                    "{:.1f} [{:.1f}, {:.1f}]".format(*(100 * (x - 1) for x in over)),
                    f"{100 * own.gain(name):.1f}",
                ]
            )
        headings = ["budget", "nodes (sd)", "MAT", "tok/s", "over AR", "% over best [95 %]"]
        return table([*headings, f"% over fixed {own.best}, the sweep's best"], lines)

    def by_set(self) -> Table:
        """The same over the best constant, set by set."""
        sources = np.array([one.response.source for one in self.laid])
        base, names = self.own.policies["best"].pace, sorted(set(sources))
        lines = []
        for name, one in self.own.policies.items():
            over = [base[sources == s].mean() / one.pace[sources == s].mean() for s in names]
            lines.append([name, *(f"{100 * (x - 1):.1f}" for x in over)])
        return table(["% over best", *names], lines)

    def by_context(self) -> Table:
        """What is the best constant at each length, what it loses, and what adapting is worth."""
        lines = []
        for context, found in self.at.items():
            chosen = int(np.median(found.policies["best"].nodes))
            least = found.fixed[found.best]
            first, last = flat({n: 1 / pace for n, pace in found.fixed.items()})
            limit = found.bounds
            lines.append(
                [
                    f"{context}",
                    f"{found.best}",
                    f"{first}..{last}",
                    f"{found.ar / least:.2f}x",
                    f"{chosen}: {100 * found.gain('best'):.1f}",
                    *(f"{100 * found.gain(name):.1f}" for name in ("fitted", "ratio", "paper")),
                    f"{100 * (limit.fixed / limit.optimum - 1):.1f}",
                    f"{100 * (least / limit.hindsight - 1):.1f}",
                ]
            )
        headings = ["context", "best fixed", "within 1 %", "over AR", "best, %", "fitted", "ratio"]
        return table([*headings, "paper", "expected optimum", "luck"], lines)

    def in_words(self) -> str:
        """What adapting every round is worth on this text."""
        best = self.own.policies["best"].pace.mean()
        worth = [
            f"{name} {100 * (best / self.own.policies[name].pace.mean() - 1):+.1f} %"
            for name in ("fitted", "ratio")
        ]
        left = f", {self.left_out} longer ones left out" if self.left_out else ""
        paper = best / self.own.policies["paper"].pace.mean() - 1
        return (
            f"adapting every round is worth {', '.join(worth)} over the best constant of each "
            f"context length (replay of {len(self.laid)} held-out responses{left}); the paper's "
            f"rule {100 * paper:+.1f} %"
        )

    def row(self) -> dict[str, Any]:
        """All of it, for files."""
        return {
            key: {
                "best_fixed": found.best,
                "fixed": {str(n): pace for n, pace in found.fixed.items()},
                "ar": found.ar,
                "bounds": dataclasses.asdict(found.bounds),
                "policies": {
                    name: {
                        "nodes": float(one.nodes.mean()),
                        "mat": one.mat,
                        "seconds_a_token": float(one.pace.mean()),
                        "gain": found.gain(name),
                    }
                    for name, one in found.policies.items()
                },
            }
            for key, found in {"own": self.own, **{str(c): r for c, r in self.at.items()}}.items()
        }


def judge(
    responses: Iterable[AnchoredResponse], builder: TreeBuilder, constants: Constants
) -> Judgement:
    """Every policy on the responses, at their own context lengths and at those of the table."""
    longest = int(constants.cost.contexts[-1])
    left_out = 0

    def measured() -> Iterator[AnchoredResponse]:
        nonlocal left_out
        for one in responses:
            if len(one.prompt) + len(one.response) <= longest:
                yield one
            else:
                left_out += 1

    laid = lay(measured(), builder, constants.reach, constants.nodes)
    if not laid:
        raise InputError(f"no response ends within the context of {longest} that was measured")
    fixed = swept(laid, builder, constants.nodes)
    contexts = [int(c) for c in constants.cost.contexts if c < FAR]
    tables = {c: constants.cost.pinned(c) for c in contexts}
    found = {
        key: regret(
            laid,
            builder,
            policies_of(dataclasses.replace(constants, cost=cost)),
            fixed=fixed,
            cost=cost,
        )
        for key, cost in {0: constants.cost, **tables}.items()
    }
    return Judgement(laid, left_out, found.pop(0), found)


if __name__ == "__main__":
    main()
