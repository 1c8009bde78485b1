"""Collect what a target and a drafter do on prompts: rounds of tree decoding, and dense anchors.

    python scripts/collect.py
    python scripts/collect.py prompts=path/to/prompts out=data/collected/mine max_new_tokens=200
    python scripts/collect.py what=[anchors] dataset=gsm8k per_set=128 hidden=null
    CUDA_VISIBLE_DEVICES=3 python scripts/collect.py +experiment=qwen3_8b shard=3/8  # GPU 3 of 8
    python scripts/collect.py -m shard=0/2,1/2              # one after the other, or by a launcher

OUT/rounds holds every round of real decoding: draft, tree, the target's logits, path, times.
OUT/anchors holds the target's own responses with a draft at every position: enough to decode them
again under any tree and budget without a model (scripts/replay.py). graft/data/rounds.py and
anchors.py say what the columns are. Kill it at any time: run again, it does what is missing.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
import zlib
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from hydra.utils import instantiate
from launch import keep_tokenizer, open_log, part_of, progress_bar, prompts_of, stage
from methods import bind, builder_of, method_of
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.progress import Progress

from graft.collect.anchors import collect_anchors
from graft.collect.asking import SAMPLING, Asker, Collected, Skipped
from graft.collect.rounds import collect_rounds
from graft.core.errors import InputError
from graft.core.runlog import provenance
from graft.data import anchors, rounds
from graft.data.collected import done, shard_of
from graft.data.shards import write_shard
from graft.decode.replay import Replay
from graft.drafters.dflash import DFlash

SCHEMAS = {"rounds": rounds.SCHEMA, "anchors": anchors.SCHEMA}
VERSIONS = {"rounds": rounds.VERSION, "anchors": anchors.VERSION}
# What a collection is made by: a folder holds one kind.
SETTINGS = {"rounds": ("method", "hist_window"), "anchors": ("hidden",)}


@stage("collect", literal=("prompts",))
def main(cfg: DictConfig) -> None:
    console = Console(highlight=False)
    products, part, parts = check(cfg)
    prompts = prompts_of(cfg)
    prompts.sort(key=lambda prompt: zlib.crc32(prompt.key.encode()))  # some of every set early on
    decode = method_of(cfg.method)
    replay = Replay.of(decode)
    target = instantiate(cfg.target)
    drafter = instantiate(cfg.drafter, target=target)
    if "anchors" in products and not isinstance(drafter, DFlash):
        raise InputError(
            "anchors need a DFlash drafter, which drafts all along a text in a few passes; with "
            f"{drafter.name} use what=[rounds]"
        )
    config: Any = OmegaConf.to_container(cfg, resolve=True)
    out = Path(cfg.out)
    built = {"builder": builder_of(decode)}
    made_by = {what: describe(what, config, target, drafter) | built for what in SCHEMAS}
    before = {what: done(out / what, made_by[what], strict=what in products) for what in SCHEMAS}
    missing = {what: before[what].missing(prompts[part::parts]) for what in products}
    keep_tokenizer(target.tokenizer, out)
    header = f"{target.name}, {target.dtype}; {drafter.name}; into {out}"
    console.print(header.replace("torch.", ""), style="dim", soft_wrap=True)

    sampling = {key: cfg[key] for key in SAMPLING}
    asker = Asker(target, sampling, cfg.max_prompt_tokens, cfg.seed, beyond=drafter.depth - 1)
    collectors = {
        "rounds": partial(
            collect_rounds,
            asker=asker,
            decode=bind(decode, target=target, drafter=drafter),
            hist_window=cfg.hist_window,
        ),
        "anchors": partial(
            collect_anchors,
            asker=asker,
            drafter=drafter,
            slots=cfg.slots,
            replay=replay,
            hidden=cfg.hidden,
        ),
    }
    log = open_log(cfg)
    for what in products:
        size, mine = cfg.shard_size[what], missing[what]
        tally = Tally(what, drafter.depth, sum(len(prompt.turns) for prompt in mine))
        with tally.progress(console):
            for first in range(0, len(mine), size):
                chunk = mine[first : first + size]
                options = {"on_step": tally.step} if what == "anchors" else {}
                found = list(map(tally.add, collectors[what](chunk, **options)))
                skipped = [dataclasses.asdict(one) for one in found if isinstance(one, Skipped)]
                rows = [row for one in found if isinstance(one, Collected) for row in one.rows]
                file = shard_of(out / what, chunk)
                says = {"skipped": skipped, "prompts": {p.key: p.digest for p in chunk}}
                write_shard(file, pa.Table.from_pylist(rows, SCHEMAS[what]), made_by[what] | says)
                tally.bytes += file.stat().st_size
                log.log(tally.row())
        console.print(tally.words(), soft_wrap=True)
        for file, skip in before[what].skipped[:3]:
            words = (
                f"left out earlier: {skip['prompt_id']} ({skip['reason']}); delete {file} to retry"
            )
            console.print(words, style="dim", soft_wrap=True)
    log.close()


def check(cfg: DictConfig) -> tuple[list[str], int, int]:
    """The products, and which part of how many this is. Raises InputError for nonsense."""
    products = [cfg.what] if isinstance(cfg.what, str) else list(cfg.what or [])
    if not products or set(products) - set(SCHEMAS):
        raise InputError(f"what={cfg.what}: choose rounds, anchors or [rounds,anchors]")
    if cfg.hidden not in (None, "int8", "float16"):
        raise InputError(f"hidden must be null, int8 or float16, not {cfg.hidden}")
    for key in ("shard_size.rounds", "shard_size.anchors", "hist_window", "slots"):
        number = OmegaConf.select(cfg, key)
        if not isinstance(number, int) or number < 1:
            raise InputError(f"{key} must be a number, at least 1, not {number}")
    if not isinstance(cfg.max_prompt_tokens, int | None):
        raise InputError(f"max_prompt_tokens must be a number or null, not {cfg.max_prompt_tokens}")
    return products, *part_of(cfg)


def describe(what: str, config: dict[str, Any], target: Any, drafter: Any) -> dict[str, Any]:
    """What makes a shard of this kind; collections are alike if the first half of it is."""
    settings = {key: config[key] for key in (*SAMPLING, "seed", *SETTINGS[what])}
    settings["dtype"] = str(target.dtype).removeprefix("torch.")
    return {
        "kind": what,
        "version": VERSIONS[what],
        "target": {"name": target.name, "fingerprint": target.fingerprint},
        "drafter": {"name": drafter.name, "fingerprint": drafter.fingerprint},
        "shape": {"D": drafter.depth, "K": drafter.candidates},
        "settings": settings,
        "config_hash": hashlib.sha256(json.dumps(config).encode()).hexdigest()[:12],
        **provenance(config),
    }


class Tally:
    """Running totals of one product over this run, and how they are shown."""

    def __init__(self, what: str, depth: int, turns: int) -> None:
        self._what, self._wanted = what, turns
        self._started = time.perf_counter()
        self._accepted = np.zeros(depth + 1, np.int64)  # rounds by accepted tokens
        self._skipped: list[Skipped] = []
        self._mats = self._model_seconds = 0.0
        self._turns = self._responses = self._tokens = self._decoded = 0
        self.bytes = 0

    def progress(self, console: Console) -> Progress:
        self._bar = progress_bar(console, self._what, "{task.fields[note]}")
        self._task = self._bar.add_task(self._what, total=self._wanted, note="")
        return self._bar

    def step(self, tokens: int) -> None:
        """So many tokens were decoded of responses that are not finished."""
        self._decoded += tokens
        self._show()

    def add(self, one: Collected | Skipped) -> Collected | Skipped:
        """Count it in, and hand it on."""
        self._turns += one.turns
        if isinstance(one, Skipped):
            self._skipped.append(one)
        else:
            self._responses += 1
            self._tokens += one.tokens
            self._model_seconds += one.seconds
            self._mats += sum(one.committed) / len(one.committed)
            accepted = np.array(one.committed) - 1
            self._accepted += np.bincount(accepted, minlength=len(self._accepted))
        self._show()
        return one

    def _show(self) -> None:
        rate = max(self._tokens, self._decoded) / self._seconds
        mat = f"MAT {self._mats / self._responses:.2f}, " if self._responses else ""
        self._bar.update(self._task, completed=self._turns, note=f"{mat}{rate:.0f} tokens/s")

    @property
    def _seconds(self) -> float:
        return time.perf_counter() - self._started

    def row(self) -> dict[str, float]:
        """For the log: acceptance_d is the share of rounds that accept d drafted tokens or more."""
        row: dict[str, float] = {
            "responses": self._responses,
            "skipped": len(self._skipped),
            "tokens": self._tokens,
            "tokens_per_second": self._tokens / self._seconds,
            "bytes": self.bytes,
        }
        if self._responses:
            row["mat"] = self._mats / self._responses
            reached = self._accepted[::-1].cumsum()[::-1] / self._accepted.sum()
            row |= {f"acceptance_{d}": float(reached[d]) for d in range(1, len(reached))}
        return {f"{self._what}/{key}": value for key, value in row.items()}

    def words(self) -> str:
        """What was made and at which price."""
        if not self._turns:
            return f"{self._what}: nothing to do, all its prompts are there"
        text = f"{self._what}: {self._responses} responses, {self._tokens} tokens"
        if self._responses:
            text += f", MAT {self._mats / self._responses:.2f}"
            text += f"; {1e3 * self._seconds / self._tokens:.2f} ms a token"
            if self._model_seconds:
                text += f", {self._seconds / self._model_seconds:.2f}x the time of decoding alone"
            entries = {"rounds": self._accepted.sum(), "anchors": self._tokens}[self._what]
            text += f"; {self.bytes / entries:.0f} bytes a "
            text += {"rounds": "round", "anchors": "position"}[self._what]
        for skip in self._skipped[:5]:
            text += f"\n  left out: {skip.prompt_id}, turn {skip.turn}: {skip.reason}"
        if len(self._skipped) > 5:
            text += f"\n  and {len(self._skipped) - 5} more"
        return text


if __name__ == "__main__":
    main()
