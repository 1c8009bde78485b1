"""Collections: what is recorded is what happened, whole shards or none, nothing lost or twice."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import weakref
from functools import partial
from pathlib import Path

import collect
import launch
import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from conftest import PROMPT
from test_scripts import run

from graft.budgets.fixed import Fixed
from graft.collect import anchors as collecting
from graft.collect.anchors import answer_all, collect_anchors
from graft.collect.asking import Asker, Collected, LeaveOut, Skipped
from graft.collect.rounds import Recorder, collect_rounds, judgements
from graft.core.errors import InputError
from graft.core.types import Draft, Request, Round, RoundState
from graft.data.anchors import Anchors
from graft.data.collected import done
from graft.data.prompts import Prompt
from graft.data.rounds import VERBS, Rounds
from graft.data.shards import read_shard, shard_files
from graft.decode import autoregressive, loop
from graft.decode.replay import Replay
from graft.drafters import anchors as drafting
from graft.drafters.anchors import judged_drafts
from graft.drafters.dflash import untrained
from graft.drafters.noisy import Noisy
from graft.targets import tiny
from graft.trees.ddtree import DDTree

CLOSE = {"rtol": 1e-4, "atol": 2e-5}


# ---- what is recorded


def test_judged_drafts_are_those_of_decoding_one_by_one(target, monkeypatch):
    """Against a draft pass and a target pass at every position; chunks smaller than the text."""
    monkeypatch.setattr(drafting, "CHUNK", 5)
    monkeypatch.setattr(drafting, "ROWS", 7)
    drafter = untrained(target, layers=2, block_size=5, mask_token_id=258, taps=1, candidates=6)
    start, length, D = 12, 20, 4
    text = np.random.default_rng(0).integers(0, 250, start + length + D - 1).tolist()
    drafts, over, norms, best = judged_drafts(
        drafter.net, target, torch.tensor(text), start=start, candidates=6
    )
    assert over.shape == (length - 1, D, 6)
    assert norms.shape == best.shape == (length - 1 + D - 1,)
    assert len(drafts) == length - 1
    drafter.reset()
    taps = target.prefill(text[:start]).taps
    for root in range(length - 1):
        one = drafter.propose(text[start + root], taps)
        np.testing.assert_array_equal(drafts[root].tokens, one.tokens)
        np.testing.assert_allclose(drafts[root].log_probs, one.log_probs, **CLOSE)
        np.testing.assert_allclose(drafts[root].cosines, one.cosines, **CLOSE)
        taps = target.prefill(text[: start + root + 1]).taps[-1:]
    for position in range(length - 1 + D - 1):
        logits = target.prefill(text[: start + position + 1]).logits[0].float().numpy()
        assert norms[position] == pytest.approx(np.log(np.exp(logits).sum()), rel=1e-5)
        assert best[position] == logits.argmax()
        for d in range(D):
            if 0 <= position - d < length - 1:
                wanted = logits[drafts.tokens[position - d, d]]
                np.testing.assert_allclose(over[position - d, d], wanted, **CLOSE)


def test_a_recorded_round_is_the_round(target):
    happened: list[Round] = []
    recorder = Recorder(Prompt("p-1", "p", ("hello",)), 0, hist_window=3)

    def both(done: Round) -> None:
        recorder(done)
        happened.append(done)

    result = loop.generate(
        Request(PROMPT, 40),
        target=target,
        drafter=Noisy(target, candidates=5, noise=0.3),
        builder=DDTree(),
        budget=Fixed(60),
        on_round=both,
    )
    assert len(recorder.rows) == len(happened) == len(result.committed)
    accepted: list[int] = []
    for row, real in zip(recorder.rows, happened, strict=True):
        draft = real.state.draft
        D, K = draft.tokens.shape
        over, norms, best = judgements(real)
        logits = real.step.logits.float().numpy()
        for node, depth in enumerate(real.tree.depths):
            candidates = draft.tokens[depth] if depth < D else None
            expected = logits[node, candidates] if depth < D else np.zeros(K)
            np.testing.assert_array_equal(over[node], expected)
            assert norms[node] == pytest.approx(np.log(np.exp(logits[node]).sum()), rel=1e-5)
            assert best[node] == logits[node].argmax()
        assert row["conf"] == pytest.approx(np.exp(draft.log_probs[:, 0]).mean())
        assert row["degen"] == pytest.approx(real.state.degen)
        assert row["hist"] == pytest.approx(np.mean(accepted[-3:]) if accepted else 0)
        assert (row["round"], row["bonus"], row["path"]) == (real.index, real.bonus, real.path)
        accepted.append(len(real.path) - 1)
    assert any(7 in real.tree.depths for real in happened), "nodes at the last depth occur"


def test_degen_rises_with_states_that_grow_alike():
    flat = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0]])
    draft = Draft.from_logits(0, torch.randn(3, 9), flat, candidates=2)
    np.testing.assert_allclose(draft.cosines, [0, 1], atol=1e-6)
    assert RoundState(draft, 1, ()).degen == pytest.approx(0.5 + 1)
    one = Draft.from_logits(0, torch.randn(1, 9), flat[:1], candidates=2)
    assert RoundState(one, 1, ()).degen == 0


def test_the_targets_own_answers_are_fed_back():
    target = tiny.load(device="cpu")
    asker = Asker(target, {"max_new_tokens": 12}, max_prompt_tokens=500, seed=0, beyond=6)
    talk = Prompt("p-1", "p", ("first question", "second question", "third"))
    decode = lambda request, **hooks: loop.generate(  # noqa: E731
        request, target=target, drafter=Noisy(target), builder=DDTree(), budget=Fixed(8), **hooks
    )
    found = list(collect_rounds([talk], asker, decode, hist_window=8))
    assert [one.turn for one in found] == [0, 1, 2]
    messages = []
    for one, text in zip(found, talk.turns, strict=True):
        messages.append({"role": "user", "content": text})
        prompt = target.encode_chat(messages)
        assert one.rows[0]["context_length"] == len(prompt)
        answer = autoregressive.generate(asker.request(talk, one.turn, messages), target=target)
        assert one.tokens == len(answer.tokens)
        messages.append({"role": "assistant", "content": target.decode(answer.tokens)})


# ---- what cannot be collected


def test_a_prompt_that_is_too_long_or_too_much_is_left_out_with_its_reason():
    target = tiny.load(device="cpu")
    asker = Asker(target, {"max_new_tokens": 8}, max_prompt_tokens=160, seed=0, beyond=6)
    prompts = [Prompt(f"p-{i}", "p", ("x" * n, "again")) for i, n in enumerate((5, 190, 6, 7))]

    def decode(request, **hooks):
        if len(request.prompt) == len(first):
            raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 9 TB")
        parts = {"target": target, "drafter": Noisy(target)}
        return loop.generate(request, builder=DDTree(), budget=Fixed(8), **parts, **hooks)

    first = target.encode_chat([{"role": "user", "content": "x" * 6}])
    found = list(collect_rounds(prompts, asker, decode, hist_window=8))
    skipped = {one.prompt_id: one for one in found if isinstance(one, Skipped)}
    assert "max_prompt_tokens=160" in skipped["p-1"].reason
    assert (skipped["p-1"].turn, skipped["p-1"].turns) == (0, 2), "with the rest of its talk"
    assert skipped["p-2"].reason.startswith("out of memory: [enforce fail]")
    kept = [one.prompt_id for one in found if not isinstance(one, Skipped)]
    assert kept == ["p-0", "p-0", "p-3", "p-3"]
    asker = Asker(target, {"max_new_tokens": 1000}, max_prompt_tokens=60, seed=0, beyond=20)
    with pytest.raises(LeaveOut, match="outgrow the target's context of 1024"):
        asker.request(prompts[0], 0, [{"role": "user", "content": "x"}])


def test_a_batch_out_of_memory_is_split_until_one_alone_is_left_out(monkeypatch):
    target = tiny.load(device="cpu")
    asker = Asker(target, {"max_new_tokens": 10}, max_prompt_tokens=500, seed=0, beyond=2)
    requests = {f"p-{i}": Request(PROMPT[i:], 10, seed=i) for i in range(7)}
    alive: list[weakref.ref] = []
    together = []

    class Small(collecting.Slots):
        """No memory for the prompt of number 3, for three at a time, or beside another batch."""

        def __init__(self, *arguments) -> None:
            assert not any(batch() for batch in alive), "the batch that failed is still held"
            super().__init__(*arguments)
            alive.append(weakref.ref(self))

        def admit(self, prompt):
            together.append(self.occupied + 1)
            if self.occupied == 2 or list(prompt) == PROMPT[3:]:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")
            return super().admit(prompt)

    monkeypatch.setattr(collecting, "Slots", Small)
    found = answer_all(requests, asker, 8, lambda tokens: None)
    assert sorted(found) == sorted(requests)
    assert "CUDA out of memory" in found.pop("p-3")
    for key, answer in found.items():
        longer = Request(requests[key].prompt, 12, seed=int(key[-1]))
        plain = autoregressive.generate(longer, target=target).tokens
        assert [*answer.tokens, *answer.beyond] == plain
    assert max(together) == 3


def test_a_response_of_one_token_leaves_no_row_and_ends_no_talk():
    target = tiny.load(device="cpu")
    drafter = untrained(target, layers=1, block_size=3, mask_token_id=258, taps=1, candidates=4)
    asker = Asker(target, {"max_new_tokens": 6}, None, seed=0, beyond=drafter.depth - 1)

    def first_token(*texts: str) -> int:
        messages = [{"role": "user", "content": texts[0]}]
        for text in texts[1:]:
            messages += [{"role": "assistant", "content": ""}, {"role": "user", "content": text}]
        request = asker.request(Prompt("p-1", "p", texts), 0, messages)
        return autoregressive.generate(request, target=target).tokens[0]

    stop = first_token("a")
    other = next(text for text in "bcdefgh" if first_token("a", text) != stop)
    talk = Prompt("p-1", "p", ("a", other))
    target.stop_tokens = frozenset({stop})
    decode = partial(
        loop.generate, target=target, drafter=drafter, builder=DDTree(), budget=Fixed(4)
    )
    replay = Replay(DDTree(), Fixed(4))
    for found in (
        list(collect_rounds([talk], asker, decode, hist_window=8)),
        list(collect_anchors([talk], asker, drafter, slots=2, replay=replay)),
    ):
        assert [one.turn for one in found] == [0, 1]
        assert isinstance(found[0], Skipped)
        assert "one token" in found[0].reason
        assert isinstance(found[1], Collected)


@pytest.mark.parametrize(("block_size", "candidates"), [(2, 4), (4, 300)])
def test_anchors_of_one_depth_and_of_more_candidates_than_tokens(block_size, candidates):
    target = tiny.load(device="cpu")
    drafter = untrained(
        target, layers=1, block_size=block_size, mask_token_id=258, taps=1, candidates=candidates
    )
    asker = Asker(target, {"max_new_tokens": 9}, None, seed=0, beyond=drafter.depth - 1)
    replay = Replay(DDTree(), Fixed(4))
    prompts = [Prompt("p-1", "p", ("a",))]
    (one,) = collect_anchors(prompts, asker, drafter, slots=2, replay=replay)
    decode = partial(
        loop.generate, target=target, drafter=drafter, builder=DDTree(), budget=Fixed(4)
    )
    (real,) = collect_rounds(prompts, asker, decode, hist_window=8)
    assert list(one.committed) == real.committed
    K = drafter.candidates
    assert min(candidates, target.vocab_size) == K
    assert len(one.rows[0]["candidates"]) == 8 * (block_size - 1) * K


# ---- through the script and the disk


@pytest.fixture
def collection(monkeypatch, tmp_path, capsys):
    """Run the script on the tiny target; gives (exit code, stdout, stderr)."""
    prompts = tmp_path / "own.jsonl"
    prompts.write_text(
        "".join(
            json.dumps({"id": f"own-{i:05d}", "turns": [f"say {i}", "more"][: 1 + i % 2]}) + "\n"
            for i in range(9)
        )
    )

    def go(out: str = "out", *arguments: str):
        code = run(
            monkeypatch,
            collect,
            "+experiment=tiny",
            f"paths.outputs={tmp_path / 'outputs'}",
            f"prompts={prompts}",
            f"out={tmp_path / out}",
            "target.dtype=float32",
            "max_new_tokens=12",
            "shard_size.rounds=2",
            "shard_size.anchors=2",
            "drafter.candidates=4",
            *arguments,
        )
        return code, *capsys.readouterr()

    return go


def table_of(folder: Path) -> dict[str, list[dict]]:
    """All rows but their times, by file."""
    return {
        file.name: [
            {name: value for name, value in row.items() if name != "seconds"}
            for row in pq.read_table(file).to_pylist()
        ]
        for file in shard_files(folder)
    }


def test_a_collection_reads_back_and_says_what_made_it(collection, tmp_path):
    code, out, err = collection("out", "hidden=int8")
    assert (code, err) == (0, "")
    assert "bytes a position" in out
    assert "the time of decoding alone" in out
    rounds, anchors = Rounds([tmp_path / "out"]), Anchors([tmp_path / "out"])
    assert len(anchors) == 9 + 4
    assert set(rounds.responses()) == {(one.prompt_id, one.turn) for one in anchors}
    for name in ("kind", "version", "target", "drafter", "shape", "settings", "config", "git"):
        assert name in rounds.made_by
    assert rounds.made_by["shape"] == {"D": 7, "K": 4}
    responses = {(one.prompt_id, one.turn): one for one in anchors}
    for key, rows in rounds.responses().items():
        response, committed = responses[key], 0
        for i in rows:
            one = rounds[i]
            assert one.context_length == len(response.prompt) + committed
            mine = response.drafts[committed]
            assert one.draft.root == mine.root
            np.testing.assert_array_equal(one.draft.tokens, mine.tokens)
            np.testing.assert_allclose(one.draft.log_probs, mine.log_probs, **CLOSE)
            assert set(one.seconds) == set(VERBS)
            assert one.target_logits.shape == (len(one.tree), 4)
            committed += len(one.path)
        assert committed >= len(response.response) - 1
        states = response.drafts.hidden
        assert states.shape == (len(response.response) - 1, 7, 64)
        cosines = torch.nn.functional.cosine_similarity(states[:, 1:], states[:, :-1], dim=-1)
        np.testing.assert_allclose(cosines, response.drafts.cosines, atol=0.03)


def test_float16_states_are_the_drafters(collection, tmp_path):
    for name, kind in (("a", "float16"), ("b", "int8")):
        assert collection(name, "what=[anchors]", f"hidden={kind}", "per_set=1")[0] == 0
    (a,), (b,) = Anchors([tmp_path / "a"]), Anchors([tmp_path / "b"])
    difference = (a.drafts.hidden - b.drafts.hidden).abs().amax(-1)
    assert (difference <= a.drafts.hidden.abs().amax(-1) / 240).all(), "half a step of int8"


def test_parts_add_up_to_the_whole_and_more_prompts_go_behind(collection, tmp_path):
    assert collection("whole")[0] == 0
    for part in ("shard=1/3", "shard=0/3", "shard=2/3"):
        assert collection("parts", part)[0] == 0
    for what in ("rounds", "anchors"):
        parts, whole = (
            [row for rows in table_of(tmp_path / out / what).values() for row in rows]
            for out in ("parts", "whole")
        )
        assert sorted(parts, key=repr) == sorted(whole, key=repr)
    assert collection("grown", "per_set=4")[0] == 0
    code, out, _ = collection("grown")
    assert code == 0
    assert "rounds: 7 responses" in out, "five prompts, two with a second turn"
    grown, whole = (
        sorted((one.prompt_id, one.turn) for one in Anchors([tmp_path / out]))
        for out in ("grown", "whole")
    )
    assert grown == whole
    assert "nothing to do" in collection("grown")[1]


def test_other_settings_do_not_go_into_the_same_folder(collection, tmp_path):
    assert collection("out", "per_set=1")[0] == 0
    for change, words in [
        ("max_new_tokens=13", "settings.max_new_tokens (12, not 13)"),
        ("drafter.seed=1", "drafter.fingerprint"),
        ("target.seed=1", "target.fingerprint"),
        ("drafter.candidates=5", "shape.K (4, not 5)"),
        ("method.budget.nodes=5", "settings.method.budget.nodes (16, not 5)"),
    ]:
        code, _, err = collection("out", change)
        assert code == 2
        assert words in err
        assert "choose another out=" in err
        assert err.count("\n") == 1
    assert collection("other", "per_set=1", "target.seed=1")[0] == 0
    assert collection("rounds", "per_set=1", "what=rounds")[0] == 0
    code, _, err = collection("rounds", "what=[anchors]", "target.seed=1")
    assert code == 2, "what lies beside it must be of the same models"
    assert "target.fingerprint" in err
    with pytest.raises(InputError, match=r"different target\.fingerprint"):
        Anchors([tmp_path / "out", tmp_path / "other"])


def test_damaged_shards_are_named(collection, tmp_path, monkeypatch):
    assert collection("out", "what=[anchors]")[0] == 0
    files = shard_files(tmp_path / "out" / "anchors")
    whole = files[1].read_bytes()
    files[1].write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InputError, match=f"{files[1].name} cannot be read"):
        Anchors([tmp_path / "out"])
    code, _, err = collection("out", "what=[anchors]")
    assert code == 2
    assert f"{files[1].name} cannot be read" in err
    files[1].write_bytes(whole[:300] + bytes(500) + whole[800:])  # the footer is whole
    with pytest.raises(InputError, match=f"{files[1].name}"):
        Anchors([tmp_path / "out"])
    files[1].unlink()
    assert collection("out", "what=[anchors]")[0] == 0
    assert files[1].read_bytes()[:4] == b"PAR1", "the missing one is made again, under its name"
    monkeypatch.setattr("graft.data.anchors.VERSION", 2)
    with pytest.raises(InputError, match="version 1 of the anchors schema, this code reads 2"):
        Anchors([tmp_path / "out"])
    with pytest.raises(InputError, match=r"holds no shards; scripts/collect\.py makes them"):
        Rounds([tmp_path / "out"])


def test_what_was_left_out_is_in_the_shard_and_named_again(collection, tmp_path):
    """The limit lets no second turn pass; with shards of one prompt some have no rows at all."""
    limit = ("max_prompt_tokens=40", "shard_size.rounds=1", "shard_size.anchors=1")
    code, out, _ = collection("out", *limit)
    assert code == 0
    assert "left out: own-" in out
    made_by = [read_shard(f, [])[1] for f in shard_files(tmp_path / "out/rounds")]
    skipped = [skip for one in made_by for skip in one["skipped"]]
    assert all("max_prompt_tokens=40" in skip["reason"] for skip in skipped)
    assert len(done(tmp_path / "out/rounds", made_by[0]).digests) == 9
    again = collection("out", *limit)[1]
    assert "nothing to do" in again
    assert "left out earlier: own-" in again
    assert collection("none", "max_prompt_tokens=5")[0] == 0
    with pytest.raises(InputError, match="holds no rows: all prompts were left out"):
        Rounds([tmp_path / "none"])
    sizes = [read_shard(f, [])[0].num_rows for f in shard_files(tmp_path / "out/anchors")]
    assert len(Anchors([tmp_path / "out"])) == sum(sizes)


def test_a_shard_without_rows_does_not_hide_the_others(collection, tmp_path):
    (tmp_path / "long.jsonl").write_text(
        json.dumps({"turns": ["x" * 300]}) + "\n" + json.dumps({"turns": ["y"]}) + "\n"
    )
    small = ("shard_size.rounds=1", "shard_size.anchors=1", "max_prompt_tokens=100")
    assert collection("out", f"prompts={tmp_path / 'long.jsonl'}", *small)[0] == 0
    assert len(shard_files(tmp_path / "out" / "anchors")) == 2
    (one,) = Anchors([tmp_path / "out"])
    assert one.prompt_id == "long-00002"
    assert set(Rounds([tmp_path / "out"]).responses()) == {("long-00002", 0)}


def test_a_prompt_is_not_taken_for_another_of_its_name(collection, tmp_path):
    assert collection("out", "what=rounds")[0] == 0
    code, _, err = collection("out", "what=rounds", "+templates.own='Now {turn}'")
    assert code == 2
    assert "was collected with another text" in err
    files = shard_files(tmp_path / "out" / "rounds")
    files[0].with_name("copy.parquet").write_bytes(files[0].read_bytes())
    with pytest.raises(InputError, match=r"turn 0, round 0 is in .*; delete one"):
        Rounds([tmp_path / "out"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["what=[ronds]"], "choose rounds, anchors or [rounds,anchors]"),
        (["what=[]"], "what=[]: choose"),
        (["what=null"], "what=None: choose"),
        (["shard_size=16"], "shard_size.rounds must be a number"),
        (["slots=many"], "slots must be a number, at least 1, not many"),
        (["shard=3/3"], "shard must be i/n"),
        (["shard=1"], "shard must be i/n"),
        (["hidden=int4"], "hidden must be null, int8 or float16"),
        (["shard_size.rounds=0"], "shard_size.rounds must be a number, at least 1, not 0"),
        (["drafter=noisy"], "anchors need a DFlash drafter"),
        (["prompts=/nowhere.jsonl"], "cannot read prompts from /nowhere.jsonl"),
        (["method.budget.largest=3"], "budget.largest"),
        (["max_new_tokens=0"], "max_new_tokens must be at least 1"),
        (["out=/proc/no"], "/proc/no"),
    ],
)
def test_bad_input_is_one_line(collection, arguments, words):
    code, _, err = collection("out", *arguments)
    assert code == 2
    assert words in err
    assert err.count("\n") == 1
    assert "Traceback" not in err


KILLER = """
import os, random, signal, sys, time
import launch, collect, torch, datasets  # once, for all children
torch.set_num_threads(1)
out = next(a for a in sys.argv if a.startswith("out=")).removeprefix("out=")


def count():
    return sum(file.endswith("parquet") for _, _, files in os.walk(out) for file in files)


for attempt in range(int(sys.argv[1])):
    child = os.fork()
    if child == 0:
        sys.argv = ["scripts/collect.py", *sys.argv[2:]]
        sys.stdout = sys.stderr = open(os.devnull, "w")
        collect.main()
        os._exit(0)
    drawn = random.Random(attempt)
    wanted = count() + drawn.randint(0, 2)  # so many more shards, then a moment, then dead
    while count() < wanted and os.waitpid(child, os.WNOHANG)[0] == 0:
        time.sleep(0.005)
    time.sleep(drawn.uniform(0, 0.3))
    try:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        print("killed at", count(), flush=True)
    except (ProcessLookupError, ChildProcessError):
        print("ended by itself", flush=True)
"""


def test_ten_kills_leave_what_an_uninterrupted_run_makes(collection, tmp_path):
    arguments = ["max_new_tokens=80", "shard_size.rounds=1", "shard_size.anchors=1"]
    assert collection("whole", *arguments)[0] == 0
    command = [
        "+experiment=tiny",
        f"paths.outputs={tmp_path / 'outputs'}",
        f"prompts={tmp_path / 'own.jsonl'}",
        f"out={tmp_path / 'killed'}",
        "target.dtype=float32",
        "drafter.candidates=4",
        *arguments,
    ]
    killer = subprocess.run(
        [sys.executable, "-c", KILLER, "10", *command],
        cwd=launch.ROOT,
        env={**os.environ, "PYTHONPATH": str(launch.ROOT / "scripts"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert killer.returncode == 0, killer.stderr
    counts = [int(line.split()[-1]) for line in killer.stdout.splitlines() if "killed" in line]
    assert len(counts) >= 5, "most runs did not get through"
    assert len({count for count in counts if 0 < count < 18}) >= 2, "nor died at the start"
    assert collection("killed", *arguments)[0] == 0
    for what in ("rounds", "anchors"):
        assert table_of(tmp_path / "killed" / what) == table_of(tmp_path / "whole" / what)


def test_a_full_disk_leaves_the_shards_that_were_there(collection, tmp_path):
    assert collection("out", "per_set=2")[0] == 0
    before = table_of(tmp_path / "out" / "rounds")
    code = (
        "import resource, signal, sys, collect;"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (9000, 9000));"
        "sys.argv = ['scripts/collect.py', *sys.argv[1:]]; collect.main()"
    )
    full = subprocess.run(
        [
            *(sys.executable, "-c", code, "+experiment=tiny", f"out={tmp_path / 'out'}"),
            *(f"paths.outputs={tmp_path / 'outputs'}", f"prompts={tmp_path / 'own.jsonl'}"),
            *(
                "target.dtype=float32",
                "max_new_tokens=12",
                "shard_size.rounds=2",
                "drafter.candidates=4",
            ),
        ],
        cwd=launch.ROOT,
        env={**os.environ, "PYTHONPATH": str(launch.ROOT / "scripts"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert full.returncode == 2
    assert "File too large" in full.stderr
    assert not list(tmp_path.glob("out/**/*.partial")), "what could not be written is gone"
    assert not shard_files(tmp_path / "out" / "anchors")[1:], "nor did it stop before the shards"
    assert "Traceback" not in full.stderr
    assert table_of(tmp_path / "out" / "rounds") == before
