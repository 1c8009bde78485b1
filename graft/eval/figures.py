"""Figures of results. Each takes a block of tables.py and gives a figure, or None where the results
lack what it shows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from graft.eval.bootstrap import interval
from graft.eval.metrics import Method
from graft.eval.plots import Picture
from graft.eval.tables import FAMILIES, Block, family_of, label, mats

# Okabe and Ito's colours, told apart by everyone.
COLORS = {
    "ar": "#8c8c8c",
    "library": "#c4c4c4",
    "chain": "#0072b2",
    "ddtree": "#e69f00",
    "tdes": "#009e73",
    "graft": "#d55e00",
    "graft_paper": "#cc79a7",
}
OTHER = "#56b4e9"
THIRDS = (("sure", "#009e73"), ("middling", "#e69f00"), ("unsure", "#d55e00"))
STACK = {"drafter": "#56b4e9", "target": "#0072b2", "building": "#e69f00", "all else": "#8c8c8c"}


def color_of(name: str) -> str:
    """By family, so that a method looks the same everywhere."""
    return COLORS.get(family_of(name), OTHER)


def mismatch(block: Block) -> Figure | None:
    """Rounds that failed under a wrong parent, set by set, of DDTree and TDES at equal budget."""
    budgets = {family: fixed(block, family) for family in ("ddtree", "tdes")}
    shared = budgets["ddtree"].keys() & budgets["tdes"].keys()
    found = [budgets[f][max(shared)] for f in budgets] if shared else trees_of(block)[:4]
    if not found:
        return None
    figure, axes = canvas()
    width = 0.8 / len(found)
    for i, method in enumerate(found):
        rates = [100 * method.cells[s].mismatch for s in block.sets]
        places = np.arange(len(rates)) + (i - (len(found) - 1) / 2) * width
        bars = axes.bar(
            places, rates, width * 0.92, color=color_of(method.name), label=label(method.name)
        )
        axes.bar_label(bars, fmt="%.0f", fontsize=7, padding=1)
    axes.set_xticks(range(len(block.sets)), block.sets)
    axes.set_ylabel("mismatch rate, %")
    axes.legend(frameon=False)
    return figure


def budgets(block: Block) -> Figure | None:
    """MAT and speedup against drafted nodes; bars are 95 % intervals."""
    drafting = [m for m in block.methods.values() if m.mean.nodes]
    if len(drafting) < 2:
        return None
    figure, (left, right) = panels(2, (8, 3.4))
    for family in FAMILIES:
        mine = sorted(fixed(block, family).items())
        for axes, value in ((left, "mat"), (right, "speedup")):
            points(axes, [m for _, m in mine], value, line="-")
    for method in drafting:
        if family_of(method.name) not in FAMILIES:
            for axes, value in ((left, "mat"), (right, "speedup")):
                points(axes, [method], value, line="")
    ticks = sorted({nodes for family in FAMILIES for nodes in fixed(block, family)})
    for axes, what in (
        (left, "MAT, tokens a round"),
        (right, f"speedup over {label(block.baseline)}"),
    ):
        axes.set(xscale="log", xlabel="drafted nodes a round", ylabel=what)
        axes.set_xticks(apart(ticks), [str(t) for t in apart(ticks)])
        axes.minorticks_off()
    left.legend(frameon=False, fontsize=7)
    return figure


def points(axes: Axes, methods: Sequence[Method], value: str, *, line: str) -> None:
    """Methods of one family at their nodes, with intervals."""
    if not methods:
        return
    at = [m.mean.nodes for m in methods]
    means = np.array([getattr(m.mean, value) for m in methods])
    bounds = [mats(m) if value == "mat" else interval(m.speedup_samples) for m in methods]
    low, high = np.array(bounds).T
    name = methods[0].name
    family = family_of(name)
    axes.errorbar(
        at,
        means,
        # A resampled interval need not hold the mean of all, by a hair.
        yerr=[np.maximum(means - low, 0), np.maximum(high - means, 0)],
        color=color_of(name),
        label=FAMILIES.get(family, label(name)),
        marker="*" if methods[0].mean.nodes_sd else "o" if line else "D",
        markersize=11 if methods[0].mean.nodes_sd else 4,
        ls=line,
        lw=1.4,
        elinewidth=0.8,
        capsize=2,
    )


def difficulty(block: Block) -> Figure | None:
    """Gain, cost and utility against the budget, by how sure the drafter is of a round.

    By the prefix law a round at a large budget shows what every smaller one would have accepted.
    The cost between measured budgets is interpolated; nothing is extrapolated.
    """
    families = [fixed(block, family) for family in ("ddtree", "tdes")]
    family = max(families, key=lambda found: (len(found), max(found, default=0)))
    if len(family) < 2:
        return None
    measured = sorted(family)
    sizes = np.arange(measured[0], measured[-1] + 1)
    cost = np.interp(sizes, measured, [family[n].mean.round_ms for n in measured])
    rows = [r for r in block.rows if r["method"] == family[measured[-1]].name]
    conf = np.array([c for row in rows for c in row["conf"]])
    paths = [path for row in rows for path in row["paths"]]
    if len(paths) < len(THIRDS):
        return None
    gains = 1 + np.array([np.searchsorted(path, sizes, "right") for path in paths])
    order = np.argsort(-conf, kind="stable")
    figure, axes = panels(3, (9, 3))
    for (name, color), third in zip(THIRDS, np.array_split(order, len(THIRDS)), strict=True):
        gain = gains[third].mean(0)
        best = int((gain / cost).argmax())
        axes[0].plot(sizes, gain, color=color, label=f"{name} (conf {conf[third].mean():.2f})")
        axes[2].plot(sizes, 1e3 * gain / cost, color=color)
        axes[2].plot(sizes[best], 1e3 * gain[best] / cost[best], "o", color=color, ms=5)
        note: Any = {"xytext": (0, 5), "textcoords": "offset points", "ha": "center", "fontsize": 7}
        axes[2].annotate(str(sizes[best]), (sizes[best], 1e3 * gain[best] / cost[best]), **note)
    axes[1].plot(sizes, cost, color="#444444")
    axes[1].plot(measured, [family[n].mean.round_ms for n in measured], "o", color="#444444", ms=4)
    for one, what in zip(
        axes, ("gain, tokens a round", "cost, ms a round", "utility, tokens/s"), strict=True
    ):
        one.set(xlabel="budget, nodes", ylabel=what)
        one.margins(y=0.12)
    figure.legend(frameon=False, fontsize=8, ncols=len(THIRDS), loc="outside upper center")
    return figure


def time(block: Block) -> Figure | None:
    """Milliseconds of a round, stacked by what they are spent on; building is with scoring."""
    found = [m for m in block.methods.values() if m.mean.draft]
    if not found:
        return None
    figure, axes = canvas(height=1 + 0.32 * len(found))
    names, left = [label(m.name) for m in found], np.zeros(len(found))
    parts = [m.mean.parts for m in found]
    drafting = np.array([part["drafter's pass"] for part in parts])
    verifying = np.array([part["target's pass"] for part in parts])
    building = np.array([part["scoring"] + part["building"] for part in parts])
    rest = np.array([sum(part.values()) for part in parts]) - drafting - verifying - building
    for (what, color), ms in zip(STACK.items(), (drafting, verifying, building, rest), strict=True):
        axes.barh(names, ms, 0.7, left=left, color=color, label=what)
        left = left + ms
    for place, method in enumerate(found):
        text = f"  {method.mean.mat:.2f} tokens"
        axes.text(left[place], place, text, va="center", fontsize=7, color="#444444")
    axes.invert_yaxis()
    axes.margins(x=0.16)
    axes.set_xlabel("ms a round")
    axes.legend(frameon=False, ncols=4, loc="lower left", bbox_to_anchor=(0, 1), fontsize=8)
    return figure


def ladder(block: Block) -> Figure | None:
    """What each step adds: the chain, the tree, the edge scorer, the budget of every round."""
    base = block.methods[block.baseline]
    steps = [base, *(block.best(family) for family in FAMILIES)]
    steps += [block.methods.get(name) for name in ("graft_paper", "graft")]
    found = [method for method in steps if method is not None]
    if len(found) < 3:
        return None
    figure, axes = canvas(height=1 + 0.36 * len(found))
    values = np.array([method.mean.speedup for method in found])
    low, high = np.array([interval(method.speedup_samples) for method in found]).T
    axes.barh(
        [label(method.name) for method in found],
        values,
        0.7,
        color=[color_of(method.name) for method in found],
        xerr=[np.maximum(values - low, 0), np.maximum(high - values, 0)],
        error_kw={"lw": 0.8, "capsize": 2},
    )
    for place, method in enumerate(found):
        text = f"  {values[place]:.2f}x, MAT {method.mean.mat:.2f}"
        axes.text(np.fmax(high[place], values[place]), place, text, va="center", fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.2)
    axes.set_xlabel(f"speedup over {label(block.baseline)}, mean over sets")
    return figure


def canvas(height: float = 3.2) -> tuple[Figure, Axes]:
    """One plot."""
    figure, (axes,) = panels(1, (7, height))
    return figure, axes


def panels(count: int, size: tuple[float, float]) -> tuple[Figure, list[Axes]]:
    """Plots side by side; the size is in inches."""
    figure = Picture(figsize=size, dpi=200, layout="constrained")
    found = [figure.add_subplot(1, count, place + 1) for place in range(count)]
    for axes in found:
        axes.spines[["top", "right"]].set_visible(False)
    return figure, found


def fixed(block: Block, family: str) -> dict[int, Method]:
    """The methods of a family that draft as many nodes in every round, by that number."""
    mine = (m for name, m in block.methods.items() if family_of(name) == family)
    return {round(m.mean.nodes): m for m in mine}


def trees_of(block: Block) -> list[Method]:
    """The methods that draft more than a chain."""
    return [m for n, m in block.methods.items() if m.mean.nodes and family_of(n) != "chain"]


def apart(ticks: Sequence[int]) -> list[int]:
    """Those that can be told apart on a log scale."""
    kept: list[int] = []
    for tick in ticks:
        if not kept or tick >= 1.35 * kept[-1]:
            kept.append(tick)
    return kept


FIGURES = {
    "ladder": (
        ladder,
        "What each step adds",
        "Of each family the fastest on these prompts. Bars: 95 % intervals, by resampling prompts.",
    ),
    "budget": (
        budgets,
        "Tokens a round and speedup against the budget",
        "Stars: budgets that follow the round, at their mean. Bars: 95 % intervals.",
    ),
    "difficulty": (
        difficulty,
        "What a node is worth depends on the round",
        "Rounds in thirds by the drafter's confidence. Dots: the best budget of each third.",
    ),
    "time": (time, "Where a round's time goes", "Behind the bars: MAT, tokens a round."),
    "mismatch": (
        mismatch,
        "The right token under the wrong parent",
        "Share of the rounds that stop short of the full depth.",
    ),
}
