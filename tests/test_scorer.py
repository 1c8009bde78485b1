"""The edge scorer: the same in training and decoding, proper scores, and that it learns."""

from __future__ import annotations

import itertools
import json
import math
import os
import subprocess
import sys
import time
from types import SimpleNamespace

import ablate
import collect
import launch
import numpy as np
import pytest
import replay
import torch
from safetensors.torch import load_file
from scipy.stats import spearmanr
from test_scripts import run

import train
from graft.budgets.fixed import Fixed
from graft.core.errors import InputError
from graft.core.types import Draft, Drafts
from graft.data.anchors import AnchoredResponse, Anchors
from graft.data.rounds import Rounds
from graft.decode.replay import Replay
from graft.scorer import checkpoint
from graft.scorer.calibration import calibration_error, reliability
from graft.scorer.checkpoint import EdgeScorer
from graft.scorer.losses import scorer_losses, target_distribution
from graft.targets import tiny
from graft.training.scorer_data import EdgeBatches, EdgeData, Fans, fans_of_anchors, fans_of_round
from graft.training.scorer_module import build
from graft.trees.blackboard import fan
from graft.trees.ddtree import DDTree
from graft.trees.tdes import TDES

D, K, V, H = 4, 6, 40, 12
RUNGS = {
    "r1": {"term": "nothing", "mode": "normalised"},
    "r2": {"term": "ranks", "mode": "normalised"},
    "r3": {"term": "mlp", "mode": "raw", "width": 16, "projection": 8, "dropout": 0.0},
    "r4": {"term": "mlp", "mode": "normalised", "width": 16, "projection": 8, "dropout": 0.0},
    "r5": {"term": "bilinear", "mode": "normalised", "width": 16, "dropout": 0.0},
    "r6": {
        "term": "bilinear",
        "mode": "normalised",
        "width": 16,
        "dropout": 0.0,
        "two_parents": True,
    },
}
WEIGHTS = {"kl": 1.0, "nll": 0.0, "pairwise": 0.0, "bce": 0.0}
RECIPE = {
    "margin": 1.0,
    "budgets": [8],
    "lr": 0.01,
    "weight_decay": 0.0,
    "warmup": 0.1,
    "seed": 0,
}


class FakeTarget:
    """What training asks of a target: its embedding and its name."""

    device, vocab_size, hidden_size, fingerprint = torch.device("cpu"), V, H, "t"

    def __init__(self) -> None:
        self.rows = torch.randn(V, H, generator=torch.Generator().manual_seed(0))

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.rows[tokens]


class Planted:
    """A world whose edges have a known score: the target's logits are log q + g(parent, child)."""

    def __init__(self, strength: float = 2.0) -> None:
        generator = torch.Generator().manual_seed(1)
        target = FakeTarget()
        left, right = (torch.randn(H, 4, generator=generator) for _ in range(2))
        unit = target.rows / target.rows.square().mean(-1, keepdim=True).sqrt()
        self.g = (unit @ left @ (unit @ right).T / 4).mul(strength / 3).numpy()  # [V, V]

    def response(self, seed: int, length: int = 60) -> AnchoredResponse:
        """The target goes by log q + g over the drafter's candidates, which are drawn afresh."""
        rng = np.random.default_rng(seed)
        text = [int(rng.integers(V))]
        A = length - 1
        tokens = np.zeros((A, D, K), np.int64)
        log_probs = np.zeros((A, D, K), np.float32)
        # Each position's candidates and marginals are the same for every root that looks at it.
        by_position = {}
        for position in range(1, A + D):
            chosen = rng.permutation(V)[:K]
            marginal = np.sort(rng.normal(0, 1, K))[::-1]
            marginal = marginal - np.log(np.exp(marginal).sum()) + math.log(0.95)
            by_position[position] = chosen, marginal
            logits = marginal + self.g[text[-1], chosen]
            probs = np.exp(logits - logits.max())
            text.append(int(rng.choice(chosen, p=probs / probs.sum())))
        over = np.zeros((A, D, K), np.float32)
        for a in range(A):
            for d in range(D):
                chosen, marginal = by_position[a + d + 1]
                tokens[a, d], log_probs[a, d] = chosen, marginal
                over[a, d] = marginal + self.g[text[a + d], chosen]
        states = rng.integers(-100, 101, (A, D, 5))  # exact in int8, with this scale
        states[..., 0] = 127
        norms = np.zeros(A + D - 1, np.float32)
        for i in range(A + D - 1):
            chosen, marginal = by_position[i + 1]
            norms[i] = np.log(np.exp(marginal + self.g[text[i], chosen]).sum()) + 0.02
        return AnchoredResponse(
            prompt_id=f"p-{seed}",
            source="p",
            turn=0,
            prompt=np.array([1]),
            response=np.array(text[:length]),
            beyond=np.array(text[length : length + D - 1]),
            stopped=False,
            drafts=Drafts(
                roots=np.array(text[:A]),
                tokens=tokens,
                log_probs=log_probs,
                cosines=np.zeros((A, D - 1), np.float32),
                hidden=torch.from_numpy(states.astype(np.float32) / 64),
            ),
            target_logits=over,
            target_log_norm=norms,
            target_argmax=np.array(text[1 : A + D]),
        )


class FakeData:
    """What a module asks of its data."""

    def __init__(self, responses: list[AnchoredResponse]) -> None:
        rng = np.random.default_rng(0)
        self.made_by = {
            "target": {"fingerprint": "t"},
            "drafter": {"fingerprint": "d"},
            "shape": {"D": D, "K": K},
        }
        self.training = Fans.concatenate([fans_of_anchors(one, rng) for one in responses])
        self.validation_fans, self.prompts = self.training, []


def module_of(rung: str, data: FakeData, **changes):
    module = build(FakeTarget(), data, scorer=RUNGS[rung], losses=WEIGHTS, **RECIPE | changes)
    module.log = lambda *_, **__: None
    optimizers = [torch.optim.SGD(module.scorer.parameters(), lr=0.1)]
    module.trainer = SimpleNamespace(
        optimizers=optimizers, global_step=0, global_rank=0, default_root_dir=""
    )
    return module


def shaken(rung: str, data: FakeData):
    """A module whose parameters are not at their start."""
    module = module_of(rung, data)
    torch.manual_seed(3)
    for parameter in module.scorer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return module


@pytest.fixture(scope="module")
def data() -> FakeData:
    return FakeData([Planted().response(seed) for seed in range(3)])


@pytest.mark.parametrize("rung", RUNGS)
def test_decoding_scores_an_edge_as_training_did(rung, data):
    """Every fan of a response, at the place of its parent and grandparent in the draft's table."""
    response = Planted().response(0)
    module = shaken(rung, data)
    scorer = module.edge_scorer()
    fans = fans_of_anchors(response, np.random.default_rng(0))
    edges = fans.edges(torch.device("cpu"))
    net = module.scorer.eval()
    trained = net(edges, net.sides(edges, module._embedding)).sum(1)
    if net.mode == "normalised":
        trained = trained.log_softmax(-1)[:, :-1]
    ranks, checked = response.ranks(), 0
    places = [
        (a, d) for a in range(len(ranks)) for d in range(D) if d == 0 or (ranks[a, :d] < K).all()
    ]
    assert len(places) == len(fans)
    for (a, d), wanted in zip(places, trained.detach().numpy(), strict=True):
        _, logits = scorer.edge_logits(response.drafts[a])
        rows = 1 + K * (2 if rung in ("r2", "r6") else 1)
        assert logits.shape == (D, rows, K + (net.mode == "normalised"))
        parent, grand = (ranks[a, d - up] if d >= up else 0 for up in (1, 2))
        scores = fan(logits[d], grand=grand, parent=parent, candidates=K)
        np.testing.assert_allclose(scores, wanted, rtol=0.01, atol=0.02)
        checked += 1
    assert checked > 150


@pytest.mark.parametrize("rung", [r for r in RUNGS if r != "r3"])
def test_normalised_scores_are_log_probabilities(rung, data):
    scorer = shaken(rung, data).edge_scorer()
    for i in range(5):
        _, logits = scorer.edge_logits(Planted().response(0).drafts[i])
        for rows, grand, parent in itertools.product(logits, range(K), range(K)):
            scores = fan(rows, grand=grand, parent=parent, candidates=K)
            assert (scores <= 0).all()
            assert np.exp(scores).sum() <= 1 + 1e-5, "none of these keeps its share"


def test_a_scorer_that_knows_nothing_is_ddtree(data):
    raw = checkpoint.build({"term": "nothing", "mode": "raw", "depth": D})
    builder = TDES(EdgeScorer(raw, {}, {"depth": D, "candidates": K}))
    for draft in (Planted().response(1).drafts[i] for i in range(10)):
        mine, theirs = builder.build(draft, 20), DDTree().build(draft, 20)
        assert mine.tokens.tolist() == theirs.tokens.tolist()
        assert mine.parents.tolist() == theirs.parents.tolist()


def test_a_planted_edge_function_is_found():
    """The order of children under each parent, and nearly the oracle's tokens a round."""
    torch.manual_seed(0)
    world = Planted(strength=4.0)
    data = FakeData([world.response(seed) for seed in range(80)])
    module = module_of("r5", data)
    optimizer = torch.optim.Adam(module.scorer.parameters(), lr=0.02)
    for step, fans in enumerate(
        EdgeBatches(data.training, batch_size=512, steps=300, seed=0, rank=0)
    ):
        loss = module.training_step(fans, step)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for group in optimizer.param_groups:
            group["lr"] = 0.02 * (1 - step / 300)
    scorer = module.edge_scorer()
    term = module.scorer.term
    rows = module._embedding / module._embedding.square().mean(-1, keepdim=True).sqrt()
    gate = 2 * torch.sigmoid(term.gate.bias + term.depth.weight[1])
    learned = ((term.parent(rows) * gate) @ term.child(rows).T).detach().numpy()
    centred = [
        x - x.mean(1, keepdims=True) for x in (learned, world.g)
    ]  # up to a parent's constant
    assert spearmanr(centred[0].ravel(), centred[1].ravel()).statistic > 0.95

    class Oracle:
        def edge_logits(self, draft: Draft):
            parents = np.concatenate((np.full((1, K), draft.root), draft.tokens[:-1]))
            logits = draft.log_probs[:, None] + world.g[parents[:, :, None], draft.tokens[:, None]]
            logits = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
            logits = np.concatenate((np.zeros((D, 1, K)), logits), 1)
            return draft.tokens, logits.astype(np.float32)

    unseen = [world.response(seed) for seed in range(500, 530)]

    def mat(builder) -> float:
        method = Replay(builder, Fixed(8))
        return float(np.mean([method(r.drafts, r.response, r.beyond).mat for r in unseen]))

    plain, trained, oracle = mat(DDTree()), mat(TDES(scorer)), mat(TDES(Oracle()))
    assert oracle > 1.1 * plain
    assert trained > plain + 0.9 * (oracle - plain)


def test_losses_by_hand():
    target = target_distribution(torch.log(torch.tensor([[0.5, 0.2]])), torch.zeros(1))
    torch.testing.assert_close(target, torch.tensor([[0.5, 0.2, 0.3]]))
    f = torch.tensor([[1.0, -1.0]])
    logits = torch.log(torch.tensor([[0.25, 0.25, 0.5]]))
    found = scorer_losses(
        logits,
        f,
        torch.tensor([[0.5, 9.0]]),
        torch.tensor([True]),
        target=target,
        taken=torch.tensor([0]),
        weights=dict.fromkeys(("kl", "nll", "pairwise", "bce"), 1.0),
        margin=1.0,
    )
    kl = 0.5 * math.log(2) + 0.2 * math.log(0.8) + 0.3 * math.log(0.6)
    assert found["kl"].item() == pytest.approx(kl)
    assert found["nll"].item() == pytest.approx(math.log(4))
    softplus = [math.log1p(math.exp(1 - 1 + x)) for x in (-1.0, 0.5)]
    assert found["pairwise"].item() == pytest.approx(np.mean(softplus))
    bce = (math.log1p(math.exp(-1)) + math.log1p(math.exp(-1))) / 2
    assert found["bce"].item() == pytest.approx(bce)


def test_calibration_error():
    probs = torch.full((1000,), 0.3)
    hits = torch.zeros(1000)
    hits[:300] = 1
    assert calibration_error(reliability(probs, hits)) == pytest.approx(0, abs=1e-6)
    assert calibration_error(reliability(probs, torch.ones(1000))) == pytest.approx(0.7)


# ---- through the scripts


@pytest.fixture(scope="module")
def collected(tmp_path_factory):
    """A small collection of the tiny target, with the drafter's states."""
    folder = tmp_path_factory.mktemp("collected")
    prompts = folder / "own.jsonl"
    prompts.write_text("".join(json.dumps({"turns": [f"say {i}"]}) + "\n" for i in range(12)))
    with pytest.MonkeyPatch.context() as patch:
        code = run(
            patch,
            collect,
            "+experiment=tiny",
            f"prompts={prompts}",
            f"out={folder}",
            f"paths.outputs={folder / 'outputs'}",
            "max_new_tokens=20",
            "hidden=int8",
            "drafter.candidates=8",
            "target.dtype=float32",
        )
    assert code == 0
    return folder


@pytest.fixture
def trained(monkeypatch, tmp_path, collected, capsys):
    """Train on it for a few steps; gives (exit code, stdout, stderr)."""

    def go(*arguments: str):
        base = (
            "+experiment=tiny",
            f"data.collected={collected}",
            "data.held_out=3",
            "data.batch_size=64",
            "trainer.max_steps=6",
            "trainer.val_check_interval=3",
            "save_every=3",
            f"out={tmp_path / 'scorer'}",
            f"paths.outputs={tmp_path / 'outputs'}",
        )
        capsys.readouterr()
        return run(monkeypatch, train, *base, *arguments), *capsys.readouterr()

    return go


@pytest.mark.parametrize("rung", ["r1", "r2", "r3", "r4", "r5", "r6"])
def test_every_rung_trains_and_is_replayed(rung, trained, tmp_path, collected, monkeypatch, capsys):
    code, _, err = trained(f"scorer={rung}")
    assert code == 0, err
    rows = [
        json.loads(line)
        for line in (tmp_path / "outputs/train/tiny/metrics.jsonl").read_text().splitlines()
    ]
    gains = [row["gain"] for row in rows if "gain" in row]
    assert len(gains) == 2
    scorer = checkpoint.load(str(tmp_path / "scorer"))
    assert scorer.config["trained"]["gain"] == pytest.approx(max(gains), abs=1e-6)
    arguments = ("methods=tdes", "baseline=ddtree", f"paths.scorer={tmp_path / 'scorer'}")
    places = (f"collected={collected}", f"paths.outputs={tmp_path / 'outputs'}")
    capsys.readouterr()
    assert run(monkeypatch, replay, *arguments, *places) == 0
    assert "tdes_16" in capsys.readouterr().out
    assert (tmp_path / "scorer/training.png").stat().st_size > 10_000
    assert "Tokens a round over DDTree's" in (tmp_path / "scorer/README.md").read_text()


def test_a_scorer_learns_from_rounds_too(trained, collected):
    code, _, err = trained("scorer=r4", "data.use=[anchors,rounds]")
    assert code == 0, err
    rounds = Rounds([collected])
    fans = fans_of_round(rounds[0], np.random.default_rng(0))
    one = rounds[0]
    assert len(fans) == (one.tree.depths < 7).sum()
    for i, node in enumerate(np.flatnonzero(one.tree.depths < 7)):
        assert fans.parents[i] == one.tree.tokens[node]
        taken = int(fans.taken[i])
        chosen = one.draft.tokens[one.tree.depths[node]]
        assert (taken < 8 and chosen[taken] == one.target_argmax[node]) or (
            taken == 8 and one.target_argmax[node] not in chosen
        )


def test_batches_go_on_where_they_were(data):
    def loader() -> EdgeBatches:
        return EdgeBatches(data.training, batch_size=16, steps=6, seed=0, rank=0)

    whole = [fans.parents.tolist() for fans in loader()]
    first, second = loader(), loader()
    begun = [next(iter(first)).parents.tolist() for _ in range(2)]
    second.load_state_dict(first.state_dict())
    assert begun + [fans.parents.tolist() for fans in second] == whole
    other = EdgeBatches(data.training, batch_size=16, steps=6, seed=0, rank=1)
    assert other.batch(0).parents.tolist() != whole[0]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["data.collected=/nowhere"], "holds no shards; scripts/collect.py makes them"),
        (["target.seed=1"], "was collected with another target"),
        (["scorer=r5", "data.use=[rounds]"], "collect anchors with hidden=int8"),
        (["data.use=[foo]"], "choose from anchors and rounds"),
        (["data.held_out=99"], "data.held_out=99"),
        (["data.development=[foo]"], "data.development names foo"),
        (["data.batch_size=0"], "data.batch_size must be at least 1"),
        (["scorer.net.term=foo"], "scorer.net.term must be one of"),
        (["scorer.net.mode=foo"], "raw or normalised"),
        (["scorer.losses={kl:0,nll:0,pairwise:0,bce:0}"], "nothing would be learned"),
        (["monitor=mat/foo"], "choose from gain"),
        (["model.lr=1e30", "trainer.max_steps=40"], "the loss of step"),
        (["scorer.net.dropout=2"], "scorer.net cannot be built"),
        (["trainer.max_steps=2"], "no validation"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_one_line(trained, arguments, words, tmp_path):
    code, _, err = trained(*arguments)
    if "the loss" in words:
        batch = torch.load(tmp_path / "outputs/train/tiny/nan_batch_0.pt", weights_only=False)
        assert len(batch) == 64
    assert code == 2
    assert words in err
    assert err.startswith("error: ")
    assert err.count("\n") == 1, err


def test_a_scorer_of_other_models_is_refused(trained, tmp_path, collected, monkeypatch, capsys):
    assert trained("scorer=r5")[0] == 0
    scorer = checkpoint.load(str(tmp_path / "scorer"))
    draft = Anchors([collected])[0].drafts[0]
    with pytest.raises(InputError, match="another target"):
        scorer.check_fits("x", scorer.config["drafter"])
    with pytest.raises(InputError, match="another drafter"):
        scorer.check_fits(scorer.config["target"], "x")
    few = Draft(0, draft.tokens[:, :4], draft.log_probs[:, :4], draft.cosines, draft.hidden)
    with pytest.raises(InputError, match=r"D = 7 and K = 8.*drafter\.candidates=8"):
        scorer.edge_logits(few)
    blind = Draft(0, draft.tokens, draft.log_probs, draft.cosines, torch.empty(7, 0))
    with pytest.raises(InputError, match="collect anchors with hidden=int8"):
        scorer.edge_logits(blind)
    with pytest.raises(InputError, match=r"cannot read a scorer from .*train\.py makes one"):
        checkpoint.load(str(tmp_path / "none"))
    (tmp_path / "scorer" / "tables.safetensors").write_bytes(b"x" * 100)
    with pytest.raises(InputError, match="cannot read a scorer"):
        checkpoint.load(str(tmp_path / "scorer"))


def test_fans_of_one_outcome_teach_nothing(collected, monkeypatch):
    target = tiny.load(device="cpu")
    original = Fans.concatenate

    def same(parts):
        whole = original(parts)
        whole.taken.fill_(0)
        return whole

    monkeypatch.setattr(Fans, "concatenate", same)
    with pytest.raises(InputError, match="the same outcome"):
        EdgeData(
            target,
            collected=str(collected),
            use=["anchors"],
            held_out=2,
            development=[],
            batch_size=4,
            seed=0,
        )


@pytest.mark.slow
def test_a_killed_training_ends_as_an_uninterrupted_one(collected, tmp_path):
    """Dropout, optimiser, batches and the best state included."""

    def command(name: str) -> list[str]:
        return [
            *(sys.executable, str(launch.ROOT / "train.py"), "+experiment=tiny"),
            *(f"data.collected={collected}", "data.held_out=3", "data.batch_size=64"),
            *("trainer.max_steps=60", "trainer.val_check_interval=20", "save_every=10"),
            *("scorer.net.dropout=0.3", f"out={tmp_path / name}"),
            f"paths.outputs={tmp_path / 'outputs' / name}",
        ]

    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(command("whole"), check=True, env=environment)
    state = tmp_path / "outputs/cut/train/tiny/last.ckpt"
    process = subprocess.Popen(command("cut"), env=environment)
    while not state.exists():
        assert process.poll() is None, "it ended before it saved anything"
        time.sleep(0.01)
    process.kill()
    process.wait()
    assert torch.load(state, weights_only=False)["global_step"] < 60
    subprocess.run(command("cut"), check=True, env=environment)
    whole, cut = (load_file(tmp_path / n / "scorer.safetensors") for n in ("whole", "cut"))
    assert all(torch.equal(whole[key], cut[key]) for key in whole)


@pytest.mark.slow
def test_the_ladder_is_trained_and_compared(collected, tmp_path, monkeypatch, capsys):
    (tmp_path / "new.jsonl").write_text(json.dumps({"turns": ["something else"]}) + "\n")
    others = tmp_path / "others"
    places = (f"out={others}", f"paths.outputs={tmp_path}", f"prompts={tmp_path / 'new.jsonl'}")
    settings = ("max_new_tokens=20", "hidden=int8", "drafter.candidates=8", "target.dtype=float32")
    assert run(monkeypatch, collect, "+experiment=tiny", "what=anchors", *settings, *places) == 0
    arguments = (
        "+experiment=tiny",
        f"data.collected={collected}",
        f"evaluate={others}",
        "data.held_out=3",
        "data.batch_size=64",
        "trainer.max_steps=4",
        "trainer.val_check_interval=2",
        f"out={tmp_path / 'ladder'}",
        f"paths.outputs={tmp_path / 'outputs'}",
        "rungs=[r1,r4]",
        "budgets=[4,8]",
    )
    assert run(monkeypatch, ablate, *arguments) == 0
    out = capsys.readouterr().out
    assert "r0" in out
    assert "r4" in out
    before = (tmp_path / "ladder/r4/scorer.safetensors").stat().st_mtime_ns
    assert run(monkeypatch, ablate, *arguments) == 0
    assert (tmp_path / "ladder/r4/scorer.safetensors").stat().st_mtime_ns == before
    assert run(monkeypatch, ablate, *arguments, f"evaluate={collected}") == 2
    assert "share 12 prompts" in capsys.readouterr().err
