"""Figures of budgets: what rounds cost by size and context, and what they earn by difficulty."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure

from graft.budgets.constants import Constants
from graft.budgets.cost import CostTable
from graft.budgets.observed import Observed
from graft.eval.plots import Picture

COLOURS = ("#009e73", "#0072b2", "#d55e00", "#cc79a7", "#56b4e9", "#e69f00")  # Okabe and Ito
TICKS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


def draw_costs(cost: CostTable) -> Figure:
    """Milliseconds of a round by drafted nodes, a curve a context, its straight line dashed."""
    figure = Picture(figsize=(5.4, 3.4), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    for row, context in enumerate(cost.contexts):
        colour, line = COLOURS[row % len(COLOURS)], cost.line(context)
        milliseconds = 1e3 * cost.rounds[row]
        half = milliseconds * cost.spread[row] / 2
        axes.plot(cost.nodes, milliseconds, color=colour, lw=1.5, label=f"context {context}")
        axes.fill_between(
            cost.nodes, milliseconds - half, milliseconds + half, color=colour, alpha=0.15, lw=0
        )
        axes.plot(
            cost.nodes,
            1e3 * (line.fixed + line.per_node * cost.nodes),
            color=colour,
            lw=0.8,
            ls="--",
        )
        axes.plot(0, 1e3 * cost.ar[row], "o", color=colour, ms=3)
    axes.set(xlabel="drafted nodes (dot: a step of plain decoding)", ylabel="ms a round")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def draw_gains(constants: Constants, rounds: Observed, *, context: int | None = None) -> Figure:
    """Gain and utility against budget by tercile of the drafter's confidence, optima marked.

    Points are means of held-out rounds, lines the fitted gain (the paper's Figure 1c, from data).
    """
    lengths = constants.cost.contexts
    context = int(lengths[min(1, len(lengths) - 1)]) if context is None else context
    nodes = constants.nodes
    seconds = constants.cost.curve(context)[: len(nodes)]
    gain, tokens = constants.gains[constants.fitted], rounds.tokens(nodes)
    thirds = np.digitize(rounds.states[:, 0], np.quantile(rounds.states[:, 0], [1 / 3, 2 / 3]))
    figure = Picture(figsize=(8, 3.4), dpi=150, layout="constrained")
    left, right = figure.subplots(1, 2)
    for third, name in enumerate(("hard", "medium", "easy")):
        mine, colour = thirds == third, COLOURS[third]
        real = np.nanmean(tokens[mine], axis=0)
        said = gain.tokens(nodes, rounds.states[mine]).mean(0)
        for axes, scale in ((left, 1.0), (right, 1 / seconds)):
            axes.plot(nodes, real * scale, ".", color=colour, ms=4)
            axes.plot(nodes, said * scale, color=colour, lw=1.2, label=name)
        best = int(np.argmax(said / seconds))
        right.plot(nodes[best], said[best] / seconds[best], "v", color=colour, ms=7)
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xticks(
            [t for t in TICKS if t <= nodes[-1]], labels=[str(t) for t in TICKS if t <= nodes[-1]]
        )
        axes.set_xlabel("budget, drafted nodes")
        axes.spines[["top", "right"]].set_visible(False)
    left.set_ylabel("tokens a round")
    right.set_ylabel(f"tokens/s at context {context}")
    left.legend(title="drafter's confidence", frameon=False, fontsize=8, title_fontsize=8)
    return figure
