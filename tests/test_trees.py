"""Tree builders: compiled against plain, builders against the laws, best-first against search."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from conftest import composed, group
from hydra.utils import instantiate
from hypothesis import given, settings
from hypothesis import strategies as st

from graft.core.tree import accept, ancestor_mask
from graft.core.types import Draft, DraftTree
from graft.trees.best_first import (
    expand,
    expand_edges,
)
from graft.trees.blackboard import expand_edges_reference, expand_reference
from graft.trees.tdes import TDES

FIELDS = ("tokens", "parents", "depths", "log_scores", "visible")


@st.composite
def drafts(draw, max_depth: int = 6, max_candidates: int = 6) -> Draft:
    """Random drafts; rounding makes ties common."""
    D, K = draw(st.integers(1, max_depth)), draw(st.integers(1, max_candidates))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    logits = rng.normal(0, 2, (D, K + 3)).round(draw(st.integers(0, 3)))
    log_probs = torch.from_numpy(logits).float().log_softmax(-1).numpy()
    tokens = np.argsort(-log_probs, axis=-1, kind="stable")[:, :K]
    return Draft(
        root=int(rng.integers(100)),
        tokens=tokens,
        log_probs=np.ascontiguousarray(np.take_along_axis(log_probs, tokens, -1)),
        cosines=np.zeros(D - 1, np.float32),
        hidden=torch.empty(D, 0),
    )


class AnyScorer:
    """Logits out of the hat, the same for the same draft, with and without grandparents, with and
    without a none class; without one some scores are positive.
    """

    def edge_logits(self, draft: Draft, *, none: bool | None = None) -> tuple[np.ndarray, ...]:
        D, K = draft.tokens.shape
        rng = np.random.default_rng(draft.root)
        grand, nones = K * (draft.root % 2), draft.root // 2 % 2 if none is None else none
        logits = rng.normal(-0.5, 1, (D, 1 + K + grand, K + nones)).round(draft.root % 3)
        return draft.tokens, logits.astype(np.float32)


def same(a: DraftTree, b: DraftTree) -> bool:
    pairs = [(getattr(a, field), getattr(b, field)) for field in FIELDS]
    return all(x.dtype == y.dtype and np.array_equal(x, y) for x, y in pairs)


@given(drafts(), st.integers(1, 80))
@settings(max_examples=300, deadline=None)
def test_compiled_expansion_is_the_plain_one(draft, budget):
    assert same(expand(draft, budget), expand_reference(draft, budget))


@given(drafts(max_depth=5, max_candidates=5), st.integers(1, 60), st.booleans())
@settings(max_examples=300, deadline=None)
def test_compiled_expansion_of_edges_is_the_plain_one(draft, budget, spine):
    tokens, logits = AnyScorer().edge_logits(draft)
    arguments = (draft.root, tokens, logits, budget)
    tree = expand_edges(*arguments, spine=spine)
    assert same(tree, expand_edges_reference(*arguments, spine=spine))
    if spine:
        depth = min(budget, len(tokens))
        assert tree.tokens[1 : depth + 1].tolist() == tokens[:depth, 0].tolist()
        assert tree.prefix(depth).is_chain


@given(drafts(max_depth=5, max_candidates=5), st.integers(1, 60))
@settings(max_examples=200, deadline=None)
def test_edges_that_ignore_the_parent_give_ddtree(draft, budget):
    D, K = draft.log_probs.shape
    logits = np.zeros((D, 1 + K, K), np.float32)
    logits[:, 0] = draft.log_probs
    assert same(expand_edges(draft.root, draft.tokens, logits, budget), expand(draft, budget))


@given(drafts(max_depth=4, max_candidates=4), st.integers(1, 60))
@settings(max_examples=100, deadline=None)
def test_scores_that_are_log_probabilities_come_out_in_order(draft, budget):
    """And raw ones need not: what comes out is a tree all the same (the laws above)."""
    tokens, logits = AnyScorer().edge_logits(draft, none=True)
    tree = expand_edges(draft.root, tokens, logits, budget)
    assert (np.diff(tree.log_scores[1:]) <= 0).all()


def test_raw_scores_break_the_order():
    logits = np.zeros((2, 3, 2), np.float32)
    logits[:, 0] = [[-1], [2]]  # a child better than its parent
    tree = expand_edges(0, np.array([[1, 2], [3, 4]]), logits, 6)
    assert (np.diff(tree.log_scores[1:]) > 0).any()


@pytest.mark.parametrize("name", group("tree"))
@given(draft=drafts(), budget=st.integers(1, 60), smaller=st.integers(0, 60))
@settings(max_examples=60, deadline=None)
def test_every_builder_obeys_the_laws(name, draft, budget, smaller):
    if name == "tdes":  # a trained scorer has one D and one K
        builder = TDES(AnyScorer())
    else:
        builder = instantiate(composed("generate", f"tree@method.builder={name}").method.builder)
    tree = builder.build(draft, budget)
    n = len(tree)
    assert 1 <= n <= budget + 1
    assert (tree.tokens[0], tree.parents[0], tree.depths[0], tree.log_scores[0]) == (
        draft.root,
        -1,
        0,
        0,
    )
    assert (tree.parents[1:] < np.arange(1, n)).all(), "a parent precedes its children"
    assert (tree.parents[1:] >= 0).all()
    assert np.array_equal(tree.depths[1:], tree.depths[tree.parents[1:]] + 1)
    assert np.array_equal(tree.visible, ancestor_mask(tree.parents))
    edges = list(zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True))
    assert len(set(edges)) == n, "no two children of a node carry the same token"
    assert tree.is_chain == np.array_equal(tree.parents, np.arange(n) - 1)
    if smaller <= budget:
        prefix = tree.prefix(smaller)
        assert len(prefix) == min(smaller + 1, n)
        if smaller >= 1:
            assert same(prefix, builder.build(draft, smaller)), "the prefix law"


@given(drafts(max_depth=3, max_candidates=4), st.integers(1, 40))
@settings(max_examples=100, deadline=None)
def test_best_first_takes_the_most_probable_paths(draft, budget):
    D, K = draft.log_probs.shape
    scores = [
        sum(draft.log_probs[d, r] for d, r in enumerate(ranks))
        for depth in range(1, D + 1)
        for ranks in itertools.product(range(K), repeat=depth)
    ]
    tree = expand(draft, budget)
    best = np.sort(scores)[::-1][: len(tree) - 1]
    np.testing.assert_allclose(np.exp(tree.log_scores[1:]), np.exp(best), rtol=1e-4)
    assert len(tree) - 1 == min(budget, len(scores))
    assert (np.diff(tree.log_scores) <= 0).all()


def test_ancestor_mask_by_hand():
    #      0
    #     1 2
    #    3   4
    expected = np.array(
        [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 0, 1, 0, 0], [1, 1, 0, 1, 0], [1, 0, 1, 0, 1]], bool
    )
    assert np.array_equal(ancestor_mask(np.array([-1, 0, 0, 1, 2])), expected)


@given(drafts(), st.integers(1, 60), st.integers(0, 2**32 - 1))
@settings(max_examples=200, deadline=None)
def test_accept_follows_the_target(draft, budget, seed):
    tree = expand(draft, budget)
    vocabulary = int(draft.tokens.max()) + 2
    drawn = np.random.default_rng(seed).integers(0, vocabulary, len(tree)).tolist()
    calls = []
    path, bonus = accept(tree, lambda node: calls.append(node) or drawn[node])

    children = {
        (p, t): i for i, (p, t) in enumerate(zip(tree.parents, tree.tokens, strict=True)) if i
    }
    expected = [0]
    while (child := children.get((expected[-1], drawn[expected[-1]]))) is not None:
        expected.append(child)
    assert path == expected
    assert bonus == drawn[expected[-1]]
    assert calls == path, "one draw per committed token, in text order"


@pytest.mark.parametrize(("target_says", "path"), [("never", [0]), ("always", [0, 1, 2, 3])])
def test_accept_never_and_always(target_says, path):
    draft = Draft(
        root=9,
        tokens=np.arange(6).reshape(3, 2),
        log_probs=np.full((3, 2), -0.7, np.float32),
        cosines=np.zeros(2, np.float32),
        hidden=torch.empty(3, 0),
    )
    chain = instantiate(composed("generate", "method=dflash").method.builder).build(draft, 3)
    drawn = [*chain.tokens[1:].tolist(), 77] if target_says == "always" else [99] * 4
    assert accept(chain, drawn.__getitem__) == (path, drawn[path[-1]])
