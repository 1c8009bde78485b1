"""Configs compose, their targets import, and the scripts work and fail as a user would see it."""

from __future__ import annotations

import json
import subprocess
import sys

import bench
import generate
import launch
import lossless
import pytest
import torch
from conftest import composed, group
from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf
from PIL import Image

from graft.core.runlog import RunLog
from graft.drafters import dflash_checkpoint
from graft.drafters.dflash import untrained
from graft.targets import tiny

STAGES = sorted(p.stem for p in launch.CONF.glob("*.yaml") if p.stem not in ("base", "prompted"))
GROUPS = sorted(p.name for p in launch.CONF.iterdir() if p.is_dir() and p.name != "experiment")
AWKWARD = "{x}, 'y' = ${z}"  # everything Hydra's grammar trips over
PLACES = {
    "tree": "tree@method.builder",
    "budget": "budget@method.budget",
}
STAGE_OF = {  # of groups that `generate` does not have
    **dict.fromkeys(("data", "model", "trainer"), "train"),
    "methods": "replay",
    "scorer": "train",
    "dataset": "respond",
}


def targets_of(node) -> list[str]:
    """Every `_target_` below a node. Values that only an experiment fills in may be missing."""
    if not isinstance(node, DictConfig):
        return []
    own = [node._target_] if "_target_" in node else []
    return own + [
        t for key in node if not OmegaConf.is_missing(node, key) for t in targets_of(node[key])
    ]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("experiment", group("experiment"))
def test_every_stage_composes_with_every_experiment(stage, experiment):
    if experiment.startswith("train_") and stage != "train":
        pytest.skip("an experiment of the training stage")
    cfg = composed(stage, f"+experiment={experiment}")
    OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    found = targets_of(cfg)
    assert len(found) >= 2
    assert all(callable(get_object(target)) for target in found)


@pytest.mark.parametrize(("name", "option"), [(g, option) for g in GROUPS for option in group(g)])
def test_every_option_composes_and_its_targets_import(name, option):
    cfg = composed(STAGE_OF.get(name, "generate"), f"{PLACES.get(name, name)}={option}")
    assert all(callable(get_object(target)) for target in targets_of(cfg))


def run(monkeypatch, module, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", [module.__file__, *arguments])
    try:
        module.main()
    except SystemExit as leave:
        return leave.code
    return 0


@pytest.fixture
def tiny_run(monkeypatch, tmp_path, capsys):
    """Run a script on the tiny experiment; gives (exit code, stdout, stderr)."""

    def go(module, *arguments: str):
        code = run(
            monkeypatch,
            module,
            "+experiment=tiny",
            f"paths.outputs={tmp_path / 'outputs'}",
            *arguments,
        )
        return code, *capsys.readouterr()

    return go


def test_generate_compares_with_plain_decoding(tiny_run, tmp_path):
    code, out, _ = tiny_run(
        generate, "drafter=noisy", "compare=true", "max_new_tokens=30", f"prompt={AWKWARD}"
    )
    assert code == 0
    assert "tokens identical to AR: yes" in out
    for row in (
        "tokens",
        "rounds",
        "MAT",
        "tokens/s",
        "drafter's pass, ms",
        "cache, ms",
        "Python between, ms",
    ):
        assert row in out
    folder = next((tmp_path / "outputs/generate").iterdir())
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["method"] for row in rows] == ["ddtree", "ar"]
    assert rows[0]["tokens"] == rows[1]["tokens"] == 30
    assert rows[0]["rounds"] < rows[1]["rounds"] == 29
    made_by = json.loads((folder / "run.json").read_text())
    assert made_by["config"]["prompt"] == AWKWARD


NO_CHECKPOINT = {"library", "llama_cpp", "published_ddtree"}  # of the tiny target, which they need


@pytest.mark.parametrize("method", [m for m in group("method") if m not in NO_CHECKPOINT])
def test_every_method_generates_the_same_text(
    tiny_run, tmp_path, method, tiny_scorer, tiny_constants
):
    conversation = tmp_path / "conversation.json"
    turns = [("user", "one"), ("assistant", "two"), ("user", "three")]
    conversation.write_text(json.dumps([{"role": r, "content": c} for r, c in turns]))
    settings = (f"messages={conversation}", "max_new_tokens=20", "temperature=0.9", "seed=7")
    settings += (f"paths.scorer={tiny_scorer}", f"paths.constants={tiny_constants}")
    mine = [f"method={method}"]
    if method == "graft_paper":  # names its scorer
        mine.append(f"method.builder.scorer={tiny_scorer}")
    texts = {
        tiny_run(generate, *chosen, "stream=false", *settings)[1].split("\n\n")[1]
        for chosen in (mine, ["method=ar"])
    }
    assert len(texts) == 1
    code, streamed, _ = tiny_run(generate, *mine, *settings)
    assert code == 0
    assert texts.pop() in streamed


def test_no_memory_left_is_one_line():
    assert "out of memory" in launch.describe(torch.OutOfMemoryError("CUDA: no room\nfor it"))
    assert launch.describe(RuntimeError("a bug")) is None


def test_wandb_is_on_offline_by_default(tiny_run, tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_MODE")
    code, out, err = tiny_run(generate, "max_new_tokens=5")
    assert (code, "wandb" in out + err) == (0, False)
    (run,) = (tmp_path / "outputs").rglob("offline-run-*/run-*.wandb")
    content = run.read_bytes()
    for word in (b"graft", b"tiny-generate"):  # project; group and stage
        assert word in content
    assert tiny_run(generate, "logger=none", "max_new_tokens=5")[0] == 0
    assert len(list((tmp_path / "outputs").rglob("offline-run-*/run-*.wandb"))) == 1


def test_artifacts_pictures_and_tables_go_to_wandb(tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_MODE")
    (tmp_path / "made").mkdir()
    (tmp_path / "made/weights").write_text("w")
    Image.new("RGB", (2, 2)).save(tmp_path / "drawn.png")
    log = RunLog(tmp_path / "run", {"seed": 0}, stage="train", group="mine", wandb="offline")
    log.log({"gain": 0.5})
    log.pictures([tmp_path / "drawn.png"])
    log.table("speeds", ["method", "x"], [["ar", "1.00"]])
    log.artifact("scorer", tmp_path / "made")
    log.close()
    (run,) = tmp_path.rglob("run-*.wandb")
    content = run.read_bytes()
    for word in (b"mine-train", b"gain", b"mine-scorer", b"drawn", b"speeds"):
        assert word in content


def test_lossless_goes_on_where_it_was(tiny_run, tmp_path):
    code, out, _ = tiny_run(lossless, "drafter=noisy", "per_set=2", "max_new_tokens=24")
    assert code == 0
    assert "ddtree_64" in out
    file = next((tmp_path / "outputs/lossless").glob("*/metrics.jsonl"))
    whole = file.read_text().splitlines(keepends=True)
    assert len(whole) == 10
    file.write_text("".join(whole[:3]) + whole[3][:20])  # killed in the middle of a row
    assert tiny_run(lossless, "drafter=noisy", "per_set=2", "max_new_tokens=24")[0] == 0
    again = file.read_text().splitlines(keepends=True)
    assert again[:3] == whole[:3]
    assert sorted(map(json.loads, again), key=str) == sorted(map(json.loads, whole), key=str)


def test_lossless_trusts_no_rows_of_other_code(tiny_run, tmp_path, monkeypatch):
    settings = ("drafter=noisy", "per_set=1", "max_new_tokens=8")
    assert tiny_run(lossless, *settings)[0] == 0
    assert "going on after 5 rows" in tiny_run(lossless, *settings)[1]
    monkeypatch.setattr(lossless, "revision", lambda: "another revision")
    assert "going on" not in tiny_run(lossless, *settings)[1]
    assert len(list((tmp_path / "outputs/lossless").glob("*/metrics.jsonl"))) == 2


def test_bench_measures_the_tiny_model(tiny_run, tmp_path):
    pytest.importorskip("psutil")
    settings = ("repeats=2", "context=20", "new_tokens=6", "rounds=120", "drafter=noisy")
    settings += (f"out={tmp_path / 'constants'}",)
    code, out, _ = tiny_run(bench, *settings)
    assert code == 0
    for row in ("plain heap / ours", "verify, 64 rows", "overhead, % of the round", "grew by"):
        assert row in out
    rows = next((tmp_path / "outputs/bench").glob("*/metrics.jsonl")).read_text().splitlines()
    assert all(isinstance(v, float | int) for row in rows for v in json.loads(row).values())
    for wrong, words in (
        ("method=ar", "choose another method"),
        ("what=[passes,nothing]", "what must be all, or some of passes, trees"),
        ("context=1000", "context=1000 must lie in 1..896"),
    ):
        code, _, err = tiny_run(bench, wrong, *settings[-1:])
        assert code == 2
        assert words in err


def test_lossless_reports_a_method_that_is_not(tiny_run, monkeypatch):
    from graft.decode import loop

    monkeypatch.setattr(
        loop, "accept", lambda tree, draw: ([0], 65)
    )  # a walk that makes its tokens up
    code, out, _ = tiny_run(lossless, "per_set=1", "max_new_tokens=8")
    assert code == 1
    assert all(line.split()[3] == "1" for line in out.splitlines() if line.startswith("ddtree"))


@pytest.fixture(scope="session")
def broken(tmp_path_factory):
    """Folders that are wrong in one way each."""
    folder = tmp_path_factory.mktemp("broken")
    target = tiny.load("qwen3", device="cpu")
    made = untrained(
        target,
        layers=2,
        block_size=8,
        mask_token_id=258,
        taps=1,
    )
    dflash_checkpoint.save(made.net, folder / "truncated")
    weights = folder / "truncated/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:2000])
    other = tiny.model("qwen3")
    other.lm_head.weight.data[0, 0] = torch.nan
    other.save_pretrained(folder / "nan")
    tiny.tokenizer().save_pretrained(folder / "nan")
    (folder / "messages.json").write_text('{"role": "user"}')
    return folder


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["method=foo"], "Could not find 'method/foo'"),
        (["method.budget.nodes=0"], "must lie in 1..4096, not 0"),
        (["method.budget.nodes=-3"], "must lie in 1..4096, not -3"),
        (["method.budget.nodes=100000"], "must lie in 1..4096"),
        (["method.budget.nodes=many"], "Fixed"),
        (["max_new_tokens=abc"], "max_new_tokens must be a number"),
        (["temperature=warm"], "temperature must be a number"),
        (["+method.nonsense=1"], "nonsense"),
        (["method._target_=graft.nonsense"], "graft.nonsense"),
        (["max_new_tokens=5000"], "more than the target's context of 1024"),
        (["prompt=" + "long " * 400], "more than the target's context of 1024"),
        (["prompt="], "prompt is empty"),
        (["prompt=   "], "prompt is empty"),
        (["temperature=-1"], "temperature must be 0"),
        (["top_p=0"], "top_p"),
        (
            ["drafter=dflash", "drafter.checkpoint=/nowhere"],
            "drafter folder /nowhere does not exist",
        ),
        (["drafter=dflash", "drafter.checkpoint={broken}/truncated"], "truncated"),
        (["drafter=dflash"], "drafter.checkpoint"),
        (["drafter=default"], "was made for a target with hidden size 576"),
        (["drafter.mask_token_id=999"], "masks with token 999"),
        (["drafter.candidates=0"], "candidates must be at least 1"),
        (["drafter=noisy", "drafter.depth=0"], "must be at least 1"),
        (["target=hf", "target.model={broken}/nan"], "lm_head.weight holds NaN"),
        (["target=hf", "target.model=/nowhere"], "/nowhere does not exist"),
        (["target.dtype=int8"], "dtype must be one of"),
        (["nonsense=1"], "nonsense"),
        (["target.nonsense=1"], "nonsense"),
        (["+target.nonsense=1"], "nonsense"),
        (["prompt"], "prompt"),
        (["messages=/nowhere.json"], "/nowhere.json"),
        (["messages={broken}/messages.json"], "must be a JSON list"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)
def test_bad_input_is_one_line_and_exit_code_2(tiny_run, broken, arguments, message):
    code, _, err = tiny_run(generate, *(argument.format(broken=broken) for argument in arguments))
    assert code == 2
    assert err.startswith("error: ")
    assert err.count("\n") == 1, err
    assert message in err


def test_help_and_a_run_from_another_folder(tmp_path):
    """The script as a user starts it, in a process of its own, from somewhere else."""
    script = [sys.executable, str(launch.ROOT / "scripts/generate.py")]
    done = subprocess.run(
        [*script, "+experiment=tiny", "max_new_tokens=4", f"paths.outputs={tmp_path}"],
        cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "MAT" in done.stdout
    assert done.stderr == ""
    usage = subprocess.run([*script, "--help"], cwd=tmp_path, capture_output=True, text=True).stdout
    assert "max_new_tokens" in usage
    assert "scripts/generate.py" in usage
