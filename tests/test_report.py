"""Tables, figures and the page, out of results alone."""

from __future__ import annotations

import io
import json
import re
import shutil
from pathlib import Path

import eval as evaluation
import launch
import numpy as np
import pytest
import report
import yaml
from test_scripts import run

from graft.eval import figures, tables
from graft.eval.limits import Pass, Passes, Work
from graft.eval.metrics import PARTS, summarise
from graft.eval.tables import Block

RACE = (
    *("methods=demo", "~methods.library", "~methods.graft", "~methods.ddtree_7"),
    *("~methods.tdes_7", "+method@methods.ddtree_4=ddtree", "methods.ddtree_4.budget.nodes=4"),
    *("+method@methods.ddtree_9=ddtree", "methods.ddtree_9.budget.nodes=9"),
    *("+method@methods.tdes_4=graft_tdes", "methods.tdes_4.budget.nodes=4"),
)


@pytest.fixture(scope="module")
def raced(tmp_path_factory, tiny_scorer) -> Path:
    """Results on two sets at two temperatures, in folders t0 and t1."""
    folder = tmp_path_factory.mktemp("raced")
    for name in ("one", "two"):
        rows = [{"id": str(i), "turns": [f"{name} tree of tokens"[i:]]} for i in range(3)]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / "prompts").mkdir(exist_ok=True)
        (folder / f"prompts/{name}.jsonl").write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        for temperature in (0, 1):
            settings = (f"temperature={temperature}.0", f"out={folder / f't{temperature}'}")
            places = (f"prompts={folder / 'prompts'}", f"paths.outputs={folder / 'outputs'}")
            model = ("+experiment=tiny", "target.dtype=float32", f"paths.scorer={tiny_scorer}")
            more = ("drafter.candidates=8", "max_new_tokens=24")
            assert run(patch, evaluation, *model, *RACE, *settings, *places, *more) == 0
    return folder


@pytest.fixture
def reported(monkeypatch, tmp_path, capsys):
    """Run the stage; gives (exit code, stdout, stderr), and what it wrote is in tmp_path/out."""

    def go(*arguments: str):
        capsys.readouterr()
        places = (f"out={tmp_path / 'out'}", f"paths.outputs={tmp_path / 'outputs'}")
        return run(monkeypatch, report, *places, *arguments), *capsys.readouterr()

    return go


def test_everything_comes_out_of_results(reported, raced, tmp_path):
    code, out, err = reported(f"results={raced / 't0'}")
    assert code == 0, err
    there = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"table.md", "table.tex", "index.html"} <= there
    for name in figures.FIGURES:
        assert {f"{name}.png", f"{name}.pdf"} <= there
    text = (tmp_path / "out/table.md").read_text()
    for word in ("Speedup over AR / MAT", "Why rounds end", "unlike AR", "DDTree 4", "TDES 4"):
        assert word in text
    assert "0 of 6" in text, "fp32: lossless"
    assert "DDTree 9" in out
    page = (tmp_path / "out/index.html").read_text()
    shown = re.search(r'<script[^>]*type="application/json"[^>]*>(.*?)</script>', page, re.S)
    responses = json.loads(shown[1])
    assert {r["method"] for r in responses} == {"TDES 4", "DDTree 4", "DDTree 9"} & {
        r["method"] for r in responses
    }
    assert {r["source"] for r in responses} == {"one", "two"}
    assert all(round["words"].startswith("the target wanted") for round in responses[0]["rounds"])


def test_temperatures_stand_in_one_table(reported, raced, tmp_path):
    code, _, err = reported(f"results=[{raced / 't0'},{raced / 't1'}]")
    assert code == 0, err
    tex = (tmp_path / "out/table.tex").read_text()
    assert tex.count("\\midrule") == 2
    assert "$T=0$" in tex
    assert "$T=1$" in tex
    lines = [line for line in tex.splitlines() if line.endswith("\\\\")]
    assert {line.count("&") for line in lines[1:]} == {7}, "two numbers a set and their mean"
    assert (tmp_path / "out/tiny-qwen3-float32-t1-ladder.png").exists()


def test_published_numbers_stand_beside_ours(reported, raced, tmp_path):
    cells = [{"target": "someone/Tiny-Qwen3", "method": "DDTree", "set": "one", "speedup": 7.5}]
    cells += [{"target": "someone/else", "method": "DDTree", "set": "one", "speedup": 9.9}]
    source = {"source": "A paper", "hardware": "a GPU", "note": "careful", "temperature": 0.0}
    file = tmp_path / "published.yaml"
    file.write_text(yaml.safe_dump([{**source, "rows": cells}]))
    asked = (f"results={raced / 't0'}", "compare=paper", f"published={file}")
    code, out, err = reported(*asked)
    assert code == 0, err
    assert "A paper; a GPU; careful" in out
    assert "7.50" in out
    assert "9.90" not in out
    code, out, _ = reported(f"results={raced / 't1'}", "compare=paper", f"published={file}")
    assert code == 0
    assert "Nothing is known to be published" in out


def test_bad_input_is_one_line(reported, raced, tmp_path):
    (tmp_path / "same").symlink_to(raced / "t0")
    torn = tmp_path / "torn"
    shutil.copytree(raced / "t0", torn)
    made_by = json.loads((torn / "made_by.json").read_text())
    made_by["models"]["drafter"] = "another"
    (torn / "made_by.json").write_text(json.dumps(made_by))
    for arguments, words in (
        ((f"results={tmp_path / 'none'}",), "holds no results; python scripts/eval.py"),
        ((f"results=[{raced / 't0'},{tmp_path / 'same'}]",), "are both tiny-qwen3, float32, T = 0"),
        ((f"results=[{raced / 't0'},{torn}]",), "another models.drafter"),
        ((f"results={raced / 't0'}", "compare=them"), "compare must be paper"),
        ((f"results={raced / 't0'}", "compare=paper", "published=none.yaml"), "none.yaml"),
    ):
        code, _, err = reported(*arguments)
        assert code == 2, words
        assert words in err
        assert err.count("\n") == 1
    rows = torn / "rows-0-of-1.jsonl"
    rows.write_text(rows.read_text() + '{"method": "ar", "promp')
    assert reported(f"results={torn}")[0] == 0, "a half-written row is left out"


def planted(seconds: dict[str, float], prompts: int = 4) -> Block:
    """Methods that take so long a token, on one set."""
    rows = []
    for name, took in seconds.items():
        nodes = 0 if name == "ar" else int(name.rpartition("_")[2])
        for i in range(prompts):
            row = {"method": name, "prompt": f"s{i}", "turn": 0, "source": "s", "conf": [0.2, 0.8]}
            row |= {"response": [1, 2, 3, 4, 5], "committed": [2, 2], "nodes": [nodes, nodes]}
            row |= {"fates": [1, 2], "paths": [[1], [nodes]]}
            row["seconds"] = {"prefill": 1.0, "propose": took, "verify": 3 * took}
            rows.append(row)
    methods = summarise(rows, baseline="ar")
    return Block("t", "d", "float32", 0.0, methods, "ar", {}, rows)


def test_the_fastest_of_each_column_is_bold():
    block = planted({"ar": 4.0, "ddtree_4": 2.0, "ddtree_8": 1.0})
    found = tables.by_set(block)
    assert found.headings == ["", "s"], "of one set there is no mean"
    assert found.best == {(2, 1)}
    assert found.rows[2][0] == "DDTree 8"
    assert "**4.00x / 2.00**" in tables.markdown(found)
    assert "\\textbf{4.00}" in tables.latex([block])
    assert block.best("ddtree").name == "ddtree_8"
    assert block.best("tdes") is None


def test_parts_of_a_round_add_up(raced):
    block = report.block_of(raced / "t0", seed=0)
    table = tables.times(block)
    for place, method in enumerate(block.methods.values(), 1):
        column = [row[place] for row in table.rows]
        parts = [cell.split() for cell in column[: len(PARTS)] if cell]
        assert float(column[len(PARTS)]) == pytest.approx(method.mean.round_ms, abs=1e-3)
        assert sum(float(ms) for ms, *_ in parts) == pytest.approx(method.mean.round_ms, abs=5e-3)
        assert sum(float(share[1:]) for _, share, _ in parts) == pytest.approx(100, abs=0.6)
    of = {row[0]: dict(zip(table.headings[1:], row[1:], strict=True)) for row in table.rows}
    assert of["scoring"]["TDES 4"], "the scorer's own"
    assert of["scoring"]["DDTree 4"] == of["drafter's pass"]["AR"] == "", "it has none"
    assert all(of["Python between"].values())


def test_passes_of_the_same_models_are_shown_beside_the_limit(reported, raced, tmp_path):
    made_by = json.loads((raced / "t0/made_by.json").read_text())["models"]
    step = Pass("verify", 1, 2e-3, 8e-3, Work(10**6, 10**6))
    wide = Pass("verify", 64, 6e-3, None, Work(10**6, 64 * 10**6))
    draft = Pass("draft", 8, 1e-3, None, None)
    file = tmp_path / "passes.json"
    for models, shown in ((made_by, True), (made_by | {"threads": 99}, False)):
        Passes(256, 1e9, 2e10, [step, wide, draft], models).save(file)
        code, _, err = reported(f"results={raced / 't0'}", f"passes={file}")
        assert code == 0, err
        page = (tmp_path / "out/index.html").read_text()
        assert ("reading 1 GB/s, multiplying 20 GFLOP/s" in page) is shown
        assert ("what=passes" in page) is not shown
        text = (tmp_path / "out/table.md").read_text()
        line = "| plain step | 1 | reading | 2 | 2.00x | 8 | 8.00x | 1.00 |"
        assert (line in text) is shown
    file.write_text("{}")
    code, _, err = reported(f"results={raced / 't0'}", f"passes={file}")
    assert code == 2
    assert "holds no passes" in err


def test_results_that_told_no_parts_apart_leave_them_blank():
    table = tables.times(planted({"ar": 4.0, "ddtree_4": 2.0}))  # seconds as they once were
    of = {row[0]: row[2] for row in table.rows}
    assert of["drafter's pass"] == "1000.000 (25.0 %)"
    assert of["Python between"] == of["scoring"] == ""
    assert of["the round"] == "4000.000"


def test_a_tie_is_called_one():
    block = planted({"ar": 4.0, "ddtree_4": 2.0, "ddtree_8": 2.0})
    verdicts = {row[0]: row[-1] for row in tables.head_to_head(block, "ddtree_8").rows}
    assert verdicts == {"AR": "faster", "DDTree 4": "tie"}


def test_one_prompt_a_set_gives_no_interval():
    block = planted({"ar": 4.0, "ddtree_4": 2.0, "ddtree_8": 1.0}, prompts=1)
    assert tables.head_to_head(block, "ddtree_8").rows[0][1:] == [
        *("4.00x", "", "of one prompt a set: unknown"),
    ]
    for draw, *_ in figures.FIGURES.values():
        if (figure := draw(block)) is not None:
            figure.savefig(io.BytesIO())


def test_a_round_at_a_large_budget_shows_the_gain_of_smaller_ones():
    block = planted({"ar": 4.0, "ddtree_4": 2.0, "ddtree_8": 2.0})
    figure = figures.difficulty(block)
    lines = figure.axes[0].lines
    assert [line.get_label().split()[0] for line in lines] == ["sure", "middling", "unsure"]
    sure, _, unsure = (line.get_ydata() for line in lines)  # node 8 where sure, 1 elsewhere
    assert sure.tolist() == [1, 1, 1, 1, 2]
    assert np.allclose(unsure, 2)


def test_figures_need_what_they_show():
    block = planted({"ar": 4.0, "ddtree_4": 2.0})
    assert figures.budgets(block) is None
    assert figures.difficulty(block) is None
    assert figures.ladder(block) is None
    assert figures.time(block) is not None


def test_the_notebook_runs_on_results(raced, monkeypatch, capsys):
    monkeypatch.chdir(launch.ROOT)
    notebook = json.loads((launch.ROOT / "notebooks/results.ipynb").read_text())
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all(not cell["outputs"] for cell in cells), "outputs are stripped before a commit"
    scope: dict = {}
    exec("".join(cells[0]["source"]), scope)
    assert scope["results"] == launch.ROOT / "data/results/demo"
    scope["results"] = raced / "t0"
    for cell in cells[1:]:
        exec("".join(cell["source"]), scope)
    assert "ddtree_9 cut to   9 nodes" in capsys.readouterr().out
