"""Parquet shards: each appears whole or not at all and carries what made it.

A stage appends shards to its folder and, started again, goes on behind them. Readers refuse a
folder whose shards were made by different models, and name a damaged one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from graft.core.errors import InputError

KEY = b"graft"  # of the schema's metadata: a JSON object


def write_shard(path: Path, table: pa.Table, made_by: Mapping[str, Any]) -> None:
    """Write one shard atomically, `made_by` in its metadata."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    metadata = {KEY: json.dumps(made_by).encode()}
    try:
        with partial.open("wb") as file:
            pq.write_table(table.replace_schema_metadata(metadata), file, compression="zstd")
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def shard_files(path: Path) -> list[Path]:
    """The shards of a folder in order, or the one file."""
    return sorted(path.glob("*.parquet")) if path.is_dir() else [path]


def next_shard(folder: Path) -> Path:
    """The file behind the last one, whatever is missing before it."""
    numbers = [int(file.stem) for file in shard_files(folder) if file.stem.isdigit()]
    return folder / f"{max(numbers, default=-1) + 1:05d}.parquet"


def read_shard(path: Path, columns: Sequence[str]) -> tuple[pa.Table, dict[str, Any]]:
    """These columns and what made the shard ({} for a file of others). Raises InputError."""
    try:
        file = pq.ParquetFile(path)
        if missing := [name for name in columns if name not in file.schema_arrow.names]:
            raise InputError(
                f"{path} has no column {', '.join(missing)}; needed are {', '.join(columns)}"
            )
        made_by = (file.schema_arrow.metadata or {}).get(KEY, b"{}")
        return file.read(list(columns)), json.loads(made_by)
    except (OSError, pa.ArrowException, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise InputError(
            f"{path} cannot be read ({reason}); delete it and make it again"
        ) from error
