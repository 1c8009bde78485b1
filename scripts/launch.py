"""What every stage script shares: compose the config, run the stage, turn bad input into one line
and exit code 2.

A traceback from a script is a bug of ours; set GRAFT_DEBUG=1 to see one for bad input too.
"""

from __future__ import annotations

import errno
import inspect
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
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
import torch
from hydra.errors import HydraException, InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig
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

from graft.budgets.cost import CostTable
from graft.core.errors import InputError
from graft.core.runlog import cpu_name
from graft.core.types import Generation
from graft.data.prompts import Prompt, apply_templates, check_keys, read_prompts
from graft.scorer.checkpoint import EdgeScorer

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


def method_of(method: DictConfig) -> partial[Generation]:
    """A method's decode function, before any model is loaded, so that a wrong key costs no time."""
    decode: partial[Generation] = instantiate(method)
    try:
        inspect.signature(decode.func).bind_partial(**decode.keywords)
    except TypeError as error:
        raise InputError(f"method: {error}") from error
    return decode


def bind(decode: partial[Generation], *, target: Any, drafter: Any | None) -> partial[Generation]:
    """Give a decode function its models; plain decoding takes no drafter.

    Raises InputError for a tree builder whose scorer was trained for other models, and for a budget
    policy whose constants were fitted for others, or on another machine.
    """
    if (scorer := scorer_of(decode)) is not None and drafter is not None:
        scorer.check_fits(target.fingerprint, drafter.fingerprint)
        scorer.to(target.device)
    if (check := getattr(decode.keywords.get("budget"), "check_fits", None)) is not None:
        check(setting_of(decode, target, drafter))
    return partial(decode, target=target, **({"drafter": drafter} if drafter else {}))


def scorer_of(decode: partial[Generation]) -> EdgeScorer | None:
    """The edge scorer that a method's builder asks, if it asks one."""
    return getattr(decode.keywords.get("builder"), "scorer", None)


def check_collected(decode: partial[Generation], made_by: Mapping[str, Any]) -> None:
    """Refuse a method that was made for other models than a collection shows (InputError)."""
    found = models_of(made_by)
    if (scorer := scorer_of(decode)) is not None:
        scorer.check_fits(found["target"], found["drafter"])
    if (check := getattr(decode.keywords["budget"], "check_fits", None)) is not None:
        check(found | {"builder": builder_of(decode)})


def models_of(made_by: Mapping[str, Any]) -> dict[str, Any]:
    """The models that a collection shows, by fingerprint, and their dtype."""
    models = {key: made_by[key]["fingerprint"] for key in ("target", "drafter")}
    return models | {"dtype": made_by["settings"]["dtype"]}


def cost_of(decode: partial[Generation]) -> CostTable | None:
    """The cost table that a method's budget policy weighs with, if it does."""
    return getattr(decode.keywords.get("budget"), "cost", None)


def builder_of(decode: partial[Generation]) -> str:
    """What tells a method's tree builder from others: its class, settings and scorer."""
    builder = decode.keywords["builder"]
    settings: dict[str, Any]
    settings = {k.strip("_"): v for k, v in vars(builder).items() if isinstance(v, int | float)}
    if (scorer := scorer_of(decode)) is not None:
        settings["scorer"] = scorer.fingerprint
    return f"{type(builder).__name__}({', '.join(f'{k}={v}' for k, v in settings.items())})"


def setting_of(decode: partial[Generation], target: Any, drafter: Any) -> dict[str, Any]:
    """What the costs of a method's rounds depend on: models, builder, dtype and machine."""
    return machine_of(target, drafter) | {"builder": builder_of(decode)}


def machine_of(target: Any, drafter: Any) -> dict[str, Any]:
    """Models, dtype and machine, as they tell measurements apart."""
    cuda = target.device.type == "cuda"
    return {
        "target": target.fingerprint,
        "drafter": drafter.fingerprint,
        "dtype": str(target.dtype).removeprefix("torch."),
        "device": torch.cuda.get_device_name(target.device) if cuda else cpu_name(),
        "threads": torch.get_num_threads(),
    }


def drafts(method: DictConfig) -> bool:
    """Whether a method needs a drafter."""
    return "builder" in method


def describe(error: BaseException | None) -> str | None:
    """One line for an error that the user can mend, None for one of ours."""
    if isinstance(error, InputError):
        return " ".join(str(error).split())
    if isinstance(error, OSError) and error.errno in DISK and error.filename:
        return f"{error.filename}: {error.strerror}"
    if isinstance(error, OSError) and error.errno in DISK:
        return f"cannot write: {error.strerror}; what was written before is intact"
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
