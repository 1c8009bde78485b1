"""A collection: shards of one kind (rounds, anchors) that the same models made in the same way.

A stage writes a shard for every chunk of prompts, named after them. A chunk is there as a whole or
not at all, so a stage that was killed does the missing ones again and ends as if it had not been,
and several processes can deal the prompts among themselves. Prompts that had to be left out are in
the shard's `skipped`, with the reason; `prompts` has a digest of what each one says.
"""

from __future__ import annotations

import bisect
import glob
import hashlib
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from graft.core.errors import InputError
from graft.data.prompts import Prompt
from graft.data.shards import read_shard, shard_files

MODELS = ("target", "drafter", "shape")  # what shards read together must have in common
ALIKE = (*MODELS, "settings")


def shard_of(folder: Path, prompts: Iterable[Prompt]) -> Path:
    """The file for a chunk of prompts: the same prompts, the same file."""
    keys = "\n".join(prompt.key for prompt in prompts)
    return folder / f"{hashlib.sha256(keys.encode()).hexdigest()[:16]}.parquet"


@dataclass
class Done:
    """What a folder holds: the digest of every prompt that was collected or left out."""

    digests: dict[str, str] = field(default_factory=dict)
    skipped: list[tuple[Path, dict[str, Any]]] = field(default_factory=list)

    def missing(self, prompts: Iterable[Prompt]) -> list[Prompt]:
        """Those still to do. Raises InputError for one that says something else by now."""
        found = []
        for prompt in prompts:
            known = self.digests.get(prompt.key, prompt.digest)
            if known != prompt.digest:
                raise InputError(
                    f"prompt {prompt.key} was collected with another text (another split, another "
                    "template?); choose another out="
                )
            if prompt.key not in self.digests:
                found.append(prompt)
        return found


def done(folder: Path, made_by: Mapping[str, Any], *, strict: bool = True) -> Done:
    """What is in `folder`. Raises InputError where it was made otherwise than `made_by` says.

    Not `strict` looks at the models alone: what lies beside a collection need not be made alike.
    """
    found = Done()
    for file in shard_files(folder) if folder.is_dir() else []:
        _, theirs = read_shard(file, [])
        _check_kind(file, theirs, made_by["kind"], made_by["version"])
        if apart := difference(theirs, made_by, ALIKE if strict else MODELS):
            raise InputError(f"{file} was collected with another {apart}; choose another out=")
        found.digests.update(theirs["prompts"])
        found.skipped += [(file, skip) for skip in theirs["skipped"]]
    return found


class Shards:
    """All rows of one or several folders of shards, memory-mapped through `datasets`.

    A row is a dict; its lists are arrays, views into the map. `key` names the columns that tell
    rows apart. Raises InputError for folders without shards or rows, shards of other kinds or
    versions, shards made by different models, repeated rows, damaged files.
    """

    def __init__(
        self, folders: Sequence[Path], kind: str, version: int, *, key: Sequence[str]
    ) -> None:
        files = [file for folder in folders for file in _files(folder / kind)]
        if not files:
            raise InputError("collected= names no folder; scripts/collect.py makes them")
        made_by = [_footer(file, kind, version) for file in files]
        self.made_by, _ = made_by[0]
        for file, (theirs, _) in zip(files, made_by, strict=True):
            if apart := difference(theirs, self.made_by, ALIKE):
                raise InputError(
                    f"{file} and {files[0]} were collected with a different {apart}; read them "
                    "apart"
                )
        # A chunk whose prompts were all left out has no rows, and `datasets` fails on it.
        sizes = {file: rows for file, (_, rows) in zip(files, made_by, strict=True) if rows}
        if not sizes:
            raise InputError(f"{files[0].parent} holds no rows: all prompts were left out")
        self._files, self._ends = list(sizes), list(itertools.accumulate(sizes.values()))
        self._rows = _mapped(self._files)
        columns = (self.column(name) for name in key)
        self.keys = list(zip(*columns, strict=True))
        self._check_once(key)

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

    def _check_once(self, key: Sequence[str]) -> None:
        first: dict[Any, int] = {}
        for i, value in enumerate(self.keys):
            if (other := first.setdefault(value, i)) != i:
                words = ", ".join(f"{k} {v}" for k, v in zip(key, value, strict=True))
                raise InputError(
                    f"{words} is in {self.file_of(other)} and in {self.file_of(i)}; delete one"
                )


def difference(a: Mapping[str, Any], b: Mapping[str, Any], keys: Iterable[str]) -> str:
    """The first setting that two shards do not share, with both values; empty if there is none.

    What a model is called does not matter, its fingerprint does.
    """
    for key in keys:
        ours, theirs = a.get(key), b.get(key)
        if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
            names = sorted((ours.keys() | theirs.keys()) - {"name"})
            if apart := difference(ours, theirs, names):
                return f"{key}.{apart}"
        elif ours != theirs:
            return f"{key} ({ours}, not {theirs})"
    return ""


def _files(folder: Path) -> list[Path]:
    files = shard_files(folder) if folder.is_dir() else []
    if not files:
        raise InputError(f"{folder} holds no shards; scripts/collect.py makes them")
    return files


def _footer(file: Path, kind: str, version: int) -> tuple[dict[str, Any], int]:
    """What made a shard, and its rows."""
    table, made_by = read_shard(file, [])
    _check_kind(file, made_by, kind, version)
    return made_by, table.num_rows


def _check_kind(file: Path, made_by: Mapping[str, Any], kind: str, version: int) -> None:
    if made_by.get("kind") != kind:
        raise InputError(f"{file} holds {made_by.get('kind', 'data of others')}, not {kind}")
    if made_by["version"] != version:
        raise InputError(
            f"{file} has version {made_by['version']} of the {kind} schema, this code reads "
            f"{version}; collect it again"
        )


def _mapped(files: Sequence[Path]) -> Any:
    """The rows as an Arrow-formatted `datasets.Dataset`, cached and mapped by that library."""
    import datasets  # takes a second

    shown = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        names = [glob.escape(str(file)) for file in files]
        return datasets.Dataset.from_parquet(names).with_format("arrow")
    except datasets.exceptions.DatasetGenerationError as error:
        for file in files:
            _read_whole(file)
        raise InputError(f"cannot map {files[0].parent}: {error.__cause__}") from error
    finally:
        if shown:
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
