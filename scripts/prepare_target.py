"""Fetch and convert the default target. Part of `make setup`; does nothing when it is there.

python scripts/prepare_target.py
"""

from __future__ import annotations

from pathlib import Path

from launch import stage
from omegaconf import DictConfig

from graft.targets import smollm2


@stage("prepare_target")
def main(cfg: DictConfig) -> None:
    smollm2.prepare(Path(cfg.folder))


if __name__ == "__main__":
    main()
