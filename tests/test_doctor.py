"""The doctor finds the shipped drafter healthy and names each planted fault."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import diagnose_drafter
import pytest
import torch
from conftest import THREADS, composed
from hydra.utils import instantiate
from rich.console import Console

from graft.data.prompts import read_prompts
from graft.drafters.dflash import DFlash
from graft.drafters.dflash_checkpoint import load
from graft.drafters.dflash_net import rotary_embedding
from graft.eval.doctor import Doctor, Reading, cache_disagreement, diagnosis, readings

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def case(default_folder):
    """The default pair and a few of the target's answers."""
    torch.set_num_threads(THREADS)
    cfg = composed("diagnose_drafter", "per_set=5", "max_new_tokens=40")
    target = instantiate(cfg.target, passes="eager")  # planted parts are torch modules
    prompts = read_prompts(Path(cfg.prompts), cfg.per_set)
    answers = diagnose_drafter.answer(prompts, target, cfg, Console(quiet=True))
    yield cfg.drafter.checkpoint, target, [text for _, text in answers]
    torch.set_num_threads(1)


def examine(case, plant=lambda net: net, kind=DFlash) -> str:
    checkpoint, target, texts = case
    net = load(checkpoint)
    net = plant(net) or net
    drafter = kind(net, target, candidates=8, name="under test")
    doctor = Doctor(drafter.net, target, texts)
    # Of the mask rows two, for the sake of time.
    wanted = [r for r in readings(drafter.net, target)[1:] if r.mask_token in (None, 4, 40)]
    others = [doctor.measure(reading) for reading in wanted]
    disagreement = cache_disagreement(drafter, target, texts[:3])
    return diagnosis(doctor.measure(Reading()), others, disagreement)


def reconfigure(**changes):
    def plant(net):
        net.config = dataclasses.replace(net.config, **changes)

    return plant


def test_the_shipped_drafter_is_healthy(case):
    assert examine(case).startswith("healthy")


def test_a_wrong_mask_row_is_named(case):
    words = examine(case, reconfigure(mask_token_id=40))
    # Which one it was cannot be told: the control tokens that text never uses have alike rows.
    assert words.startswith("mask row")


def test_a_wrong_rope_base_is_named(case):
    def plant(net):
        reconfigure(rope_theta=100.0)(net)
        net.rope = rotary_embedding(net.config)

    words = examine(case, plant)
    # Bases from 1e5 up read this short context alike.
    assert words.startswith("RoPE")


def test_shifted_labels_are_named(case):
    class Shifted(torch.nn.Module):
        """The final norm of a drafter whose slot k predicts position root + k + 1."""

        def __init__(self, norm):
            super().__init__()
            self.norm, self.weight = norm, norm.weight

        def forward(self, x):
            size = 8
            blocks = self.norm(x).unflatten(1, (-1, size))
            return blocks[:, :, [*range(1, size), size - 1]].flatten(1, 2)

    def plant(net):
        net.norm = Shifted(net.norm)

    assert examine(case, plant).startswith("shifted labels: slot k predicts position root + k +1")


def test_a_drafter_of_another_target_is_not_called_healthy(case):
    def plant(net):
        torch.manual_seed(0)
        for parameter in net.parameters():
            parameter.data = torch.randn_like(parameter) * 0.05

    assert examine(case, plant).startswith("it accepts next to nothing")


def test_an_uncropped_draft_cache_is_named(case):
    class Uncropped(DFlash):
        def propose(self, root, taps):
            draft = super().propose(root, taps)
            self._cache.length += self.config.block_size  # the block stays
            return draft

    assert examine(case, kind=Uncropped).startswith("draft cache")
