"""Prompts as JSONL, one object a line: {"id": "gsm8k-00002", "turns": ["first user turn", ...]}."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from graft.core.errors import InputError


@dataclass(frozen=True)
class Prompt:
    """A benchmark prompt; `source` is the set it belongs to, the file's name."""

    id: str
    source: str
    turns: tuple[str, ...]

    @property
    def key(self) -> str:
        """The id with its source: ids alone may repeat across files."""
        return self.id if self.id.startswith(self.source) else f"{self.source}-{self.id}"


def read_prompts(path: Path, limit: int | None = None) -> list[Prompt]:
    """The first `limit` prompts of each JSONL file at `path`. Raises InputError naming the line."""
    files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    if not files:
        raise InputError(f"{path} holds no .jsonl files")
    return [prompt for file in files for prompt in _read_file(file, limit)]


def _read_file(file: Path, limit: int | None) -> list[Prompt]:
    try:
        lines = file.read_text().splitlines()
    except OSError as error:
        raise InputError(f"cannot read prompts from {file}: {error.strerror}") from error
    prompts: list[Prompt] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if limit is not None and len(prompts) == limit:
            break
        try:
            row = json.loads(line)
            turns = tuple(row["turns"])
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(
                f'{file}:{number} is not {{"id": ..., "turns": [...]}} ({error})'
            ) from error
        if not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
            raise InputError(f"{file}:{number}: turns must be a list of non-empty strings")
        prompts.append(Prompt(str(row.get("id", f"{file.stem}-{number:05d}")), file.stem, turns))
    if not prompts:
        raise InputError(f"{file} holds no prompts")
    return prompts
