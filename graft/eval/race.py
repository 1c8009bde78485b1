"""Results of a race as one table, fastest first within a precision: what a method is, its pace, and
its ratio over the fastest plain decoding of the same weights in the same precision, ours or not.

    ms a token    median over responses
    ratio         the median over responses of plain decoding's time a token over the method's, on
                  the same turn; in brackets 95 % by resampling prompts with their turns
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from graft.core.errors import InputError
from graft.eval.benchmark import Row, seconds_a_token
from graft.eval.bootstrap import RESAMPLES, interval
from graft.eval.metrics import aligned, differs
from graft.eval.page import TableData
from graft.eval.tables import FAMILIES, between

PEERS = {
    "graft.eval.library.generate": "transformers",
    "graft.eval.llama_cpp.generate": "llama.cpp",
    "graft.eval.published_ddtree.generate": "DDTree as published",
}


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """One method of a race."""

    name: str
    what: str
    ours: bool
    drafts: bool
    precision: str
    paces: np.ndarray  # [responses] seconds a token
    identical: int  # responses that are the baseline's, token by token

    @property
    def pace(self) -> float:
        return float(np.median(self.paces))

    @property
    def tokens_per_second(self) -> float:
        return 1 / self.pace


@dataclass(frozen=True, slots=True, eq=False)
class Race:
    """Every method of a folder of results, over the turns that all of them decoded."""

    entries: Sequence[Entry]
    prompts: np.ndarray  # [responses]
    baseline: str

    @property
    def plain(self) -> dict[str, Entry]:
        """The fastest plain decoding of each precision, where there is one."""
        found: dict[str, Entry] = {}
        for entry in sorted(self.entries, key=lambda entry: entry.pace):
            if not entry.drafts:
                found.setdefault(entry.precision, entry)
        return found

    def of(self, name: str) -> Entry:
        """The entry of a method. Raises InputError."""
        try:
            return next(entry for entry in self.entries if entry.name == name)
        except StopIteration:
            names = ", ".join(entry.name for entry in self.entries)
            raise InputError(f"no method {name} was raced; there are {names}") from None

    def ratio(self, one: Entry, other: Entry) -> tuple[float, tuple[float, float]]:
        """How much faster one is than the other, and the interval (NaN for a single prompt)."""
        ratios = other.paces / one.paces
        names, owner = np.unique(self.prompts, return_inverse=True)
        if len(names) == 1:
            return float(np.median(ratios)), (np.nan, np.nan)
        of_prompt = [ratios[owner == i] for i in range(len(names))]
        drawn = np.random.default_rng(0).integers(len(names), size=(RESAMPLES, len(names)))
        samples = np.array(
            [np.median(np.concatenate([of_prompt[i] for i in draw])) for draw in drawn]
        )
        return float(np.median(ratios)), interval(samples)


def race_of(made_by: Mapping[str, Any], rows: Sequence[Row]) -> Race:
    """What raced in a folder of results. Raises InputError."""
    baseline, dtype = made_by["settings"]["baseline"], made_by["models"]["dtype"]
    found, _, prompts = aligned(rows)
    if baseline not in found:
        raise InputError(f"no row is of the baseline {baseline}; there are {', '.join(found)}")
    entries = []
    for name, mine in found.items():
        config = made_by["methods"][name]["config"]
        alike = sum(not differs(*pair) for pair in zip(mine, found[baseline], strict=True))
        entries.append(
            Entry(
                name=name,
                what=what(config),
                ours=config["_target_"] not in PEERS,
                drafts=any(config.get(key) for key in ("builder", "lookup", "nodes")),
                precision=config.get("precision") or dtype,
                paces=np.array([seconds_a_token(row) for row in mine]),
                identical=alike,
            )
        )
    return Race(entries, prompts, baseline)


def what(config: Mapping[str, Any]) -> str:
    """A method in a few words, from its config."""
    words = PEERS.get(config["_target_"], "ours")
    if "builder" in config:  # graft.trees.ddtree.DDTree, graft.budgets.ratio.Ratio.load
        builder, budget = (config[key]["_target_"].split(".")[2] for key in ("builder", "budget"))
        nodes = config["budget"].get("nodes")
        settings = f"{nodes} nodes" if nodes else f"budget {budget}"
        return f"{words}: {FAMILIES.get(builder, builder)}, {settings}"
    if lookup := config.get("lookup"):
        if not isinstance(lookup, Mapping):
            return f"{words}, prompt lookup {lookup}"
        sizes = [f"{value}" for key, value in lookup.items() if key != "type"]
        return f"{words}, {' '.join([lookup['type'].replace('_', '-'), *sizes])}"
    return f"{words}, {config['nodes']} nodes" if "nodes" in config else f"{words}, plain"


def table(race: Race, caption: str) -> TableData:
    """Rows by precision, the baseline's first, then by pace; the fastest plain of each in bold."""
    dtype = race.of(race.baseline).precision
    order = sorted(race.entries, key=lambda e: (e.precision != dtype, e.precision, e.pace))
    rows, best = [], set()
    for i, entry in enumerate(order):
        plain = race.plain.get(entry.precision)
        ratio = ""
        if plain is entry:
            ratio = "fastest plain"
            best.add((i, 0))
        elif plain is not None:
            value, bounds = race.ratio(entry, plain)
            ratio = f"{value:.2f}x {between(bounds)}".strip()
        row = [entry.name, entry.what, entry.precision, f"{entry.tokens_per_second:.1f}"]
        alike = f"{entry.identical} of {len(entry.paces)}"
        rows.append([*row, f"{1e3 * entry.pace:.2f}", ratio, alike])
    headings = ["method", "what it is", "precision", "tokens/s", "ms a token"]
    headings += ["over plain [95 %]", f"tokens as {race.baseline}"]
    return TableData(caption, headings, rows, best)


def sentences(race: Race, focus: str) -> list[str]:
    """What is fastest, what the focus is worth over it, and who is ahead of the focus."""
    mine, said = race.of(focus), []
    for precision in sorted(race.plain, key=lambda name: (name != mine.precision, name)):
        plain = race.plain[precision]
        whose = "our own" if plain.ours else "a peer's"
        line = f"Fastest plain decoding in {precision}: {plain.name} ({plain.what}; {whose})"
        line += f", {plain.tokens_per_second:.1f} tokens/s"
        if precision == mine.precision:
            value, bounds = race.ratio(mine, plain)
            line += f"; {focus} is {value:.2f}x that {between(bounds)}".rstrip()
        said.append(f"{line}.")
    ahead = sorted(
        (e for e in race.entries if not e.ours and e.pace < mine.pace), key=lambda e: e.pace
    )
    names = [f"{e.name} ({e.precision}, {e.tokens_per_second:.1f} tokens/s)" for e in ahead]
    verdict = f"Ahead of {focus} ({mine.tokens_per_second:.1f} tokens/s): {', '.join(names)}."
    return [*said, verdict if names else f"No peer is ahead of {focus} here."]
