"""What every stage script shares: compose the config, run the stage, turn bad input into one line
and exit code 2.

A traceback from a script is a bug of ours; set GRAFT_DEBUG=1 to see one for bad input too.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

DISK = {  # what a user's disk or permissions may answer
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS),
    *(errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EEXIST, errno.ENOENT),
}
HYDRA_HINT = ", set env var HYDRA_FULL_ERROR=1 to see chained exception."
ROOT = Path(__file__).resolve().parents[1]
CONF = ROOT / "conf"
WIDTH = 120  # columns that a table of results needs, also where the output is no terminal
os.environ.setdefault("GRAFT_ROOT", str(ROOT))
os.environ["HYDRA_FULL_ERROR"] = "1"  # let errors reach `stage`, which words them
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("DATASETS_VERBOSITY", "critical")  # it logs errors before it raises them

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from transformers import AutoTokenizer

from graft.core.errors import InputError, is_out_of_memory
from graft.core.runlog import RunLog
from graft.data.prompts import Prompt, apply_templates, check_keys, read_prompts

logging.getLogger("huggingface_hub").propagate = False  # it has a handler of its own


def stage(
    config_name: str, *, literal: Sequence[str] = ()
) -> Callable[[Callable[[DictConfig], None]], Callable]:
    """Decorate a stage's main function; values of `literal` keys are taken as typed."""

    def decorate(story: Callable[[DictConfig], None]) -> Callable[[], None]:
        def main() -> None:
            # Schedulers end jobs with SIGTERM; shells start background jobs deaf to SIGINT.
            signal.signal(signal.SIGTERM, signal.default_int_handler)
            sys.argv[1:] = [quote(argument, literal) for argument in sys.argv[1:]]
            if {"--help", "-h"} & set(sys.argv):
                print(sys.modules[story.__module__].__doc__)
            failures: list[Exception] = []  # kept from Hydra, which would word them its own way

            def run(cfg: DictConfig) -> None:
                try:
                    story(cfg)
                except Exception as error:
                    failures.append(error)

            try:
                launch = hydra.main(
                    version_base="1.3", config_path=str(CONF), config_name=config_name
                )
                launch(run)()
                if failures:
                    raise failures[0]
            except KeyboardInterrupt:
                sys.exit(130)
            except Exception as error:
                message = describe(error)
                if message is None or os.environ.get("GRAFT_DEBUG"):
                    raise
                print(f"error: {message}", file=sys.stderr)
                sys.exit(2)

        return main

    return decorate


def progress_bar(console: Console, what: str, note: str = "") -> Progress:
    """A bar with count, elapsed time and ETA; `note` is a rich template of task fields."""
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    return Progress(what, *columns, TextColumn(note), console=console)


def table(headings: Sequence[str], lines: Iterable[Sequence[str]]) -> Table:
    """Plain columns: the first to the left, numbers to the right."""
    out = Table(box=None, pad_edge=False)
    for place, heading in enumerate(headings):
        out.add_column(heading, justify="right" if place else "left", no_wrap=True)
    for line in lines:
        out.add_row(*line)
    return out


def prompts_of(cfg: DictConfig) -> list[Prompt]:
    """The prompts of a stage on conf/prompted.yaml: the dataset's if one is chosen, else JSONL."""
    if cfg.get("dataset"):
        prompts = instantiate(cfg.dataset, limit=cfg.per_set, _convert_="all")
    else:
        prompts = apply_templates(read_prompts(Path(cfg.prompts), cfg.per_set), cfg.templates)
    check_keys(prompts)
    return prompts


def folders_of(value: Any) -> list[Path]:
    """One folder or a list of them."""
    return [Path(folder) for folder in ([value] if isinstance(value, str) else value or [])]


def open_log(cfg: DictConfig, folder: Path | None = None, **more: Any) -> RunLog:
    """The log of this run, in `folder` or in the one that Hydra made for it.

    `more` is what a run should be known by beside its config.
    """
    config: Any = OmegaConf.to_container(cfg, resolve=True)
    folder = folder or Path(HydraConfig.get().runtime.output_dir)
    return RunLog(folder, config | more, stage=cfg.stage, group=cfg.name, wandb=cfg.logger.wandb)


def part_of(cfg: DictConfig) -> tuple[int, int]:
    """Which part of how many `shard` names. Raises InputError."""
    part, _, parts = str(cfg.shard).partition("/")
    if not (part.isdigit() and parts.isdigit() and int(part) < int(parts)):
        raise InputError(f"shard must be i/n with 0 <= i < n (0/8 is the first of 8): {cfg.shard}")
    return int(part), int(parts)


def keep_tokenizer(tokenizer: Any, folder: Path) -> None:
    """In `folder`/tokenizer, so that what lies there can be read as text without the target."""
    place = folder / "tokenizer"
    if place.exists():
        return
    partial_place = place.with_name(f"{place.name}.{os.getpid()}.partial")
    tokenizer.save_pretrained(partial_place)
    try:
        partial_place.rename(place)
    except OSError:
        shutil.rmtree(partial_place)
        if not place.exists():  # else another process was faster
            raise


def tokenizer_of(folder: Path) -> Any:
    """The target's own, which lies beside rounds and results. Raises InputError."""
    place = folder / "tokenizer"
    if not place.is_dir():
        raise InputError(f"{place} is not there; the stage that wrote {folder} puts it there")
    try:
        return AutoTokenizer.from_pretrained(place)
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read the tokenizer in {place}: {error}") from error


def describe(error: BaseException | None) -> str | None:
    """One line for an error that the user can mend, None for one of ours."""
    if isinstance(error, InputError):
        return " ".join(str(error).split())
    if isinstance(error, OSError) and error.errno in DISK and error.filename:
        return f"{error.filename}: {error.strerror}"
    if isinstance(error, OSError) and error.errno in DISK:
        return f"cannot write: {error.strerror}; what was written before is intact"
    if error is not None and is_out_of_memory(error):
        return f"out of memory ({str(error).strip().splitlines()[0]}): fewer or smaller models"
    if isinstance(error, InstantiationException):
        cause = error.__cause__
        while isinstance(cause, InstantiationException):
            cause = cause.__cause__
        # A wrong key, type or `_target_` in the config; what a constructor raises beyond is ours.
        if isinstance(cause, TypeError | ImportError | None):
            return " ".join(str(error).replace(HYDRA_HINT, "").split())
        return describe(cause)
    if isinstance(error, HydraException | OmegaConfBaseException):
        details = f"{error} {error.__cause__ or ''}".split("Config search path")[0]
        return " ".join(details.split()) + " (--help lists the keys)"
    return None


def quote(argument: str, literal: Sequence[str]) -> str:
    """Quote `key=value` for Hydra if the key is literal: a prompt may hold commas and braces."""
    key, equals, value = argument.partition("=")
    if not equals or key not in literal or value == "null":
        return argument
    escaped = value.replace("\\", "\\\\").replace("'", "\\'").replace("${", "\\${")
    return f"{key}='{escaped}'"
