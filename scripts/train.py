"""Train an edge scorer on collected data (TDES), or a drafter on its target's own responses.

    python train.py
    python train.py scorer=r4 name=mlp data.collected=[data/collected/a,data/collected/b]
    python train.py +experiment=qwen3_8b
    python train.py +experiment=train_drafter_smollm2 data.responses=[data/responses/default]
    python train.py +experiment=train_drafter_qwen3_8b data.responses=[...] trainer.devices=8

Interrupt it at any time: the same command goes on from the last saved state. The run's state and
log lie in outputs/train/<name>; data/scorers/<name> (data/drafters/<name>) always holds the best
state so far, as conf/tree/tdes.yaml (conf/drafter/dflash.yaml) takes it.
"""

from __future__ import annotations

import ctypes
import json
import logging
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning as L
from hydra.utils import instantiate
from launch import open_log, stage
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.utilities import rank_zero_only
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from graft.core.errors import InputError
from graft.core.runlog import revision
from graft.eval.plots import draw_training
from graft.training.run import LAST, KeepBest, KeepLast, RunFacts, RunLogger

# A run is resumed under the same ones.
SETTINGS = ("target", "data", "model", "trainer", "seed", "texts")


@stage("train")
def main(cfg: DictConfig) -> None:
    quiet()
    console = Console(highlight=False)
    config: Any = OmegaConf.to_container(cfg, resolve=True)
    folder, out = Path(cfg.run_folder), Path(cfg.out)
    folder.mkdir(parents=True, exist_ok=True)
    keep_freed_memory()
    L.seed_everything(cfg.seed, verbose=False)
    target = instantiate(cfg.target)
    data = instantiate(cfg.data, target=target)
    config["texts"] = data.digest
    check_resumable(folder, config)
    model = instantiate(cfg.model, target=target, data=data)
    model.check_replaceable(out)
    if (
        cfg.trainer.max_steps
        < cfg.trainer.val_check_interval // cfg.trainer.accumulate_grad_batches
    ):
        raise InputError(
            f"trainer.max_steps={cfg.trainer.max_steps} ends before the first validation, so no "
            "validation would choose a state; lower trainer.val_check_interval"
        )
    if cfg.monitor not in model.monitors:
        known = ", ".join(model.monitors)
        raise InputError(f"monitor={cfg.monitor} is not validated; choose from {known}")
    console.print(
        f"{target.name}: {data.describe()}; state in {folder}", style="dim", soft_wrap=True
    )
    first = getattr(rank_zero_only, "rank", 0) == 0
    log = open_log(cfg, folder, texts=data.digest) if first else None
    if log is not None:
        log.rows()  # cuts the torn line that a killed run may have left
    last = KeepLast(folder, cfg.save_every)

    def facts() -> RunFacts:
        batches = trainer.global_step * trainer.accumulate_grad_batches * trainer.world_size
        return RunFacts(
            target=cfg.target.get("model", target.name),
            config=config,
            git=revision(),
            command=" ".join(["python train.py", *sys.argv[1:]]),
            steps=trainer.global_step,
            batches=batches,
            seconds=last.seconds,
            rows=log.rows() if log else [],
        )

    best = KeepBest(cfg.monitor, lambda: model.write(out, facts()))
    stop = EarlyStopping(cfg.monitor, mode="max", patience=cfg.patience)
    trainer = instantiate(
        cfg.trainer,
        accelerator="gpu" if target.device.type == "cuda" else "cpu",
        logger=RunLogger(log),
        callbacks=[stop, best, last],  # the state that is kept holds what the others decided
        default_root_dir=folder,
        enable_checkpointing=False,
    )
    state = folder / LAST
    trainer.fit(model, data, ckpt_path=str(state) if state.exists() else None, weights_only=False)
    if log is not None:
        if not out.exists():
            raise InputError(f"{folder} holds a finished run whose {out} is gone; delete it")
        model.finish(out, facts())
        if (trained := model.trained(out)) is not None:
            draw_training(trained).savefig(out / "training.png")
            log.pictures([out / "training.png"])
        log.artifact("scorer" if trained is not None else "drafter", out)
        log.close()
        console.print(f"{out} holds the best state ({cfg.monitor} {best.score:.3f})")


def check_resumable(folder: Path, config: dict[str, Any]) -> None:
    """Refuse to go on with other settings or texts than a run began with (InputError)."""
    if not (folder / LAST).exists():
        return
    before = json.loads((folder / "run.json").read_text())["config"]
    for key in SETTINGS:
        if before.get(key) != config[key]:
            raise InputError(
                f"{folder} holds a run with another {key}; choose a new name= or delete the folder"
            )


def keep_freed_memory() -> None:
    """Let glibc keep what training frees: fresh pages cost a CPU a tenth of its time otherwise."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD: give nothing back
        mallopt(-4, 0)  # M_MMAP_MAX: no mappings that would go back at once


def quiet() -> None:
    """Lightning's advice about loggers, workers and its own products is not about this run."""
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    ours = (".*transfer_batch_to_device.*", ".*smaller than the logging interval.*")
    for message in (
        *ours,
        ".*does not have many workers.*",
        ".*srun.*",
        ".*LeafSpec.*",
        ".*is not an.*",
    ):
        warnings.filterwarnings("ignore", message)


if __name__ == "__main__":
    main()
