"""All fits of scripts/fit.py on watched rounds, judged on prompts that were held out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from graft.budgets.constants import Constants
from graft.budgets.cost import CostTable
from graft.budgets.gain import STATEFUL, Arrival, Gain, Lomax, Power, explained
from graft.budgets.observed import mean_gain
from graft.budgets.reach import Reach
from graft.core.errors import InputError
from graft.eval.watch import Watched
from graft.scorer.calibration import calibration_error, reliability

FIRST = 16  # nodes of a tree whose calibration is quoted: almost all later ones are never reached


def split(watched: Watched, held_out: float, seed: int) -> tuple[Watched, Watched]:
    """Rounds to fit on, and rounds of other prompts to judge on. Raises InputError."""
    prompts = np.unique(watched.prompts)
    drawn = np.random.default_rng(seed).permutation(prompts)
    held = np.isin(watched.prompts, drawn[: round(held_out * len(prompts))])
    if held.all() or not held.any():
        raise InputError(
            f"held_out={held_out} of {len(prompts)} prompts leaves none on one side; collect more"
        )
    return watched[~held], watched[held]


def fit(
    learn: Watched, held: Watched, cost: CostTable, made_by: Mapping[str, Any], *, window: int
) -> Constants:
    """All gains and the calibration, and how they do on held-out rounds. Raises InputError."""
    rounds, sizes = learn.observed, cost.nodes
    mean = mean_gain(rounds, sizes)
    reached = sizes[: len(mean)]
    gains: dict[str, Gain] = {
        "paper": Power.fit(rounds, sizes, beta=0.5),
        "power": Power.fit(rounds, sizes),
        "lomax": Lomax.fit(rounds, sizes),
        "arrival": Arrival.fit(rounds, sizes),
    }
    r2 = {name: explained(gain, held.observed, reached, mean) for name, gain in gains.items()}
    reach = Reach.fit(*learn.edges(), depth=rounds.arrivals.shape[1])
    best = {
        str(context): int(reached[np.argmax(mean / cost.curve(context)[: len(mean)])])
        for context in cost.contexts
    }
    found = {"r2": r2, "calibration": calibrated(reach, held), "rounds": len(learn)}
    fitted = max(STATEFUL, key=lambda name: r2[name])
    return Constants(cost, mean, gains, fitted, reach, window, best, found, made_by)


def calibrated(reach: Reach, held: Watched) -> dict[str, Any]:
    """Path probabilities of held-out rounds before and after calibration.

    Calibration errors of the first nodes, and tokens a round of the largest trees.
    """
    nodes, hits = held.depths > 0, held.hits
    told = {
        "before": np.exp(np.minimum(held.log_scores, 0)) * nodes,
        "after": reach.of_paths(held.log_scores, held.parents, held.depths),
        "real": hits,
    }
    first = nodes[:, :FIRST]

    def error(probabilities: np.ndarray) -> float:
        both = (torch.from_numpy(x[:, :FIRST][first]) for x in (probabilities, hits))
        return calibration_error(reliability(*both))

    return {
        "ece": {name: error(told[name]) for name in ("before", "after")},
        "tokens": {name: 1 + float(p.sum(1).mean()) for name, p in told.items()},
    }
