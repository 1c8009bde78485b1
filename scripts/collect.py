"""Collect what a target and a drafter do on prompts: rounds of tree decoding, and dense anchors.

    python scripts/collect.py
    python scripts/collect.py prompts=path/to/prompts out=data/collected/mine max_new_tokens=200
    python scripts/collect.py what=[anchors] dataset=gsm8k per_set=128 hidden=int8
    python scripts/collect.py +experiment=qwen3_8b shard=0/8        # one of eight GPUs or machines
    python scripts/collect.py -m shard=0/2,1/2                      # one after the other, by Hydra

OUT/rounds holds every round of real decoding: draft, tree, the target's logits, path, times.
OUT/anchors holds the target's own responses with a draft at every position: enough to decode them
again under any tree and budget without a model (scripts/replay.py). graft/data/rounds.py and
anchors.py say what the columns are. Kill it at any time: run again, it does what is missing.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import time
import zlib
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import pyarrow as pa
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from launch import bind, drafts, method_of, progress_bar, prompts_of, stage
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from graft.collect.anchors import collect_anchors
from graft.collect.asking import Asker, Collected, Skipped
from graft.collect.rounds import collect_rounds
from graft.core.errors import InputError
from graft.core.runlog import RunLog, provenance
from graft.data import anchors, rounds
from graft.data.collected import done, shard_of
from graft.data.shards import write_shard
from graft.decode.replay import Replay
from graft.drafters.dflash import DFlash

SCHEMAS = {"rounds": rounds.SCHEMA, "anchors": anchors.SCHEMA}
VERSIONS = {"rounds": rounds.VERSION, "anchors": anchors.VERSION}
SAMPLING = ("max_new_tokens", "temperature", "top_p", "top_k")
# What a collection is made by: a folder holds one kind.
SETTINGS = {"rounds": ("method", "hist_window"), "anchors": ("hidden",)}


@stage("collect", literal=("prompts",))
def main(cfg: DictConfig) -> None:
    console = Console(highlight=False)
    part, parts = check(cfg)
    prompts = prompts_of(cfg)
    prompts.sort(key=lambda prompt: zlib.crc32(prompt.key.encode()))  # some of every set early on
    decode = method_of(cfg.method)
    target = instantiate(cfg.target)
    drafter = instantiate(cfg.drafter, target=target)
    if "anchors" in cfg.what and not isinstance(drafter, DFlash):
        raise InputError(
            "anchors need a DFlash drafter, which drafts all along a text in a few passes; with "
            f"{drafter.name} use what=[rounds]"
        )
    asker = Asker(target, {key: cfg[key] for key in SAMPLING}, cfg.max_prompt_tokens, cfg.seed)
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
            replay=Replay.of(decode),
            hidden=cfg.hidden,
        ),
    }
    config: Any = OmegaConf.to_container(cfg, resolve=True)
    log = RunLog(
        Path(HydraConfig.get().runtime.output_dir), config, stage=cfg.stage, wandb=cfg.logger.wandb
    )
    header = f"{target.name}, {target.dtype}; {drafter.name}; into {cfg.out}"
    console.print(header.replace("torch.", ""), style="dim", soft_wrap=True)
    keep_tokenizer(target.tokenizer, Path(cfg.out) / "tokenizer")
    for what in cfg.what:
        folder = Path(cfg.out) / what
        made_by = describe(what, config, target, drafter)
        already = done(folder, made_by)
        chunks = [prompts[i : i + cfg.shard_size] for i in range(0, len(prompts), cfg.shard_size)]
        missing = [[p for p in chunk if p.key not in already] for chunk in chunks[part::parts]]
        tally = Tally(what, drafter.depth)
        turns = sum(len(prompt.turns) for chunk in missing for prompt in chunk)
        with progress_bar(console, what, "{task.fields[note]}") as progress:
            task = progress.add_task(what, total=turns, note="")
            for chunk in filter(None, missing):
                rows, skipped = [], []
                for one in collectors[what](chunk):
                    if isinstance(one, Skipped):
                        skipped.append(dataclasses.asdict(one))
                    else:
                        rows += one.rows
                    tally.add(one)
                    progress.update(task, completed=tally.turns, note=tally.note())
                file = shard_of(folder, [prompt.key for prompt in chunk])
                table = pa.Table.from_pylist(rows, SCHEMAS[what])
                write_shard(file, table, made_by | {"skipped": skipped})
                tally.bytes += file.stat().st_size
                log.log(tally.row())
        console.print(tally.words(), soft_wrap=True)
    log.close()


def check(cfg: DictConfig) -> tuple[int, int]:
    """This process's number and how many there are. Raises InputError for what makes no sense."""
    if unknown := set(cfg.what) - set(SCHEMAS):
        raise InputError(f"what={','.join(sorted(unknown))}: choose from rounds and anchors")
    if not cfg.what:
        raise InputError("what=[] collects nothing; choose from rounds and anchors")
    if cfg.hidden not in (None, "int8", "float16"):
        raise InputError(f"hidden must be null, int8 or float16, not {cfg.hidden}")
    for key in ("shard_size", "hist_window", "slots"):
        if cfg[key] < 1:
            raise InputError(f"{key} must be at least 1, not {cfg[key]}")
    if not drafts(cfg.method):
        raise InputError("method: plain decoding has no rounds; choose a method that drafts")
    part, _, parts = str(cfg.shard).partition("/")
    if not (part.isdigit() and parts.isdigit() and int(part) < int(parts)):
        raise InputError(f"shard must be i/n with 0 <= i < n (0/8 is the first of 8): {cfg.shard}")
    return int(part), int(parts)


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


def keep_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Beside the shards, so that they can be read as text without the target."""
    if folder.exists():
        return
    partial_folder = folder.with_name(f"{folder.name}.{os.getpid()}.partial")
    tokenizer.save_pretrained(partial_folder)
    try:
        partial_folder.rename(folder)
    except OSError:  # another process was faster
        shutil.rmtree(partial_folder)


class Tally:
    """Running totals of one product, over this run."""

    def __init__(self, what: str, depth: int) -> None:
        self._what, self._depth = what, depth
        self._started = time.perf_counter()
        self._mats: list[float] = []
        self._committed: list[int] = []
        self._skipped: list[Skipped] = []
        self._model_seconds = 0.0
        self.turns = self.tokens = self.bytes = 0

    def add(self, one: Collected | Skipped) -> None:
        self.turns += one.turns
        if isinstance(one, Skipped):
            self._skipped.append(one)
            return
        self.tokens += one.tokens
        self._model_seconds += one.seconds
        self._mats.append(mean(one.committed))
        self._committed += one.committed

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._started

    def note(self) -> str:
        if not self._mats:
            return f"{len(self._skipped)} left out"
        return f"MAT {mean(self._mats):.2f}, {self.tokens / self.seconds:.0f} tokens/s"

    def row(self) -> dict[str, float]:
        """For the log: acceptance_d is the share of rounds that accept d drafted tokens or more."""
        row: dict[str, float] = {
            "responses": len(self._mats),
            "skipped": len(self._skipped),
            "tokens": self.tokens,
            "tokens_per_second": self.tokens / self.seconds,
            "bytes": self.bytes,
        }
        if self._mats:
            row["mat"] = mean(self._mats)
            for depth in range(1, self._depth + 1):
                row[f"acceptance_{depth}"] = mean(n > depth for n in self._committed)
        return {f"{self._what}/{key}": value for key, value in row.items()}

    def words(self) -> str:
        """What was made and at which price."""
        if not self._mats and not self._skipped:
            return f"{self._what}: all there already"
        text = f"{self._what}: {len(self._mats)} responses, {self.tokens} tokens"
        if self._mats:
            text += f", MAT {mean(self._mats):.2f}"
            text += f"; {1e3 * self.seconds / self.tokens:.2f} ms a token"
            if self._model_seconds:
                text += f", {self.seconds / self._model_seconds:.2f}x the time of decoding alone"
            entries = {"rounds": len(self._committed), "anchors": self.tokens}[self._what]
            text += f"; {self.bytes / entries:.0f} bytes a "
            text += {"rounds": "round", "anchors": "position"}[self._what]
        for skip in self._skipped[:5]:
            text += f"\n  left out: {skip.prompt_id}, turn {skip.turn}: {skip.reason}"
        if len(self._skipped) > 5:
            text += f"\n  and {len(self._skipped) - 5} more"
        return text


if __name__ == "__main__":
    main()
