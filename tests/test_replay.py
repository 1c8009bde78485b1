"""Replay is decoding: round for round on real models, node for node on random trees; and what is
made of it adds up.
"""

from __future__ import annotations

import copy
import functools
from collections import Counter
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
import torch.nn.functional as F
from conftest import costs_of, planted
from hypothesis import given, settings
from hypothesis import strategies as st
from test_trees import drafts

from graft.budgets.explore import Explore
from graft.budgets.fitted import Fitted
from graft.budgets.fixed import Fixed
from graft.budgets.ratio import Ratio
from graft.collect.anchors import collect_anchors
from graft.collect.asking import Asker, Collected
from graft.core.errors import InputError
from graft.core.tree import ancestor_mask
from graft.core.types import Draft, Drafts, DraftTree, Request, RoundState
from graft.data import anchors
from graft.data.anchors import AnchoredResponse, Anchors
from graft.data.prompts import Prompt
from graft.data.shards import write_shard
from graft.decode import autoregressive, loop
from graft.decode.replay import Replay
from graft.drafters.blocks import context_of, draft_blocks
from graft.drafters.dflash import DFlash, new_network
from graft.drafters.dflash_net import DFlashNet
from graft.eval.bootstrap import interval, resampled_means
from graft.eval.fate import KINDS, fate
from graft.eval.replay import replay_all, summarise
from graft.targets import tiny
from graft.trees.chain import Chain
from graft.trees.ddtree import DDTree

PROMPTS = [Prompt(f"p-{i}", "p", ("What is a tree of tokens?"[i:],)) for i in range(6)]
COST = costs_of(1e-3 * (10 + 0.05 * np.arange(1, 65)), np.arange(1, 65))
CONSTANTS = planted(COST, depth=5, conf=0.06)  # about as sure as the drafters below are
METHODS = {
    "chain": Replay(Chain(), Fixed(64)),
    "ddtree_4": Replay(DDTree(), Fixed(4)),
    "ddtree_16": Replay(DDTree(), Fixed(16)),
    "ddtree_64": Replay(DDTree(), Fixed(64)),
    "explore": Replay(DDTree(), Explore(4, share=0.5, largest=64)),
    "fitted": Replay(DDTree(), Fitted(CONSTANTS)),
    "ratio": Replay(DDTree(), Ratio(CONSTANTS, trust=1)),
}


@functools.cache
def trained(family: str, *, depth: int = 5) -> DFlashNet:
    """A network that has seen what the target says to the prompts below, and half remembers it."""
    target = tiny.load(family, device="cpu")
    net = new_network(target, layers=2, block_size=depth + 1, mask_token_id=258, taps=1, seed=1)
    target.tap(net.config.target_layer_ids)
    optimizer = torch.optim.AdamW(net.parameters(), lr=4e-3)
    head = target.head_rows(None)
    texts = []
    for prompt in PROMPTS:
        tokens = target.encode_chat([{"role": "user", "content": prompt.turns[0]}])
        said = autoregressive.generate(Request(tokens, 60), target=target).tokens
        texts.append((torch.tensor([*tokens, *said]), len(tokens)))
    for step in range(60):
        text, start = texts[step % len(texts)]
        anchors_ = torch.arange(start, len(text) - depth)
        (taps,) = target.read([text])
        hidden = draft_blocks(
            net,
            target.embed,
            context=context_of(net, taps[None]),
            roots=text[anchors_][None],
            anchors=anchors_[None],
        )[0, :, 1:]
        labels = text[anchors_[:, None] + torch.arange(1, depth + 1)]
        loss = F.cross_entropy((hidden @ head.T).flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return net.eval().requires_grad_(False)


def collected(folder: Path, prompts: list[Prompt], asker: Asker, drafter: DFlash) -> Anchors:
    """Anchors along the answers to the prompts, through the disk and back."""
    found = collect_anchors(prompts, asker, drafter, slots=3, replay=METHODS["chain"])
    rows = [row for one in found if isinstance(one, Collected) for row in one.rows]
    write_shard(
        folder / "anchors" / "a.parquet",
        pa.Table.from_pylist(rows, anchors.SCHEMA),
        {
            "kind": "anchors",
            "version": anchors.VERSION,
            "target": {"name": "t", "fingerprint": "t"},
            "drafter": {"name": "d", "fingerprint": "d"},
            "shape": {"D": drafter.depth, "K": drafter.candidates},
            "settings": {},
            "prompts": {},
            "skipped": [],
        },
    )
    return Anchors([folder])


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.3}], ids=["greedy", "sampled"])
def test_replay_is_decoding_round_for_round(family, target, sampling, tmp_path):
    net = copy.deepcopy(trained(family))
    drafter = DFlash(net, target, candidates=8, name="trained for a minute")
    asker = Asker(
        target, {"max_new_tokens": 40, **sampling}, max_prompt_tokens=200, seed=0, beyond=4
    )
    # A stop token that does occur, so that a response ends inside a path.
    first = asker.request(PROMPTS[0], 0, [{"role": "user", "content": PROMPTS[0].turns[0]}])
    target.stop_tokens = frozenset(autoregressive.generate(first, target=target).tokens[20:21])
    lengths: Counter[int] = Counter()
    nodes: dict[str, set[int]] = {name: set() for name in METHODS}
    stopped = 0
    for response in collected(tmp_path, PROMPTS, asker, drafter):
        prompt = next(prompt for prompt in PROMPTS if prompt.key == response.prompt_id)
        request = asker.request(prompt, 0, [{"role": "user", "content": prompt.turns[0]}])
        assert response.prompt.tolist() == list(request.prompt)
        stopped += response.stopped
        for name, method in METHODS.items():
            real = loop.generate(
                request,
                target=target,
                drafter=drafter,
                builder=method.builder,
                budget=method.budget,
            )
            assert real.tokens == response.response.tolist()
            walk = method(
                response.drafts, response.response, response.beyond, start=len(response.prompt)
            )
            assert walk.committed.tolist() == real.committed, name
            assert walk.nodes.tolist() == real.nodes, name
            lengths.update(real.committed)
            nodes[name].update(real.nodes)
    assert len(lengths) >= 3, "short and long paths occur"
    assert len(nodes["fitted"]) + len(nodes["ratio"]) > 2, "they adapt"
    assert stopped, "at least one ends before the limit"


def replayed(response: list[int], right: dict[int, int], budget: int) -> list[int]:
    """Tokens a round of a chain whose draft at a root is right for so many tokens."""
    rows = [
        [[root + k if k <= right.get(root, 0) else 99] for k in (1, 2, 3)]
        for root in range(len(response))
    ]
    drafts_ = Drafts(
        roots=np.array(response),
        tokens=np.array(rows),
        log_probs=np.zeros((len(response), 3, 1), np.float32),
        cosines=np.zeros((len(response), 2), np.float32),
        hidden=torch.empty(len(response), 3, 0),
    )
    return Replay(Chain(), Fixed(budget))(drafts_, response).committed.tolist()


def test_replay_counts_what_decoding_would_commit():
    text = list(range(12))
    # Root 9 would look past the end, of which nothing is known here.
    assert replayed(text, {0: 2, 3: 3, 7: 0}, 3) == [3, 4, 1, 1]
    assert replayed(text, {0: 3}, 1) == [2, 1, 1, 1, 1, 1, 1, 1]


def test_plain_decoding_cannot_be_replayed():
    with pytest.raises(InputError, match="plain decoding has no rounds to replay"):
        Replay.of(partial(autoregressive.generate))


class Given:
    """A builder that gives one tree."""

    def __init__(self, tree: DraftTree) -> None:
        self.tree = tree

    def build(self, draft: Draft, budget: int) -> DraftTree:
        return self.tree


@st.composite
def trees(draw) -> tuple[Draft, DraftTree]:
    """Random trees out of a draft's candidates, the same token often under several parents."""
    draft = draw(drafts(max_depth=4, max_candidates=4))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    D, K = draft.tokens.shape
    parents, depths, ranks = [-1], [0], [-1]
    for _ in range(draw(st.integers(0, 30))):
        parent = int(rng.integers(len(parents)))
        rank = int(rng.integers(K))
        if depths[parent] < D and (parent, rank) not in zip(parents, ranks, strict=True):
            parents.append(parent)
            depths.append(depths[parent] + 1)
            ranks.append(rank)
    tokens = [draft.root] + [
        int(draft.tokens[d - 1, r]) for d, r in zip(depths[1:], ranks[1:], strict=True)
    ]
    zeros = np.zeros(len(parents), np.float32)
    mask = ancestor_mask(np.array(parents))
    tree = DraftTree(np.array(tokens), np.array(parents), np.array(depths), zeros, mask)
    return draft, tree


@given(trees(), st.integers(0, 2**32 - 1))
@settings(max_examples=300, deadline=None)
def test_a_round_is_the_longest_prefix_in_the_tree(drawn, seed):
    """Against the set of all paths; and the reason for its end against `fate`."""
    draft, tree = drawn
    D, K = draft.tokens.shape
    rng = np.random.default_rng(seed)
    # The target's words: mostly candidates, so that paths get long, sometimes others.
    said = [int(rng.choice([*draft.tokens[d], 77])) for d in range(D)] + [88]
    paths = {}
    for node in range(len(tree)):
        parent = int(tree.parents[node])
        paths[node] = () if node == 0 else (*paths[parent], int(tree.tokens[node]))
    longest = max(n for n in range(D + 1) if tuple(said[:n]) in paths.values())

    arrays = (np.array([x]) for x in (draft.root, draft.tokens, draft.log_probs, draft.cosines))
    one = Drafts(*arrays, draft.hidden[None])
    response = np.array([draft.root, said[0]])  # one round
    walk = Replay(Given(tree), Fixed(99))(one, response, said[1:D])
    assert walk.accepted.tolist() == [longest]

    anchored = AnchoredResponse(
        prompt_id="p",
        source="s",
        turn=0,
        prompt=np.array([1]),
        response=response,
        beyond=np.array(said[1:D]),
        stopped=False,
        drafts=one,
        target_logits=np.zeros((1, D, K), np.float32),
        target_log_norm=np.zeros(D, np.float32),
        target_argmax=np.zeros(D, np.int64),
    )
    (result,) = replay_all([anchored], {"m": Replay(Given(tree), Fixed(99))})["m"]
    along = [node for node, path in paths.items() if path == tuple(said[: len(path)])]
    expected = fate(tree, sorted(along), said[longest], draft.tokens)
    assert KINDS[result.fates[0]] == expected.kind
    assert result.taken.sum() == longest


def response_of(key: str, source: str, seed: int, length: int = 30) -> AnchoredResponse:
    """A response whose drafts are now and then right."""
    rng = np.random.default_rng(seed)
    A, D, K = length - 1, 3, 4
    text = rng.integers(0, 6, length + D - 1)
    tokens = np.array([[rng.permutation(6)[:K] for _ in range(D)] for _ in range(A)])
    log_probs = np.sort(rng.normal(-1.5, 0.5, (A, D, K)), -1)[..., ::-1].astype(np.float32)
    return AnchoredResponse(
        prompt_id=key,
        source=source,
        turn=0,
        prompt=np.array([1, 2]),
        response=text[:length],
        beyond=text[length:],
        stopped=False,
        drafts=Drafts(
            roots=text[:A],
            tokens=tokens,
            log_probs=np.minimum(log_probs, 0),
            cosines=np.zeros((A, D - 1), np.float32),
            hidden=torch.empty(A, D, 0),
        ),
        target_logits=np.zeros((A, D, K), np.float32),
        target_log_norm=np.zeros(A + D - 1, np.float32),
        target_argmax=np.zeros(A + D - 1, np.int64),
    )


def test_a_summary_adds_up():
    responses = [response_of(f"{s}-{i}", s, 10 * i + len(s)) for s in ("a", "bb") for i in range(6)]
    methods = {name: METHODS[name] for name in ("chain", "ddtree_4", "ddtree_64")}
    nodes = np.array([1, 3, 127])
    cost = costs_of([[1.0, 1.5, 3.0], [2.0, 4.0, 9.0]], nodes, contexts=[2, 40])

    def seconds_of(drafted, contexts):
        share, short, long = (
            (contexts - 2) / 38,
            *(np.interp(drafted, nodes, row) for row in ([1.0, 1.5, 3.0], [2.0, 4.0, 9.0])),
        )
        return ((1 - share) * short + share * long).sum()

    found = replay_all(responses, methods)
    baselines = dict.fromkeys(methods, "chain")
    summaries = {s.name: s for s in summarise(found, baselines=baselines, cost=cost)}
    for name, s in summaries.items():
        mine = found[name]
        rounds = [n for one in mine for n in one.walk.committed]
        assert s.rounds == len(rounds)
        assert s.mat == pytest.approx(np.mean([np.mean(one.walk.committed) for one in mine]))
        assert s.pooled == pytest.approx(np.mean(rounds))
        assert s.mat_by_source["a"] == pytest.approx(np.mean([o.walk.mat for o in mine[:6]]))
        assert sum(s.loss.values()) == pytest.approx(1)
        assert s.mismatch == pytest.approx(s.loss["mismatch"] / (1 - s.loss["cap"]))
        at_least_1 = np.mean([n > 1 for n in rounds])
        assert s.acceptance[0] == pytest.approx(at_least_1)
        assert sum(s.by_depth_and_rank[0]) == pytest.approx(at_least_1)
        assert sum(s.by_rank) == pytest.approx(1)
        assert s.mat_interval[0] < s.mat < s.mat_interval[1]
        # The prompts have two tokens, and 29 output tokens come after the first.
        contexts = [2 + one.walk.roots for one in mine]
        pace = np.mean([seconds_of(o.walk.nodes, c) for o, c in zip(mine, contexts, strict=True)])
        assert s.tokens_per_second == pytest.approx(29 / pace)
        share = np.arange(29) / 38  # of the way from one measured context to the other
        assert s.speedup == pytest.approx(29 * 0.9 * np.mean(1 + share) / pace)
    assert summaries["chain"].gain_interval == (0, 0)
    assert summaries["ddtree_64"].gain > summaries["ddtree_4"].gain > 0
    assert summaries["ddtree_64"].loss["budget"] == 0, "64 nodes hold all paths of 4 candidates"
    assert summaries["chain"].loss["mismatch"] == 0, "a chain has one node a depth"


def test_intervals_pair_columns_and_keep_prompts_together():
    rng = np.random.default_rng(0)
    hard = rng.normal(3, 1, (200, 1))
    values = np.hstack([hard, hard + 0.1])
    samples = resampled_means(values, [str(i) for i in range(200)])
    low, high = interval(samples[:, 1] - samples[:, 0])
    assert low == pytest.approx(0.1)
    assert high == pytest.approx(0.1)
    low, high = interval(samples[:, 0])
    assert high - low == pytest.approx(2 * 1.96 / np.sqrt(200), rel=0.15)
    # Twenty turns of one prompt are no twenty prompts: the interval stays as wide.
    turns = np.repeat(values, 20, axis=0)
    samples = resampled_means(turns, [str(i // 20) for i in range(4000)])
    wide = interval(samples[:, 0])
    assert wide[1] - wide[0] == pytest.approx(high - low, rel=0.15)


def test_explored_budgets_are_a_share_drawn_from_the_place():
    policy = Explore(16, share=0.25, largest=128)
    tokens = np.arange(4000).reshape(1000, 2, 2)
    nothing = (np.zeros((2, 2), np.float32), np.zeros(1, np.float32), torch.empty(2, 0))
    states = [RoundState(Draft(7, t, *nothing), i, []) for i, t in enumerate(tokens)]
    budgets = [policy.allocate(state) for state in states]
    larger = [budget for budget in budgets if budget != 16]
    assert 0.2 < len(larger) / 1000 < 0.3
    assert min(larger) >= 17
    assert max(larger) <= 128
    assert np.median(larger) == pytest.approx(np.sqrt(17 * 128), rel=0.2), "log-uniform"
    assert budgets == [policy.allocate(state) for state in reversed(states)][::-1]
    assert budgets != [Explore(16, share=0.25, largest=128, seed=1).allocate(s) for s in states]
    for nodes, share, largest in [(16, 1.5, 64), (16, 0.1, 16), (0, 0.1, 16), (1, 0.1, 10**6)]:
        with pytest.raises(InputError):
            Explore(nodes, share=share, largest=largest)
