"""What every training run needs beside its module: its log, and a state to resume from.

Lightning's own checkpoint is written over its predecessor; here the new one appears whole beside it
and takes its name, so a kill or a full disk leaves the last good state.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only

from graft.core.errors import InputError
from graft.core.runlog import RunLog

LAST = "last.ckpt"


class RunLogger(Logger):
    """Lightning's metrics into a `RunLog`."""

    def __init__(self, log: RunLog) -> None:
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
        self._log.log({"step": step, **metrics})

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        """run.json holds the whole config."""


class KeepLast(L.Callback):
    """Save the whole training state every `every` optimiser steps, and when interrupted."""

    def __init__(self, folder: Path, every: int) -> None:
        self._path, self._every, self._saved = folder / LAST, every, 0

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        step = trainer.global_step
        if step > self._saved and (step % self._every == 0 or step == trainer.max_steps):
            self.save(trainer)

    def save(self, trainer: L.Trainer) -> None:
        """Raises InputError when the disk is full; the previous state is still there then."""
        partial = self._path.with_name(LAST + ".partial")
        try:
            trainer.save_checkpoint(partial)
            if trainer.is_global_zero:
                partial.replace(self._path)
        except (OSError, RuntimeError) as error:
            partial.unlink(missing_ok=True)
            reason = str(error).strip().splitlines()[0]
            kept = "the previous one is intact" if self._path.exists() else "none was saved before"
            raise InputError(
                f"cannot save the training state in {self._path.parent} ({reason}); {kept}: make "
                "room and run the same command again"
            ) from error
        self._saved = trainer.global_step
