"""Published numbers: those in data/published.yaml, and files that are damaged."""

from __future__ import annotations

from statistics import fmean, geometric_mean

import launch
import pytest
import yaml
from conftest import group

from graft.core.errors import InputError
from graft.data.published import METHODS, read

FILE = launch.ROOT / "data/published.yaml"
TABLE = {
    "source": "a paper",
    "hardware": "a GPU",
    "note": "none",
    "temperature": 0.0,
    "rows": [{"target": "a/b", "method": "AR", "set": "gsm8k", "speedup": 1.0, "mat": 1}],
}


@pytest.mark.parametrize(
    ("source", "temperature", "target", "method", "dataset", "speedup", "mat"),
    [
        ("2604.12989", 0.0, "Qwen3-4B", "DFlash", "math500", 5.54, 7.72),
        ("2604.12989", 0.0, "Qwen3-8B", "DDTree", "swe_bench", 4.23, 5.91),
        ("2604.12989", 0.0, "Qwen3-Coder-30B-A3B-Instruct", "DDTree", "humaneval", 8.22, 10.72),
        ("2604.12989", 1.0, "Qwen3-4B", "DDTree", "mt_bench", 3.91, 6.27),
        ("2604.12989", 1.0, "Qwen3-Coder-30B-A3B-Instruct", "DFlash", "alpaca", 1.51, 2.14),
        ("2602.06036", 0.0, "Qwen3-4B", "EAGLE-3", "gsm8k", 2.27, 3.77),
        ("2602.06036", 0.0, "Qwen3-8B", "DFlash", "livecodebench", 5.51, 7.27),
        ("2602.06036", 1.0, "Qwen3-8B", "DFlash", "aime25", 3.57, 4.73),
        ("2602.06036", 1.0, "Qwen3-4B", "EAGLE-3", "all", 1.93, 3.36),
        ("2608.20375", None, "Qwen3-8B", "GRAFT", "all", None, 8.06),
    ],
)
def test_cells_are_as_printed(source, temperature, target, method, dataset, speedup, mat):
    (cell,) = [
        cell
        for cell in read(FILE)
        if f"arXiv {source}" in cell.source
        and (cell.temperature, cell.target) == (temperature, f"Qwen/{target}")
        and (cell.method, cell.set) == (method, dataset)
    ]
    assert (cell.speedup, cell.mat) == (speedup, mat)


def test_tables_are_whole_and_about_sets_that_there_are():
    cells = read(FILE)
    sets = {cell.set for cell in cells} - {"all"}
    assert sets == set(group("dataset")) - {"custom", "paper"}
    assert {cell.method for cell in cells} <= set(METHODS)
    ddtree = [cell for cell in cells if "2604.12989" in cell.source]
    assert len(ddtree) == 2 * 3 * 2 * 10  # temperatures, targets, methods, sets
    for one in (cell for cell in ddtree if cell.method == "DDTree"):
        (other,) = (
            cell
            for cell in ddtree
            if cell.method == "DFlash"
            and (cell.temperature, cell.target, cell.set) == (one.temperature, one.target, one.set)
        )
        assert one.speedup > other.speedup
        assert one.mat > other.mat


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("target", ["Qwen/Qwen3-4B", "Qwen/Qwen3-8B"])
def test_means_of_dflash_are_those_of_its_cells(temperature, target):
    cells = {
        cell.set: cell
        for cell in read(FILE)
        if "2602.06036" in cell.source
        and (cell.temperature, cell.target, cell.method) == (temperature, target, "DFlash")
    }
    mean = cells.pop("all")
    assert len(cells) == 7
    assert geometric_mean(c.speedup for c in cells.values()) == pytest.approx(
        mean.speedup, abs=0.02
    )
    assert fmean(c.mat for c in cells.values()) == pytest.approx(mean.mat, abs=0.01)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot read published numbers"),
        ("[", "is not YAML"),
        ("", "must be a list of tables"),
        ("a: 1", "must be a list of tables"),
        ("[1]", "a table has hardware, note"),
        ({"extra": 1}, "a table has hardware, note"),
        ({"source": ""}, "source must be text"),
        ({"hardware": 200}, "hardware must be text"),
        ({"temperature": "hot"}, "temperature must be a number"),
        ({"rows": []}, "rows must be a list"),
        ({"rows": [1]}, "row 1 must have target"),
        ({"rows": [{"target": "a", "method": "AR", "set": "b"}]}, "row 1 must have target"),
        ({"speedup": "fast"}, "row 1: speedup must be a number"),
        ({"mat": True}, "row 1: mat must be a number"),
        ({"mat": float("nan")}, "row 1: mat must be a number"),
        ({"mat": 0}, "must be above 0"),
        ({"set": 5}, "row 1: set must be text"),
        ({"method": "Medusa"}, "method must be one of AR"),
        ({"rows": TABLE["rows"] * 2}, "says twice"),
    ],
)
def test_damage_is_named_in_one_line(tmp_path, text, message):
    file = tmp_path / "published.yaml"
    if isinstance(text, dict):
        row = TABLE["rows"][0]
        changed = {"rows": [row | text]} if set(text) <= {*row} else text
        text = yaml.safe_dump([TABLE | changed])
    if text is not None:
        file.write_text(text)
    with pytest.raises(InputError) as caught:
        read(file)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
