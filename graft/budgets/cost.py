"""What a round costs on one machine, by drafted nodes and context length, as measured.

    seconds(n, T) = draft(T) + verify(n, T) + host(n, T)

n drafted nodes, so a verify pass of n + 1 rows. decode/profile.py measures the three on the real
execution path. Between measured sizes and contexts a round costs what the line between them says;
beyond the largest nothing is known and nothing is invented. Costs are not forced onto a line: they
have knees and steps, and a line through a knee is what misleads a budget most. `line` is a summary.
"""

from __future__ import annotations

import bisect
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import isotonic_regression

from graft.core.errors import InputError
from graft.core.runlog import write_atomically

FAR = 2**31  # a context length beyond all
MACHINE = ("target", "drafter", "builder", "dtype", "device", "threads")  # what costs depend on
AGAIN = "python scripts/fit.py measures it"


@dataclass(frozen=True, slots=True)
class Line:
    """A straight line through the costs of a context length: c_f + c_v * n (DESIGN 5.4)."""

    fixed: float  # c_f, seconds
    per_node: float  # c_v, seconds
    residual: float  # the largest distance of a measured cost from the line, relative to the cost


@dataclass(frozen=True, eq=False)
class CostTable:
    """Medians, in seconds, at C context lengths and S sizes of a tree; costs rise with the size."""

    contexts: np.ndarray  # [C] tokens before the root, ascending
    nodes: np.ndarray  # [S] drafted, ascending: the sizes that a policy chooses among
    ar: np.ndarray  # [C] a step of plain decoding
    draft: np.ndarray  # [C] the drafter's pass
    verify: np.ndarray  # [C, S] the target's pass
    host: np.ndarray  # [C, S] everything else in a round
    spread: np.ndarray  # [C, S] interquartile range of a round's time over its median
    made_by: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        C, S = len(self.contexts), len(self.nodes)
        for name in ("contexts", "nodes"):
            values = getattr(self, name)
            if not len(values) or values[0] < 1 or (np.diff(values) <= 0).any():
                raise InputError(f"a cost table needs ascending {name} from 1 on, not {values}")
        for name in ("ar", "draft", "verify", "host", "spread"):
            values, shape = getattr(self, name), (C, S) if name[0] in "vhs" else (C,)
            if values.shape != shape:
                raise InputError(f"a cost table needs {shape} numbers of {name}")
            if not np.isfinite(values).all() or (values < 0).any():
                raise InputError(f"a cost table needs times >= 0, not the {name} it has; {AGAIN}")
        if min(self.ar.min(), self.verify.min()) <= 0:
            raise InputError(f"a pass takes more than no time; {AGAIN}")
        if (np.diff(self.verify, axis=1) < 0).any() or (np.diff(self.host, axis=1) < 0).any():
            raise InputError(f"more nodes cannot cost less; {AGAIN}")

    @classmethod
    def measured(cls, medians: Mapping[str, np.ndarray], made_by: Mapping[str, Any]) -> CostTable:
        """From what decode/profile.py measured, made monotone by isotonic regression."""
        levelled = {
            name: np.array([isotonic_regression(row).x for row in medians[name]])
            for name in ("verify", "host")
        }
        return cls(**{**medians, **levelled}, made_by=made_by)

    @cached_property
    def rounds(self) -> np.ndarray:
        """Seconds of a whole round, [C, S]."""
        return self.draft[:, None] + self.verify + self.host

    def check_fits(self, made_by: Mapping[str, Any]) -> None:
        """Refuse costs of another model, dtype or machine: of what `made_by` says (InputError)."""
        for key in MACHINE:
            measured, wanted = self.made_by.get(key), made_by.get(key)
            if key in made_by and measured != wanted:
                raise InputError(
                    f"the cost table was measured with {key} {measured}, not {wanted}; {AGAIN}"
                    + (f", or set target.dtype={measured}" if key == "dtype" else "")
                )

    def curve(self, context: float) -> np.ndarray:
        """Seconds of a round at this context length, by `nodes` [S]."""
        return self.at(context, self.rounds)

    def ar_step(self, context: float) -> float:
        """Seconds of a step of plain decoding at this context length."""
        return float(self.at(context, self.ar))

    def at(self, context: float, values: np.ndarray) -> np.ndarray:
        """The row of `values` [C, ...] for a context length, on the line between the measured."""
        if not self._lengths[0] <= context <= self._lengths[-1]:
            raise InputError(
                f"the cost table has contexts {self.contexts[0]}..{self.contexts[-1]}, not "
                f"{context:.0f}; measure that too: python scripts/fit.py contexts=[...]"
            )
        above = min(bisect.bisect_left(self._lengths, context), len(self._lengths) - 1)
        below = max(above - 1, 0)
        gap = self._lengths[above] - self._lengths[below]
        share = (context - self._lengths[below]) / gap if gap else 0.0
        # In this form rounding keeps the order of nodes: a + share (b - a) does not.
        return (1 - share) * values[below] + share * values[above]

    @cached_property
    def _lengths(self) -> list[int]:
        return self.contexts.tolist()

    def seconds(self, nodes: np.ndarray, contexts: np.ndarray) -> np.ndarray:
        """Of rounds with these many drafted nodes [R] at these context lengths [R].

        Raises InputError beyond the largest measured.
        """
        if nodes.size and not self.nodes[0] <= nodes.min() <= nodes.max() <= self.nodes[-1]:
            raise InputError(
                f"the cost table has {self.nodes[0]}..{self.nodes[-1]} drafted nodes, a round has "
                f"{nodes.min()}..{nodes.max()}; python scripts/fit.py sizes=[...] measures it"
            )
        found = np.empty(len(nodes))
        for context in np.unique(contexts):
            here = contexts == context
            found[here] = np.interp(nodes[here], self.nodes, self.curve(context))
        return found

    def ar_seconds(self, contexts: np.ndarray) -> np.ndarray:
        """Of steps of plain decoding at these context lengths."""
        return np.array([self.ar_step(context) for context in contexts])

    def pinned(self, context: int) -> CostTable:
        """As if every context were this long: what a workload at that length would cost."""
        names = ("ar", "draft", "verify", "host", "spread")
        here = {name: np.stack([self.at(context, getattr(self, name))] * 2) for name in names}
        ends = np.array([1, FAR])
        return CostTable(contexts=ends, nodes=self.nodes, **here, made_by=self.made_by)

    def straight(self, *, fixed: float, per_node: float) -> CostTable:
        """The same sizes as if a round of n nodes cost fixed + per_node * n seconds.

        And a step of plain decoding as much as the smallest round.
        """
        verify = np.stack([fixed + per_node * self.nodes] * 2)
        nothing = np.zeros_like(verify)
        return CostTable(
            contexts=np.array([1, FAR]),
            nodes=self.nodes,
            ar=verify[:, 0],
            draft=nothing[:, 0],
            verify=verify,
            host=nothing,
            spread=nothing,
            made_by=self.made_by,
        )

    def line(self, context: float) -> Line:
        """The least-squares line through `curve(context)`, every measured size alike."""
        costs = self.curve(context)
        if len(self.nodes) < 2:
            raise InputError("one size makes no line; measure more: python scripts/fit.py sizes=")
        per_node, fixed = np.polyfit(self.nodes, costs, 1)
        residual = np.abs(fixed + per_node * self.nodes - costs) / costs
        return Line(float(fixed), float(per_node), float(residual.max()))

    def to_json(self) -> dict[str, Any]:
        """Lists and numbers."""
        return {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in asdict(self).items()}

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> CostTable:
        """Of `to_json`. Raises InputError, or KeyError and TypeError for something else."""
        kinds = {"contexts": np.int64, "nodes": np.int64}
        arrays = {
            k: np.array(v, kinds.get(k, np.float64)) for k, v in found.items() if k != "made_by"
        }
        return cls(**arrays, made_by=found["made_by"])

    def save(self, path: Path) -> None:
        """Write it as JSON."""
        write_atomically(path, json.dumps(self.to_json(), indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> CostTable:
        """Raises InputError for a file that is not one."""
        try:
            return cls.from_json(json.loads(path.read_text()))
        except OSError as error:
            raise InputError(f"cannot read {path}: {error.strerror}; {AGAIN}") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            reason = str(error).strip().splitlines()[0]
            raise InputError(f"{path} is no cost table ({reason}); delete it, {AGAIN}") from error
