"""The target's own answers to prompts, as token ids: what a drafter is trained on.

    prompt_id            string        the set and a number in it, "gsm8k-00002"
    source               string        the set
    prompt_token_ids     list<int32>   chat template included
    response_token_ids   list<int32>   the stop token included
    stopped              bool          ended by a stop token
    looped               bool          repeated itself and was cut at the first repeat

Only the id and the two lists of tokens are needed to train.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from graft.core.errors import InputError
from graft.data.shards import read_shard, shard_files

SCHEMA = pa.schema(
    [
        ("prompt_id", pa.string()),
        ("source", pa.string()),
        ("prompt_token_ids", pa.list_(pa.int32())),
        ("response_token_ids", pa.list_(pa.int32())),
        ("stopped", pa.bool_()),
        ("looped", pa.bool_()),
    ]
)
NEEDED = ("prompt_id", "prompt_token_ids", "response_token_ids")


@dataclass(frozen=True, slots=True)
class TokenizedResponse:
    """One text to train on."""

    id: str
    source: str
    prompt: Sequence[int]
    response: Sequence[int]


def finished_ids(folder: Path, fingerprint: str) -> set[str]:
    """Prompts answered in `folder` so far. Raises InputError if another target answered them."""
    found: set[str] = set()
    for file in shard_files(folder) if folder.is_dir() else []:
        table, made_by = read_shard(file, ["prompt_id"])
        check_made_by(file, made_by, fingerprint)
        found.update(table["prompt_id"].to_pylist())
    return found


def read_responses(paths: Sequence[Path], fingerprint: str) -> tuple[list[TokenizedResponse], bool]:
    """All responses of files and folders, and whether every shard says that this target wrote it.

    Raises InputError for a shard of another target, for damaged ones and for missing columns.
    """
    responses: dict[str, TokenizedResponse] = {}  # a prompt answered twice counts once
    marked = True
    for path in paths:
        files = shard_files(path)
        if not files or not all(file.exists() for file in files):
            raise InputError(f"{path} holds no responses; scripts/respond.py makes them")
        for file in files:
            table, made_by = read_shard(file, NEEDED)
            marked = marked and check_made_by(file, made_by, fingerprint)
            columns = (table[name].to_pylist() for name in NEEDED)
            for id_, prompt, response in zip(*columns, strict=True):
                if not prompt or response is None:
                    raise InputError(
                        f"{file}: response {id_} has no prompt; its tokens are needed as context"
                    )
                source = id_.rsplit("-", 1)[0]
                responses.setdefault(id_, TokenizedResponse(id_, source, prompt, response))
    return list(responses.values()), marked


def check_made_by(file: Path, made_by: dict[str, Any], fingerprint: str) -> bool:
    """Whether a shard says which target wrote it; InputError if it was another one."""
    target = made_by.get("target")
    if target is not None and target["fingerprint"] != fingerprint:
        raise InputError(
            f"{file} was written by another target or tokenizer ({target['name']}); "
            "a drafter learns its own target's text only"
        )
    return target is not None
