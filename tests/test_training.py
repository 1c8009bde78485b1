"""Training a drafter: its loss, its data, that it learns, that a resumed run is the same run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from functools import partial

import launch
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import train
from graft.budgets.fixed import Fixed
from graft.core.errors import InputError
from graft.data.responses import TokenizedResponse
from graft.decode import loop
from graft.drafters import dflash_checkpoint
from graft.drafters.anchors import drafts_along
from graft.drafters.dflash import new_network
from graft.targets import tiny
from graft.training.dflash_data import (
    BlockBatch,
    BlockBatches,
    Text,
    check_written_by,
    frequent_tokens,
    make_texts,
    split,
)
from graft.training.dflash_module import DFlashModule
from graft.training.head_loss import head_loss
from graft.training.objective import decay_weights, default_gamma, dpace_weights
from graft.training.run import LAST, KeepLast
from graft.training.tap_cache import TapCache
from graft.training.warm_start import warm_start
from graft.trees.chain import Chain


@pytest.fixture(scope="module")
def target():
    return tiny.load("qwen3", device="cpu")


def random_texts(count: int, seed: int = 0) -> list[Text]:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(24, 40, count)
    return [Text("tiny", torch.from_numpy(rng.integers(0, 250, n)), 10) for n in lengths]


def module_for(target, **recipe) -> DFlashModule:
    net = new_network(target, layers=2, block_size=5, mask_token_id=258, taps=1, seed=0)
    chain = partial(loop.generate, builder=Chain(), budget=Fixed(4))
    return DFlashModule(net, target, methods={"chain": chain}, **recipe)


@given(rows=st.integers(1, 700), seed=st.integers(0, 5))
@settings(max_examples=12, deadline=None)
def test_head_loss_is_cross_entropy(rows, seed):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, 12, generator=generator, requires_grad=True)
    weight = torch.randn(33, 12, generator=generator)
    labels = torch.randint(0, 33, (rows,), generator=generator)
    scale = torch.rand(rows, generator=generator)
    got = head_loss(hidden, weight, labels)
    (mine,) = torch.autograd.grad((got.loss * scale).sum(), hidden)
    logits = hidden @ weight.T
    expected = F.cross_entropy(logits, labels, reduction="none")
    (theirs,) = torch.autograd.grad((expected * scale).sum(), hidden)
    torch.testing.assert_close(got.loss, expected)
    torch.testing.assert_close(mine, theirs)
    assert torch.equal(got.right, logits.argmax(1) == labels)


def test_slot_weights():
    torch.testing.assert_close(
        decay_weights(3, 4.0), torch.tensor([1.0, 0.7788, 0.6065]), atol=1e-4, rtol=0
    )
    assert [default_gamma(size) for size in (8, 10, 16)] == [4, 5, 7]
    losses = torch.tensor([[0.1, 0.3, 2.0], [1.0, 0.1, 5.0], [0.2, 0.3, 0.4]])
    counts = torch.tensor([[True] * 3, [True, False, True], [True, True, False]])
    for loss, count, got in zip(losses, counts, dpace_weights(losses, counts, 0.5), strict=True):
        q = [0.5 * float(np.exp(-x)) * bool(c) + 0.5 for x, c in zip(loss, count, strict=True)]
        chain = [float(np.prod(q[: k + 1])) * bool(count[k]) for k in range(3)]
        expected = [sum(chain[k:]) * bool(count[k]) for k in range(3)]
        assert got.tolist() == pytest.approx(expected)


def test_only_slots_with_a_known_token_count(target):
    module = module_for(target).eval()
    module.net.draft_tokens = None
    text = torch.arange(100, 130)
    batch = BlockBatch([0, 1], [text, text[:20]], torch.tensor([[12, 27, 28], [12, 17, 18]]))
    _, _, counts = module.block_losses(batch)
    assert counts.sum(-1).tolist() == [[4, 2, 1], [4, 2, 1]]  # tokens left behind each anchor


def test_padding_and_neighbours_change_nothing(target):
    module = module_for(target).eval()
    long, short = (text.tokens for text in random_texts(2, seed=3))
    anchors = torch.tensor([[10, 12, 20]])
    alone = module.block_losses(BlockBatch([0], [short], anchors))[0]
    beside = module.block_losses(BlockBatch([0, 1], [long, short], anchors.expand(2, 3)))[0]
    torch.testing.assert_close(beside[1], alone[0], rtol=1e-4, atol=1e-5)


def test_loss_starts_at_log_v_and_a_batch_can_be_learned(target):
    module = module_for(target)
    texts = random_texts(3)
    batch = BlockBatches(texts, batch_size=3, anchors=6, steps=1, seed=0).batch(0)
    optimizer = torch.optim.Adam(module.net.parameters(), lr=3e-3)
    losses, _, counts = module.block_losses(batch)
    scale = module._head.std() * module.net.config.hidden_size**0.5  # logits' deviation
    expected = np.log(target.vocab_size) + scale.item() ** 2 / 2
    assert losses[counts].mean().item() == pytest.approx(expected, rel=0.15)
    for _ in range(150):
        losses, right, counts = module.block_losses(batch)
        optimizer.zero_grad()
        losses[counts].mean().backward()
        optimizer.step()
    by_slot = right.sum((0, 1)) / counts.sum((0, 1))
    assert (by_slot > 0.95).all(), by_slot
    # and the trained network proposes the same through its decoding path
    drafts = drafts_along(module.net, target, texts[0].tokens, start=10)
    row = next(i for i, text in enumerate(batch.texts) if torch.equal(text, texts[0].tokens))
    anchor = int(batch.anchors[row, 0])
    wanted = texts[0].tokens[anchor + 1 : anchor + 5].tolist()
    assert drafts[anchor - 10].tokens[:, 0].tolist()[: len(wanted)] == wanted


def test_cached_taps_train_alike(target, tmp_path):
    texts = random_texts(5)
    width = target.hidden_size
    cache = TapCache(tmp_path, [len(text.tokens) for text in texts], width)
    assert not list(tmp_path.iterdir()), "it goes with the process"
    plain, cached = module_for(target).eval(), module_for(target, cache=cache).eval()
    batches = BlockBatches(texts, batch_size=2, anchors=3, steps=9, seed=0)
    for batch in batches:  # three visits and more
        one, other = plain.block_losses(batch)[0], cached.block_losses(batch)[0]
        torch.testing.assert_close(one, other, rtol=0.02, atol=0.02)  # the cache is bf16
    known = cache.get(3)
    torch.testing.assert_close(
        known.float(), target.read([texts[3].tokens])[0], rtol=0.01, atol=0.02
    )


def test_batches_follow_from_seed_step_and_rank():
    texts = random_texts(11)
    whole = BlockBatches(texts, batch_size=4, anchors=3, steps=6, seed=7)
    batches = list(whole)
    resumed = BlockBatches(texts, batch_size=4, anchors=3, steps=6, seed=7)
    resumed.load_state_dict({"taken": 2})
    for mine, theirs in zip(resumed, batches[2:], strict=True):
        assert torch.equal(mine.anchors, theirs.anchors)
        assert all(map(torch.equal, mine.texts, theirs.texts))
    for batch in batches:
        assert (batch.anchors.diff(dim=1) >= 0).all()
        for text, row in zip(batch.texts, batch.anchors, strict=True):
            assert 10 <= row.min() <= row.max() <= len(text) - 2
    ranks = [
        BlockBatches(texts, batch_size=2, anchors=3, steps=6, seed=7, rank=r, world_size=2)
        for r in range(2)
    ]
    for step in range(6):  # two ranks of two are one of four
        parts = [text for rank in ranks for text in rank.batch(step).texts]
        assert all(map(torch.equal, parts, batches[step].texts))


def test_frequent_tokens_keep_the_stop_token():
    text = Text("tiny", torch.tensor([5, 5, 5, 9, 7, 7, 7, 7]), 4)
    assert frequent_tokens([text], 2, always=[2]).tolist() == [2, 7]
    assert frequent_tokens([text], 99, always=[2]).tolist() == [2, 5, 7, 9]


def test_prompts_are_never_on_both_sides():
    rows = [TokenizedResponse(f"set-{i // 2:05d}", "set", [1], [2, 3]) for i in range(40)]
    training, validation = split(rows, 10)
    assert not {row.id for row in training} & {row.id for row in validation}
    assert len(training) + len(validation) >= 40 - 1


def test_responses_of_another_target_are_refused(target):
    own = [greedy_text(target, seed) for seed in range(4)]
    check_written_by(target, own)
    with pytest.raises(InputError, match="do not read like"):
        check_written_by(target, random_texts(4))
    with pytest.raises(InputError, match="another tokenizer"):
        make_texts([TokenizedResponse("a-1", "a", [1], [2, 5000])], max_length=9, vocab_size=259)
    with pytest.raises(InputError, match="nothing can be anchored"):
        make_texts([TokenizedResponse("a-1", "a", [1] * 9, [2, 3])], max_length=9, vocab_size=259)


def greedy_text(target, seed: int) -> Text:
    from graft.core.types import Request
    from graft.decode import autoregressive

    prompt = torch.randint(0, 250, (12,), generator=torch.Generator().manual_seed(seed)).tolist()
    tokens = autoregressive.generate(Request(prompt, 24), target=target).tokens
    return Text("tiny", torch.tensor([*prompt, *tokens]), 12)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_warm_start_takes_the_targets_blocks(tmp_path, family):
    model = tiny.model(family, layers=4)
    model.save_pretrained(tmp_path / "target")
    target = tiny.load(family)
    net = new_network(target, layers=2, block_size=5, mask_token_id=258, taps=1, seed=0)
    before = net.layers[0].mlp.down_proj.weight.clone()
    warm_start(net, str(tmp_path / "target"), torch.arange(30))
    block = model.model.layers[2]
    assert torch.equal(net.layers[0].mlp.down_proj.weight, block.mlp.down_proj.weight)
    assert not torch.equal(net.layers[0].mlp.down_proj.weight, before)
    assert torch.equal(net.norm.weight, model.model.norm.weight)
    taps = model(torch.arange(30)[None], output_hidden_states=True).hidden_states[2][0, 1:]
    features = net.fc(taps)
    assert features.pow(2).mean(-1).sqrt().median().item() == pytest.approx(1, rel=0.1)


TINY_RUN = (
    "+experiment=tiny",
    "data=responses",
    "model=dflash",
    "trainer=default",
    "monitor=mat/ddtree_16",
    "name=drafter",
    "model.layers=1",
    "model.block_size=4",
    "model.taps=1",
    "model.mask_token_id=258",
    "data.batch_size=2",
    "data.anchors=4",
    "data.held_out=2",
    "trainer.max_steps=24",
    "trainer.val_check_interval=12",
    "trainer.precision=32-true",
    "trainer.accumulate_grad_batches=2",
    "target.device=cpu",
    "model.weighting=dpace",
    "model.tap_dropout=0.2",
    "save_every=4",
)


@pytest.fixture(scope="module")
def responses(tmp_path_factory):
    """Responses of the tiny target, as scripts/respond.py writes them."""
    folder = tmp_path_factory.mktemp("responses")
    prompts = folder / "own.jsonl"
    prompts.write_text(
        "".join(json.dumps({"id": f"own-{i:05d}", "turns": [f"say {i}"]}) + "\n" for i in range(12))
    )
    arguments = ["+experiment=tiny", f"prompts={prompts}", f"out={folder / 'shards'}"]
    script(launch.ROOT / "scripts/respond.py", *arguments, "max_new_tokens=24", "slots=5")
    return folder / "shards"


def script(path, *arguments: str) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, path, *arguments], check=True, env=environment)


@pytest.mark.slow
def test_a_killed_run_resumes_to_the_same_weights(tmp_path, responses):
    entry = launch.ROOT / "train.py"
    arguments = [*TINY_RUN, f"data.responses=[{responses}]"]
    arguments.append(f"model.tap_cache={tmp_path}")
    whole = [*arguments, f"paths.outputs={tmp_path / 'whole'}", f"out={tmp_path / 'whole_drafter'}"]
    script(entry, *whole)
    killed = [*arguments, f"paths.outputs={tmp_path / 'cut'}", f"out={tmp_path / 'cut_drafter'}"]
    state = tmp_path / "cut/train/drafter/last.ckpt"
    process = subprocess.Popen(
        [sys.executable, entry, *killed], env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    while not state.exists():
        assert process.poll() is None, "it ended before it saved anything"
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert torch.load(state, weights_only=False)["global_step"] < 24
    script(entry, *killed)
    one, other = (
        dflash_checkpoint.load(str(tmp_path / name)).state_dict()
        for name in ("whole_drafter", "cut_drafter")
    )
    assert one.keys() == other.keys()
    assert all(torch.equal(one[key], other[key]) for key in one)
    card = (tmp_path / "cut_drafter/README.md").read_text()
    assert "| own |" in card
    assert "24 optimiser steps" in card
    changed = subprocess.run(
        [sys.executable, entry, *killed, "model.lr=1"], capture_output=True, text=True
    )
    assert changed.returncode == 2
    assert "holds a run with another model" in changed.stderr


def test_a_full_disk_leaves_the_last_state(tmp_path):
    class Trainer:
        global_step, max_steps, is_global_zero, full = 4, 100, True, False

        val_check_batch = 3

        def save_checkpoint(self, path) -> None:
            path.write_bytes(b"state")
            if self.full:
                raise OSError(28, "No space left on device")

    trainer, keep = Trainer(), KeepLast(tmp_path, every=4)
    keep.on_train_batch_end(trainer, None, None, None, 0)
    before = (tmp_path / LAST).read_bytes()
    trainer.global_step, trainer.full = 8, True
    with pytest.raises(InputError, match=r"No space left.*previous one is intact"):
        keep.on_train_batch_end(trainer, None, None, None, 0)
    assert (tmp_path / LAST).read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == [LAST]


def test_a_full_disk_leaves_the_drafter_that_was_there(target, tmp_path, monkeypatch):
    net = module_for(target).net
    dflash_checkpoint.save(net, tmp_path / "drafter", {"README.md": "first"})

    def full(_state, path, _metadata):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(dflash_checkpoint, "save_file", full)
    with pytest.raises(InputError, match="No space left"):
        dflash_checkpoint.save(net, tmp_path / "drafter", {"README.md": "second"})
    dflash_checkpoint.load(str(tmp_path / "drafter"))
    assert (tmp_path / "drafter/README.md").read_text() == "first"
    assert [path.name for path in tmp_path.iterdir()] == ["drafter"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["data.responses=[/nowhere]"], "/nowhere holds no responses"),
        (["model.block_size=1"], "a block is the root and at least one slot"),
        (["data.held_out=99"], "data.held_out=99"),
        (["data.max_length=5"], "data.max_length=5"),
        (["data.anchors=0"], "must be at least 1"),
        (["model.mask_token_id=null"], "set model.mask_token_id"),
        (["model.weighting=foo"], "decay or dpace"),
        (["target.seed=1"], "another target or tokenizer"),
        (["target.family=llama", "model.warm=true"], "another target or tokenizer"),
        (["model.nonsense=1"], "nonsense"),
        (["monitor=mat/foo"], "choose from mat/chain"),
        (["model.warm=true"], "set it to false"),
        (["out={here}"], "something other than a drafter"),
        (["model.tap_cache=/proc/nowhere"], "has no room"),
        (["paths.outputs=/proc/nowhere"], "/proc/nowhere"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_training_input_is_one_line(
    responses, tmp_path, monkeypatch, capsys, arguments, message
):
    base = [*TINY_RUN, f"data.responses=[{responses}]", f"paths.outputs={tmp_path}"]
    monkeypatch.setattr(
        sys, "argv", ["train.py", *base, *(a.format(here=responses) for a in arguments)]
    )
    capsys.readouterr()
    with pytest.raises(SystemExit) as leave:
        train.main()
    err = capsys.readouterr().err
    assert leave.value.code == 2
    assert err.startswith("error: ")
    assert err.count("\n") == 1, err
    assert message in err
