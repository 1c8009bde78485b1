"""Methods as configs describe them: their decode functions, what these need, and what they fit."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig

from graft.budgets.cost import CostTable
from graft.core.errors import InputError
from graft.core.runlog import cpu_name
from graft.core.types import Generation
from graft.scorer.checkpoint import EdgeScorer


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


def versions_of(method: Mapping[str, Any]) -> dict[str, str]:
    """Of packages that only this method runs on, as its module tells them."""
    module = method["_target_"].rpartition(".")[0]
    return getattr(sys.modules[module], "versions", dict)()


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
