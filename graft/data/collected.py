"""A collection: shards of one kind (rounds, anchors) that the same models made in the same way.

A stage writes a shard for every chunk of prompts, named after them. A chunk is there as a whole or
not at all, so a stage that was killed does the missing ones again and ends as if it had not been,
and several processes can deal the chunks among themselves. Prompts that had to be left out are in
the shard's `skipped`, with the reason.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from graft.core.errors import InputError
from graft.data.shards import read_shard, shard_files

ALIKE = ("target", "drafter", "shape", "settings")  # what shards read together must have in common
MAKE = "scripts/collect.py makes them"


def shard_of(folder: Path, keys: Iterable[str]) -> Path:
    """The file for a chunk of prompts: the same prompts, the same file."""
    return folder / f"{hashlib.sha256(chr(10).join(keys).encode()).hexdigest()[:16]}.parquet"


def done(folder: Path, made_by: Mapping[str, Any]) -> set[str]:
    """Prompts that are collected in `folder`, or were left out for a reason.

    Raises InputError where the folder's shards were made otherwise than `made_by` says.
    """
    found: set[str] = set()
    for file in shard_files(folder) if folder.is_dir() else []:
        table, theirs = read_shard(file, ["prompt_id"])
        _check_kind(file, theirs, made_by["kind"], made_by["version"])
        if difference := _difference(theirs, made_by):
            raise InputError(f"{file} was collected with another {difference}; choose another out=")
        found.update(table["prompt_id"].to_pylist())
        found.update(skipped["prompt_id"] for skipped in theirs["skipped"])
    return found


class Shards:
    """All rows of one or several folders of shards, memory-mapped through `datasets`.

    A row is a dict; its lists are arrays, views into the map. Raises InputError for folders without
    shards, shards of other kinds or versions, shards made by different models, damaged ones.
    """

    def __init__(self, folders: Sequence[Path], kind: str, version: int) -> None:
        files = [file for folder in folders for file in _files(folder / kind)]
        made_by = [_footer(file, kind, version) for file in files]
        self.made_by, _ = made_by[0]
        for file, (theirs, _) in zip(files, made_by, strict=True):
            if difference := _difference(theirs, self.made_by):
                raise InputError(
                    f"{file} and {files[0]} were collected with a different {difference}; read "
                    "them apart"
                )
        self._files = files
        self._ends = list(itertools.accumulate(rows for _, rows in made_by))
        self._rows = _mapped(files)

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, i: int) -> dict[str, Any]:
        row = self._rows[i]
        return {name: _plain(row.column(name)[0]) for name in row.column_names}

    def column(self, name: str) -> list[Any]:
        """One column of scalars."""
        return self._rows.data.column(name).to_pylist()

    def file_of(self, i: int) -> Path:
        """The shard that row i came from."""
        return self._files[bisect.bisect_right(self._ends, i)]


def _files(folder: Path) -> list[Path]:
    files = shard_files(folder) if folder.is_dir() else []
    if not files:
        raise InputError(f"{folder} holds no shards; {MAKE}")
    return files


def _footer(file: Path, kind: str, version: int) -> tuple[dict[str, Any], int]:
    """What made a shard, and its rows."""
    table, made_by = read_shard(file, ["prompt_id"])
    _check_kind(file, made_by, kind, version)
    return made_by, len(table)


def _check_kind(file: Path, made_by: Mapping[str, Any], kind: str, version: int) -> None:
    if made_by.get("kind") != kind:
        raise InputError(f"{file} holds {made_by.get('kind', 'data of others')}, not {kind}")
    if made_by["version"] != version:
        raise InputError(
            f"{file} has version {made_by['version']} of the {kind} schema, this code reads "
            f"{version}; collect it again"
        )


def _difference(a: Mapping[str, Any], b: Mapping[str, Any]) -> str:
    """What two shards do not have in common, with both values; empty if they go together."""
    for key in ALIKE:
        if isinstance(a[key], dict):
            for name in sorted(a[key].keys() | b[key].keys() - {"name"}):
                ours, theirs = a[key].get(name), b[key].get(name)
                if ours != theirs and name != "name":
                    return f"{key}.{name} ({ours}, not {theirs})"
    return ""


def _mapped(files: Sequence[Path]) -> Any:
    """The rows as an Arrow-formatted `datasets.Dataset`, cached and mapped by that library."""
    import datasets  # takes a second

    shown = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        names = [str(file) for file in files]
        return datasets.Dataset.from_parquet(names).with_format("arrow")
    except datasets.exceptions.DatasetGenerationError as error:
        for file in files:
            _read_whole(file)
        raise InputError(f"cannot map {files[0].parent}: {error.__cause__}") from error
    finally:
        if not shown:
            datasets.enable_progress_bars()


def _read_whole(file: Path) -> None:
    """Raise InputError naming a shard whose footer is whole and whose pages are not."""
    try:
        pq.read_table(file)
    except (OSError, pa.ArrowException) as error:
        reason = str(error).strip().splitlines()[0]
        raise InputError(
            f"{file} is damaged ({reason}); delete it and collect again: the rest is kept"
        ) from error


def _plain(value: pa.Scalar) -> Any:
    if isinstance(value, pa.ListScalar):
        return None if value.values is None else value.values.to_numpy(zero_copy_only=False)
    if isinstance(value, pa.LargeBinaryScalar):
        return value.as_buffer()
    return value.as_py()
