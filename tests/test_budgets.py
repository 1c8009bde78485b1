"""Budgets: costs are what was measured, gains what was planted, and policies pick the best size."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
import math
import statistics
import time
from functools import partial

import numpy as np
import pytest
import torch
from conftest import PROMPT, costs_of, planted
from hypothesis import given, settings
from hypothesis import strategies as st
from test_replay import PROMPTS, collected, response_of, trained
from test_trees import AnyScorer, drafts

from graft.budgets import paper
from graft.budgets.best import Best
from graft.budgets.constants import Constants
from graft.budgets.cost import MACHINE, CostTable
from graft.budgets.explore import Explore
from graft.budgets.fitted import Fitted
from graft.budgets.fixed import Fixed
from graft.budgets.gain import Arrival, Lomax, Power, explained
from graft.budgets.observed import STATE, Observed, mean_gain
from graft.budgets.paper import Paper
from graft.budgets.ratio import Ratio
from graft.budgets.reach import Reach
from graft.collect.asking import Asker
from graft.core.errors import InputError
from graft.core.types import Draft, DraftTree, Request, Round, RoundState
from graft.data.rounds import RecordedRound
from graft.decode import loop
from graft.decode import profile as profiling
from graft.decode.profile import profile
from graft.decode.replay import NEVER, Replay
from graft.drafters.dflash import DFlash
from graft.drafters.noisy import Noisy
from graft.eval.regret import bounds, lay, regret, seconds_a_token, swept, walks
from graft.eval.watch import Watched, watch_anchors, watch_rounds
from graft.scorer.calibration import calibration_error, reliability
from graft.targets import tiny
from graft.trees.best_first import expand, expand_edges
from graft.trees.chain import Chain
from graft.trees.ddtree import DDTree

SIZES = np.array([1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64])


def state_of(
    conf: float = 0.5, degen: float = 0.0, hist: float = 1.0, context: int = 100, depth: int = 7
) -> RoundState:
    """A state with these features: every depth alike, cosines alike, one round before."""
    draft = Draft(
        root=0,
        tokens=np.zeros((depth, 1), np.int64),
        log_probs=np.full((depth, 1), math.log(conf), np.float32),
        cosines=np.full(depth - 1, degen, np.float32),
        hidden=torch.empty(depth, 0),
    )
    return RoundState(draft, context, [hist])


# ---- what rounds cost


def a_table(**changes) -> CostTable:
    parts = {
        "contexts": np.array([1, 101]),
        "nodes": np.array([1, 3, 7]),
        "ar": np.array([1.0, 2.0]),
        "draft": np.array([0.5, 0.7]),
        "verify": np.array([[1.0, 2.0, 2.0], [3.0, 5.0, 9.0]]),
        "host": np.array([[0.1, 0.1, 0.2], [0.1, 0.2, 0.3]]),
        "spread": np.zeros((2, 3)),
        "made_by": {"target": "t", "dtype": "float32", "device": "cpu", "threads": 1},
    }
    return CostTable(**{**parts, **changes})


def test_costs_lie_on_the_lines_between_what_was_measured():
    table = a_table()
    assert table.curve(1) == pytest.approx([1.6, 2.6, 2.7])
    assert table.curve(101) == pytest.approx([3.8, 5.9, 10.0])
    assert table.curve(26) == pytest.approx([1.6 + 2.2 / 4, 2.6 + 3.3 / 4, 2.7 + 7.3 / 4])
    assert table.ar_step(51) == pytest.approx(1.5)
    assert table.ar_seconds(np.array([1, 51, 101])) == pytest.approx([1, 1.5, 2])
    nodes, contexts = np.array([1, 2, 5, 7, 3]), np.array([1, 101, 1, 101, 51])
    wanted = [1.6, (3.8 + 5.9) / 2, (2.6 + 2.7) / 2, 10.0, (2.6 + 5.9) / 2]
    assert table.seconds(nodes, contexts) == pytest.approx(wanted)
    assert table.seconds(nodes[:0], contexts[:0]).shape == (0,)
    one = costs_of([1.0, 2.0], [1, 2], contexts=[50])
    assert one.curve(50) == pytest.approx([1, 2])
    with pytest.raises(InputError, match=r"contexts 50\.\.50, not 51"):
        one.curve(51)


def test_nothing_is_invented_beyond_what_was_measured():
    table = a_table()
    for nodes in ([8], [0], [3, 9]):
        with pytest.raises(InputError, match=r"has 1\.\.7 drafted nodes, .*fit\.py sizes="):
            table.seconds(np.array(nodes), np.full(len(nodes), 50))
    for context in (0, 102, 5000):
        words = rf"has contexts 1\.\.101, not {context}; .*fit\.py contexts="
        with pytest.raises(InputError, match=words):
            table.curve(context)
        with pytest.raises(InputError, match=words):
            table.ar_step(context)
        with pytest.raises(InputError, match=words):
            table.seconds(np.array([3]), np.array([context]))
        with pytest.raises(InputError, match=words):
            table.pinned(context)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"nodes": np.array([1, 7, 3])}, "ascending nodes from 1 on"),
        ({"nodes": np.array([1, 3, 3])}, "ascending nodes"),
        ({"nodes": np.array([0, 3, 7])}, "ascending nodes"),
        ({"nodes": np.array([], int)}, "ascending nodes"),
        ({"contexts": np.array([101, 1])}, "ascending contexts"),
        ({"contexts": np.array([0, 101])}, "ascending contexts"),
        ({"verify": np.ones((2, 2))}, r"\(2, 3\) numbers of verify"),
        ({"ar": np.ones(3)}, r"\(2,\) numbers of ar"),
        ({"ar": np.array([1.0, 0.0])}, "a pass takes more than no time"),
        ({"verify": np.array([[0.0, 1, 1], [1, 1, 1]])}, "a pass takes more than no time"),
        ({"host": np.array([[-0.1, 0.1, 0.2], [0.1, 0.2, 0.3]])}, "not the host it has"),
        ({"draft": np.array([0.5, np.nan])}, "not the draft it has"),
        ({"spread": np.full((2, 3), np.inf)}, "not the spread it has"),
        ({"verify": np.array([[1.0, 2, 1.9], [3, 5, 9]])}, "more nodes cannot cost less"),
        ({"host": np.array([[0.1, 0.1, 0.2], [0.3, 0.2, 0.3]])}, "more nodes cannot cost less"),
    ],
)
def test_a_table_that_makes_no_sense_is_refused(changes, words):
    with pytest.raises(InputError, match=words):
        a_table(**changes)


def test_a_cost_table_goes_through_the_disk(tmp_path):
    table, file = a_table(), tmp_path / "cost.json"
    table.save(file)
    again = CostTable.load(file)
    for one in dataclasses.fields(CostTable):
        np.testing.assert_array_equal(getattr(again, one.name), getattr(table, one.name))
    assert again.nodes.dtype == again.contexts.dtype == np.int64
    whole = json.loads(file.read_text())
    bad = tmp_path / "bad.json"
    lacking = {k: v for k, v in whole.items() if k != "verify"}
    for content in (
        *("", "{", "[]", "null", "3", json.dumps(lacking), file.read_text()[:200]),
        *(json.dumps(whole | change) for change in ({"unit": "ms"}, {"nodes": ["a"]})),
        *(json.dumps(whole | change) for change in ({"ar": [1.0]}, {"nodes": [3, 1, 7]})),
    ):
        bad.write_text(content)
        with pytest.raises(InputError, match=r"bad\.json is no cost table .*scripts/fit\.py"):
            CostTable.load(bad)
    with pytest.raises(InputError, match=r"cannot read .*none\.json: No such file.*fit\.py"):
        CostTable.load(tmp_path / "none.json")


def test_costs_of_another_machine_do_not_fit():
    table = costs_of([1.0, 2.0], [1, 2], **{key: f"my {key}" for key in MACHINE})
    table.check_fits(table.made_by)
    table.check_fits({"target": "my target", "weather": "fine"})  # replay knows no machine
    for key in MACHINE:
        with pytest.raises(InputError, match=f"measured with {key} my {key}, not another; "):
            table.check_fits({**table.made_by, key: "another"})
    with pytest.raises(InputError, match="measured with threads None, not 4"):
        a_table(made_by={}).check_fits({"threads": 4})


def test_noise_is_levelled():
    """Isotonic regression pools neighbours that fall: to their mean, and nothing else is moved."""
    parts = {one.name: getattr(a_table(), one.name) for one in dataclasses.fields(CostTable)}
    made_by = parts.pop("made_by")
    noisy = parts | {"verify": np.array([[3.0, 2.0, 4.0], [1.0, 2.0, 3.0]])}
    noisy["host"] = np.array([[0.3, 0.2, 0.1], [0.1, 0.2, 0.3]])
    table = CostTable.measured(noisy, made_by)
    assert table.verify == pytest.approx(np.array([[2.5, 2.5, 4], [1, 2, 3]]))
    assert table.host == pytest.approx(np.array([[0.2, 0.2, 0.2], [0.1, 0.2, 0.3]]))
    assert (table.made_by, table.ar.tolist()) == (made_by, [1, 2])


@pytest.mark.parametrize("seed", range(3))
def test_a_line_is_found_under_noise(seed):
    rng = np.random.default_rng(seed)
    fixed, per_node = 10e-3, 0.4e-3
    costs = (fixed + per_node * SIZES) * rng.normal(1, 0.01, (2, len(SIZES)))
    table = CostTable.measured(
        {
            "contexts": np.array([1, 1000]),
            "nodes": SIZES,
            "ar": np.full(2, 9e-3),
            "draft": np.full(2, 2e-3),
            "verify": costs - 2.5e-3,
            "host": np.full(costs.shape, 0.5e-3),
            "spread": np.zeros(costs.shape),
        },
        {},
    )
    for context in (1, 300, 1000):
        line = table.line(context)
        assert line.fixed == pytest.approx(fixed, rel=0.05)
        assert line.per_node == pytest.approx(per_node, rel=0.05)
        assert line.residual < 0.04


def test_a_line_says_how_far_off_it_is():
    nodes = np.array([1, 2, 3, 4])
    knee = costs_of([1e-3, 1e-3, 1e-3, 2e-3], nodes)  # in ms, the line is 0.5 + 0.3 n
    line = knee.line(1)
    assert (line.fixed, line.per_node) == pytest.approx((0.5e-3, 0.3e-3))
    assert line.residual == pytest.approx(0.4)
    assert costs_of(0.5 + 0.3 * nodes, nodes).line(1).residual == pytest.approx(0, abs=1e-9)
    with pytest.raises(InputError, match="one size makes no line"):
        costs_of([1.0], [4]).line(1)


def test_a_pinned_table_costs_the_same_everywhere():
    table = a_table()
    pinned = table.pinned(26)
    for context in (1, 26, 10**6):
        assert pinned.curve(context) == pytest.approx(table.curve(26))
        assert pinned.ar_step(context) == pytest.approx(table.ar_step(26))
    assert pinned.made_by == table.made_by
    straight = table.straight(fixed=0.2, per_node=0.1)
    for context in (1, 26, 10**6):
        assert straight.curve(context) == pytest.approx([0.3, 0.5, 0.9])
    assert straight.nodes.tolist() == table.nodes.tolist()
    assert (straight.line(7).fixed, straight.line(7).per_node) == pytest.approx((0.2, 0.1))


# ---- how it is measured


def test_a_slow_neighbour_is_divided_out():
    """Repetitions drift over a factor of three; planted costs come out as if it had been quiet."""
    truth = {"propose": 2e-3, "verify": 9e-3 + 2e-4 * SIZES, "build": 1e-4 + 1e-5 * SIZES}
    plain, polished = [], []
    for seed in range(8):
        rng = np.random.default_rng(seed)
        drift = np.exp(rng.normal(0, 0.25, 20).cumsum())
        rounds: dict[int, list] = {7: [], 90: []}
        steps: dict[int, list[float]] = {7: [], 90: []}
        for context, repeat in ((c, r) for r in range(20) for c in rounds):
            noise = drift[repeat] * rng.normal(1, 0.02, (len(SIZES), len(truth)))
            seconds = np.stack(np.broadcast_arrays(*truth.values()), 1) * noise
            rounds[context].append(
                {
                    int(n): dict(zip(truth, row, strict=True))
                    for n, row in zip(SIZES, seconds.tolist(), strict=True)
                }
            )
            steps[context].append(8e-3 * drift[repeat])
        found = profiling._medians(rounds, steps)
        assert found["nodes"].tolist() == SIZES.tolist()
        assert found["contexts"].tolist() == [7, 90]
        assert found["verify"].shape == found["host"].shape == found["spread"].shape == (2, 12)
        assert found["ar"].shape == found["draft"].shape == (2,)
        assert found["spread"].max() < 0.06, "the spread is the noise, not the drift"
        usual = np.array([[[d[n]["verify"] for n in SIZES] for d in rounds[c]] for c in (7, 90)])
        for errors, verify in ((plain, np.median(usual, 1)), (polished, found["verify"])):
            pace = verify / truth["verify"]  # how fast the whole machine was is not at stake
            errors.append(np.abs(pace / np.median(pace, 1, keepdims=True) - 1).max())
        for name, real in (("ar", 8e-3), ("draft", truth["propose"])):
            ratio = found[name] / real * (truth["verify"] / found["verify"]).mean(1)
            assert ratio == pytest.approx(1, rel=0.03)
        assert found["host"] / found["verify"] == pytest.approx(
            np.tile(truth["build"] / truth["verify"], (2, 1)), rel=0.05
        )
    assert all(better < worse for better, worse in zip(polished, plain, strict=True))
    assert np.mean(plain) > 1.7 * np.mean(polished)
    assert np.mean(polished) < 0.02


class Spy:
    """A builder that keeps what it is asked for."""

    def __init__(self, builder) -> None:
        self.builder, self.asked = builder, []

    def build(self, draft: Draft, budget: int) -> DraftTree:
        self.asked.append(budget)
        return self.builder.build(draft, budget)


def test_a_profile_deals_every_size_once_a_repetition():
    target = tiny.load(device="cpu")
    builder, repeats = Spy(DDTree()), []
    parts = {"target": target, "drafter": Noisy(target, depth=3, candidates=6)}
    sizes, contexts = [7, 1, 20], [40, 9]
    text = np.random.default_rng(0).integers(0, 250, 60).tolist()
    found = profile(
        **parts,
        builder=builder,
        text=text,
        contexts=contexts,
        sizes=sizes,
        repeats=3,
        on_repeat=lambda: repeats.append(len(builder.asked)),
    )
    table = CostTable.measured(found, {})  # which says that all times are times
    assert table.nodes.tolist() == [1, 7, 20]
    assert table.contexts.tolist() == [9, 40]
    assert (table.draft > 0).all()
    assert (table.host > 0).all()
    # A warm-up and three repetitions of two contexts; in each the first round is dealt twice.
    decks = np.array(builder.asked).reshape(4, 2, 4)
    assert repeats == [8, 16, 24, 32]
    assert (np.sort(decks[..., 1:]) == [1, 7, 20]).all()
    assert len({tuple(deck) for deck in decks[..., 1:].reshape(8, 3).tolist()}) > 1, "shuffled"
    with pytest.raises(InputError, match=r"contexts=\[9, 1010\].*context of 1024 leaves 1004 "):
        profile(**parts, builder=builder, text=text, contexts=[9, 1010], sizes=sizes, repeats=3)
    with pytest.raises(InputError, match=r"contexts=\[61\]: the text has 60 tokens only"):
        profile(**parts, builder=builder, text=text, contexts=[61], sizes=sizes, repeats=3)
    asked = len(builder.asked)
    assert asked == 32, "refused before anything is measured"


class SlowStart(Noisy):
    """Reads a prompt for 50 ms."""

    def propose(self, root: int, taps: torch.Tensor) -> Draft:
        if len(taps) > 8:
            time.sleep(0.05)
        return super().propose(root, taps)


def test_reading_the_prompt_is_no_rounds_cost():
    target = tiny.load(device="cpu")
    found = profile(
        target=target,
        drafter=SlowStart(target, depth=3, candidates=6),
        builder=DDTree(),
        text=list(PROMPT),
        contexts=[20],
        sizes=[4],
        repeats=3,
    )
    assert found["draft"].max() < 0.04


def test_sizes_that_a_chain_cannot_fill_are_left_out():
    target = tiny.load(device="cpu")
    found = profile(
        target=target,
        drafter=Noisy(target, depth=3, candidates=6),
        builder=Chain(),
        text=list(PROMPT),
        contexts=[5],
        sizes=[1, 2, 3, 4, 64],
        repeats=3,
    )
    assert found["nodes"].tolist() == [1, 2, 3]


# ---- what budgets earn: rounds that known models made, and what the fits say of them

CENTER, SCALE = np.array([-0.7, 0.1, 2.0]), np.array([0.2, 0.3, 1.5])
WIDE = np.array([1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128])
NODES = np.arange(1, 129)
POWER = {"a": 1.8, "beta": 0.15}
LOMAX = {"log_a": 0.7, "log_a_conf": 0.2, "log_a_degen": -0.15, "log_a_hist": 0.15}
LOMAX |= {"log_b": 2.0, "log_c": 0.5, "chain": 0.1}
GAMMA, KAPPA = [0.2, -0.15, 0.12], [-0.05, 0.04, -0.06]
ALPHA = -0.9 - 0.9 * np.log((WIDE + np.append(0, WIDE[:-1]) + 1) / 2)
ARRIVAL = dict(zip([f"alpha_{n}" for n in WIDE], ALPHA.tolist(), strict=True))
ARRIVAL |= dict(zip([f"gamma_{name}" for name in STATE], GAMMA, strict=True))
ARRIVAL |= dict(zip([f"kappa_{name}" for name in STATE], KAPPA, strict=True))
DEPTH = 24  # places for arrivals: more than a round ever has


def features(rng: np.random.Generator, rounds: int) -> np.ndarray:
    """Standardised to the last digit, so that what is fitted is what was planted: [R, 3]."""
    x = rng.uniform(-1, 1, (rounds, 3))
    return (x - x.mean(0)) / x.std(0)


def lomax(n: int, x: np.ndarray, numbers: dict[str, float], depth: int) -> np.ndarray:
    """As the paper draft has it; of features x [..., 3]."""
    slopes = [numbers[f"log_a_{name}"] for name in STATE]
    a, b, c = math.exp(numbers["log_a"]), math.exp(numbers["log_b"]), math.exp(numbers["log_c"])
    tail = 1 - (1 + n / b) ** -c
    return 1 + numbers["chain"] * min(n, depth) + a * np.exp(x @ slopes) * tail


def intensities(x: np.ndarray, numbers: dict[str, float], ends: list[int]) -> np.ndarray:
    """Of nodes 1, 2, ..., [..., N]: constant in a bin, and never more than in the one before."""
    gamma, kappa = ([numbers[f"{s}_{name}"] for name in STATE] for s in ("gamma", "kappa"))
    found, first = [], 1
    for end in ends:
        middle = (first + end) / 2
        phi = np.exp(numbers[f"alpha_{end}"] + x @ gamma + x @ kappa * math.log(middle))
        phi = phi if not found else np.minimum(phi, found[-1])
        found += [phi] * (end + 1 - first)
        first = end + 1
    return np.stack(found, -1)


def increments(kind: str, x: np.ndarray) -> np.ndarray:
    """What every node adds to the tokens of a round in this state: [R, N] or [N]."""
    if kind == "power":
        return np.diff(POWER["a"] * NODES ** POWER["beta"], prepend=1)
    if kind == "arrival":
        return intensities(x, ARRIVAL, WIDE.tolist())
    by_node = np.stack([lomax(n, x, LOMAX, DEPTH) for n in NODES], -1)
    return np.diff(by_node, prepend=1.0)


def simulate(
    rng: np.random.Generator,
    odds: np.ndarray,
    x: np.ndarray,
    budgets: tuple[int, ...] = (8, 16, 32, 64, 128),
    rounds_a_response: int = 10,
) -> Observed:
    """At every node an arrival or none, by these odds; seen up to a budget drawn at random."""
    rounds = len(x)
    seen = rng.choice(budgets, rounds)
    came = (rng.random((rounds, len(NODES))) < odds) & (seen[:, None] >= NODES)
    rows, nodes = came.nonzero()
    arrivals = np.full((rounds, DEPTH), NEVER, np.int64)
    arrivals[rows, came.cumsum(1)[rows, nodes] - 1] = nodes + 1
    states = CENTER + SCALE * x
    states[:, 0] = np.exp(states[:, 0])  # conf; gains follow a power of it
    return Observed(arrivals, seen, states, np.arange(rounds) // rounds_a_response)


FITS = {
    "power": (Power.fit, POWER),
    "power, beta given": (partial(Power.fit, beta=POWER["beta"]), POWER),
    "lomax": (Lomax.fit, LOMAX),
    "arrival": (Arrival.fit, ARRIVAL),
}


@pytest.mark.parametrize("name", FITS)
def test_fits_find_what_was_planted(name):
    """Within 5 %, from censored rounds: in numbers, and in tokens at every size and state."""
    rng = np.random.default_rng(0)
    x = features(rng, 60_000)
    odds = increments(name.partition(",")[0], x)
    assert odds.max() <= 1, "what is planted are odds"
    rounds = simulate(rng, odds, x)
    assert (rounds.seen < 128).mean() > 0.7, "most are censored"
    fit, truth = FITS[name]
    gain = fit(rounds, WIDE)
    assert set(gain.numbers) == set(truth)
    for key, value in truth.items():
        error = abs(gain.numbers[key] - value)
        plain = key in ("a", "beta", "chain")  # the others are logarithms: of factors within 5 %
        assert error < (0.05 * value if plain else 0.05), key
        if key in gain.errors:
            assert error < 4 * gain.errors[key], key
    real = 1 + np.broadcast_to(odds, (len(x), 128)).cumsum(1)[:3000, WIDE - 1]
    said = gain.tokens(WIDE, rounds.states[:3000])
    assert said.shape == real.shape
    assert np.abs(said / real - 1).max() < 0.05


@pytest.mark.parametrize("name", FITS)
def test_standard_errors_are_of_the_right_size(name):
    """Over twelve samples: as large as the spread of what they are errors of."""
    fit, truth = FITS[name]
    found, errors = [], []
    for seed in range(12):
        rng = np.random.default_rng(seed)
        x = features(rng, 3000)
        gain = fit(simulate(rng, increments(name.partition(",")[0], x), x), WIDE)
        found.append([gain.numbers[key] for key in gain.errors])
        errors.append(list(gain.errors.values()))
        for key, error in gain.errors.items():
            assert abs(gain.numbers[key] - truth[key]) < 4.5 * error, key
    said, spread = np.mean(errors, 0), np.std(found, 0, ddof=1)
    assert np.median(said / spread) == pytest.approx(1, rel=0.35)
    assert (said < 2 * spread).all()
    assert (said > spread / 2).all()


@pytest.mark.parametrize("name", FITS)
def test_rounds_of_a_response_are_no_independent_rounds(name):
    """The same rounds over again, in the same responses, say nothing new."""
    rng = np.random.default_rng(5)
    x = features(rng, 2000)
    once = simulate(rng, increments(name.partition(",")[0], x), x)
    fit, _ = FITS[name]
    thrice = once[np.tile(np.arange(2000), 3)]
    others = dataclasses.replace(
        thrice, responses=np.concatenate([once.responses + 1000 * i for i in range(3)])
    )
    alone, repeated, apart = fit(once, WIDE), fit(thrice, WIDE), fit(others, WIDE)
    for key, error in alone.errors.items():
        assert repeated.numbers[key] == pytest.approx(alone.numbers[key], rel=0.01, abs=0.01)
        assert repeated.errors[key] == pytest.approx(error, rel=0.03)
        assert apart.errors[key] == pytest.approx(error / math.sqrt(3), rel=0.03)


def test_moods_of_a_response_are_in_the_errors():
    """Responses that are easy or hard as a whole: the mean is as uncertain as their number says."""
    found, errors, naive = [], [], []
    for seed in range(40):
        rng = np.random.default_rng(seed)
        x = features(rng, 3000)
        mood = np.repeat(rng.choice([0.5, 1.2], 60), 50)[:, None]
        rounds = simulate(rng, mood * increments("power", x), x, rounds_a_response=50)
        gain = Power.fit(rounds, WIDE, beta=POWER["beta"])
        found.append(gain.numbers["a"])
        errors.append(gain.errors["a"])
        apart = dataclasses.replace(rounds, responses=np.arange(3000))
        naive.append(Power.fit(apart, WIDE, beta=POWER["beta"]).errors["a"])
    spread = np.std(found, ddof=1)
    assert np.mean(errors) == pytest.approx(spread, rel=0.35)
    assert np.mean(naive) < spread / 2


def test_the_mean_gain_is_not_misled_by_censoring():
    """Small trees where rounds are hard would fool a mean over what was seen; budgets are not
    drawn by difficulty here, and every round counts as far as it was seen.
    """
    found = []
    for seed in range(8):
        rng = np.random.default_rng(seed)
        x = features(rng, 4000)
        odds = increments("arrival", x)
        rounds = simulate(rng, odds, x, budgets=(4, 16, 128))
        real = 1 + odds.mean(0).cumsum()[WIDE - 1]
        found.append(mean_gain(rounds, WIDE) / real - 1)
    assert np.abs(found).max() < 0.06
    assert np.abs(np.mean(found, 0)).max() < 0.015
    rare = simulate(rng, odds, x, budgets=(4,) * 30 + (128,))  # 130 rounds in 4000
    assert len(mean_gain(rare, WIDE)) == 4, "sizes that few rounds reach are not told of"
    assert rare.horizon(WIDE).tolist() == [1, 2, 3, 4]


def test_tokens_by_budget_are_those_of_the_arrivals():
    arrivals = np.array([[1, 3, NEVER], [2, 9, NEVER]])
    rounds = Observed(arrivals, np.array([4, 8]), np.zeros((2, 3)), np.array([0, 0]))
    tokens = rounds.tokens(np.array([1, 2, 3, 4, 8, 9]))
    np.testing.assert_array_equal(
        tokens, [[2, 2, 3, 3, np.nan, np.nan], [1, 2, 2, 2, 2, np.nan]]
    )  # the node 9 of a tree of 8 is not there


def test_what_a_fit_cannot_know_is_refused():
    rng = np.random.default_rng(0)
    x = features(rng, 400)
    odds = increments("power", x)
    with pytest.raises(InputError, match=r"199 rounds are too few .* collect 200 at least"):
        simulate(rng, odds[:199], x[:199]).horizon(WIDE)
    same = simulate(rng, odds, x, budgets=(16,))
    for refused in (same.horizon, partial(mean_gain, same), *(partial(f, same) for f in fits())):
        with pytest.raises(InputError, match=r"tree of 16 nodes.*budget@method\.budget=explore"):
            refused(WIDE)
    assert same.horizon(WIDE[WIDE <= 16])[-1] == 16, "all that is asked for is in the data"


def fits():
    return [fit for fit, _ in FITS.values()]


@given(st.integers(0, 2**32 - 1), st.integers(1, 24))
@settings(max_examples=100, deadline=None)
def test_arrivals_earn_less_and_less(seed, depth):
    """Whatever is fitted and whatever the state; against the sum over nodes, in plain python."""
    rng = np.random.default_rng(seed)
    ends = np.unique(rng.integers(1, 60, 8)).tolist()
    numbers = {f"alpha_{end}": float(rng.normal(-2, 2)) for end in ends}
    numbers |= {f"{s}_{n}": float(rng.normal(0, 1)) for s in ("gamma", "kappa") for n in STATE}
    gain = Arrival(depth, CENTER.tolist(), SCALE.tolist(), ends, numbers, {})
    x = rng.normal(0, 1, (5, 3))
    states = CENTER + SCALE * x
    states[:, 0] = np.exp(states[:, 0])
    nodes = np.arange(1, ends[-1] + 1)
    tokens = gain.tokens(nodes, states)
    steps = np.diff(tokens, prepend=1, axis=1)
    assert (steps > -1e-9).all()
    assert (np.diff(steps) < 1e-9).all()
    plain = np.minimum(1 + intensities(x, numbers, ends).cumsum(1), depth + 1)
    assert tokens == pytest.approx(plain)
    assert gain.tokens(nodes, states[2]) == pytest.approx(tokens[2])
    some = np.unique(rng.integers(1, ends[-1] + 1, 4))
    assert gain.tokens(some, states) == pytest.approx(tokens[:, some - 1])
    assert gain.tokens(nodes[-1:] + 50, states) == pytest.approx(tokens[:, -1:]), "known no more"


def test_a_gain_explains_what_the_state_tells():
    rng = np.random.default_rng(3)
    x = features(rng, 20_000)
    odds = increments("lomax", x)
    learn, held = (simulate(rng, odds, x) for _ in range(2))
    mean = mean_gain(learn, WIDE)
    gains = {name: explained(fit(learn, WIDE), held, WIDE, mean) for name, (fit, _) in FITS.items()}
    tokens = held.tokens(WIDE)
    told = 1 + odds.cumsum(1)[:, WIDE - 1]
    best = 1 - np.nansum((told - tokens) ** 2) / np.nansum((mean - tokens) ** 2)
    assert 0.02 < gains["lomax"] <= best + 0.001
    assert gains["lomax"] == pytest.approx(best, abs=0.005)
    assert gains["arrival"] == pytest.approx(best, abs=0.01)
    assert gains["power"] < 0.001, "the same for all rounds"


# ---- how likely a node is reached

MAP = Reach([-0.4, -1.0, -1.4, -1.6], 0.7, 0.9)


def odds_of(score: float, depth: int, reach: Reach = MAP) -> float:
    """Of one edge, in plain python."""
    rest = math.log(-math.expm1(min(score, -1e-4)))
    logit = reach.offsets[depth - 1] + reach.up * score - reach.down * rest
    return 1 / (1 + math.exp(-logit))


def reached(tree: DraftTree, reach: Reach) -> list[float]:
    """Products over ancestors, in plain python."""
    found = [1.0]
    for node in range(1, len(tree)):
        parent = int(tree.parents[node])
        score = float(tree.log_scores[node]) - float(tree.log_scores[parent])
        found.append(found[parent] * odds_of(score, int(tree.depths[node]), reach))
    return found[1:]


def edges(rng: np.random.Generator, count: int, highest: float = 0.0):
    """Scores, depths and outcomes as MAP has them."""
    scores, depths = rng.uniform(-4, highest, count), rng.integers(1, 5, count)
    odds = np.array([odds_of(s, d) for s, d in zip(scores.tolist(), depths, strict=True)])
    return scores, depths, rng.random(count) < odds, odds


@pytest.mark.parametrize("seed", range(3))
def test_a_map_of_edges_is_found_again(seed):
    scores, depths, hits, odds = edges(np.random.default_rng(seed), 40_000)
    found = Reach.fit(scores, depths, hits, depth=4)
    assert found.offsets == pytest.approx(MAP.offsets, abs=0.15)
    assert (found.up, found.down) == pytest.approx((MAP.up, MAP.down), abs=0.1)
    said = np.array([odds_of(s, d, found) for s, d in zip(scores.tolist(), depths, strict=True)])
    assert np.abs(said - odds).max() < 0.04

    def error(probabilities: np.ndarray) -> float:
        bins = reliability(torch.from_numpy(probabilities), torch.from_numpy(hits))
        return calibration_error(bins)

    assert error(said) < 0.01 < 0.05 < error(np.exp(scores))


def test_raw_scores_above_zero_are_taken_as_they_come():
    scores, depths, hits, _ = edges(np.random.default_rng(0), 20_000, highest=4.0)
    assert (scores > 0).mean() > 0.3
    found = Reach.fit(scores, depths, hits, depth=4)
    rising = [odds_of(s, 2, found) for s in np.linspace(-4, 4, 50)]
    assert (np.diff(rising) > 0).all()
    assert all(0 < p < 1 for p in rising)
    never = np.where(depths == 3, False, hits)  # a depth that is never reached stays finite
    assert np.isfinite(Reach.fit(scores, depths, never, depth=5).offsets).all()


def test_too_few_edges_calibrate_nothing():
    scores, depths, hits, _ = edges(np.random.default_rng(0), 2000)
    Reach.fit(scores[:1000], depths[:1000], hits[:1000], depth=4)
    for some in (hits[:999], np.zeros(2000, bool), np.ones(2000, bool), hits[:0]):
        n = len(some)
        with pytest.raises(InputError, match=rf"^{n} edges, {some.sum()} .*collect 1000 at least"):
            Reach.fit(scores[:n], depths[:n], some, depth=4)


@given(drafts(max_depth=4, max_candidates=5), st.integers(1, 40), st.booleans())
@settings(max_examples=150, deadline=None)
def test_a_path_is_as_likely_as_all_its_edges(draft, budget, scored):
    tokens, logits = AnyScorer().edge_logits(draft)
    trees = [expand(draft, budget), expand(draft, 3), expand(draft, 1)]
    if scored:  # scores above 0 among them
        trees = [expand_edges(draft.root, tokens, logits, n) for n in (budget, 3, 1)]
    sizes = [len(tree) - 1 for tree in trees]
    padded = {
        name: np.zeros((3, max(sizes)), kind)
        for name, kind in (("log_scores", "f4"), ("parents", "i2"), ("depths", "i1"))
    }
    for row, (tree, size) in enumerate(zip(trees, sizes, strict=True)):
        for name, values in padded.items():
            values[row, :size] = getattr(tree, name)[1:]
    together = MAP.of_paths(**padded)
    for row, tree in enumerate(trees):
        assert MAP(tree) == pytest.approx(np.array(reached(tree, MAP)), rel=1e-9)
        assert together[row, : sizes[row]] == pytest.approx(MAP(tree), rel=1e-12)
        assert (together[row, sizes[row] :] == 0).all()


# ---- the policies


@st.composite
def curves(draw) -> tuple[np.ndarray, np.ndarray]:
    """Ends of cost buckets, and tokens of 1, 2, ... nodes: less and less for each one more."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    ends = np.unique(rng.integers(1, 80, draw(st.integers(1, 8))))
    steps = np.sort(rng.exponential(0.5, ends[-1]))[::-1] * (rng.random(ends[-1]) < 0.8)
    return ends, 1 + np.sort(steps)[::-1].cumsum()


@given(curves(), st.integers(0, 2**32 - 1))
@settings(max_examples=200, deadline=None)
def test_no_size_between_the_measured_ones_is_better(drawn, seed):
    """Where a round costs what its bucket does, by brute force over all sizes."""
    ends, tokens = drawn
    steps = np.random.default_rng(seed).exponential(1e-2, len(ends)).cumsum() + 1e-3
    constants = dataclasses.replace(planted(costs_of(steps, ends)), mean=tokens[ends - 1])
    best = Best(constants).allocate(state_of())

    def speed(n: int) -> float:
        bucket = next(i for i, end in enumerate(ends) if n <= end)
        return tokens[n - 1] / steps[bucket]

    assert best in ends
    assert speed(best) == pytest.approx(max(speed(n) for n in range(1, ends[-1] + 1)))


@given(st.integers(0, 2**32 - 1), st.integers(1, 1024), st.integers(1, 70), st.integers(1, 70))
@settings(max_examples=150, deadline=None)
def test_a_knee_does_not_mislead(seed, context, a, b):
    """Costs flat, then steep, at three contexts; best and fitted against loops in plain python."""
    rng = np.random.default_rng(seed)
    knees = rng.uniform(1, 64, 3)
    rows = [[0.01 + rng.uniform(1e-5, 1e-2) * max(0, n - knee) for n in SIZES] for knee in knees]
    costs = np.maximum.accumulate(rows, axis=1)
    constants = planted(costs_of(costs, SIZES, contexts=(1, 300, 1024)))
    seconds = [float(np.interp(context, (1, 300, 1024), costs[:, i])) for i in range(len(SIZES))]
    state = state_of(
        *(rng.uniform(0.05, 0.99), rng.uniform(-1, 1), float(rng.integers(0, 7)), context)
    )
    lomax_, arrival = constants.gains["lomax"], constants.gains["arrival"]
    x = np.array([math.log(state.conf), state.degen, state.hist(8)])
    x = (x - lomax_.center) / lomax_.scale
    arrivals = np.minimum(1 + intensities(x, arrival.numbers, arrival.ends).cumsum(), 8)
    tokens = {
        None: constants.mean.tolist(),
        "lomax": [float(lomax(n, x, lomax_.numbers, 7)) for n in SIZES],
        "arrival": arrivals[SIZES - 1].tolist(),
    }
    limits = [(1, None), (min(a, b), max(a, b))]
    for (kind, earned), (least, largest) in itertools.product(tokens.items(), limits):
        speeds = {
            n: earned[i] / seconds[i]
            for i, n in enumerate(SIZES.tolist())
            if least <= n <= (largest or 64)
        }
        make = partial(Fitted, gain=kind) if kind else Best
        if not speeds:
            with pytest.raises(InputError, match="none of the measured sizes"):
                make(constants, least=least, largest=largest)
            continue
        chosen = make(constants, least=least, largest=largest).allocate(state)
        assert speeds[chosen] == pytest.approx(max(speeds.values()), rel=1e-9)


LINE = costs_of(1e-3 * (10 + 0.2 * SIZES), SIZES)


def test_the_best_constant_looks_at_nothing_but_the_context():
    steep = costs_of([1e-3 * (10 + 0.05 * SIZES), 1e-3 * (10 + 4.0 * SIZES)], SIZES)
    policy, rng = Best(planted(steep)), np.random.default_rng(0)
    by_context = {}
    for context in (1, 300, 1024):
        found = {
            policy.allocate(state_of(*rng.uniform(0.01, 0.9, 2), 7 * rng.random(), context))
            for _ in range(20)
        }
        assert len(found) == 1
        (by_context[context],) = found
    assert by_context[1] > by_context[300] > by_context[1024]
    for context in (0, 1025):
        with pytest.raises(InputError, match=rf"has contexts 1\.\.1024, not {context};"):
            policy.allocate(state_of(context=context))
    one = Best(planted(costs_of(1e-3 * (10 + 0.05 * SIZES), SIZES, contexts=[7])))
    assert one.allocate(state_of(context=7)) == by_context[1]
    tree = expand(state_of().draft, 5)
    assert policy.trim(tree, 1) == len(tree) - 1


def test_confident_rounds_get_more_nodes():
    for gain in ("lomax", "arrival"):
        policy = Fitted(planted(LINE), gain=gain)
        sizes = [policy.allocate(state_of(conf)) for conf in (0.05, 0.2, 0.4, 0.6, 0.8, 0.95)]
        assert sizes == sorted(sizes)
        assert sizes[-1] > 2 * sizes[0]
    chosen = [Fitted(planted(LINE, slope=0.0)).allocate(state_of(conf)) for conf in (0.05, 0.95)]
    assert chosen[0] == chosen[1]
    unlike = dataclasses.replace(planted(LINE), fitted="arrival")
    state = state_of(0.9)
    assert Fitted(unlike).allocate(state) == Fitted(unlike, gain="arrival").allocate(state)
    with pytest.raises(InputError, match=r"budget\.gain must be one of .*, not magic"):
        Fitted(unlike, gain="magic")


@given(
    st.floats(1e-3, 1e-1), st.floats(1e-5, 1e-3), st.floats(0.05, 0.95), st.integers(0, 2**32 - 1)
)
@settings(max_examples=100, deadline=None)
def test_the_papers_budget_is_a_constant_of_the_machine(fixed, per_node, beta, seed):
    sizes = np.array([1, 16, 64, 200, 512])
    policy = Paper(costs_of(fixed + per_node * sizes, sizes), beta=beta)
    rng = np.random.default_rng(seed)
    found = {
        policy.allocate(
            state_of(rng.uniform(0.01, 1), rng.normal(), 7 * rng.random(), int(rng.integers(9000)))
        )
        for _ in range(10)
    }
    assert len(found) == 1
    wanted = min(max(beta * fixed / ((1 - beta) * per_node), 32), 512)
    assert abs(found.pop() - wanted) <= 1


def test_the_papers_costs_can_be_read_in_three_ways():
    verify = np.array([[9e-3, 11e-3, 23e-3], [9e-3, 11e-3, 23e-3]])
    parts = {"ar": np.full(2, 8e-3), "draft": np.full(2, 2e-3), "verify": verify}
    parts |= {"host": np.zeros((2, 3)), "spread": np.zeros((2, 3))}
    table = CostTable(np.array([1, 512]), np.array([16, 32, 128]), **parts)
    line = table.line(256)
    assert paper.costs(table, "whole", 256) == (line.fixed, line.per_node)
    assert paper.costs(table, "draft", 256) == pytest.approx((2e-3, line.per_node))
    assert paper.costs(table, "per_node", 256) == pytest.approx((2e-3, 15e-3 / 64))
    small = CostTable(
        *(table.contexts, table.nodes[:2]),
        **{k: v[:, :2] if v.ndim == 2 else v for k, v in parts.items()},
    )
    assert paper.costs(small, "per_node", 256)[1] == pytest.approx(11e-3 / 32)
    wide = {"least": 1, "largest": 128}
    whole, draft, per_node = (
        Paper(table, reading=r, **wide).allocate(state_of()) for r in paper.READINGS
    )
    assert abs(whole - line.fixed / line.per_node) <= 1
    assert abs(draft - 2e-3 / line.per_node) <= 1
    assert abs(per_node - 2e-3 * 64 / 15e-3) <= 1
    assert whole > draft
    assert draft != per_node
    assert Paper(small).allocate(state_of()) == 32, "the range ends with the table"
    for options, words in [
        ({"reading": "mine"}, r"budget\.reading must be one of whole, draft, per_node, not mine"),
        ({"beta": 0}, r"budget\.beta must lie in 0\.\.1, not 0"),
        ({"beta": 1.0}, r"budget\.beta"),
        ({"least": 0}, r"1 <= budget\.least <= budget\.largest"),
        ({"least": 64, "largest": 32}, "not 64 and 32"),
    ]:
        with pytest.raises(InputError, match=words):
            Paper(table, **options)
    far = Paper(table, context=513, **wide)
    assert far.allocate(state_of()) == Paper(table, context=512, **wide).allocate(state_of())


@given(
    drafts(max_depth=4, max_candidates=6),
    st.integers(1, 1024),
    st.sampled_from([0.0, 0.3, 1.0]),
    st.sampled_from([(1, None), (3, 20)]),
)
@settings(max_examples=200, deadline=None)
def test_a_tree_is_cut_where_tokens_a_second_are_most(draft, context, trust, limits):
    """By brute force over the measured sizes, with probabilities in plain python."""
    least, largest = limits
    costs = 1e-3 * np.stack([10 + 0.3 * SIZES, 10 + np.maximum(0, SIZES - 6) * 1.0])
    constants = dataclasses.replace(planted(costs_of(costs, SIZES), depth=4), reach=MAP)
    policy = Ratio(constants, trust=trust, least=least, largest=largest)
    state = RoundState(draft, context, [])
    allowed = [n for n in SIZES.tolist() if least <= n <= (largest or 64)]
    assert policy.allocate(state) == allowed[-1], "the largest is built first"
    tree = expand(draft, allowed[-1])
    probabilities = reached(tree, MAP)
    share = (context - 1) / 1023
    speeds = {}
    for i, n in enumerate(SIZES.tolist()):
        own, mean = 1 + sum(probabilities[:n]), float(constants.mean[i])
        seconds = (1 - share) * costs[0, i] + share * costs[1, i]
        if n in allowed:
            speeds[n] = (trust * own + (1 - trust) * mean) / seconds
    kept = policy.trim(tree, context)
    fits = len(tree) - 1
    assert kept <= fits
    if kept < fits:
        assert speeds[kept] == pytest.approx(max(speeds.values()), rel=1e-9)
    else:
        largest_best = max(n for n, s in speeds.items() if s >= max(speeds.values()) * (1 - 1e-9))
        assert largest_best >= fits
    if trust == 0:
        best = Best(constants, least=least, largest=largest).allocate(state)
        assert kept == min(best, fits)


def test_trust_lies_between_none_and_all():
    for trust in (-0.1, 1.1):
        with pytest.raises(InputError, match=r"budget\.trust must lie in 0\.\.1"):
            Ratio(planted(LINE), trust=trust)


POLICIES = {
    "best": Best,
    "fitted": Fitted,
    "arrival": partial(Fitted, gain="arrival"),
    "ratio": Ratio,
}


@pytest.mark.parametrize("name", [*POLICIES, "paper"])
def test_a_decision_takes_microseconds(name):
    """Against rounds of milliseconds. The bound is generous: machines are shared."""
    rng = np.random.default_rng(0)
    nodes = np.array([1, 2, 3, 4, 5, 6, 7, 9, 11, 13, 15, 19, 23, 27, 31, 39, 47, 63, 95, 127])
    cost = costs_of(1e-3 * (10 + 0.2 * nodes), nodes, contexts=[1, 256, 1024, 2048])
    policy = Paper(cost) if name == "paper" else POLICIES[name](planted(cost))
    logits = torch.from_numpy(rng.normal(0, 3, (200, 7, 50)).astype(np.float32))
    states = [
        RoundState(Draft.from_logits(0, row, torch.randn(7, 8), candidates=16), i + 1, [1, 2, 0])
        for i, row in enumerate(logits)
    ]
    built = [DDTree().build(state.draft, 127) for state in states]
    seconds = []
    for state, tree in zip(states, built, strict=True):
        started = time.perf_counter()
        policy.allocate(state)
        policy.trim(tree, state.context_length)
        seconds.append(time.perf_counter() - started)
    median = statistics.median(seconds)
    print(f"{name}: {1e6 * median:.0f} us a decision")
    assert median < 300e-6


# ---- through the disk, and into the loop


def test_constants_decide_the_same_after_the_disk(tmp_path):
    constants = planted(LINE)
    constants.save(tmp_path / "a")
    again = Constants.load(tmp_path / "a")
    rng = np.random.default_rng(0)
    logits = torch.from_numpy(rng.normal(0, 3, (60, 7, 50)).astype(np.float32))
    for make in POLICIES.values():
        policy, copied = make(constants), make(again)
        loaded = (
            make.func.load(str(tmp_path / "a"), **make.keywords)
            if isinstance(make, partial)
            else make.load(str(tmp_path / "a"))
        )
        decisions = []
        for i, row in enumerate(logits):
            draft = Draft.from_logits(0, row, torch.randn(7, 8), candidates=16)
            context, tree = 10 * i + 1, expand(draft, 64)
            state = RoundState(draft, context, [i % 4])
            found = [(p.allocate(state), p.trim(tree, context)) for p in (policy, copied, loaded)]
            assert found[0] == found[1] == found[2]
            decisions.append(found[0])
        assert policy.max_context == copied.max_context == 1024
        assert len(set(decisions)) > (1 if make is not Best else 0)
    loaded = Paper.load(str(tmp_path / "a"))
    assert loaded.allocate(state_of()) == Paper(LINE).allocate(state_of())


def test_what_is_no_constants_is_said_in_one_line(tmp_path):
    planted(LINE).save(tmp_path)
    file = tmp_path / "constants.json"
    whole = json.loads(file.read_text())
    with pytest.raises(InputError, match=r"cannot read .*nowhere/constants\.json: No such file"):
        Constants.load(tmp_path / "nowhere")
    file.write_text(json.dumps(whole | {"version": 99}))
    with pytest.raises(InputError, match=r"^\S+ was written by another version; [^;]*$"):
        Constants.load(tmp_path)
    for change in (
        {"gains": {"lomax": {"kind": "magic"}}},
        {"gains": {"lomax": {"kind": "lomax"}}},
        {"gains": 3},
        {"reach": {"up": 1}},
        {"reach": None},
        {"cost": {"nodes": [1]}},
        *({"mean": []}, {"mean": "many"}, {"mean": [1.0] * 99}, {"window": "x"}, {"gains": {}}),
    ):
        file.write_text(json.dumps(whole | change))
        with pytest.raises(InputError, match=r"does not hold constants \(.*fit\.py makes it"):
            Constants.load(tmp_path)
    for text in ("", "{", "[]", "null", json.dumps(whole)[:300], "{}"):
        file.write_text(text)
        with pytest.raises(InputError, match="does not hold constants"):
            Constants.load(tmp_path)
    file.write_text(json.dumps(whole | {"cost": whole["cost"] | {"nodes": [3, 2]}}))
    with pytest.raises(InputError, match="ascending nodes"):
        Constants.load(tmp_path)
    file.write_text(json.dumps(whole))
    Constants.load(tmp_path)


@pytest.mark.parametrize(
    "lost", ["cost", "window", "fitted", "best", "found", "made_by", "mean", "reach"]
)
def test_constants_that_lack_something_are_refused(tmp_path, lost):
    planted(LINE).save(tmp_path)
    file = tmp_path / "constants.json"
    kept = {key: value for key, value in json.loads(file.read_text()).items() if key != lost}
    file.write_text(json.dumps(kept))
    with pytest.raises(InputError, match="does not hold constants"):
        Constants.load(tmp_path)


def test_policies_refuse_what_they_were_not_measured_for():
    mine = {key: f"my {key}" for key in MACHINE}
    cost = costs_of(1e-3 * (10 + 0.2 * SIZES), SIZES, **mine)
    for policy in (*(make(planted(cost)) for make in POLICIES.values()), Paper(cost)):
        policy.check_fits(mine)
        policy.check_fits({"target": "my target"})
        with pytest.raises(InputError, match="with device my device, not a toaster"):
            policy.check_fits({**mine, "device": "a toaster"})
    with pytest.raises(InputError, match="with builder my builder, not Chain"):
        Best(planted(cost)).check_fits({**mine, "builder": "Chain()"})
    Paper(cost).check_fits({**mine, "builder": "Chain()"})  # it weighs the machine alone


class Refusing:
    """A target that must not be asked."""

    device, max_context = torch.device("cpu"), 10**6

    def prefill(self, tokens):
        raise AssertionError("decoding began")


@pytest.mark.parametrize("make", POLICIES.values(), ids=POLICIES)
def test_a_request_beyond_the_table_is_refused_before_decoding(make):
    parts = {"target": Refusing(), "drafter": None, "builder": DDTree()}
    with pytest.raises(InputError) as refused:
        loop.generate(Request([1] * 1000, 25), **parts, budget=make(planted(LINE)))
    message = str(refused.value)
    assert "context of 1024" in message
    assert "need 1025" in message
    assert "scripts/fit.py contexts=" in message
    assert "\n" not in message
    parts["drafter"] = Noisy(tiny.load(device="cpu"))
    with pytest.raises(AssertionError, match="decoding began"):
        loop.generate(Request([1] * 1000, 24), **parts, budget=make(planted(LINE)))


# ---- rounds, watched


def walk_of(tree: DraftTree, text: np.ndarray) -> list[int]:
    """The nodes along a text, by looking for each among all."""
    path, found = 0, []
    for token in text.tolist():
        children = [n for n in range(1, len(tree)) if tree.parents[n] == path]
        nexts = [n for n in children if tree.tokens[n] == token]
        if not nexts:
            break
        (path,) = nexts
        found.append(path)
    return found


def check_watched(watched: Watched, trees: list[DraftTree], walks_: list[list[int]]) -> None:
    """Arrivals, hits and edges against walks in plain python."""
    hits, wanted = watched.hits, []
    for row, (tree, walked) in enumerate(zip(trees, walks_, strict=True)):
        size = len(tree) - 1
        assert watched.observed.seen[row] == size
        arrivals = watched.observed.arrivals[row]
        assert arrivals[arrivals <= size].tolist() == walked
        assert (np.flatnonzero(hits[row]) + 1).tolist() == walked
        assert watched.depths[row, :size].tolist() == tree.depths[1:].tolist()
        assert not watched.depths[row, size:].any()
        for node in range(1, size + 1):
            parent = int(tree.parents[node])
            if parent in (0, *walked):
                score = float(tree.log_scores[node]) - float(tree.log_scores[parent])
                wanted.append((score, int(tree.depths[node]), node in walked))
    found = list(zip(*(part.tolist() for part in watched.edges()), strict=True))
    assert [edge[1:] for edge in found] == [edge[1:] for edge in wanted]
    assert [edge[0] for edge in found] == pytest.approx([edge[0] for edge in wanted], abs=1e-6)


def recorded(round_: Round, prompt: str) -> RecordedRound:
    """As scripts/collect.py would keep it."""
    state, tree = round_.state, round_.tree
    n, K = len(tree), state.draft.tokens.shape[1]
    return RecordedRound(
        **{"prompt_id": prompt, "source": "p", "turn": 0, "index": round_.index},
        **{"context_length": state.context_length, "draft": state.draft, "budget": round_.budget},
        **{"conf": state.conf, "degen": state.degen, "hist": state.hist(3)},
        **{"tree": tree, "path": round_.path, "bonus": round_.bonus, "seconds": {}},
        target_logits=np.zeros((n, K), np.float32),
        target_log_norm=np.zeros(n, np.float32),
        target_argmax=np.zeros(n, np.int64),
    )


def test_rounds_are_seen_alike_recorded_and_replayed(tmp_path):
    """Real rounds of a trained drafter, and the walk through dense anchors that takes the same."""
    target = tiny.load(device="cpu")
    drafter = DFlash(copy.deepcopy(trained("qwen3")), target, candidates=8, name="trained")
    target.stop_tokens = frozenset()
    asker = Asker(target, {"max_new_tokens": 40}, max_prompt_tokens=200, seed=0, beyond=4)
    budget = Explore(4, share=0.5, largest=40)
    responses = list(collected(tmp_path, PROMPTS, asker, drafter))
    happened: list[RecordedRound] = []
    for one in responses:
        loop.generate(
            Request(one.prompt.tolist(), len(one.response)),
            **{"target": target, "drafter": drafter, "builder": DDTree(), "budget": budget},
            on_round=lambda done, key=one.prompt_id: happened.append(recorded(done, key)),
        )
    real = watch_rounds(happened)
    walked = [one.path[1:] for one in happened]
    assert max(map(len, walked)) >= 2, "long paths occur"
    assert len(set(real.observed.responses.tolist())) == len(PROMPTS)
    check_watched(real, [one.tree for one in happened], walked)

    pace = Replay(DDTree(), budget)
    dense = watch_anchors(responses, DDTree(), pace=pace, largest=60, window=3)
    assert len(dense) == len(real)
    assert (dense.observed.seen == 60).all()
    assert dense.prompts.tolist() == real.prompts.tolist()
    assert dense.observed.responses.tolist() == real.observed.responses.tolist()
    assert dense.observed.states == pytest.approx(real.observed.states, abs=1e-4)
    seen = real.observed.seen[:, None]
    came, came_really = dense.observed.arrivals, real.observed.arrivals
    np.testing.assert_array_equal(np.where(came <= seen, came, NEVER), came_really)
    assert (came <= 60).sum() > (came_really <= 60).sum(), "there was more to be seen"
    # The very same round again, at each place where the walk was.
    roots, texts = [], []
    for one in responses:
        mine = [r for r in happened if r.prompt_id == one.prompt_id]
        text = np.append(one.response, one.beyond)
        for r in mine:
            place = r.context_length - len(one.prompt)
            roots.append(DDTree().build(one.drafts[place], 60))
            texts.append(text[place + 1 : place + 1 + drafter.depth])
    check_watched(dense, roots, [walk_of(t, x) for t, x in zip(roots, texts, strict=True)])


def test_watched_rounds_can_be_split():
    responses = [response_of(f"p-{i}", "p", i) for i in range(5)]
    pace = Replay(DDTree(), Fixed(4))
    watched = watch_anchors(responses, DDTree(), pace=pace, largest=20, window=8)
    rows = np.isin(watched.prompts, ["p-1", "p-3"])
    part = watched[rows]
    assert set(part.prompts) == {"p-1", "p-3"}
    assert len(part) == rows.sum()
    alone = watch_anchors([responses[1], responses[3]], DDTree(), pace=pace, largest=20, window=8)
    for a, b in zip(part.edges(), alone.edges(), strict=True):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(part.observed.states, alone.observed.states)
    accepted = (watched.observed.arrivals <= 4).sum(1)  # by the walk that set the pace
    first = np.flatnonzero(watched.prompts == "p-0")
    hists = watched.observed.states[first, 2]
    assert hists[0] == 0
    assert hists[-1] == pytest.approx(np.mean(accepted[first][-9:-1]))


# ---- what policies are worth

FEW = np.array([1, 2, 4, 8, 16])


def laid_out(count: int = 4):
    responses = [response_of(f"p-{i}", "p", i) for i in range(count)]
    costs = costs_of([10 + 0.5 * FEW, 12 + 1.5 * FEW], FEW, contexts=[1, 40])
    return lay(responses, DDTree(), MAP, FEW), costs


@pytest.mark.parametrize("reach", [MAP, Reach([-1.5, 4.0, 4.0], 0.1, 0.1)], ids=["meek", "bold"])
def test_odds_of_a_tree_are_sums_over_its_nodes(reach):
    """By depth; and however bold single edges are, no depth is likelier than the one above it."""
    (laid,) = lay([response_of("p-0", "p", 0)], DDTree(), reach, FEW)
    levelled = 0
    for root in range(29):
        tree = DDTree().build(laid.response.drafts[root], 16)
        probabilities = np.array(reached(tree, reach))
        text = np.append(laid.response.response, laid.response.beyond)[root + 1 :][:3]
        for s, n in enumerate(FEW):
            upper, came = 1.0, walk_of(tree.prefix(int(n)), text)
            for k in (1, 2, 3):
                mass = probabilities[:n][tree.depths[1 : n + 1] == k].sum()
                levelled += upper < min(mass, 1)
                upper = min(upper, mass)
                assert laid.odds[root, s, k - 1] == pytest.approx(upper, abs=1e-12)
                assert laid.truth[root, s, k - 1] == (len(came) >= k)
    assert levelled or reach == MAP


def expected(odds: np.ndarray, costs: np.ndarray, place: int = 0) -> float:
    """The least expected seconds from a root on, by the definition."""
    if place >= len(odds):
        return 0.0
    _, S, D = odds.shape
    ahead = [expected(odds, costs, place + 1 + k) for k in range(D + 1)]
    values = []
    for s in range(S):
        at_least = [1.0, *odds[place, s], 0.0]
        values.append(
            costs[place, s] + sum((at_least[k] - at_least[k + 1]) * ahead[k] for k in range(D + 1))
        )
    return min(values)


def test_bounds_are_what_their_definition_says():
    """On the last places of responses: plain recursion takes 4^A steps."""
    responses = [response_of(f"p-{i}", "p", i, length=8) for i in range(3)]
    cost = costs_of([10 + 0.5 * FEW, 12 + 1.5 * FEW], FEW, contexts=[1, 10])
    laid = lay(responses, DDTree(), MAP, FEW)
    found = bounds(laid, cost, FEW)
    costs = np.array([cost.curve(2 + i) for i in range(7)])  # prompts have two tokens
    assert found.optimum == pytest.approx(np.mean([expected(o.odds, costs) / 7 for o in laid]))
    assert found.hindsight == pytest.approx(np.mean([expected(o.truth, costs) / 7 for o in laid]))
    single = [
        np.mean([expected(o.odds[:, s : s + 1], costs[:, s : s + 1]) / 7 for o in laid])
        for s in range(len(FEW))
    ]
    assert found.fixed == pytest.approx(min(single))
    assert found.optimum <= found.fixed


def test_luck_with_one_size_is_the_walk_of_that_size():
    laid, cost = laid_out()
    fixed = swept(laid, DDTree(), FEW)
    for n in FEW:
        alone = lay([one.response for one in laid], DDTree(), MAP, np.array([n]))
        pace = seconds_a_token(laid, fixed[int(n)], cost)
        assert bounds(alone, cost, np.array([n])).hindsight == pytest.approx(pace.mean())
        by_hand = [
            sum(cost.curve(2 + root)[n == FEW][0] for root in walk.roots) / 29
            for walk in fixed[int(n)]
        ]
        assert pace == pytest.approx(by_hand)


def test_nothing_beats_hindsight_and_regret_is_over_the_sweeps_best():
    laid, cost = laid_out(6)
    constants = dataclasses.replace(planted(cost, depth=3), reach=MAP)
    policies = {name: make(constants) for name, make in POLICIES.items()}
    policies |= {f"fixed {n}": Fixed(int(n)) for n in FEW}
    fixed = swept(laid, DDTree(), FEW)
    found = regret(laid, DDTree(), policies, fixed=fixed, cost=cost)
    paces = {name: one.pace.mean() for name, one in found.policies.items()}
    assert all(found.bounds.hindsight <= pace + 1e-12 for pace in paces.values())
    assert found.fixed == pytest.approx({int(n): paces[f"fixed {n}"] for n in FEW})
    assert found.best == min(FEW, key=lambda n: paces[f"fixed {n}"])
    for name, pace in paces.items():
        assert found.gain(name) == pytest.approx(paces[f"fixed {found.best}"] / pace - 1)
    assert found.gain(f"fixed {found.best}") == pytest.approx(0)
    assert len(set(found.policies["ratio"].nodes.tolist())) > 1
    assert found.policies["fixed 8"].nodes.tolist() == [8] * len(found.policies["fixed 8"].nodes)
    walked = walks(laid, DDTree(), {"ratio": policies["ratio"]})["ratio"]
    assert found.policies["ratio"].mat == pytest.approx(np.mean([walk.mat for walk in walked]))
    steps = [np.mean(cost.ar_seconds(2 + np.arange(29))) for _ in laid]
    assert found.ar == pytest.approx(np.mean(steps))


def test_a_table_read_at_a_context_stays_monotone():
    draw = np.random.default_rng(0)
    for _ in range(300):  # a noisy machine: level at one context, far below it at the other
        low = np.sort(1e-4 * draw.uniform(1, 9, 12))
        high = np.repeat(1e-2 * draw.uniform(1, 9), 12)
        table = costs_of(np.stack([low, high]), range(1, 13), contexts=(1, 300))
        for context in (1, 150, 299, 300):
            table.pinned(context)
