"""What a run leaves behind: what made it (run.json), its numbers (metrics.jsonl), and W&B if asked.

Files are written whole or appended a line at a time, so an interrupted run leaves nothing
half-written.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import torch

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("torch", "transformers", "numpy", "numba", "hydra-core")


def provenance(config: Mapping[str, Any]) -> dict[str, Any]:
    """What made a result: resolved config, command, git revision, versions, machine."""
    return {
        "config": config,
        "command": sys.argv,
        "git": revision(),
        "versions": versions(),
        "machine": {
            "platform": platform.platform(),
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else cpu_name(),
            "threads": torch.get_num_threads(),
        },
    }


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that results depend on."""
    return {"python": platform.python_version()} | {name: _version(name) for name in PACKAGES}


def revision() -> str:
    """The git revision, and a digest of what differs from it, new code included."""
    changes = _git("diff", "HEAD")
    for file in _git("ls-files", "--others", "--exclude-standard", "*.py", "*.yaml").splitlines():
        changes += file + (ROOT / file).read_text(errors="replace")
    digest = hashlib.sha256(changes.encode()).hexdigest()[:8]
    return _git("rev-parse", "HEAD") + (f"-dirty-{digest}" if changes else "")


def write_atomically(path: Path, text: str) -> None:
    """Write a file so that a reader sees the old one or the new one, never a part."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


class RunLog:
    """The log of one run in `folder`. `wandb` is None, "offline" or "online"; the variable
    WANDB_MODE=disabled silences it, as elsewhere. Runs of a `group` belong together.
    """

    def __init__(
        self,
        folder: Path,
        config: Mapping[str, Any],
        *,
        stage: str,
        group: str = "default",
        wandb: Literal["offline", "online"] | None = None,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._metrics = folder / "metrics.jsonl"
        write_atomically(folder / "run.json", json.dumps(provenance(config), indent=2) + "\n")
        self._run = None
        if wandb is not None and os.environ.get("WANDB_MODE") != "disabled":
            os.environ.setdefault("WANDB_SILENT", "true")  # not all of it reads the setting below
            import wandb as wandb_sdk

            self._run = wandb_sdk.init(
                project="graft",
                group=group,
                job_type=stage,
                name=f"{group}-{stage}",
                dir=folder,
                mode=wandb,
                config=dict(config),
                settings={"silent": True},
            )

    def log(self, row: Mapping[str, Any]) -> None:
        """Append one row; what is not a number is null (JSON knows no NaN)."""
        row = {k: None if isinstance(v, float) and math.isnan(v) else v for k, v in row.items()}
        with self._metrics.open("a") as file:
            file.write(json.dumps(row) + "\n")
        if self._run is not None:
            self._run.log(row)

    def rows(self) -> list[dict[str, Any]]:
        """The rows so far, also those of an interrupted run, whose torn last line is cut."""
        if not self._metrics.exists():
            return []
        lines = self._metrics.read_text().splitlines(keepends=True)
        whole = [line for line in lines if line.endswith("\n")]
        write_atomically(self._metrics, "".join(whole))
        return [json.loads(line) for line in whole]

    def artifact(self, kind: str, folder: Path) -> None:
        """Hand what a stage made to W&B, under the name of its group."""
        if self._run is None:
            return
        import wandb as wandb_sdk

        made = wandb_sdk.Artifact(f"{self._run.group}-{kind}", type=kind)
        made.add_dir(str(folder), policy="immutable", skip_cache=True)  # else it is copied home
        self._run.log_artifact(made)

    def pictures(self, files: Iterable[Path]) -> None:
        """Show pictures in W&B, each under its file's name."""
        if self._run is None:
            return
        import wandb as wandb_sdk

        self._run.log({file.stem: wandb_sdk.Image(str(file)) for file in files})

    def table(self, name: str, headings: Sequence[str], lines: Iterable[Sequence[Any]]) -> None:
        """Show a table in W&B."""
        if self._run is None:
            return
        import wandb as wandb_sdk

        shown = wandb_sdk.Table(columns=[*headings], data=[[*line] for line in lines])
        self._run.log({name: shown})

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return done.stdout.strip() if done.returncode == 0 else "unknown"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "absent"


def cpu_name() -> str:
    """The processor's model, as the system has it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, "cpu")
