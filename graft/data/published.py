"""Numbers that papers published, as data/published.yaml holds them.

A list of tables, each with `source`, `hardware`, `note`, `temperature` and `rows`, and in a row
`target`, `method`, `set` and what of `speedup` and `mat` is known.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from graft.core.errors import InputError

METHODS = ("AR", "EAGLE-3", "DFlash", "DDTree", "GRAFT")
TABLE = {"source", "hardware", "note", "temperature", "rows"}
ROW = {"target", "method", "set"}
NUMBERS = {"speedup", "mat"}


@dataclass(frozen=True)
class Published:
    """One cell of a published table; None is what its source does not say."""

    source: str
    hardware: str
    note: str  # what is not comparable
    temperature: float | None
    target: str  # hub id
    method: str
    set: str  # a dataset of conf/dataset, or `all` for the mean over the table's
    speedup: float | None  # over plain decoding
    mat: float | None


def read(path: Path) -> list[Published]:
    """Every row of every table at `path`. Raises InputError naming the row that is damaged."""
    try:
        tables = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"cannot read published numbers from {path}: {error.strerror}") from error
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise InputError(f"{path} is not YAML ({reason})") from error
    if not isinstance(tables, list) or not tables:
        raise InputError(f"{path} must be a list of tables")
    cells = [cell for i, table in enumerate(tables, 1) for cell in _cells(table, f"{path}, {i}")]
    seen = set()
    for cell in cells:
        where = (cell.source, cell.temperature, cell.target, cell.method, cell.set)
        if where in seen:
            raise InputError(f"{path} says twice what {cell.method} does on {cell.set}: {where}")
        seen.add(where)
    return cells


def _cells(table: Any, place: str) -> list[Published]:
    """The rows of one table; `place` says where it stands."""
    if not isinstance(table, dict) or set(table) != TABLE:
        raise InputError(f"{place}: a table has {', '.join(sorted(TABLE))}")
    common = {key: table[key] for key in ("source", "hardware", "note")}
    _check_text(common, place)
    temperature = _number(table, "temperature", place)
    if not isinstance(table["rows"], list) or not table["rows"]:
        raise InputError(f"{place}: rows must be a list of rows")
    cells = []
    for number, row in enumerate(table["rows"], 1):
        here = f"{place}, row {number}"
        if not isinstance(row, dict) or not ROW <= set(row) <= ROW | NUMBERS or set(row) == ROW:
            raise InputError(f"{here} must have target, method, set, and speedup, mat or both")
        _check_text({key: row[key] for key in ROW}, here)
        if row["method"] not in METHODS:
            raise InputError(f"{here}: method must be one of {', '.join(METHODS)}")
        numbers = {key: _number(row, key, here) for key in NUMBERS}
        if any(value == 0 for value in numbers.values()):
            raise InputError(f"{here}: speedup and mat must be above 0")
        cells.append(Published(**common, temperature=temperature, **row | numbers))
    return cells


def _check_text(values: dict[str, Any], place: str) -> None:
    for key, value in values.items():
        if not isinstance(value, str) or not value.strip():
            raise InputError(f"{place}: {key} must be text, got {value!r}")


def _number(values: dict[str, Any], key: str, place: str) -> float | None:
    """A finite number from 0 up, or None where there is none."""
    value = values.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e6:
        raise InputError(f"{place}: {key} must be a number from 0 up, got {value!r}")
    return float(value)
