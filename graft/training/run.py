"""What every training run needs beside its module: its log, its best result so far, and a state to
resume from.

Lightning's own checkpoint is written over its predecessor; here the new one appears whole beside it
and takes its name, so a kill or a full disk leaves the last good state.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only

from graft.core.errors import InputError
from graft.core.runlog import RunLog

LAST = "last.ckpt"


@dataclass(frozen=True)
class RunFacts:
    """What a model card says of the run that made the model."""

    target: str
    config: Mapping[str, Any]
    git: str
    command: str
    steps: int  # of the optimiser
    batches: int  # over all devices
    seconds: float
    rows: Sequence[Mapping[str, Any]]  # of the log


def adamw(
    module: torch.nn.Module,
    *,
    steps: int,
    lr: float,
    weight_decay: float,
    warmup: float,
    **options: Any,
) -> Any:
    """AdamW under a linear rise over a `warmup` share of the steps and a cosine to zero.

    As Lightning wants it; vectors and scalars do not decay.
    """
    groups = [
        {"params": [p for p in module.parameters() if p.dim() > 1], "weight_decay": weight_decay},
        {"params": [p for p in module.parameters() if p.dim() <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=lr, **options)
    rising = max(1, round(warmup * steps))

    def scale(step: int) -> float:
        if step < rising:
            return (step + 1) / rising
        return 0.5 * (1 + math.cos(math.pi * (step - rising) / max(1, steps - rising)))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, scale)
    return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class RunLogger(Logger):
    """Lightning's metrics into a `RunLog`, which the first rank alone has."""

    def __init__(self, log: RunLog | None) -> None:
        super().__init__()
        self._log = log

    @property
    def name(self) -> str:
        return "graft"

    @property
    def version(self) -> str:
        return ""

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        if self._log is not None:
            self._log.log({"step": step, **metrics})

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        """run.json holds the whole config."""


class KeepBest(L.Callback):
    """Call `save` whenever a validation is the best so far, so that what was learned is at hand."""

    def __init__(self, monitor: str, save: Callable[[], None]) -> None:
        self._monitor, self._save = monitor, save
        self.score = -math.inf

    def state_dict(self) -> dict[str, float]:
        return {"score": self.score}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.score = state["score"]

    def on_validation_end(self, trainer: L.Trainer, _: Any) -> None:
        score = float(trainer.callback_metrics[self._monitor])
        if score > self.score:
            self.score = score
            if trainer.is_global_zero:
                self._save()


class KeepLast(L.Callback):
    """Save the whole training state every `every` optimiser steps, and count the time spent.

    Where a validation follows a step, the state is saved after it: Lightning would not make it up.
    """

    def __init__(self, folder: Path, every: int) -> None:
        self._path, self._every = folder / LAST, every
        self._saved = 0  # step of the last save
        self._earlier = 0.0  # seconds of the sessions before this one
        self._started = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Of training, over all sessions of the run."""
        return self._earlier + time.perf_counter() - self._started

    def state_dict(self) -> dict[str, float]:
        return {"seconds": self.seconds}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self._earlier = state["seconds"]

    def on_train_start(self, trainer: L.Trainer, _: Any) -> None:
        self._saved = trainer.global_step
        self._started = time.perf_counter()

    def on_train_batch_end(
        self, trainer: L.Trainer, _module: Any, _outputs: Any, _batch: Any, index: int
    ) -> None:
        if (index + 1) % int(trainer.val_check_batch or 1) != 0:
            self._save_if_due(trainer)

    def on_validation_end(self, trainer: L.Trainer, _: Any) -> None:
        self._save_if_due(trainer)

    def _save_if_due(self, trainer: L.Trainer) -> None:
        step = trainer.global_step
        due = step // self._every > self._saved // self._every or step == trainer.max_steps
        if due and step != self._saved:
            self.save(trainer)

    def save(self, trainer: L.Trainer) -> None:
        """Raises InputError when the disk is full; the previous state is still there then."""
        partial = self._path.with_name(LAST + ".partial")
        try:
            trainer.save_checkpoint(partial)
            if trainer.is_global_zero:
                partial.replace(self._path)
        except (OSError, RuntimeError) as error:  # torch words a failed write as a RuntimeError
            partial.unlink(missing_ok=True)
            if isinstance(error, RuntimeError) and "write" not in str(error):
                raise
            reason = str(error).strip().splitlines()[0]
            kept = "the previous one is intact" if self._path.exists() else "none was saved before"
            raise InputError(
                f"cannot save the training state in {self._path.parent} ({reason}); {kept}: make "
                "room and run the same command again"
            ) from error
        self._saved = trainer.global_step
