"""Answers in batches: as one at a time, loops cut, shards whole, interrupted runs resumed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import launch
import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graft.core.errors import InputError
from graft.core.types import Request, Step
from graft.data.responses import SCHEMA, finished_ids, read_responses
from graft.data.shards import next_shard, read_shard, shard_files, write_shard
from graft.decode import autoregressive, batched
from graft.decode.batched import COPIES, LONGEST_PERIOD, SPAN, first_repeat, respond
from graft.targets.slots import Slots


def requests(target, temperature: float, count: int = 9) -> list[tuple[int, Request]]:
    rng = np.random.default_rng(0)
    return [
        (
            i,
            Request(
                rng.integers(0, 250, rng.integers(3, 90)).tolist(),
                int(rng.integers(1, 40)),
                temperature=temperature,
                seed=i,
                stop_tokens=frozenset({7, 70, 170}),
            ),
        )
        for i in range(count)
    ]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("slots", [1, 4, 20])
def test_batched_answers_are_those_of_plain_decoding(target, temperature, slots, monkeypatch):
    monkeypatch.setattr(batched, "first_repeat", lambda tokens: None)
    wanted = requests(target, temperature)
    answers = {a.key: a for a in respond(wanted, Slots(target, slots)) if a is not None}
    assert sorted(answers) == list(range(len(wanted)))
    for key, request in wanted:
        plain = autoregressive.generate(request, target=target)
        assert answers[key].tokens == plain.tokens
        assert answers[key].stopped == plain.stopped


def loops(tokens: list[int]) -> int | None:
    """`first_repeat` from its description."""
    for period in range(1, LONGEST_PERIOD + 1):
        span = max(COPIES * period, SPAN)
        if len(tokens) < span:
            continue
        if all(tokens[-i] == tokens[-i - period] for i in range(1, span - period + 1)):
            start = len(tokens) - span
            while start > 0 and tokens[start - 1] == tokens[start - 1 + period]:
                start -= 1
            return start + period
    return None


@given(
    head=st.lists(st.integers(0, 3), max_size=30),
    period=st.lists(st.integers(0, 3), min_size=1, max_size=12),
    copies=st.integers(1, 9),
)
@settings(deadline=None)
def test_a_loop_is_cut_where_it_first_repeats(head, period, copies):
    tokens = head + period * copies
    assert first_repeat(tokens) == loops(tokens)


def test_a_looping_answer_ends_and_is_counted(target):
    class Parrot:
        """A batch target that says 1 2 3 1 2 3 ... for ever."""

        device, max_context, size, occupied = target.device, 10**6, 2, 0

        def admit(self, prompt):
            self.occupied += 1
            return self._says(0)

        def step(self, tokens):
            return Step(torch.cat([self._says(token).logits for token in tokens]), torch.empty(0))

        def _says(self, token: int):
            return Step(
                torch.nn.functional.one_hot(torch.tensor([token % 3 + 1]), 5).float(),
                torch.empty(0),
            )

        def release(self, slot: int) -> None:
            self.occupied -= 1

    made = [
        a for a in respond([("x", Request([9], 500))], Parrot(), cut_loops=True) if a is not None
    ]
    assert [(a.tokens, a.stopped, a.looped) for a in made] == [([1, 2, 3], False, True)]


def rows(ids: list[str]) -> pa.Table:
    one = {"source": "s", "prompt_token_ids": [1, 2], "response_token_ids": [3, 4]}
    return pa.Table.from_pylist(
        [{"prompt_id": i, "stopped": True, "looped": False, **one} for i in ids], SCHEMA
    )


def made_by(fingerprint: str) -> dict:
    return {"target": {"name": "other", "fingerprint": fingerprint}}


def test_shards_say_who_made_them(tmp_path):
    write_shard(tmp_path / "00000.parquet", rows(["a-1"]), made_by("me"))
    write_shard(tmp_path / "00001.parquet", rows(["a-2", "a-1"]), made_by("me"))
    assert finished_ids(tmp_path, "me") == {"a-1", "a-2"}
    found, marked = read_responses([tmp_path], "me")
    assert [row.id for row in found] == ["a-1", "a-2"]
    assert marked
    with pytest.raises(InputError, match="another target or tokenizer"):
        read_responses([tmp_path], "you")
    with pytest.raises(InputError, match="another target or tokenizer"):
        finished_ids(tmp_path, "you")


def test_a_deleted_shard_is_not_taken_for_the_next(tmp_path):
    for name in ("00000", "00002"):
        write_shard(tmp_path / f"{name}.parquet", rows([f"a-{name}"]), made_by("me"))
    assert next_shard(tmp_path).name == "00003.parquet"
    assert next_shard(tmp_path / "new").name == "00000.parquet"


def test_bad_shards_are_named(tmp_path):
    write_shard(tmp_path / "00000.parquet", rows(["a-1"]), made_by("me"))
    whole = (tmp_path / "00000.parquet").read_bytes()
    (tmp_path / "00001.parquet").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InputError, match=r"00001\.parquet cannot be read"):
        read_responses([tmp_path], "me")
    lacking = rows(["a-1"]).drop_columns(["prompt_token_ids"])
    write_shard(tmp_path / "00001.parquet", lacking, {})
    with pytest.raises(InputError, match="no column prompt_token_ids"):
        read_responses([tmp_path], "me")
    empty = rows(["a-1"]).set_column(2, SCHEMA.field(2), pa.array([[]], pa.list_(pa.int32())))
    write_shard(tmp_path / "00001.parquet", empty, {})
    with pytest.raises(InputError, match="a-1 has no prompt"):
        read_responses([tmp_path], "me")
    with pytest.raises(InputError, match="holds no responses"):
        read_responses([tmp_path / "nowhere"], "me")


def test_a_full_disk_leaves_the_shards_that_were_there(tmp_path):
    """A file size limit stands in for the full disk: writing fails in the middle."""
    write_shard(tmp_path / "00000.parquet", rows(["a-1"]), made_by("me"))
    code = (
        "import resource, signal, sys; sys.path[:0] = ['tests', 'scripts'];"
        "from test_respond import rows, made_by, write_shard; from pathlib import Path;"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (300, 300));"
        f"write_shard(Path({str(tmp_path)!r}) / '00000.parquet', rows(['b-1']), made_by('me'))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=launch.ROOT, capture_output=True, text=True
    )
    assert "File too large" in done.stderr
    assert finished_ids(tmp_path, "me") == {"a-1"}


@pytest.mark.slow
def test_a_killed_run_goes_on_and_loses_no_prompt(tmp_path):
    prompts = tmp_path / "own.jsonl"
    prompts.write_text(
        "".join(json.dumps({"id": f"own-{i:05d}", "turns": [f"say {i}"]}) + "\n" for i in range(60))
    )
    command = [
        sys.executable,
        launch.ROOT / "scripts/respond.py",
        "+experiment=tiny",
        f"prompts={prompts}",
        f"out={tmp_path / 'out'}",
        f"paths.outputs={tmp_path / 'outputs'}",
        "shard_size=4",
        "slots=3",
        "max_new_tokens=60",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=environment)
    while len(shard_files(tmp_path / "out")) < 2:
        assert process.poll() is None, "it ended before it could be killed"
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert len(shard_files(tmp_path / "out")) < 15
    subprocess.run(command, check=True, env=environment)
    ids = [
        id_
        for file in shard_files(tmp_path / "out")
        for id_ in read_shard(file, ["prompt_id"])[0]["prompt_id"].to_pylist()
    ]
    assert sorted(ids) == [f"own-{i:05d}" for i in range(60)]
