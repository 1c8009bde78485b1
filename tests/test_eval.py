"""End-to-end decoding: every method on every turn once, in turns; interrupted and gone on with; and
what its rows amount to.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time

import eval as stage
import launch
import numpy as np
import pytest
from conftest import costs_of
from test_scripts import run

from graft.core.errors import InputError
from graft.core.types import Generation, Request
from graft.data.prompts import Prompt
from graft.data.results import Results, read
from graft.decode import autoregressive
from graft.eval import library
from graft.eval.benchmark import measure, predicted_seconds_a_token, seconds_a_token
from graft.eval.fate import KINDS
from graft.eval.metrics import MEAN, ratio, summarise
from graft.targets import hf, tiny

METHODS = (
    *("methods=demo", "~methods.library", "~methods.tdes_7", "~methods.graft"),
    *("+method@methods.four=ddtree", "methods.four.budget.nodes=4", "~methods.ddtree_7"),
)
NAMES = ["ar", "chain", "four"]
TALK = [{"id": str(i), "turns": ["What is a tree?"[i:], "And a token?"]} for i in range(3)]


def arguments(folder) -> list[str]:
    prompts = folder / "talk.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in TALK))
    return [
        *("+experiment=tiny", "drafter=noisy", f"prompts={prompts}", f"out={folder / 'results'}"),
        *(f"paths.outputs={folder / 'outputs'}", "target.dtype=float32", "max_new_tokens=12"),
    ]


@pytest.fixture
def evaluate(monkeypatch, tmp_path, capsys):
    """Run the stage on the tiny experiment; gives (exit code, stdout, stderr)."""

    def go(*changes: str):
        return run(monkeypatch, stage, *arguments(tmp_path), *changes), *capsys.readouterr()

    return go


def bare(rows) -> dict:
    """Of every turn and method, without what differs from run to run."""

    def still(row):
        trees = [{k: v for k, v in t.items() if k != "seconds"} for t in row.get("trees", ())]
        return {**row, "seconds": None, "trees": trees}

    return {(r["prompt"], r["turn"], r["method"]): still(r) for r in rows}


def test_methods_take_turns_and_decode_the_same_text(evaluate, tmp_path):
    code, out, err = evaluate(*METHODS)
    assert code == 0, err
    made_by, rows = read(tmp_path / "results")
    assert len(rows) == 3 * 3 * 2
    assert set(made_by["methods"]) == set(NAMES)
    for key in {(r["prompt"], r["turn"]) for r in rows}:
        mine = [r for r in rows if (r["prompt"], r["turn"]) == key]
        assert len({tuple(r["response"]) for r in mine}) == 1, "fp32: lossless"
        assert len({r["prompt_tokens"] for r in mine}) == 1, "later turns follow one conversation"
    assert out.count("0 of 6") == 3, "none parts from plain decoding"
    assert "1.00x [1.00, 1.00]" in out
    assert (tmp_path / "results/tokenizer").is_dir()
    kept = {r["prompt"] for r in rows if "trees" in r}
    assert kept == {"talk-0"}, "the first prompt's rounds are kept whole"
    drafted = [r for r in rows if r["method"] != "ar"]
    for row in drafted:
        assert len(row["paths"]) == len(row["fates"]) == len(row["nodes"]) == len(row["committed"])
        assert [len(path) + 1 for path in row["paths"]] == row["committed"]
        assert all(n <= size for p, size in zip(row["paths"], row["nodes"], strict=True) for n in p)
        for tree in row.get("trees", ()):
            assert len(tree["chances"]) == len(tree["tokens"]) - 1
            assert tree["parents"][0] == -1


def test_every_method_is_first_in_every_set():
    prompts = [Prompt(f"{s}-{i}", s, ("x",)) for s in "abcdef" for i in range(15)]
    rank, turn = stage.places(prompts)
    for name in "abcdef":
        mine = [p.key for p in prompts if p.source == name]
        assert sorted(rank[key] for key in mine) == list(range(15))
        assert {turn[key] % 15 for key in mine} == set(range(15)), "of fifteen methods"
        assert {turn[key] % 6 for key in mine} == set(range(6)), "six processes share every set"


def test_the_order_rotates():
    asked = []

    def decode(name):
        def go(request, on_round=None):
            asked.append(name)
            return Generation([1, 2], False, [1], [0], {"prefill": 0.0, "verify": 1.0})

        return go

    race = stage.Race(
        {name: decode(name) for name in "abc"}, set(), None,
        longest=99, baseline="a", shown=set(), results=None, done={},
    )  # fmt: skip
    for place in range(3):
        race._decode(Request([1], 2, temperature=1.0), place, trees=False)
    assert "".join(asked) == "abcbcacab", "each method is first once"


def test_a_killed_run_goes_on_where_it_was(evaluate, tmp_path):
    assert evaluate(*METHODS)[0] == 0
    whole = bare(read(tmp_path / "results")[1])
    file = tmp_path / "results/rows-0-of-1.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    for kept in (4, 7, 13):
        file.write_text("".join(lines[:kept]) + lines[kept][:20])  # a torn row
        code, out, err = evaluate(*METHODS)
        assert code == 0, err
        assert "going on after" in out
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        redone = {(r["prompt"], r["turn"]) for r in rows[kept:]}
        for key in redone:
            names = [r["method"] for r in rows[kept:] if (r["prompt"], r["turn"]) == key]
            assert sorted(names) == NAMES, "a turn's times are of one run"
        assert bare(read(tmp_path / "results")[1]) == whole


@pytest.mark.slow
def test_three_kills_change_nothing(evaluate, tmp_path):
    more = ("max_new_tokens=60", "+method@methods.more=ddtree")
    assert evaluate(*METHODS, *more)[0] == 0
    whole = bare(read(tmp_path / "results")[1])
    (tmp_path / "results").rename(tmp_path / "whole")
    script = [sys.executable, str(launch.ROOT / "scripts/eval.py")]
    command = [*script, *arguments(tmp_path), *METHODS, *more]
    file, draw = tmp_path / "results/rows-0-of-1.jsonl", random.Random(0)
    for rows in (1, 5, 9):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env={**os.environ})
        while process.poll() is None:
            if file.exists() and file.read_bytes().count(b"\n") >= rows:
                time.sleep(0.3 * draw.random())
                process.send_signal(signal.SIGKILL)
                break
            time.sleep(0.01)
        process.wait()
    assert subprocess.run(command, stdout=subprocess.DEVNULL).returncode == 0
    assert bare(read(tmp_path / "results")[1]) == whole


def test_results_of_other_settings_are_not_mixed(evaluate, tmp_path):
    assert evaluate(*METHODS, "per_set=1")[0] == 0
    for change, words in (
        ("max_new_tokens=9", "settings.max_new_tokens"),
        ("methods.four.budget.nodes=5", "methods.four.config.budget.nodes"),
        ("shard=0/2", "another number of processes"),
    ):
        code, _, err = evaluate(*METHODS, change)
        assert code == 2
        assert words in err
        assert err.count("\n") == 1
    more = ("+method@methods.eight=ddtree", "methods.eight.budget.nodes=8")
    code, out, _ = evaluate(*METHODS, *more, "per_set=1")
    assert code == 0, "a method may be added"
    assert "eight" in out
    code, _, err = evaluate(*METHODS, "per_set=1")
    assert (code, "has also methods eight" in err) == (2, True), "not timed with the others"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["baseline=none"], "baseline=none is no method"),
        (["+method@methods.x=nonsense"], "nonsense"),
        (["shard=3/2"], "shard must be i/n"),
        (["trees=-1"], "trees must be"),
        (["dataset=custom", "dataset.path=nowhere/at-all", "dataset.turns=q"], "prompts="),
        (["prompts=nowhere.jsonl"], "nowhere.jsonl"),
    ],
)
def test_bad_input_is_one_line(evaluate, monkeypatch, changes, words):
    import datasets

    def unreachable(*_, **__):
        raise ConnectionError("no network")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    code, _, err = evaluate(*METHODS, *changes)
    assert code == 2
    assert words in err
    assert err.count("\n") == 1


def test_processes_share_a_folder(evaluate, tmp_path):
    assert evaluate(*METHODS, "shard=0/2")[0] == 0
    assert evaluate(*METHODS, "shard=1/2")[0] == 0
    _, rows = read(tmp_path / "results")
    shared = bare(rows)
    (tmp_path / "results").rename(tmp_path / "shared")
    assert evaluate(*METHODS)[0] == 0
    assert bare(read(tmp_path / "results")[1]) == shared


MADE_BY = {key: {} for key in ("settings", "models", "names", "versions", "methods")}
MADE_BY = {**MADE_BY, "run": "abc", "git": "g"}


def test_damaged_results_are_named(tmp_path):
    with pytest.raises(InputError, match=r"holds no results.*eval.py"):
        read(tmp_path)
    results = Results(tmp_path, MADE_BY, 0, 1)
    with pytest.raises(InputError, match="holds no results"):
        read(tmp_path)
    results.append([row_of("ar", "a1", 1.0), row_of("fast", "a1", 1.0)])
    file = tmp_path / "rows-0-of-1.jsonl"
    good = file.read_text()
    for torn, words in (
        (good + "{no json}\n", "rows-0-of-1.jsonl:3 is damaged"),
        (good + '{"method": "x", "prompt": "a1", "turn": 0}\n', ":3 has no source"),
        (good + good.replace('"abc"', '"other"'), "other models or settings"),
    ):
        file.write_text(torn)
        with pytest.raises(InputError, match=words):
            read(tmp_path)
    file.write_text(good + good.splitlines()[0][:50])
    assert len(read(tmp_path)[1]) == 2, "a half-written row is not counted"
    for damaged, words in (("{", "cannot read .*made_by.json"), ("{}", "does not say what made")):
        (tmp_path / "made_by.json").write_text(damaged)
        with pytest.raises(InputError, match=words):
            read(tmp_path)


def row_of(method: str, prompt: str, seconds: float, tokens: int = 5, **more) -> dict:
    row = {"method": method, "prompt": prompt, "turn": 0, "source": prompt[0], "prompt_tokens": 10}
    row |= {"response": list(range(tokens)), "committed": [2, 2], "nodes": [4, 8], "stopped": False}
    row["seconds"] = {"prefill": 9.0, "propose": seconds / 4, "verify": seconds / 2}
    row["seconds"]["accept"] = seconds / 4
    return row | more


def test_a_summary_adds_up():
    rows = [row_of("ar", f"{s}{i}", 4.0 + i) for s in "ab" for i in range(4)]
    fates = [KINDS.index("mismatch"), KINDS.index("cap")]
    rows += [row_of("fast", f"{s}{i}", 2.0 + i / 2, fates=fates) for s in "ab" for i in range(4)]
    rows += [row_of("ar", "unshared", 100.0)]
    rows[-2]["response"], rows[-2]["logit_gap"] = [9, 9, 9, 9, 9], 0.125
    ar, fast = summarise(rows, baseline="ar").values()
    assert seconds_a_token(rows[0]) == pytest.approx(1.0), "the first token is the prefill's"
    assert (ar.responses, ar.mean.speedup, ar.parted) == (8, 1.0, 0)
    assert fast.mean.speedup == pytest.approx(2)
    assert ratio(fast, ar)[1] == pytest.approx((2, 2)), "paired"
    assert {name: cell.speedup for name, cell in fast.cells.items()} == pytest.approx(
        {"a": 2, "b": 2, MEAN: 2}
    )
    assert (fast.mean.draft, fast.mean.verify, fast.mean.other) == (0.25, 0.5, 0.25)
    assert (fast.parted, fast.gaps) == (1, [0.125])
    assert fast.mean.mat == 2
    assert sum(fast.mean.loss.values()) == pytest.approx(1)
    assert (fast.mean.loss["mismatch"], fast.mean.mismatch) == (0.5, 1.0), (
        "rounds at full depth fail not"
    )
    assert fast.mean.parts["acceptance"] == pytest.approx(1e3 * (2.75 / 4) / 2)
    assert (fast.mean.nodes, fast.mean.nodes_sd) == (6, 2)


def test_every_set_counts_alike():
    rows = [row_of("ar", f"a{i}", 4.0) for i in range(9)] + [row_of("ar", "b0", 4.0)]
    rows += [row_of("x", f"a{i}", 4.0) for i in range(9)] + [row_of("x", "b0", 1.0)]
    found = summarise(rows, baseline="ar")["x"]
    assert found.mean.speedup == pytest.approx((1 + 4) / 2)
    assert found.sets == ["a", "b"]


def test_sets_are_resampled_apart():
    draw, rows = np.random.default_rng(0), []
    for source in "abcdef":
        for i in range(8):
            rows += [row_of("ar", f"{source}{i}", 4.0)]
            rows += [row_of("x", f"{source}{i}", 4.0 / draw.uniform(1, 3))]
    found = summarise(rows, baseline="ar")["x"]
    alone = [
        summarise([r for r in rows if r["source"] == s], baseline="ar")["x"] for s in found.sets
    ]
    expected = np.sqrt(sum(one.speedup_samples.var() for one in alone)) / 6
    assert found.speedup_samples.std() == pytest.approx(expected, rel=0.08)


def test_a_difference_within_noise_is_a_tie():
    draw = np.random.default_rng(0)
    rows = []
    for i in range(30):
        noise = draw.normal(0, 0.3)
        rows += [row_of("ar", f"a{i}", 4.0), row_of("same", f"a{i}", 2.0 + noise)]
        rows += [row_of("other", f"a{i}", 2.0 - noise), row_of("slow", f"a{i}", 2.4 + noise)]
    found = summarise(rows, baseline="ar")
    low, high = ratio(found["same"], found["other"])[1]
    assert low < 1 < high
    low, high = ratio(found["same"], found["slow"])[1]
    assert low > 1.1, "paired: the shared noise cancels"


def test_nothing_in_common_is_said():
    with pytest.raises(InputError, match="every method"):
        summarise([row_of("ar", "a1", 1.0), row_of("x", "a2", 1.0)], baseline="ar")
    with pytest.raises(InputError, match="baseline ar"):
        summarise([row_of("x", "a2", 1.0)], baseline="ar")


def test_rows_are_priced_round_by_round():
    table = costs_of([[1.0, 2.0], [3.0, 4.0]], nodes=(4, 8), contexts=(10, 12))
    row = row_of("x", "p", 1.0)
    assert predicted_seconds_a_token(row, table) == pytest.approx((1.0 + 4.0) / 4)
    plain = row_of("ar", "p", 1.0, committed=[1, 1], nodes=[0, 0])
    expected = np.mean([table.ar_step(10), table.ar_step(11)])
    assert predicted_seconds_a_token(plain, table) == pytest.approx(expected)


def test_a_measured_row_says_what_was_decoded():
    done = Generation([1, 2, 3], True, [2], [4], {"prefill": 1.0, "verify": 0.5})
    row = measure(Request([7, 8], 3), lambda request: done, drafts=False, trees=True)
    assert row["prompt_tokens"] == 2
    assert json.loads(json.dumps(row)) == row


def test_the_library_says_the_same_and_is_timed_apart(tmp_path):
    tiny.model("llama").save_pretrained(tmp_path)
    tiny.tokenizer().save_pretrained(tmp_path)
    target = hf.load(str(tmp_path), device="cpu")
    request = Request(list(b"What is a tree?"), 30, stop_tokens=target.stop_tokens)
    pieces: list[int] = []
    found = library.generate(request, target=target, on_tokens=pieces.extend)
    assert found.tokens == autoregressive.generate(request, target=target).tokens == pieces
    assert found.committed == [1] * (len(found.tokens) - 1)
    assert found.seconds["prefill"] > 0 < found.seconds["verify"]
    hot = Request(list(b"What is a tree?"), 30, temperature=2.0, seed=1)
    assert (
        library.generate(hot, target=target).tokens == library.generate(hot, target=target).tokens
    )
    with pytest.raises(InputError, match="leave it out"):
        library.generate(request, target=tiny.load(device="cpu"))
