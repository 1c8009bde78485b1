"""Results of end-to-end decoding: a folder that says what made it, and a row for every (method,
prompt, turn).

    made_by.json              settings, methods, models, machine, versions, git revision
    rows-0-of-1.jsonl         rows, one a line; rows-2-of-8.jsonl where eight processes share it
    tokenizer/                the target's own

`Results` writes, `read` reads. Rows of a turn are appended together, in one write; what a kill
leaves of them is cut. A (method, prompt, turn) that was decoded twice counts as it was last.
graft/eval/benchmark.py says what a row holds.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from graft.core.errors import InputError
from graft.core.runlog import write_atomically
from graft.data.collected import difference

ALIKE = ("settings", "models", "git", "versions")
KEY = ("method", "prompt", "turn")
NEEDED = (*KEY, "source", "response", "committed", "nodes", "seconds", "run")
Row = dict[str, Any]


class Results:
    """One process's part of a folder of results, to go on with. Raises InputError for a folder that
    was made otherwise: by other models, settings, versions, or methods of the same names.

    Methods may be added to a folder, and then all turns are decoded again: what stands in one
    table is timed together.
    """

    def __init__(self, folder: Path, made_by: Mapping[str, Any], part: int, parts: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = folder / f"rows-{part}-of-{parts}.jsonl"
        file = folder / "made_by.json"
        if file.exists():
            theirs = _made_by(folder)
            if left_out := ", ".join(theirs["methods"].keys() - made_by["methods"].keys()):
                raise InputError(
                    f"{folder} has also methods {left_out}, which are timed together with these: "
                    "give them as well, or choose another out="
                )
            methods = {name: made_by["methods"][name] for name in theirs["methods"]}
            if apart := difference(theirs, {**made_by, "methods": methods}, (*ALIKE, "methods")):
                raise InputError(f"{folder} was measured with another {apart}; choose another out=")
        for other in folder.glob("rows-*.jsonl"):
            if other.stem.rpartition("-")[2] != str(parts):
                raise InputError(f"{folder} was shared by another number of processes: {other}")
        write_atomically(file, json.dumps(made_by, indent=1) + "\n")
        if self._file.exists():  # cut the torn line of a killed run
            lines = self._file.read_text().splitlines(keepends=True)
            write_atomically(self._file, "".join(line for line in lines if line.endswith("\n")))
        self._run = made_by["run"]

    def rows(self) -> list[Row]:
        """This part's rows so far."""
        return _rows(self._file, self._run) if self._file.exists() else []

    def append(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Add the rows of a turn, in one write."""
        text = "".join(json.dumps({**row, "run": self._run}) + "\n" for row in rows)
        with self._file.open("a") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())


def read(folder: Path) -> tuple[dict[str, Any], list[Row]]:
    """What made the results in a folder, and their rows. Raises InputError where there are none,
    for damaged ones, and for rows of other models or settings than the folder's.
    """
    files = sorted(folder.glob("rows-*.jsonl"))
    if not files:
        raise InputError(f"{folder} holds no results; python scripts/eval.py out={folder} makes it")
    made_by = _made_by(folder)
    found: dict[Sequence[Any], Row] = {}
    for file in files:
        for row in _rows(file, made_by["run"]):
            found[tuple(row[key] for key in KEY)] = row
    if not found:
        raise InputError(f"{folder} holds no finished response yet; scripts/eval.py goes on there")
    return made_by, list(found.values())


def _made_by(folder: Path) -> dict[str, Any]:
    file = folder / "made_by.json"
    try:
        made_by = json.loads(file.read_text())
        missing = [key for key in (*ALIKE, "methods", "names", "run") if key not in made_by]
    except (OSError, ValueError, TypeError) as error:
        raise InputError(f"cannot read {file}: {error}; choose another out=") from error
    if missing or not isinstance(made_by, dict):
        raise InputError(f"{file} does not say what made the results; choose another out=")
    return made_by


def _rows(file: Path, run: str) -> list[Row]:
    found = []
    for number, line in enumerate(file.read_text().splitlines(keepends=True), 1):
        if not line.endswith("\n"):
            break  # half-written: the turn is not finished
        try:
            row = json.loads(line)
            missing = [key for key in NEEDED if key not in row]
        except (ValueError, TypeError) as error:
            raise InputError(f"{file}:{number} is damaged ({error}); delete the line") from error
        if missing:
            raise InputError(f"{file}:{number} has no {missing[0]}; delete the line")
        if row["run"] != run:
            raise InputError(
                f"{file}:{number} was measured with other models or settings than the rest of the "
                "folder; keep one run a folder"
            )
        found.append(row)
    return found
