"""Figures. A recorded round: what was drafted, what was accepted, what the target wanted instead.

One unit of the axes is one inch, so that boxes fit their text whatever the size of the tree.
"""

from __future__ import annotations

import io
import itertools
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.markers import CARETLEFT
from matplotlib.patches import FancyBboxPatch, Patch, PathPatch
from matplotlib.path import Path

from graft.core.types import DraftTree
from graft.data.rounds import RecordedRound
from graft.eval.fate import fate_of, in_words, visible

# Okabe and Ito's colours, told apart by everyone: of a box's edge, and of its face.
PLAIN, ACCEPTED, WANTED, ELSEWHERE = (
    ("#8c8c8c", "#ffffff"),
    ("#009e73", "#d5f0e6"),
    ("#0072b2", "#d6e8f5"),
    ("#d55e00", "#fbe6d6"),
)
SMALL, NORMAL = 6, 8  # points
WIDE = 0.602 / 72  # inches that a character of the monospaced font takes, a point of its size
ROW, BOX, GAP, PAD, MARGIN = 0.27, 0.2, 0.36, 0.06, 0.15  # inches
LONGEST = 14  # characters of a token
CURVE = [Path.MOVETO, Path.CURVE4, Path.CURVE4, Path.CURVE4]


class Picture(Figure):
    """A figure that notebooks show by themselves, without pyplot."""

    def _repr_png_(self) -> bytes:
        file = io.BytesIO()
        self.savefig(file, format="png")
        return file.getvalue()


@dataclass(frozen=True, slots=True)
class Box:
    """A node on paper, and what is written into it."""

    left: float
    width: float
    y: float  # of its middle
    token: str
    chance: str

    @property
    def right(self) -> float:
        return self.left + self.width


def draw_round(round: RecordedRound, text: Callable[[int], str]) -> Figure:
    """The tree of a round by depth from left to right, best children on top.

    Beside each token stands the builder's probability of it after its parent. The bonus has a box
    of its own behind the path; where its token hung elsewhere at that depth, an arc leads there.
    """
    tree, found = round.tree, fate_of(round)
    boxes, names = _boxes(round, text)
    height = 2 * MARGIN + max(box.y for box in boxes)
    width = max(5.5, MARGIN + max(box.right for box in boxes) + (GAP if found.nodes else 0))
    words = _caption(round, text, int((width - 2 * MARGIN) / ((NORMAL - 1) * WIDE)))
    footer = ROW * (0.7 + 0.6 * len(words))
    figure = Picture(figsize=(width, height + footer), dpi=200)
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, width), ylim=(height + footer, 0))
    axes.set_axis_off()

    for left, name in names:
        axes.text(left, MARGIN, name, fontsize=SMALL, color=PLAIN[0], va="center")
    path, bonus = set(round.path), len(tree)
    for node in range(1, len(boxes)):
        parent = round.path[-1] if node == bonus else tree.parents[node]
        look = WANTED if node == bonus else ACCEPTED if node in path else PLAIN
        _edge(axes, boxes[parent], boxes[node], look[0], bold=look is not PLAIN)
    for node, box in enumerate(boxes):
        look = WANTED if node == bonus else ACCEPTED if node in path else PLAIN
        _node(axes, box, ELSEWHERE if node in found.nodes else look)
    for node in found.nodes:
        _arc(axes, boxes[bonus], boxes[node])
    _foot(axes, words, height, mismatch=bool(found.nodes))
    return figure


def _boxes(
    round: RecordedRound, text: Callable[[int], str]
) -> tuple[list[Box], list[tuple[float, str]]]:
    """The boxes of the nodes, the bonus last, and the columns' left edges and names."""
    tree = round.tree
    depths = [*tree.depths.tolist(), len(round.path)]
    numbers = [*chances(tree), ""]
    tokens = [_label(text(token)) for token in [*tree.tokens.tolist(), round.bonus]]
    lines = rows([*tree.parents.tolist(), round.path[-1]], [*tree.log_scores, -np.inf])
    needed = [
        (3 if chance else 2) * PAD + WIDE * (NORMAL * len(token) + SMALL * len(chance))
        for token, chance in zip(tokens, numbers, strict=True)
    ]
    columns = range(max(depths) + 1)
    widths = [max(w for w, d in zip(needed, depths, strict=True) if d == c) for c in columns]
    lefts = [MARGIN + sum(widths[:c]) + GAP * c for c in columns]
    boxes = [
        Box(lefts[depth], widths[depth], MARGIN + (line + 1) * ROW, token, chance)
        for depth, line, token, chance in zip(depths, lines, tokens, numbers, strict=True)
    ]
    names = ["root", *(f"depth {c}" if c == 1 else f"{c}" for c in columns[1:])]
    return boxes, list(zip(lefts, names, strict=True))


def title(round: RecordedRound) -> str:
    """Which round this is, and how far it came."""
    return (
        f"{round.prompt_id}, turn {round.turn}, round {round.index}; context "
        f"{round.context_length}, budget {round.budget}; accepted {len(round.path) - 1} of "
        f"{len(round.draft.tokens)}"
    )


def chances(tree: DraftTree) -> list[str]:
    """The builder's probability of each node after its parent, nothing at the root."""
    return ["", *(f"{chance:.2f}".removeprefix("0") for chance in tree.chances)]


def rows(parents: Sequence[int], scores: Sequence[float]) -> list[float]:
    """Which line each node is on: leaves one below the other, parents amid their children.

    Children are ordered by score, the best first, so no two edges cross.
    """
    children: list[list[int]] = [[] for _ in parents]
    for node in sorted(range(1, len(parents)), key=lambda node: -scores[node]):
        children[parents[node]].append(node)
    lines, leaves = [0.0] * len(parents), itertools.count()

    def place(node: int) -> float:
        below = [place(child) for child in children[node]]
        lines[node] = (below[0] + below[-1]) / 2 if below else next(leaves)
        return lines[node]

    place(0)
    return lines


def _boxed(text: str) -> str:
    return text.replace(" ", "\N{OPEN BOX}")


def _label(text: str) -> str:
    label = _boxed(visible(text))
    return label if len(label) <= LONGEST else label[: LONGEST - 1] + "\N{HORIZONTAL ELLIPSIS}"


def _caption(round: RecordedRound, text: Callable[[int], str], width: int) -> list[str]:
    sentences = (
        title(round),
        in_words(round, lambda token: _boxed(text(token))),
        "numbers: the builder's probability of a token after its parent",
    )
    return [line for sentence in sentences for line in textwrap.wrap(sentence, width)]


def _node(axes: Axes, box: Box, look: tuple[str, str]) -> None:
    edge, face = look
    style = f"round,pad=0,rounding_size={BOX / 4}"
    corner = (box.left, box.y - BOX / 2)
    line = 0.7 if look is PLAIN else 1.4
    axes.add_patch(
        FancyBboxPatch(corner, box.width, BOX, style, ec=edge, fc=face, lw=line, zorder=2)
    )
    shared: dict[str, Any] = {
        "family": "monospace",
        "va": "center_baseline",
        "zorder": 4,
        "parse_math": False,
    }
    axes.text(box.left + PAD, box.y, box.token, fontsize=NORMAL, **shared)
    axes.text(
        box.right - PAD, box.y, box.chance, fontsize=SMALL, color="#555555", ha="right", **shared
    )


def _edge(axes: Axes, parent: Box, child: Box, color: str, *, bold: bool) -> None:
    middle = (parent.right + child.left) / 2
    width, above = (1.6, 1.5) if bold else (0.7, 1)
    points = [
        (parent.right, parent.y),
        (middle, parent.y),
        (middle, child.y),
        (child.left, child.y),
    ]
    axes.add_patch(PathPatch(Path(points, CURVE), fill=False, ec=color, lw=width, zorder=above))


def _arc(axes: Axes, start: Box, end: Box) -> None:
    """From where a token was wanted to where it hung: both are in one column."""
    out, color = start.right + 1.2 * GAP, ELSEWHERE[0]  # the curve stays within the gap
    points = [(start.right, start.y), (out, start.y), (out, end.y), (end.right, end.y)]
    dashed = {"lw": 1.2, "ls": (0, (3, 2)), "zorder": 3}
    axes.add_patch(PathPatch(Path(points, CURVE), fill=False, ec=color, **dashed))
    axes.plot([end.right], [end.y], marker=CARETLEFT, markersize=5, color=color, zorder=3)


def _foot(axes: Axes, words: Sequence[str], top: float, *, mismatch: bool) -> None:
    """What the colours mean, and what round this is."""
    meanings = {"accepted": ACCEPTED, "the target's own token": WANTED}
    if mismatch:
        meanings["where that token hung"] = ELSEWHERE
    axes.legend(
        handles=[Patch(ec=ec, fc=fc, label=label) for label, (ec, fc) in meanings.items()],
        loc="upper left",
        bbox_to_anchor=(MARGIN, top - MARGIN / 2),
        bbox_transform=axes.transData,
        ncols=len(meanings),
        fontsize=SMALL + 1,
        frameon=False,
        borderpad=0,
        borderaxespad=0,
        handlelength=1.2,
    )
    for line, sentence in enumerate(words):
        y = top + ROW * (0.7 + 0.6 * line)
        axes.text(MARGIN, y, sentence, fontsize=NORMAL - 1, va="center", parse_math=False)


def draw_training(trained: Mapping[str, Any]) -> Figure:
    """How good a scorer is on held-out prompts: tokens a round by budget, and its calibration."""
    figure = Picture(figsize=(8, 3.2), dpi=150, layout="constrained")
    left, right = figure.subplots(1, 2)
    budgets = [int(budget) for budget in trained["mats"]]
    for label, color, values in zip(
        ("TDES", "DDTree"),
        (ACCEPTED[0], PLAIN[0]),
        zip(*trained["mats"].values(), strict=True),
        strict=True,
    ):
        left.plot(budgets, values, marker="o", color=color, label=label)
    left.set(xscale="log", xlabel="budget, nodes", ylabel="MAT, tokens a round")
    left.set_xticks(budgets, [str(budget) for budget in budgets], minor=False)
    left.minorticks_off()
    left.legend(frameon=False)
    bins = [(p, o, n) for p, o, n in trained["reliability"] if n]
    right.plot([0, 1], [0, 1], color=PLAIN[0], lw=0.8, ls="--")
    if bins:
        predicted, observed, counts = zip(*bins, strict=True)
        sizes = [8 + 60 * n / max(counts) for n in counts]
        right.scatter(predicted, observed, s=sizes, color=WANTED[0])
        right.set_title(f"calibration error {trained['ece']:.3f}", fontsize=9)
    else:
        right.set_title("raw scores are no probabilities", fontsize=9)
    right.set(xlabel="predicted probability of a child", ylabel="share the target took", aspect=1)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    return figure
