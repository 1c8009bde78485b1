"""Tables of results: speedup and MAT by method and set as papers print them, and why they are so.

A block is one model at one temperature. A `TableData` is what is printed, written as Markdown, and
put on the page; `latex` is the paper's layout.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from graft.data.published import Published
from graft.eval.bootstrap import interval
from graft.eval.fate import KINDS
from graft.eval.limits import Passes
from graft.eval.metrics import MEAN, PARTS, Method, ratio
from graft.eval.page import TableData

NAMES = {
    "ar": "AR",
    "library": "library's generate",
    "graft": "GRAFT",
    "graft_paper": "GRAFT-paper",
}
FAMILIES = {"chain": "DFlash", "ddtree": "DDTree", "tdes": "TDES"}
PUBLISHED_AS = {"DFlash": "chain", "DDTree": "ddtree", "GRAFT": "graft"}


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """One model at one temperature."""

    target: str
    drafter: str
    dtype: str
    temperature: float
    methods: Mapping[str, Method]
    baseline: str
    made_by: Mapping[str, Any]
    rows: Sequence[Mapping[str, Any]]

    @property
    def title(self) -> str:
        return f"{self.target}, {self.dtype}, T = {self.temperature:g}"

    @property
    def sets(self) -> list[str]:
        return self.methods[self.baseline].sets

    @property
    def columns(self) -> list[str]:
        """The sets, and their mean where there are several."""
        return [*self.sets, *([MEAN] if len(self.sets) > 1 else [])]

    def best(self, family: str) -> Method | None:
        """The fastest method of a family (chain, ddtree, tdes), if there is one."""
        mine = [m for name, m in self.methods.items() if family_of(name) == family]
        return max(mine, key=lambda method: method.mean.speedup, default=None)


def family_of(name: str) -> str:
    """ddtree_15 -> ddtree."""
    return re.sub(r"_\d+$", "", name)


def label(name: str) -> str:
    """A method's name as papers write it; other names are themselves."""
    family, nodes = family_of(name), name.rpartition("_")[2]
    if family in FAMILIES:
        return FAMILIES[family] + (f" {nodes}" if nodes.isdigit() else "")
    return NAMES.get(name, name)


def by_set(block: Block) -> TableData:
    """Speedup / MAT, the best of each column in bold."""
    columns = block.columns
    rows = []
    for name, method in block.methods.items():
        cells = [method.cells[column] for column in columns]
        rows.append([label(name), *(f"{cell.speedup:.2f}x / {cell.mat:.2f}" for cell in cells)])
    best = {(fastest(block, column), place) for place, column in enumerate(columns, 1)}
    return TableData(f"Speedup over AR / MAT: {block.title}", ["", *columns], rows, best)


def fastest(block: Block, column: str) -> int:
    """The row of the fastest method on a set."""
    return int(np.argmax([method.cells[column].speedup for method in block.methods.values()]))


def speeds(block: Block) -> TableData:
    """Means over sets with their intervals."""
    base, rows = block.methods[block.baseline], []
    for name, method in block.methods.items():
        cell, (_, bounds) = method.mean, ratio(method, base)
        nodes = f"{cell.nodes:.1f} ({cell.nodes_sd:.1f})" if cell.nodes else ""
        row = [label(name), f"{cell.speedup:.2f}x {between(bounds)}", f"{cell.median:.2f}x"]
        row += [f"{cell.tokens_per_second:.1f}", f"{cell.mat:.2f} {between(mats(method))}"]
        rows.append([*row, f"{cell.pooled:.2f}", nodes])
    headings = [
        "",
        "speedup [95 %]",
        "median",
        "tokens/s",
        "MAT [95 %]",
        "pooled MAT",
        "nodes (sd)",
    ]
    return TableData(f"Means over sets: {block.title}", headings, rows)


def head_to_head(block: Block, focus: str) -> TableData:
    """One method against each of the others, paired; a difference inside its interval is a tie."""
    rows = []
    for name, method in block.methods.items():
        if name != focus:
            value, bounds = ratio(block.methods[focus], method)
            verdict = "faster" if bounds[0] > 1 else "slower" if bounds[1] < 1 else "tie"
            verdict = verdict if between(bounds) else "of one prompt a set: unknown"
            rows.append([label(name), f"{value:.2f}x", between(bounds), verdict])
    caption = f"{label(focus)} over the others, mean over sets: {block.title}"
    return TableData(caption, ["", "speed ratio", "95 %", label(focus) + " is"], rows)


def times(block: Block) -> TableData:
    """Where a round's time goes, part by part: the parts of a method sum to its round."""
    cells = [method.mean for method in block.methods.values()]
    rows = []
    for part in PARTS:
        shares = [(cell.parts[part], 100 * cell.parts[part] / cell.round_ms) for cell in cells]
        rows.append([part, *(f"{ms:.3f} ({of:.1f} %)" if ms else "" for ms, of in shares)])
    rows.append(["the round", *(f"{sum(cell.parts.values()):.3f}" for cell in cells)])
    over = [f"{100 * cell.other / cell.verify:.1f} %" for cell in cells]
    rows.append(["all but the passes / target's pass", *over])
    names = [label(name) for name in block.methods]
    caption = f"Where the time goes, ms a round (share of it): {block.title}"
    return TableData(caption, ["", *names], rows)


def passes(found: Passes) -> TableData:
    """Each pass beside the machine's limit: what is near 1 cannot be had faster."""
    through_torch = any(one.eager is not None for one in found.passes)
    rows = []
    for one in found.passes:
        kind = "verify" if one.kind == "verify" else "drafter's pass"
        name = f"{kind}, {one.rows} rows" if one.rows > 1 else "plain step"
        times = [one.seconds, *([one.eager] if through_torch else [])]
        limit = found.limit(one.work) if one.work else None
        row = [name, _ms(limit) if limit else ""]
        row.append("" if not one.work else "reading" if found.reads(one.work) else "arithmetic")
        for took in times:
            row += [_ms(took) if took else ""]
            row += [f"{took / limit:.2f}x" if took and limit else ""]
        rows.append([*row, f"{one.seconds / found.step:.2f}"])
    headings = ["", "limit, ms", "set by", "pass, ms", "/ limit"]
    headings += ["through torch, ms", "/ limit"] if through_torch else []
    caption = (
        f"Passes at context {found.context} beside the machine's limit: reading "
        f"{found.bandwidth / 1e9:.3g} GB/s, multiplying {found.rate / 1e9:.3g} GFLOP/s"
    )
    return TableData(caption, [*headings, "pass / plain step"], rows)


def _ms(seconds: float) -> str:
    """Milliseconds, three digits of them."""
    ms = 1e3 * seconds
    return f"{ms:.0f}" if ms >= 100 else f"{ms:.3g}"


def losses(block: Block) -> TableData:
    """Why rounds end: shares of all rounds by what became of the failing token."""
    rows = []
    for name, method in block.methods.items():
        if loss := method.mean.loss:
            shares = [f"{100 * loss[kind]:.1f} %" for kind in KINDS]
            rows.append([label(name), *shares, f"{100 * method.mean.mismatch:.1f} %"])
    headings = ["", *(kind.replace("_", " ") for kind in KINDS), "mismatch rate"]
    return TableData(f"Why rounds end: {block.title}", headings, rows)


def divergences(block: Block) -> TableData:
    """Responses whose tokens are not plain decoding's, and by how little they parted."""
    rows = []
    for name, method in block.methods.items():
        if name != block.baseline:
            gaps = method.gaps
            spread = f"{np.median(gaps):.3g} ({max(gaps):.3g})" if gaps else ""
            rows.append([label(name), f"{method.parted} of {method.responses}", spread])
    headings = ["", "unlike AR", "logit gap where they part: median (largest)"]
    return TableData(f"Against plain decoding: {block.title}", headings, rows)


def beside(block: Block, published: Sequence[Published]) -> list[TableData]:
    """Published numbers for the same target, sets and temperature beside ours, a table a source.

    Without any, one that says so.
    """
    by_source: dict[str, list[list[str]]] = {}
    alike = [
        one
        for one in published
        if short(one.target) == short(block.target) and one.temperature in (None, block.temperature)
    ]
    for one in alike:
        # DDTree's cells have the best of several budgets; so has ours then.
        family = PUBLISHED_AS.get(one.method, "")
        mine = block.methods.get(family) or block.best(family)
        theirs_of = {o.set for o in alike if (o.source, o.method) == (one.source, one.method)}
        column = one.set
        if one.set == "all" and theirs_of - {"all"} <= set(block.sets):
            column = MEAN  # of the same sets, or nobody knows which
        if mine is None or column not in mine.cells:
            continue
        cell = mine.cells[column]
        theirs = [f"{x:.2f}" if x is not None else "" for x in (one.speedup, one.mat)]
        ours = [label(mine.name), f"{cell.speedup:.2f}", f"{cell.mat:.2f}"]
        source = f"{one.source}; {one.hardware}; {one.note}"
        by_source.setdefault(source, []).append([f"{one.method}, {one.set}", *theirs, *ours])
    headings = ["published", "speedup", "MAT", "ours", "speedup", "MAT"]
    nothing = f"Nothing is known to be published for {block.title}, on these sets"
    found = [
        TableData(f"Published: {source}", headings, rows) for source, rows in by_source.items()
    ]
    return found or [TableData(nothing, headings, [])]


def short(target: str) -> str:
    """A model's name without its owner, for comparing and for files."""
    return target.rpartition("/")[2].lower()


def mats(method: Method) -> tuple[float, float]:
    """Of the mean over sets, 95 %."""
    return interval(method.mat_samples)


def between(bounds: tuple[float, float]) -> str:
    """[low, high], nothing where there is no interval."""
    return "" if np.isnan(bounds).any() else "[{:.2f}, {:.2f}]".format(*bounds)


def markdown(table: TableData) -> str:
    """As GitHub reads it."""
    lines = [f"**{table.caption}**", "", "| " + " | ".join(table.headings) + " |"]
    lines.append("|" + "---|" * len(table.headings))
    for i, row in enumerate(table.rows):
        cells = [f"**{c}**" if (i, j) in table.best else c for j, c in enumerate(row)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def latex(blocks: Sequence[Block]) -> str:
    """Models and temperatures down, sets across, speedup and MAT of each; the best in bold."""
    sets = [*dict.fromkeys(s for block in blocks for s in block.sets), MEAN]
    heads = " & ".join(f"\\multicolumn{{2}}{{c}}{{{tex(name)}}}" for name in sets)
    lines = [
        "% needs \\usepackage{booktabs}",
        f"\\begin{{tabular}}{{ll{'rr' * len(sets)}}}",
        "\\toprule",
        f"Model & Method & {heads} \\\\",
        " & & " + " & ".join("Speedup & MAT" for _ in sets) + " \\\\",
    ]
    for block in blocks:
        lines.append("\\midrule")
        found = list(block.methods.items())
        for i, (name, method) in enumerate(found):
            cells = []
            for column in sets:
                for value in ("speedup", "mat"):
                    rival = [m.cells.get(column) for _, m in found]
                    top = max((getattr(c, value) for c in rival if c), default=None)
                    mine = method.cells.get(column)
                    number = f"{getattr(mine, value):.2f}" if mine else "--"
                    bold = mine is not None and getattr(mine, value) == top
                    cells.append(f"\\textbf{{{number}}}" if bold else number)
            about = f"{tex(block.target)}, {block.dtype}, $T={block.temperature:g}$"
            head = about if i == 0 else ""
            lines.append(f"{head} & {tex(label(name))} & {' & '.join(cells)} \\\\")
    return "\n".join([*lines, "\\bottomrule", "\\end{tabular}"]) + "\n"


def tex(text: str) -> str:
    """With LaTeX's own characters escaped."""
    return re.sub(r"([&%$#_{}])", r"\\\1", text)
