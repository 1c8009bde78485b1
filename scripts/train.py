"""Train a drafter on its target's own responses.

    python train.py +experiment=train_drafter_smollm2 data.responses=[data/responses/default]
    python train.py +experiment=train_drafter_qwen3_8b data.responses=[...] trainer.devices=8
    python train.py name=mine model.layers=2 model.weighting=dpace trainer.max_steps=2000

Interrupt it at any time: the same command goes on from the last saved state. The run's state and
log lie in outputs/train/<name>; data/drafters/<name> always holds the best drafter so far, as
`drafter=dflash drafter.checkpoint=data/drafters/<name>` takes it.
"""

from __future__ import annotations

import copy
import ctypes
import json
import logging
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import torch
from hydra.utils import instantiate
from launch import stage
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.utilities import rank_zero_only
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from graft.core.errors import InputError
from graft.core.linear import cast_parameters
from graft.core.runlog import RunLog, revision, write_atomically
from graft.drafters import dflash_checkpoint
from graft.training.model_card import model_card
from graft.training.run import LAST, KeepBest, KeepLast, RunLogger

# A run is resumed under the same ones.
SETTINGS = ("target", "data", "model", "trainer", "seed", "responses")


@stage("train")
def main(cfg: DictConfig) -> None:
    quiet()
    console = Console(highlight=False)
    config: Any = OmegaConf.to_container(cfg, resolve=True)
    folder, out = Path(cfg.run_folder), Path(cfg.out)
    dflash_checkpoint.check_replaceable(out)
    folder.mkdir(parents=True, exist_ok=True)
    keep_freed_memory()
    L.seed_everything(cfg.seed, verbose=False)
    target = instantiate(cfg.target)
    data = instantiate(cfg.data, target=target)
    config["responses"] = data.digest
    check_resumable(folder, config)
    model = instantiate(cfg.model, target=target, data=data)
    check_monitor(cfg, model, data)
    tokens = data.answer_tokens()
    console.print(
        f"{target.name}: {len(data.training)} responses, {sum(tokens.values())} answer tokens; "
        f"{len(data.validation)} held out; state in {folder}".replace("torch.", ""),
        style="dim",
        soft_wrap=True,
    )
    first = getattr(rank_zero_only, "rank", 0) == 0
    log = RunLog(folder, config, stage=cfg.stage, wandb=cfg.logger.wandb) if first else None
    if log is not None:
        log.rows()  # cuts the torn line that a killed run may have left
    last = KeepLast(folder, cfg.save_every)

    def card() -> str:
        visits = trainer.global_step * trainer.accumulate_grad_batches * trainer.world_size
        return model_card(
            name=out.name,
            target=cfg.target.get("model", target.name),
            net=model.net,
            config=config,
            texts=len(data.training),
            answer_tokens=tokens,
            visits=visits * cfg.data.batch_size,
            steps=trainer.global_step,
            seconds=last.seconds,
            log=log.rows() if log else [],
            git=revision(),
            command=" ".join(["python train.py", *sys.argv[1:]]),
        )

    def save() -> None:
        net = copy.deepcopy(model.net).cpu()
        cast_parameters(net, torch.device("cpu"), torch.bfloat16)
        dflash_checkpoint.save(net, out, {"README.md": card()})

    best = KeepBest(cfg.monitor, save)
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
        write_atomically(out / "README.md", card())  # the whole curve
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


def check_monitor(cfg: DictConfig, model: Any, data: Any) -> None:
    """Refuse what would be found out at the first validation, hours from now (InputError)."""
    known = [f"mat/{name}" for name in cfg.model.methods]
    if cfg.monitor not in known:
        raise InputError(f"monitor={cfg.monitor} is not validated; choose from {', '.join(known)}")
    size = model.net.config.block_size
    if all(len(text.tokens) - text.start <= size for text in data.validation):
        raise InputError(
            f"no held-out answer is longer than a block of {size}: nothing can be validated; raise "
            "data.held_out, or max_new_tokens when the responses are made"
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
    for message in (".*does not have many workers.*", ".*srun.*", ".*LeafSpec.*", ".*is not an.*"):
        warnings.filterwarnings("ignore", message)


if __name__ == "__main__":
    main()
