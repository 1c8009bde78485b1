"""Prompts from JSONL and from datasets: every form read, every mistake named in one line."""

from __future__ import annotations

import json
import sys
from functools import partial

import datasets
import launch
import lossless
import pytest
import respond
from conftest import composed, group
from huggingface_hub.errors import HTTPError
from omegaconf import OmegaConf

from graft.core.errors import InputError
from graft.data.prompts import (
    apply_templates,
    check_keys,
    read_dataset,
    read_datasets,
    read_prompts,
)
from graft.data.shards import read_shard, shard_files
from graft.targets import tiny

MESSAGES = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "hello"},
    {"role": "user", "content": "and?"},
]
ROWS = [
    {
        "number": i,
        "question": f"what is {i}?",
        "turns": [f"first {i}", f"second {i}"],
        "messages": MESSAGES,
        "input": "" if i % 2 else f"input {i}",
    }
    for i in range(20)
]


@pytest.fixture(autouse=True)
def alone(monkeypatch, tmp_path):
    """No network, no cache that other runs share."""
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def saved(tmp_path) -> str:
    """A folder made by `save_to_disk`."""
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "saved")
    return str(tmp_path / "saved")


def read(path, **changed):
    settings = {"split": "train", "turns": "question", "source": "mine"}
    return read_dataset(str(path), **(settings | changed))


def jsonl(path, rows) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_text_may_hold_other_line_separators_than_jsonl_has(tmp_path):
    (tmp_path / "odd.jsonl").write_text(
        '{"turns": ["one\u2028line\x85still"]}\n\n{"turns": ["two"]}\n'
    )
    assert [p.turns[0] for p in read_prompts(tmp_path / "odd.jsonl")] == [
        "one\u2028line\x85still",
        "two",
    ]
    (tmp_path / "latin.jsonl").write_bytes('{"turns": ["\xe9"]}'.encode("latin-1"))
    with pytest.raises(InputError, match="is not UTF-8 text"):
        read_prompts(tmp_path / "latin.jsonl")


def test_jsonl_has_templates_and_limits(tmp_path):
    for name in ("a", "b"):
        jsonl(tmp_path / f"{name}.jsonl", [{"turns": ["x", "y"]}, {"id": 7, "turns": ["z"]}])
    prompts = read_prompts(tmp_path)
    check_keys(prompts)
    assert [prompt.key for prompt in prompts] == ["a-00001", "a-7", "b-00001", "b-7"]
    assert read_prompts(tmp_path, limit=1) == prompts[::2]
    filled = apply_templates(prompts, {"b": "{turn}, {turn} {x}"})
    assert filled[:2] == prompts[:2]
    assert [prompt.turns for prompt in filled[2:]] == [("x, x {x}", "y"), ("z, z {x}",)]
    for template in ("no place", None, 5):
        with pytest.raises(InputError, match=r"templates\.a must contain \{turn\}"):
            apply_templates(prompts, {"a": template})


def test_two_prompts_of_one_name_are_refused(tmp_path):
    twice = read_prompts(tmp_path / jsonl(tmp_path / "a.jsonl", [{"id": 1, "turns": ["x"]}] * 2))
    with pytest.raises(InputError, match="2 prompts are called a-1; ids must be unique"):
        check_keys(twice)


@pytest.mark.parametrize("form", ["saved", "saved with splits", "folder", "jsonl", "parquet"])
def test_every_place_gives_the_same_prompts(tmp_path, form):
    path = tmp_path / "data"
    made = datasets.Dataset.from_list(ROWS)
    if form == "saved":
        made.save_to_disk(path)
    elif form == "saved with splits":
        other = made.select([3])
        datasets.DatasetDict({"test": other, "train": made}).save_to_disk(path)
    elif form == "folder":
        path.mkdir()
        made.to_parquet(path / "train-00000-of-00001.parquet")
        made.select([3]).to_parquet(path / "test-00000-of-00001.parquet")
    elif form == "jsonl":
        path = jsonl(tmp_path / "data.jsonl", ROWS)
    else:
        path = tmp_path / "data.parquet"
        made.to_parquet(path)
    prompts = read(path)
    assert [(p.key, p.source, p.turns) for p in prompts] == [
        (f"mine-{i + 1:05d}", "mine", (f"what is {i}?",)) for i in range(20)
    ]
    assert read(path, turns="turns", limit=1)[0].turns == ("first 0", "second 0")
    assert read(path, turns="messages", limit=1)[0].turns == ("hi", "and?")


def test_csv(tmp_path):
    (tmp_path / "a.csv").write_text('n,question\n1,"what, is it?"\n2,two\n')
    assert [p.turns for p in read(tmp_path / "a.csv")] == [("what, is it?",), ("two",)]


def test_columns_are_joined_and_templates_filled(saved):
    settings = {"turns": ["question", "input"], "template": "Answer: {turn} \\boxed{}"}
    prompts = read(saved, limit=2, id="number", **settings)
    assert [(p.key, p.turns) for p in prompts] == [
        ("mine-0", ("Answer: what is 0?\ninput 0 \\boxed{}",)),
        ("mine-1", ("Answer: what is 1? \\boxed{}",)),
    ]
    both = read(saved, turns="turns", template="Say {turn}", limit=1)
    assert both[0].turns == ("Say first 0", "second 0")


def test_a_row_with_only_its_first_column_may_have_its_own_template(saved):
    settings = {"turns": ["question", "input"], "join": " with ", "alone": "Just {turn}"}
    prompts = read(saved, limit=2, template="{turn}.", **settings)
    assert [p.turns[0] for p in prompts] == ["what is 0? with input 0.", "Just what is 1?"]
    assert read(saved, limit=1, alone="Just {turn}")[0].turns == ("what is 0?",)


def test_a_pattern_reads_its_files_in_order(tmp_path):
    for file in range(7, 0, -1):
        rows = [{"question": f"file {file}, row {row}"} for row in range(2)]
        jsonl(tmp_path / f"test{file if file > 1 else ''}.jsonl", rows)
    jsonl(tmp_path / "other.jsonl", [{"question": "no"}])
    prompts = read(tmp_path / "test*.jsonl")
    assert [p.turns[0] for p in prompts] == [
        f"file {f}, row {r}" for f in range(1, 8) for r in (0, 1)
    ]
    with pytest.raises(InputError, match=r"none\*\.jsonl matches no file"):
        read(tmp_path / "none*.jsonl")
    with pytest.raises(InputError, match=r"must end in one of \.csv"):
        read(tmp_path / "test*")


def test_files_on_the_hub_are_asked_of_their_format(monkeypatch):
    asked = []

    def load(*given, **named):
        asked.append((given, named))
        return datasets.Dataset.from_list(ROWS)

    monkeypatch.setattr(datasets, "load_dataset", load)
    assert len(read("hf://datasets/owner/name/test*.jsonl", split="test", limit=2)) == 2
    files = "hf://datasets/owner/name/test*.jsonl"
    assert asked == [(("json",), {"data_files": files, "split": "train"})]
    with pytest.raises(InputError, match="must end in one of"):
        read("hf://datasets/owner/name")


def test_a_hub_that_cannot_be_reached_is_one_line(monkeypatch):
    def load(*given, **named):
        raise HTTPError("no\nnetwork")

    monkeypatch.setattr(datasets, "load_dataset", load)
    with pytest.raises(InputError, match="no network; prompts= takes a JSONL file instead"):
        read("hf://datasets/owner/name/test*.jsonl")


@pytest.mark.parametrize("seed", [0, 42])
def test_a_seed_takes_the_subset_that_the_library_would(saved, seed):
    theirs = datasets.load_from_disk(saved).shuffle(seed=seed).select(range(5))
    ours = read(saved, seed=seed, limit=5)
    assert [p.turns[0] for p in ours] == list(theirs["question"])
    assert [p.id for p in ours] == [f"mine-{number + 1:05d}" for number in theirs["number"]]


@pytest.mark.parametrize(
    ("path", "changed", "message"),
    [
        ("{saved}", {"turns": "prompt"}, "has no column prompt; there are number, question, turns"),
        ("{saved}", {"turns": ["question", "prompt"]}, "has no column prompt"),
        ("{saved}", {"id": "name"}, "has no column name"),
        ("{saved}", {"turns": "number"}, "row 1: number must hold text"),
        ("{saved}", {"turns": "input"}, "row 2: input must hold text"),
        ("{saved}", {"turns": ["number", "input"]}, "must hold text"),
        ("{saved}", {"turns": "struct"}, "row 1: struct must hold text"),
        ("{saved}", {"template": "no place"}, "dataset.template must contain {turn}"),
        ("{tmp}/two", {"split": "test"}, "has no split test; there are train, other"),
        ("{tmp}/folder", {"split": "test"}, "has no split test; there are train"),
        ("{tmp}/folder", {"name": "main"}, "BuilderConfig 'main' not found"),
        ("{tmp}/none", {}, "/none does not exist"),
        ("data/none.jsonl", {}, "data/none.jsonl does not exist"),
        ("{tmp}/rows.txt", {}, "must end in one of .csv, .json, .jsonl, .parquet"),
        ("{tmp}/broken.jsonl", {}, "JSON parse error"),
        ("{tmp}/broken.parquet", {}, "cannot load dataset"),
        ("{tmp}/nothing", {}, "doesn't contain any data files"),
        ("{tmp}/empty", {}, "holds no prompts"),
        ("{tmp}/empty.csv", {}, "corresponds to no data"),
        ("{saved}", {"limit": 0}, "holds no prompts"),
        ("{saved}", {"alone": "no place"}, "dataset.alone must contain {turn}"),
        ("hf://datasets/a/b/c.jsonl", {}, "prompts= takes a JSONL file instead"),
        ("openai/gsm8k", {"name": "main"}, "prompts= takes a JSONL file instead"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_mistakes_are_named_in_one_line(tmp_path, path, changed, message):
    made = datasets.Dataset.from_list([row | {"struct": {"text": "x"}} for row in ROWS])
    made.save_to_disk(tmp_path / "saved")
    datasets.DatasetDict({"train": made, "other": made}).save_to_disk(tmp_path / "two")
    made.select([]).save_to_disk(tmp_path / "empty")
    (tmp_path / "empty.csv").write_text("number,question\n")
    for folder in ("folder", "nothing"):
        (tmp_path / folder).mkdir()
    made.to_parquet(tmp_path / "folder/train.parquet")
    for file in ("rows.txt", "broken.jsonl", "broken.parquet"):
        (tmp_path / file).write_text("what is this\n")
    with pytest.raises(InputError) as caught:
        read(path.format(saved=tmp_path / "saved", tmp=tmp_path), **changed)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", [name for name in group("dataset") if name != "paper"])
def test_every_set_says_all_that_can_be_said(name):
    cfg = composed("lossless", f"dataset={name}").dataset
    keys = {"path", "name", "split", "turns", "id", "template", "source", "seed"}
    assert set(cfg) - {"_target_", "join", "alone"} == keys
    assert "{turn}" in cfg.template
    assert cfg.source == name
    missing = {key for key in keys if OmegaConf.is_missing(cfg, key)}
    assert missing == ({"path", "turns"} if name == "custom" else set())


def test_livecodebench_asks_as_published(tmp_path):
    """The texts of the DFlash harness, starter code or none."""
    rows = [{"question_content": "Add.", "starter_code": code} for code in ("def add(a, b):", "")]
    cfg = composed("respond", "dataset=livecodebench", "per_set=2")
    cfg.dataset.path = jsonl(tmp_path / "test.jsonl", rows)
    coded, bare = (prompt.turns[0] for prompt in launch.prompts_of(cfg))
    head, question = coded.split("\n\n### Question:\n")
    assert head.startswith("You are an expert Python programmer. You will be given a question ")
    assert head.endswith("You will NOT return anything except for the program")
    end = "\n```\n\n### Answer: (use the provided format with backticks)"
    code = "Use the following code structure:\n```python\ndef add(a, b):"
    assert question == f"Add.\n\n### Format: {code}{end}"
    none = "Write your code in the following format:\n```python\n# YOUR CODE HERE"
    assert bare == f"{head}\n\n### Question:\nAdd.\n\n### Format: {none}{end}"


PAPER = {  # of each set, how many the published tables are about
    **dict.fromkeys(("gsm8k", "math500", "mbpp", "livecodebench", "swe_bench", "alpaca"), 128),
    **{"aime24": 30, "aime25": 30, "humaneval": 164, "mt_bench": 80},
}


@pytest.fixture
def hub(monkeypatch) -> datasets.Dataset:
    """A hub on which every set has the same 200 rows."""
    columns = ("question", "problem", "prompt", "question_content", "problem_statement")
    columns += ("instruction", "prompt_id", "instance_id")
    rows = [{name: f"{name} {i}" for name in columns} for i in range(200)]
    made = datasets.Dataset.from_list([r | {"input": "", "starter_code": ""} for r in rows])
    everything = datasets.DatasetDict({"train": made, "test": made})
    monkeypatch.setattr(
        datasets, "load_dataset", lambda *given, split=None, **rest: made if split else everything
    )
    return made


def test_the_paper_sets_are_the_published_subsets(hub):
    prompts = launch.prompts_of(composed("respond", "dataset=paper"))
    found = {name: [p for p in prompts if p.source == name] for name in PAPER}
    assert {name: len(mine) for name, mine in found.items()} == PAPER
    assert sum(PAPER.values()) == len(prompts)
    for name, column in (("gsm8k", "question"), ("aime24", "problem"), ("livecodebench", None)):
        theirs = hub.shuffle(seed=0).select(range(PAPER[name]))[column or "question_content"]
        for prompt, text in zip(found[name], theirs, strict=True):
            assert f"{text}\n" in prompt.turns[0]


def test_the_paper_sets_can_be_fewer_and_shorter(hub):
    fewer = composed("lossless", "dataset=paper", "~dataset.sets.swe_bench", "per_set=40")
    prompts = launch.prompts_of(fewer)
    sizes = {name: min(40, size) for name, size in PAPER.items() if name != "swe_bench"}
    assert {name: sum(p.source == name for p in prompts) for name in sizes} == sizes
    assert len(prompts) == sum(sizes.values())


def test_of_two_limits_the_smaller_counts(saved):
    settings = {"split": "train", "turns": "question"}
    sets = {
        "few": partial(read_dataset, saved, source="few", limit=2, **settings),
        "all": partial(read_dataset, saved, source="all", **settings),
    }
    for limit, sizes in ((None, (2, 20)), (1, (1, 1)), (5, (2, 5))):
        prompts = read_datasets(sets, limit)
        assert tuple(sum(p.source == name for p in prompts) for name in sets) == sizes
    with pytest.raises(InputError, match=r"dataset\.sets is empty"):
        read_datasets({})


def test_a_stage_reads_jsonl_unless_told_otherwise():
    cfg = composed("respond", "+templates.own='Say: {turn}'", "per_set=2")
    assert cfg.get("dataset") is None
    assert all(prompt.turns[0].startswith("Say: ") for prompt in launch.prompts_of(cfg))
    asked = composed("respond", "dataset=gsm8k").dataset.template
    assert asked.splitlines()[1].endswith("your final answer within \\boxed{}.")


def run(monkeypatch, module, *arguments: str):
    monkeypatch.setattr(sys, "argv", [module.__file__, "+experiment=tiny", *arguments])
    try:
        module.main()
    except SystemExit as leave:
        return leave.code
    return 0


def test_scripts_read_datasets(monkeypatch, tmp_path, saved, capsys):
    asked = ("dataset=custom", f"dataset.path={saved}", f"paths.outputs={tmp_path}")
    short = ("dataset.turns=question", "max_new_tokens=4", "per_set=3")
    assert run(monkeypatch, respond, *asked, *short, f"out={tmp_path / 'out'}") == 0
    (shard,) = shard_files(tmp_path / "out")
    rows = read_shard(shard, ["prompt_id", "prompt_token_ids"])[0].to_pylist()
    assert {row["prompt_id"] for row in rows} == {f"custom-{i:05d}" for i in (1, 2, 3)}
    tokenizer = tiny.tokenizer()
    assert all("what is" in tokenizer.decode(row["prompt_token_ids"]) for row in rows)
    assert run(monkeypatch, lossless, *asked, *short, "drafter=noisy") == 0
    capsys.readouterr()
    for wrong, message in (
        ((), "dataset.turns"),
        (("dataset.turns=prompt",), "has no column prompt"),
        (("dataset.turns=question", "+dataset.nonsense=1"), "nonsense"),
        (("dataset.turns=question", "dataset.seed=many"), "many"),
    ):
        assert run(monkeypatch, respond, *asked, *wrong) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ")
        assert error.count("\n") == 1
        assert message in error
