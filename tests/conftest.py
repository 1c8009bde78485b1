"""Fixtures: composed configs, tiny targets of every family and what goes with them, the prepared
default target.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import launch  # sets GRAFT_ROOT, which conf/paths needs
import methods
import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

from graft.budgets.constants import Constants
from graft.budgets.cost import CostTable
from graft.budgets.gain import Arrival, Lomax, Power
from graft.budgets.reach import Reach
from graft.decode import loop
from graft.drafters.dflash import untrained
from graft.scorer import checkpoint
from graft.scorer.checkpoint import EdgeScorer
from graft.targets import hf, tiny
from graft.trees.tdes import TDES

# What tests collect is mapped through the cache of `datasets`, which nobody has imported yet: not
# the user's.
CACHE = tempfile.TemporaryDirectory(prefix="graft-tests-")
os.environ["HF_DATASETS_CACHE"] = CACHE.name
os.environ["WANDB_MODE"] = "disabled"  # a second a run; test_scripts.py looks at it once

# Tiny models are faster on one thread, and on a busy machine many times so.
THREADS = torch.get_num_threads()
torch.set_num_threads(1)

FAMILIES = ("llama", "qwen3", "qwen3_moe")
PROMPT = list(b"What is a tree of tokens?")  # bytes are tokens of the tiny targets


def composed(stage: str, *overrides: str) -> DictConfig:
    """A stage's config as its script would see it."""
    with initialize_config_dir(str(launch.CONF), version_base="1.3"):
        return compose(stage, list(overrides))


def group(name: str) -> list[str]:
    """The options of a config group, as found on disk."""
    return sorted(path.stem for path in (launch.CONF / name).glob("*.yaml"))


@pytest.fixture(params=FAMILIES)
def family(request) -> str:
    return request.param


@pytest.fixture
def target(family: str) -> hf.HFTarget:
    return tiny.load(family, device="cpu")


@pytest.fixture(scope="session")
def tiny_scorer(tmp_path_factory) -> str:
    """A scorer with random weights for the tiny target and drafter, D = 7 and K = 8."""
    target = tiny.load(device="cpu")
    drafter = untrained(target, layers=2, block_size=8, mask_token_id=258, taps=1)
    folder = tmp_path_factory.mktemp("scorer") / "random"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = {"term": "mlp", "mode": "normalised", "depth": 7, "hidden_size": 64}
        net = checkpoint.build({**model, "width": 8, "projection": 8, "dropout": 0.0})
        torch.nn.init.normal_(net.term.out.weight, std=2.0)
        tables = net.tables(torch.randn(target.vocab_size, 64))
    config = {"model": {**model, "width": 8, "projection": 8, "dropout": 0.0}}
    config |= {"target": target.fingerprint, "drafter": drafter.fingerprint}
    config |= {"depth": 7, "candidates": 8}
    EdgeScorer(net, tables, config).save(folder, {})
    return str(folder)


def costs_of(
    rounds: Any, nodes: Sequence[int], contexts: Sequence[int] = (1, 1024), **made_by: Any
) -> CostTable:
    """A table whose rounds take so many seconds, [S] or [C, S]: nine tenths of them the target's
    pass, 5 % each the drafter's and the host's at the smallest size, and nothing else known.
    """
    rounds = np.broadcast_to(np.asarray(rounds, float), (len(contexts), len(nodes)))
    part = 0.05 * rounds[:, :1]
    return CostTable(
        contexts=np.array(contexts),
        nodes=np.array(nodes),
        ar=0.9 * rounds[:, 0],
        draft=part[:, 0],
        verify=rounds - 2 * part,
        host=np.repeat(part, len(nodes), axis=1),
        spread=np.zeros(rounds.shape),
        made_by=made_by,
    )


def planted(cost: CostTable, *, depth: int = 7, conf: float = 0.5, slope: float = 0.8) -> Constants:
    """Constants out of the hat; rounds earn more the more confident they are, by `slope`."""
    nodes, plain = cost.nodes, {"center": [np.log(conf), 0.0, 1.0], "scale": [0.3, 0.5, 1.0]}
    lomax = {"log_a": 0.7, "log_a_conf": slope, "log_a_degen": 0.0, "log_a_hist": 0.1}
    lomax |= {"log_b": 1.0, "log_c": -0.5, "chain": 0.02}
    alphas = {f"alpha_{n}": -0.3 - 1.1 * float(np.log(n)) for n in nodes.tolist()}
    slopes = {f"{part}_{name}": 0.0 for part in ("gamma", "kappa") for name in ("degen", "hist")}
    slopes = {"gamma_conf": slope / 2, "kappa_conf": slope / 10} | slopes
    order = [f"{part}_{name}" for part in ("gamma", "kappa") for name in ("conf", "degen", "hist")]
    arrival = alphas | {name: slopes[name] for name in order}
    gains = {
        "paper": Power({"a": 1.5, "beta": 0.5}, {"a": 0.1}),
        "power": Power({"a": 1.8, "beta": 0.15}, {"a": 0.1, "beta": 0.01}),
        "lomax": Lomax(depth, **plain, numbers=lomax, errors=dict.fromkeys(lomax, 0.01)),
        "arrival": Arrival(
            depth, **plain, ends=nodes.tolist(), numbers=arrival, errors=dict.fromkeys(arrival, 0.1)
        ),
    }
    return Constants(
        cost=cost,
        mean=gains["lomax"].tokens(nodes, np.array([conf, 0.0, 1.0])),
        gains=gains,
        fitted="lomax",
        reach=Reach(np.linspace(0.2, -0.4, depth).tolist(), 0.9, 0.8),
        window=8,
        best={},
        found={},
        made_by=cost.made_by,
    )


@pytest.fixture(scope="session")
def tiny_constants(tmp_path_factory, tiny_scorer) -> str:
    """Constants for the tiny target, its drafter and the random scorer, on this machine."""
    target = tiny.load()
    drafter = untrained(target, layers=2, block_size=8, mask_token_id=258, taps=1)
    decode = partial(loop.generate, builder=TDES(checkpoint.load(tiny_scorer)))
    nodes = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64]
    made_by: Mapping[str, Any] = methods.setting_of(decode, target, drafter)
    cost = costs_of(1e-3 * (10 + 0.3 * np.array(nodes)), nodes, **made_by)
    folder = tmp_path_factory.mktemp("constants")
    planted(cost).save(folder)
    return str(folder)


@pytest.fixture(scope="session")
def default_folder() -> Path:
    folder = launch.ROOT / "data/targets/smollm2-135m-instruct"
    assert (folder / "origin.json").exists(), "run `make setup` first"
    return folder
