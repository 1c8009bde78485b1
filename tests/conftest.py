"""Fixtures: composed configs, tiny targets of every family, the prepared default target."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import launch  # sets GRAFT_ROOT, which conf/paths needs
import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

from graft.drafters.dflash import untrained
from graft.scorer import checkpoint
from graft.scorer.checkpoint import EdgeScorer
from graft.targets import hf, tiny

# What tests collect is mapped through the cache of `datasets`, which nobody has imported yet: not
# the user's.
CACHE = tempfile.TemporaryDirectory(prefix="graft-tests-")
os.environ["HF_DATASETS_CACHE"] = CACHE.name

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


@pytest.fixture(scope="session")
def default_folder() -> Path:
    folder = launch.ROOT / "data/targets/smollm2-135m-instruct"
    assert (folder / "origin.json").exists(), "run `make setup` first"
    return folder
