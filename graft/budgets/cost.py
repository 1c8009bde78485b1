"""What a round costs on one machine: the drafter's pass, the target's by nodes, the host's work.

    seconds(n) = draft + verify(n + 1) + host        n drafted nodes, so n + 1 rows with the root

Measured by scripts/bench.py in interleaved repetitions, at one context length; the host's work is
that of the method it measured. Between measured sizes a pass costs what
the line between them says; beyond the largest nothing is known and nothing is invented.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from graft.core.errors import InputError
from graft.core.runlog import write_atomically


@dataclass(frozen=True)
class CostTable:
    """Seconds of each part of a round, and what they were measured on."""

    rows: tuple[int, ...]  # of a verify pass, ascending, the first 1: an AR step
    verify: tuple[float, ...]
    draft: float
    host: float
    made_by: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        ascending = all(a < b for a, b in zip(self.rows, self.rows[1:], strict=False))
        if len(self.rows) != len(self.verify) or self.rows[:1] != (1,) or not ascending:
            raise InputError("a cost table needs ascending rows from 1 on, and seconds for each")
        if min(*self.verify, self.draft) <= 0 or self.host < 0:
            raise InputError("a cost table needs positive times; measure again (scripts/bench.py)")

    def check_fits(self, made_by: Mapping[str, Any]) -> None:
        """Raise InputError if another target, drafter or dtype was measured than rounds are of."""
        for key in ("target", "drafter", "dtype"):
            measured, wanted = self.made_by.get(key), made_by[key]
            if measured != wanted:
                raise InputError(
                    f"the cost table was measured with {key} {measured}, not {wanted}; "
                    "scripts/bench.py measures another"
                )

    @property
    def ar(self) -> float:
        """An AR step."""
        return self.verify[0]

    def seconds(self, nodes: np.ndarray) -> np.ndarray:
        """Of rounds with these many drafted nodes. Raises InputError beyond the largest measured.

        More rows are never cheaper: what a noisy measurement says otherwise is levelled up.
        """
        if nodes.size and nodes.max() + 1 > self.rows[-1]:
            raise InputError(
                f"the cost table ends at {self.rows[-1] - 1} drafted nodes, a round has "
                f"{nodes.max()}; measure larger passes (scripts/bench.py)"
            )
        monotone = np.maximum.accumulate(self.verify)
        return np.interp(nodes + 1, self.rows, monotone) + self.draft + self.host

    def save(self, path: Path) -> None:
        write_atomically(path, json.dumps(asdict(self), indent=2) + "\n")

    @classmethod
    def load(cls, path: Path) -> CostTable:
        """Raises InputError for a file that is not one."""
        try:
            found = json.loads(path.read_text())
            found["rows"], found["verify"] = tuple(found["rows"]), tuple(found["verify"])
            return cls(**found)
        except OSError as error:
            raise InputError(
                f"cannot read cost={path}: {error.strerror}; scripts/bench.py makes one"
            ) from error
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f"cost={path} is no cost table ({error})") from error
