"""Prompts, from JSONL or from a dataset of the `datasets` library.

JSONL is one object a line: {"id": "gsm8k-00002", "turns": ["first user turn", ...]}.
"""

from __future__ import annotations

import glob
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from graft.core.errors import InputError

BUILDERS = {".csv": "csv", ".json": "json", ".jsonl": "json", ".parquet": "parquet"}


@dataclass(frozen=True)
class Prompt:
    """A benchmark prompt; `source` is the set it belongs to, for JSONL the file's name."""

    id: str
    source: str
    turns: tuple[str, ...]

    @property
    def key(self) -> str:
        """The id with its source: ids alone may repeat across files."""
        return self.id if self.id.startswith(self.source) else f"{self.source}-{self.id}"

    @property
    def digest(self) -> str:
        """Eight hex digits of what it says."""
        return hashlib.sha256(json.dumps(self.turns).encode()).hexdigest()[:8]


def read_prompts(path: Path, limit: int | None = None) -> list[Prompt]:
    """The first `limit` prompts of each JSONL file at `path`. Raises InputError naming the line."""
    files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    if not files:
        raise InputError(f"{path} holds no .jsonl files")
    return [prompt for file in files for prompt in _read_file(file, limit)]


def _read_file(file: Path, limit: int | None) -> list[Prompt]:
    try:
        lines = file.read_text(encoding="utf-8").split("\n")  # JSON may hold other line separators
    except OSError as error:
        raise InputError(f"cannot read prompts from {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{file} is not UTF-8 text ({error})") from error
    prompts: list[Prompt] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if limit is not None and len(prompts) == limit:
            break
        try:
            row = json.loads(line)
            turns = row["turns"]
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(
                f'{file}:{number} is not {{"id": ..., "turns": [...]}} ({error})'
            ) from error
        texts = isinstance(turns, list) and all(isinstance(t, str) and t.strip() for t in turns)
        if not turns or not texts:
            raise InputError(f"{file}:{number}: turns must be a list of non-empty strings")
        name = str(row.get("id", f"{file.stem}-{number:05d}"))
        prompts.append(Prompt(name, file.stem, tuple(turns)))
    if not prompts:
        raise InputError(f"{file} holds no prompts")
    return prompts


def read_dataset(
    path: str,
    *,
    split: str,
    turns: str | Sequence[str],
    source: str,
    name: str | None = None,
    id: str | None = None,
    join: str = "\n",
    template: str = "{turn}",
    alone: str | None = None,
    seed: int | None = None,
    limit: int | None = None,
) -> list[Prompt]:
    """The first `limit` rows of a hub id, a local folder or data files, as prompts of set `source`.

    Data files are a path or a pattern, on this disk or `hf://datasets/owner/name/test*.jsonl`.
    `turns` is a column of strings, of lists of strings or of lists of messages (the user's are the
    turns), or several columns, those with text joined by `join`; `alone` is the template where only
    the first of them has text. `seed` shuffles first, as published subsets do. Without an `id`
    column a prompt is named by its row in the unshuffled set.
    """
    check_template("dataset.template", template)
    if alone is None:
        alone = template
    check_template("dataset.alone", alone)
    dataset = _load(path, name, split)
    columns = [*([turns] if isinstance(turns, str) else turns), *([id] if id else [])]
    for column in columns:
        if column not in dataset.column_names:
            there = ", ".join(dataset.column_names)
            raise InputError(f"{path} has no column {column}; there are {there}")
    order = _order(len(dataset), seed)[:limit]
    prompts = []
    for place, row in zip(order, dataset.select_columns(columns).select(order), strict=True):
        found = _turns_of(row, turns, join)
        if not found or not all(isinstance(turn, str) and turn.strip() for turn in found):
            raise InputError(f"{path}, row {place + 1}: {turns} must hold text, and not be empty")
        name_of_row = str(row[id]) if id else f"{source}-{place + 1:05d}"
        joined = isinstance(turns, str) or any(row[column] for column in turns[1:])
        prompts.append(_fill(template if joined else alone, Prompt(name_of_row, source, found)))
    if not prompts:
        raise InputError(f"{path} holds no prompts")
    return prompts


def read_datasets(
    sets: Mapping[str, Callable[..., list[Prompt]]], limit: int | None = None
) -> list[Prompt]:
    """The prompts of several sets, each a `partial` of `read_dataset`.

    Of its own `limit` and this one the smaller counts.
    """
    if not sets:
        raise InputError("dataset.sets is empty: no prompts")
    prompts: list[Prompt] = []
    for read in sets.values():
        own = getattr(read, "keywords", {}).get("limit")
        limits = [each for each in (own, limit) if each is not None]
        prompts += read(limit=min(limits, default=None))
    return prompts


def apply_templates(prompts: Sequence[Prompt], templates: Mapping[str, str]) -> list[Prompt]:
    """First turns in the template of their set, where it has one."""
    for source, template in templates.items():
        check_template(f"templates.{source}", template)
    return [_fill(templates.get(prompt.source, "{turn}"), prompt) for prompt in prompts]


def check_template(key: str, template: Any) -> None:
    """Raise InputError unless a turn has its place in it."""
    if not isinstance(template, str) or "{turn}" not in template:
        raise InputError(f"{key} must contain {{turn}}, got {template!r}")


def check_keys(prompts: Sequence[Prompt]) -> None:
    """Raise InputError if two prompts share a key: a resumed run takes one for the other."""
    counts = Counter(prompt.key for prompt in prompts)
    for key, count in counts.items():
        if count > 1:
            raise InputError(f"{count} prompts are called {key}; ids must be unique within a set")


def _data_files(path: str) -> str | None:
    """The data file, or pattern of some, that `path` is; None for a folder or a hub id."""
    local, remote = Path(path).expanduser(), path.startswith("hf://")
    pattern = not remote and not local.exists() and glob.has_magic(path)
    if not (remote or pattern or local.is_file()):
        ours = local.is_absolute() or path.startswith(".") or local.suffix in BUILDERS
        if ours and not local.exists():
            raise InputError(f"dataset.path {path} does not exist")
        return None
    if local.suffix not in BUILDERS:
        raise InputError(f"dataset.path {path} must end in one of {', '.join(BUILDERS)}")
    if pattern and not glob.glob(str(local), recursive=True):
        raise InputError(f"dataset.path {path} matches no file")
    return path if remote else str(local)


def _load(path: str, name: str | None, split: str) -> Any:
    """The split as a `datasets.Dataset`; files or a single saved Dataset are the split itself."""
    import datasets  # here: it takes a second
    from huggingface_hub.errors import HTTPError  # what `hf://` raises where there is no network

    datasets.disable_progress_bars()
    local, files = Path(path).expanduser(), _data_files(path)
    saved = (datasets.config.DATASET_STATE_JSON_FILENAME, datasets.config.DATASETDICT_JSON_FILENAME)
    try:
        if any((local / file).exists() for file in saved):
            loaded = datasets.load_from_disk(str(local))
        elif files:
            builder = BUILDERS[local.suffix]
            loaded = datasets.load_dataset(builder, data_files=files, split="train")
        else:
            loaded = datasets.load_dataset(str(local) if local.is_dir() else path, name)
    except (ConnectionError, HTTPError) as error:
        reason = " ".join(str(error).split())
        raise InputError(
            f"cannot reach dataset {path}: {reason}; prompts= takes a JSONL file instead"
        ) from error
    except IndexError as error:  # of `load_from_disk`, where no rows were saved
        raise InputError(f"{path} holds no prompts") from error
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        vague = isinstance(error, datasets.exceptions.DatasetGenerationError)
        reason = " ".join(str(error.__cause__ if vague else error).split())
        raise InputError(f"cannot load dataset {path}: {reason}") from error
    if not isinstance(loaded, datasets.DatasetDict):
        return loaded
    if split not in loaded:
        raise InputError(f"{path} has no split {split}; there are {', '.join(loaded)}")
    return loaded[split]


def _order(rows: int, seed: int | None) -> list[int]:
    """The rows as `dataset.shuffle(seed=seed)` would have them, which does not say where from."""
    if seed is None:
        return list(range(rows))
    from datasets import Dataset

    return list(Dataset.from_dict({"row": range(rows)}).shuffle(seed=seed)["row"])


def _turns_of(row: dict[str, Any], turns: str | Sequence[str], join: str) -> tuple[Any, ...]:
    """What a row holds for turns, which need not be text; nothing if it has another form."""
    if not isinstance(turns, str):
        parts = [row[column] for column in turns if row[column]]
        return (join.join(parts),) if all(isinstance(part, str) for part in parts) else ()
    value = row[turns]
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list):
        return ()
    if all(isinstance(message, dict) for message in value):
        return tuple(m.get("content") for m in value if m.get("role") == "user")
    return tuple(value)


def _fill(template: str, prompt: Prompt) -> Prompt:
    first, *others = prompt.turns
    return replace(prompt, turns=(template.replace("{turn}", first), *others))
