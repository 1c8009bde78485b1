"""Every stage with the experiment file of Qwen3-8B, on a tiny pair in the published formats."""

from __future__ import annotations

import json

import collect
import eval as evaluation
import fit
import pytest
import report
from test_replay import trained
from test_scripts import run

import train
from graft.drafters import dflash_checkpoint
from graft.targets import tiny

STAGES = {
    collect: ("what=[anchors]", "prompts={prompts}", "max_new_tokens=40"),
    train: (
        *("data.held_out=12", "data.batch_size=64", "trainer.max_steps=4"),
        *("trainer.val_check_interval=2", "save_every=2"),
    ),
    fit: ("contexts=[1,300]", "sizes=[1,2,4,8]", "repeats=3"),
    evaluation: ("methods=demo", "prompts={prompts}", "per_set=2", "max_new_tokens=24"),
    report: ("compare=paper",),
}


@pytest.mark.parametrize("experiment", ["qwen3_8b"])
def test_an_experiment_runs_from_prompts_to_the_page(experiment, monkeypatch, tmp_path, capsys):
    target, drafter, prompts = (tmp_path / p for p in ("Qwen3-8B", "DFlash", "own.jsonl"))
    tiny.model("qwen3").save_pretrained(target)
    tiny.tokenizer().save_pretrained(target)
    dflash_checkpoint.save(trained("qwen3"), drafter)
    rows = [{"id": f"own-{i}", "turns": ["What is a tree of tokens?"[i:]]} for i in range(20)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    capsys.readouterr()
    common = (
        *(f"+experiment={experiment}", f"target.model={target}", f"drafter.checkpoint={drafter}"),
        *(f"paths.data={tmp_path / 'data'}", f"paths.outputs={tmp_path / 'outputs'}"),
    )
    for module, settings in STAGES.items():
        own = [setting.format(prompts=prompts) for setting in settings]
        if module is not report:
            own.append("target.dtype=float32")
        if module is report:
            own.append("published=data/published.yaml")
        code = run(monkeypatch, module, *common, *own)
        out, err = capsys.readouterr()
        assert code == 0, f"{module.__name__}: {err}"
        if module is fit:
            assert "left out: 8 responses that the scorer learned from" in out
    assert "GRAFT" in out
    made = {path.name for path in (tmp_path / "data").rglob(experiment)}
    assert made == {experiment}, "each artifact goes by the experiment's name"
    for kind in ("collected", "scorers", "constants", "results"):
        assert (tmp_path / f"data/{kind}/{experiment}").is_dir()
    table = (tmp_path / f"outputs/report/{experiment}/table.md").read_text()
    counts = [row.split("|")[2].strip() for row in table.split("unlike AR")[1].splitlines()[2:7]]
    assert counts == ["0 of 2"] * 5, "fp32: every method, the library's too, says what AR says"
    page = (tmp_path / f"outputs/report/{experiment}/index.html").read_text()
    assert "Qwen3-8B" in page
