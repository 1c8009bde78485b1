"""The master property: every tree, budget and drafter reproduces plain decoding, token by token."""

from __future__ import annotations

import math
import os
from collections import Counter

import pytest
import torch
from conftest import PROMPT, composed, group
from hydra.utils import instantiate
from scipy.stats import chisquare

from graft.budgets.fixed import Fixed
from graft.core.clock import PYTHON, by_verb
from graft.core.kv_cache import GROWTH
from graft.core.types import Request
from graft.decode import autoregressive, loop
from graft.decode.sampling import probabilities
from graft.drafters.noisy import Noisy
from graft.targets import tiny
from graft.trees.ddtree import DDTree

BUDGETS = (1, 4, 16, 64)
SAMPLING = {
    "greedy": {},
    "sampled": {"temperature": 1.0, "seed": 3},
    "filtered": {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "seed": 4},
}


@pytest.mark.parametrize("drafter", ["tiny", "noisy"])
@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("policy", group("budget"))
@pytest.mark.parametrize("tree", group("tree"))
def test_every_config_reproduces_plain_decoding(
    target, tree, policy, sampling, drafter, tiny_scorer, tiny_constants
):
    request = Request(PROMPT, 40, stop_tokens=target.stop_tokens, **SAMPLING[sampling])
    oracle = autoregressive.generate(request, target=target)
    overrides = (
        f"tree@method.builder={tree}",
        f"budget@method.budget={policy}",
        f"drafter={drafter}",
        f"paths.scorer={tiny_scorer}",
        f"paths.constants={tiny_constants}",
    )
    for nodes in BUDGETS if policy == "fixed" else (None,):
        sized = [f"method.budget.nodes={nodes}"] if nodes else []
        cfg = composed("generate", "+experiment=tiny", *overrides, *sized)
        result = instantiate(cfg.method)(
            request, target=target, drafter=instantiate(cfg.drafter, target=target)
        )
        assert result.tokens == oracle.tokens
        assert result.stopped == oracle.stopped
        assert len(result.tokens) <= 1 + sum(result.committed)


def test_the_noisy_drafter_is_accepted_often_enough_to_test_anything(target):
    request = Request(PROMPT, 60)
    drafter = Noisy(target)
    result = loop.generate(
        request, target=target, drafter=drafter, builder=DDTree(), budget=Fixed(16)
    )
    assert 2 < result.mat < 8
    assert len(set(result.committed)) > 2, "short and long paths both occur"


def test_plain_decoding_is_the_librarys_own(family):
    model = tiny.model(family)
    ids = torch.tensor([PROMPT])
    theirs = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=50, do_sample=False
    )
    request = Request(PROMPT, 50, stop_tokens=frozenset({model.config.eos_token_id}))
    ours = autoregressive.generate(request, target=tiny.load(family, device="cpu"))
    assert ours.tokens == theirs[0, len(PROMPT) :].tolist()


def test_a_stop_token_ends_the_response_inside_a_path(target):
    full = autoregressive.generate(Request(PROMPT, 40), target=target).tokens
    drafter = Noisy(target, noise=0.2)
    for stop in set(full[5:30]):
        request = Request(PROMPT, 40, stop_tokens=frozenset({stop}))
        result = loop.generate(
            request, target=target, drafter=drafter, builder=DDTree(), budget=Fixed(16)
        )
        assert result.tokens == full[: full.index(stop) + 1], "the stop token itself is kept"
        assert result.stopped


def test_lossless_across_a_growing_cache(target):
    """Rounds on both sides of a growth, the commit that follows it among them."""
    request = Request((PROMPT * 11)[: GROWTH - 20], 60)
    result = loop.generate(
        request, target=target, drafter=Noisy(target), builder=DDTree(), budget=Fixed(16)
    )
    assert target.cache.capacity > GROWTH
    assert result.tokens == autoregressive.generate(request, target=target).tokens


def test_a_response_of_one_token(target):
    request = Request(PROMPT, 1)
    parts = {"drafter": Noisy(target), "builder": DDTree(), "budget": Fixed(4)}
    result = loop.generate(request, target=target, **parts)
    assert result.tokens == autoregressive.generate(request, target=target).tokens
    assert result.committed == []
    assert math.isnan(result.mat)
    assert math.isnan(result.tokens_per_second)


def test_streamed_tokens_are_the_response(target):
    streamed: list[int] = []
    rounds = []
    result = loop.generate(
        Request(PROMPT, 30),
        target=target,
        drafter=Noisy(target),
        builder=DDTree(),
        budget=Fixed(8),
        on_round=rounds.append,
        on_tokens=streamed.extend,
    )
    assert streamed == result.tokens
    assert [len(r.path) for r in rounds] == result.committed
    assert [r.index for r in rounds] == list(range(len(rounds)))
    assert [r.state.context_length for r in rounds] == [
        len(PROMPT) + sum(result.committed[:i]) for i in range(len(rounds))
    ]
    before = [result.committed[:i] for i in range(len(rounds))]
    assert [list(r.state.accepted) for r in rounds] == [[n - 1 for n in part] for part in before]
    verbs = {"propose", "allocate", "build", "trim", "verify", "accept", "commit"}
    assert all(by_verb(r.seconds).keys() == {*verbs, PYTHON} for r in rounds)


DRAWS = int(os.environ.get("GRAFT_DRAWS", "2000"))


@pytest.mark.slow
def test_sampled_continuations_follow_the_targets_distribution():
    """Chi-square of three-token continuations against the exact law, enumerated from the target.

    GRAFT_DRAWS=100000 runs it at full size.
    """
    target = tiny.load("qwen3", device="cpu")
    length, settings = 3, {"temperature": 4.0, "top_k": 3}
    drafter, builder, budget = Noisy(target, depth=3, candidates=8), DDTree(), Fixed(6)

    def draw(seed: int, **changed) -> tuple[int, ...]:
        request = Request(PROMPT[:8], length, seed=seed, **(settings | changed))
        parts = {"target": target, "drafter": drafter, "builder": builder, "budget": budget}
        return tuple(loop.generate(request, **parts).tokens)

    exact = {(): 1.0}
    for _ in range(length):
        longer = {}
        for prefix, mass in exact.items():
            logits = target.prefill([*PROMPT[:8], *prefix]).logits[0]
            law = probabilities(logits, Request(PROMPT, 1, **settings))
            for token in law.nonzero()[:, 0].tolist():
                longer[(*prefix, token)] = mass * float(law[token])
        exact = longer
    assert len(exact) == 27

    def p_value(counts: Counter) -> float:
        observed = [counts[key] for key in exact]
        assert sum(observed) == sum(counts.values()), "nothing outside the support"
        expected = [mass * sum(observed) / sum(exact.values()) for mass in exact.values()]
        return chisquare(observed, expected).pvalue

    assert p_value(Counter(draw(seed) for seed in range(DRAWS))) > 0.01
    assert p_value(Counter(draw(seed, temperature=2.0) for seed in range(1000))) < 1e-4, "can fail"


def test_probabilities_filter():
    logits = torch.log(torch.tensor([0.5, 0.2, 0.2, 0.07, 0.03]))

    def law(**settings):
        return probabilities(logits, Request([1], 1, **settings)).tolist()

    assert law(temperature=1.0) == pytest.approx([0.5, 0.2, 0.2, 0.07, 0.03])
    assert law(temperature=0.5)[0] == pytest.approx(0.25 / (0.25 + 0.04 + 0.04 + 0.0049 + 0.0009))
    assert law(temperature=1.0, top_k=1) == [1, 0, 0, 0, 0]
    assert law(temperature=1.0, top_p=0.5) == [1, 0, 0, 0, 0]
    assert law(temperature=1.0, top_p=0.6) == pytest.approx([5 / 9, 2 / 9, 2 / 9, 0, 0]), (
        "ties stay"
    )
    assert law(temperature=1.0, top_p=1e-9) == [1, 0, 0, 0, 0]


@pytest.mark.slow
def test_memory_stays_flat_over_two_thousand_rounds():
    import psutil

    target = tiny.load("qwen3", device="cpu")
    drafter = instantiate(composed("generate", "+experiment=tiny").drafter, target=target)
    rounds, resident = 0, []
    while rounds < 2100:
        result = loop.generate(
            Request(PROMPT, 100), target=target, drafter=drafter, builder=DDTree(), budget=Fixed(16)
        )
        rounds += len(result.committed)
        if rounds > 100:
            resident.append(psutil.Process().memory_info().rss)
    assert resident[-1] - resident[0] < 20e6
