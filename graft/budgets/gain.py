"""What a budget buys: expected tokens of a round by drafted nodes and decoding state, fitted.

    power     G(B) = a B^beta                                 the paper's; beta given or fitted
    lomax     G(B|s) = 1 + chain min(B, D) + a(s) (1 - (1 + B / b)^-c),  log a linear in s
              easy rounds earn a token a node until the chain ends, the others with a heavy tail
    arrival   G(B|s) = 1 + sum_{n <= B} phi(n|s),  log phi = alpha_bin(n) + (gamma + kappa log n) s
              the target's own tokens arrive at the nodes of a tree with intensity phi, which never
              rises along the admission order

s = [log conf, degen, hist] (DESIGN 5.4), standardised: gains follow a power of conf. A round with a
tree of N nodes shows what every budget up to N would have earned (a smaller tree is a prefix), and
nothing beyond: it is censored at N. The first two are fitted by least squares on what rounds show
at a grid of budgets, the third by Poisson likelihood with the popped nodes of a bin as exposure.
Rounds of one response are alike, so standard errors are sandwich estimates clustered by response
(Liang and Zeger, 1986).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numba
import numpy as np
from scipy.optimize import isotonic_regression

from graft.budgets.estimate import least_squares, poisson
from graft.budgets.observed import STATE, Observed, binned

LEAST_CONF = 1e-6  # below it a logarithm says no more


class Gain(Protocol):
    """A fitted gain."""

    @property
    def numbers(self) -> dict[str, float]: ...  # by name

    @property
    def errors(self) -> dict[str, float]: ...  # their standard errors

    def tokens(self, nodes: np.ndarray, states: np.ndarray) -> np.ndarray:
        """Expected a round: nodes [S], states [..., 3] -> [..., S]."""
        ...


@dataclass(frozen=True)
class Power:
    """a B^beta, whatever the state."""

    numbers: dict[str, float]
    errors: dict[str, float]

    @classmethod
    def fit(cls, rounds: Observed, sizes: np.ndarray, *, beta: float | None = None) -> Power:
        """With `beta` free if it is None. Raises InputError for rounds that do not tell."""
        budgets = _grid(rounds.horizon(sizes))

        def curve(theta: np.ndarray) -> np.ndarray:
            exponent = theta[1] if beta is None else beta
            return np.broadcast_to(theta[0] * budgets**exponent, (len(rounds), len(budgets)))

        start = {"a": 2.0} | ({"beta": 0.1} if beta is None else {})
        numbers, errors = least_squares(curve, start, rounds, budgets)
        return cls(numbers | ({} if beta is None else {"beta": beta}), errors)

    def tokens(self, nodes: np.ndarray, states: np.ndarray) -> np.ndarray:
        curve = self.numbers["a"] * nodes ** self.numbers["beta"]
        return np.broadcast_to(curve, (*states.shape[:-1], len(nodes)))


@dataclass(frozen=True)
class Lomax:
    """A chain and a heavy tail that the state scales."""

    depth: int  # D
    center: list[float]  # of the features, [3]
    scale: list[float]
    numbers: dict[str, float]
    errors: dict[str, float]

    @classmethod
    def fit(cls, rounds: Observed, sizes: np.ndarray) -> Lomax:
        """Raises InputError for rounds that do not tell."""
        budgets = _grid(rounds.horizon(sizes))
        x, center, scale = _standard(rounds.states)
        depth = rounds.arrivals.shape[1]
        start = {"log_a": 0.5} | {f"log_a_{name}": 0.0 for name in STATE}
        start |= {"log_b": 1.0, "log_c": -0.5, "chain": 0.01}

        def curve(theta: np.ndarray) -> np.ndarray:
            return _lomax(theta, budgets, x, depth)

        numbers, errors = least_squares(curve, start, rounds, budgets, at_least={"chain": 0.0})
        return cls(depth, center.tolist(), scale.tolist(), numbers, errors)

    def tokens(self, nodes: np.ndarray, states: np.ndarray) -> np.ndarray:
        theta, center, scale = self._arrays
        x = ((_features(states) - center) / scale).reshape(-1, len(STATE))
        return _lomax(theta, nodes, x, self.depth).reshape(*states.shape[:-1], len(nodes))

    @cached_property
    def _arrays(self) -> tuple[np.ndarray, ...]:
        return np.array(list(self.numbers.values())), np.array(self.center), np.array(self.scale)


@numba.njit(cache=True)
def _lomax(theta, nodes, x, depth):
    """Tokens [R, S] of x [R, 3]; theta: log a and its slopes, log b, log c, chain."""
    out = np.empty((len(x), len(nodes)))
    b, c = np.exp(theta[4]), np.exp(theta[5])
    tail = 1 - (1 + nodes / b) ** -c
    for row in range(len(x)):
        a = np.exp(theta[0] + theta[1] * x[row, 0] + theta[2] * x[row, 1] + theta[3] * x[row, 2])
        for j in range(len(nodes)):
            out[row, j] = 1 + theta[6] * min(nodes[j], depth) + a * tail[j]
    return out


@dataclass(frozen=True)
class Arrival:
    """Intensities by bin of nodes, moved by the state."""

    depth: int
    center: list[float]
    scale: list[float]
    ends: list[int]  # of the bins, ascending; a bin begins behind the end of the one before
    numbers: dict[str, float]
    errors: dict[str, float]

    @classmethod
    def fit(cls, rounds: Observed, sizes: np.ndarray) -> Arrival:
        """By Poisson likelihood (Newton). Raises InputError for rounds that do not tell."""
        ends = rounds.horizon(sizes)
        x, center, scale = _standard(rounds.states)
        counts, exposure = binned(rounds, ends)
        theta, covariance = poisson(counts, exposure, x, _middles(ends), rounds.responses)
        S = len(ends)
        moved = np.outer(x @ theta[S : S + 3], np.ones(S))
        moved += np.outer(x @ theta[S + 3 :], np.log(_middles(ends)))
        weights = (exposure * np.exp(moved)).sum(0)  # how often, at the mean state, it was asked
        levelled = isotonic_regression(np.exp(theta[:S]), weights=weights, increasing=False).x
        names = [f"alpha_{end}" for end in ends]
        names += [f"{slope}_{name}" for slope in ("gamma", "kappa") for name in STATE]
        values = [*np.log(levelled), *theta[S:]]
        return cls(
            rounds.arrivals.shape[1],
            center.tolist(),
            scale.tolist(),
            ends.tolist(),
            dict(zip(names, map(float, values), strict=True)),
            dict(zip(names, map(float, np.sqrt(np.diag(covariance))), strict=True)),
        )

    def tokens(self, nodes: np.ndarray, states: np.ndarray) -> np.ndarray:
        flat = states.reshape(-1, len(STATE))
        theta, center, scale, ends = self._arrays
        found = _arrived(theta, center, scale, ends, flat, nodes, self.depth)
        return found.reshape(*states.shape[:-1], len(nodes))

    @cached_property
    def _arrays(self) -> tuple[np.ndarray, ...]:
        theta = np.array(list(self.numbers.values()))
        return theta, np.array(self.center), np.array(self.scale), np.array(self.ends)


@numba.njit(cache=True)
def _arrived(theta, center, scale, ends, states, nodes, depth):
    """Tokens [R, S'] of states [R, 3]: 1 and the arrivals up to a node. One call: it is a round's.

    theta holds alpha by bin, gamma and kappa.
    """
    S, width = len(ends), states.shape[1]
    out = np.empty((len(states), len(nodes)))
    for row in range(len(states)):
        gamma, kappa = 0.0, 0.0
        for i in range(width):
            feature = np.log(max(states[row, i], LEAST_CONF)) if i == 0 else states[row, i]
            x = (feature - center[i]) / scale[i]
            gamma += theta[S + i] * x
            kappa += theta[S + width + i] * x
        total, phi, begin, b = 1.0, np.inf, 0, 0
        for j in range(len(nodes)):
            while b < S and begin < nodes[j]:
                middle = (begin + 1 + ends[b]) / 2
                phi = min(phi, np.exp(theta[b] + gamma + kappa * np.log(middle)))  # never rises
                if ends[b] > nodes[j]:
                    break
                total += phi * (ends[b] - begin)
                begin, b = ends[b], b + 1
            part = phi * (nodes[j] - begin) if b < S and begin < nodes[j] else 0.0
            out[row, j] = min(total + part, depth + 1.0)
    return out


STATEFUL = ("lomax", "arrival")  # gains that look at the state
GAINS: dict[str, Any] = {"power": Power, "lomax": Lomax, "arrival": Arrival}


def _middles(ends: np.ndarray) -> np.ndarray:
    """Of the bins, as node numbers."""
    return (ends + np.concatenate([[0], ends[:-1]]) + 1) / 2


def explained(gain: Gain, rounds: Observed, sizes: np.ndarray, mean: np.ndarray) -> float:
    """R^2 of a gain at `sizes` over the mean curve of other rounds [S]: what the state tells."""
    tokens = rounds.tokens(sizes)
    known = ~np.isnan(tokens)
    errors = [
        ((guess - tokens)[known] ** 2).sum() for guess in (gain.tokens(sizes, rounds.states), mean)
    ]
    return float(1 - errors[0] / errors[1])


def _features(states: np.ndarray) -> np.ndarray:
    """[conf, degen, hist] as the links have it, [..., 3]."""
    features = np.array(states, np.float64)
    features[..., 0] = np.log(np.maximum(features[..., 0], LEAST_CONF))
    return features


def _standard(states: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Standardised features [R, 3], and what was taken off and divided by."""
    features = _features(states)
    center, scale = features.mean(0), np.maximum(features.std(0), 1e-6)
    return (features - center) / scale, center, scale


def _grid(sizes: np.ndarray) -> np.ndarray:
    """About a dozen of the sizes, evenly spread in the logarithm."""
    wanted = np.geomspace(sizes[0], sizes[-1], 12)
    return np.unique(sizes[np.abs(np.log(sizes[:, None] / wanted)).argmin(0)]).astype(float)
