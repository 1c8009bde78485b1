"""What scripts/fit.py found out about a machine, a pair of models and a tree builder: what rounds
cost, what they earn, and how likely a node is reached. Every policy that weighs gain against cost
reads this one artifact.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from graft.budgets.cost import CostTable
from graft.budgets.gain import GAINS, STATEFUL, Gain
from graft.budgets.reach import Reach
from graft.core.errors import InputError
from graft.core.runlog import write_atomically

VERSION = 1
AGAIN = "python scripts/fit.py makes it (name= or paths.constants= says where)"


@dataclass(frozen=True, eq=False)
class Constants:
    """Fitted constants of one tree builder on one machine."""

    cost: CostTable
    mean: np.ndarray  # [S'] tokens of a mean round at the sizes of the cost table that rounds reach
    gains: Mapping[str, Gain]  # by name: paper, power, lomax, arrival
    fitted: str  # which of them predicts held-out rounds best
    reach: Reach
    window: int  # rounds that hist averages over
    best: Mapping[str, int]  # the best fixed budget by context length, from `mean`
    found: Mapping[str, Any] = field(repr=False)  # what else was measured, for reports
    made_by: Mapping[str, Any] = field(repr=False)

    @property
    def nodes(self) -> np.ndarray:
        """The sizes that policies choose among, [S']."""
        return self.cost.nodes[: len(self.mean)]

    def save(self, folder: Path) -> None:
        """Write constants.json, the cost table in it."""
        folder.mkdir(parents=True, exist_ok=True)
        own = {
            "version": VERSION,
            "cost": self.cost.to_json(),
            "mean": self.mean.tolist(),
            "gains": {
                name: {"kind": kind_of(gain)} | dataclasses.asdict(gain)  # type: ignore[call-overload]
                for name, gain in self.gains.items()
            },
            "reach": dataclasses.asdict(self.reach),
            **{k: getattr(self, k) for k in ("fitted", "window", "best", "found", "made_by")},
        }
        write_atomically(folder / "constants.json", json.dumps(own, indent=1) + "\n")

    @classmethod
    def load(cls, folder: Path) -> Constants:
        """Raises InputError for a folder that holds none."""
        file = folder.expanduser() / "constants.json"
        try:
            found = json.loads(file.read_text())
            if found.pop("version") != VERSION:
                raise InputError(f"{file} was written by another version; {AGAIN}")
            found["mean"] = np.array(found["mean"])
            found["gains"] = {
                name: GAINS[gain.pop("kind")](**gain) for name, gain in found["gains"].items()
            }
            found["reach"] = Reach(**found["reach"])
            found["cost"] = CostTable.from_json(found["cost"])
            if found["mean"].ndim != 1 or not 0 < len(found["mean"]) <= len(found["cost"].nodes):
                raise ValueError("mean is not one number a size")
            if not isinstance(found["window"], int) or not set(STATEFUL) <= set(found["gains"]):
                raise ValueError("a window and all gains are needed")
            return cls(**found)
        except InputError:
            raise
        except OSError as error:
            raise InputError(f"cannot read {file}: {error.strerror}; {AGAIN}") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            reason = str(error).strip().splitlines()[0]
            raise InputError(f"{file} does not hold constants ({reason}); {AGAIN}") from error


def kind_of(gain: Gain) -> str:
    """Its name in `GAINS`."""
    return next(name for name, kind in GAINS.items() if isinstance(gain, kind))
