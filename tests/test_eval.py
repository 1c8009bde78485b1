"""End-to-end decoding: every method on every turn once, in turns; interrupted and gone on with."""

from __future__ import annotations

import json

import eval as stage
import numpy as np
import pytest
from conftest import costs_of
from test_scripts import run

from graft.eval.benchmark import measure, predicted_seconds_a_token, seconds_a_token, summarise

METHODS = (
    "~methods.best",
    "~methods.fitted",
    "~methods.ratio",
    "~methods.paper",
    "+method@methods.four=ddtree",
    "methods.four.budget.nodes=4",
    "+method@methods.chain=dflash",
)
TALK = [{"id": str(i), "turns": ["What is a tree?"[i:], "And a token?"]} for i in range(3)]


@pytest.fixture
def evaluate(monkeypatch, tmp_path, capsys):
    """Run the stage on the tiny experiment; gives (exit code, stdout, stderr)."""
    prompts = tmp_path / "talk.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in TALK))

    def go(*arguments: str):
        code = run(
            monkeypatch,
            stage,
            "+experiment=tiny",
            "drafter=noisy",
            f"prompts={prompts}",
            f"out={tmp_path / 'results'}",
            f"paths.outputs={tmp_path / 'outputs'}",
            "target.dtype=float32",
            "max_new_tokens=12",
            *arguments,
        )
        return code, *capsys.readouterr()

    return go


def rows_of(tmp_path) -> list[dict]:
    return [json.loads(r) for r in (tmp_path / "results/metrics.jsonl").read_text().splitlines()]


def test_methods_take_turns_and_decode_the_same_text(evaluate, tmp_path):
    code, out, err = evaluate(*METHODS)
    assert code == 0, err
    rows = rows_of(tmp_path)
    assert len(rows) == 3 * 3 * 2
    first = {next(r["method"] for r in rows if r["prompt"] == f"talk-{i}") for i in range(3)}
    assert first == {"ar", "four", "chain"}, "each method is first once"
    for key in {(r["prompt"], r["turn"]) for r in rows}:
        mine = [r for r in rows if (r["prompt"], r["turn"]) == key]
        assert len({tuple(r["response"]) for r in mine}) == 1, "fp32: lossless"
        assert len({r["prompt_tokens"] for r in mine}) == 1, "later turns follow one conversation"
    assert out.count("0 of 6") == 3, "none parts from plain decoding"
    assert "1.00x [1.00, 1.00]" in out


def test_a_killed_run_goes_on_where_it_was(evaluate, tmp_path):
    assert evaluate(*METHODS)[0] == 0
    whole = rows_of(tmp_path)
    file = tmp_path / "results/metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[:7]) + lines[7][:20])  # a torn row
    code, out, err = evaluate(*METHODS)
    assert code == 0, err
    assert "going on after" in out
    again = rows_of(tmp_path)
    assert again[:7] == whole[:7]

    def last(rows):  # of every turn and method, without what differs from run to run
        kept = {(r["prompt"], r["turn"], r["method"]): r for r in rows}
        return {k: {**r, "seconds": None} for k, r in kept.items()}

    assert last(again) == last(whole)
    redone = {(r["prompt"], r["turn"]) for r in again[7:]}
    torn = json.loads(lines[7])
    for key in redone:
        methods = [r["method"] for r in again[7:] if (r["prompt"], r["turn"]) == key]
        assert sorted(methods) == ["ar", "chain", "four"], "a turn's times are of one run"
    assert (torn["prompt"], torn["turn"]) in redone


def test_results_of_other_settings_are_not_mixed(evaluate, tmp_path):
    assert evaluate(*METHODS, "per_set=1")[0] == 0
    for change, words in (
        ("max_new_tokens=9", "settings.max_new_tokens"),
        ("methods.four.budget.nodes=5", "methods.four.config.budget.nodes"),
    ):
        code, _, err = evaluate(*METHODS, change)
        assert code == 2
        assert words in err
        assert err.count("\n") == 1
    more = ("+method@methods.eight=ddtree", "methods.eight.budget.nodes=8")
    code, out, _ = evaluate(*METHODS, *more, "per_set=1")
    assert code == 0, "a method may be added"
    assert "eight" in out
    code, _, err = evaluate(*METHODS, "baseline=none")
    assert (code, "baseline=none is no method" in err) == (2, True)


def row_of(method: str, prompt: str, seconds: float, tokens: int = 5, **more) -> dict:
    row = {"method": method, "prompt": prompt, "turn": 0, "source": prompt[0], "prompt_tokens": 10}
    row |= {"response": list(range(tokens)), "committed": [2, 2], "nodes": [4, 8], "stopped": False}
    row["seconds"] = {"prefill": 9.0, "propose": seconds / 4, "verify": seconds / 2}
    row["seconds"]["accept"] = seconds / 4
    return row | more


def test_a_summary_adds_up():
    rows = [row_of("ar", f"{s}{i}", 4.0 + i) for s in "ab" for i in range(4)]
    rows += [row_of("fast", f"{s}{i}", 2.0 + i / 2) for s in "ab" for i in range(4)]
    rows += [row_of("ar", "unshared", 100.0)]
    rows[-2]["response"] = [9, 9, 9, 9, 9]
    ar, fast = summarise(rows, baseline="ar")
    assert seconds_a_token(rows[0]) == pytest.approx(1.0), "the first token is the prefill's"
    assert (ar.responses, ar.speedup, ar.parted) == (8, 1.0, 0)
    assert fast.speedup == pytest.approx(2)
    assert fast.speedup_interval == pytest.approx((2, 2)), "paired"
    assert fast.by_source == pytest.approx({"a": 2, "b": 2})
    assert fast.overhead == pytest.approx(0.25)
    assert fast.parted == 1
    assert fast.mat == 2


def test_rows_are_priced_round_by_round():
    table = costs_of([[1.0, 2.0], [3.0, 4.0]], nodes=(4, 8), contexts=(10, 12))
    row = row_of("x", "p", 1.0)
    assert predicted_seconds_a_token(row, table) == pytest.approx((1.0 + 4.0) / 4)
    plain = row_of("ar", "p", 1.0, committed=[1, 1], nodes=[0, 0])
    expected = np.mean([table.ar_step(10), table.ar_step(11)])
    assert predicted_seconds_a_token(plain, table) == pytest.approx(expected)


def test_a_measured_row_says_what_was_decoded():
    from graft.core.types import Generation, Request

    done = Generation([1, 2, 3], True, [2], [4], {"prefill": 1.0, "verify": 0.5})
    row = measure(Request([7, 8], 3), lambda request: done)
    assert row["prompt_tokens"] == 2
    assert json.loads(json.dumps(row)) == row
