"""The pass table of a GPU: plain step, verify and drafter, eager, captured, and compiled before
capture, beside the time that reading the weights takes.

python scripts/gpu_passes.py
python scripts/gpu_passes.py rows='[1,64]' contexts='[2048]' compiled_rows='[]'

Models are random and in the shape of Qwen3-8B: nothing is fetched. It ends by itself, and leaves
what it has measured so far in passes.json. Without a GPU programs run uncaptured: a rehearsal.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from bench import medians, random_draft
from hydra.core.hydra_config import HydraConfig
from launch import open_log, stage, table
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from transformers import AutoConfig, AutoModelForCausalLM

from graft.core.kv_cache import KVCache
from graft.core.runlog import write_atomically
from graft.drafters import dflash
from graft.drafters.captured import CapturedDFlash
from graft.targets import tiny
from graft.targets.captured import CapturedPasses
from graft.targets.hf import HFTarget, parse_device, parse_dtype
from graft.trees.best_first import expand

TOKEN = 100
WAYS = ("eager", "captured", "compiled")
Runs = dict[str, Callable[[], object]]  # by way


@dataclass
class Line:
    """One pass of the table."""

    name: str
    context: int
    floor: float  # ms: its weights over the bandwidth
    ms: dict[str, float] = field(default_factory=dict)  # by way


@stage("gpu_passes")
def main(cfg: DictConfig) -> None:
    stop = time.monotonic() + cfg.seconds
    console, log = Console(highlight=False), open_log(cfg)
    speed = bandwidth(parse_device(cfg.device), cfg.read, cfg.repeats)
    models = Models(cfg)
    lines: dict[tuple[str, int], Line] = {}
    for context, ways, name, nbytes, runs in passes(cfg, models):
        if time.monotonic() > stop:
            console.print(f"{cfg.seconds} s are over (seconds=): passes are missing")
            break
        line = lines.setdefault((name, context), Line(name, context, 1e3 * nbytes / speed))
        took = medians({way: runs[way] for way in ways}, cfg.repeats)
        line.ms |= {way: 1e3 * seconds for way, seconds in took.items()}
        log.log({f"{name} at {context}/{way}, ms": line.ms[way] for way in ways})
        keep(Path(HydraConfig.get().runtime.output_dir), models.name, speed, list(lines.values()))
    console.print(f"{models.name}; reads {speed / 1e9:.3g} GB/s", style="dim", soft_wrap=True)
    console.print(table(("pass, ms", "context", *WAYS, "weights / bandwidth"), cells(lines)))
    log.close()


def passes(cfg: DictConfig, models: Models) -> Iterator[tuple[int, Sequence[str], str, int, Runs]]:
    """Context, ways to measure, name, bytes of weights and runs of every pass, caches filled.

    Compilation comes last: it may take longer than there is.
    """
    parts: list[tuple[int, Sequence[str], list[int]]]
    parts = [(context, WAYS[:2], list(cfg.rows)) for context in cfg.contexts]
    if cfg.compiled_rows:
        parts.append((cfg.contexts[0], WAYS[2:], list(cfg.compiled_rows)))
    for context, ways, rows in parts:
        models.start(context)
        for n in rows:
            name = "plain step" if n == 1 else f"verify, {n} rows"
            yield context, ways, name, models.bytes, models.verify(n)
        yield context, ways, "drafter", models.drafter_bytes, models.draft()


class Models:
    """A random target and drafter, and every way to run their passes."""

    def __init__(self, cfg: DictConfig) -> None:
        device, dtype = parse_device(cfg.device), parse_dtype(cfg.dtype)
        shape: Any = OmegaConf.to_container(cfg.shape)
        config = AutoConfig.for_model(
            "qwen3", **shape, max_position_embeddings=40960, tie_word_embeddings=False
        )
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
        model.requires_grad_(False)
        self.bytes = size_of(model) - size_of(model.model.embed_tokens)
        target = HFTarget(model, tiny.tokenizer(), name="random qwen3", passes="eager")
        with torch.device(device):
            net = dflash.new_network(target, **cfg.draft, mask_token_id=TOKEN - 1, seed=cfg.seed)
        net.eval().requires_grad_(False)
        self._drafter = dflash.DFlash(net, target, candidates=cfg.candidates, name="random DFlash")
        self.drafter_bytes = size_of(net) + target.head_rows(None).nbytes
        self._target = target
        self._cache = KVCache(
            layers=net.config.num_layers,
            heads=net.config.num_kv_heads,
            head_dim=net.config.head_dim,
            dtype=dtype,
            device=device,
        )
        self._programs = {
            way: (
                CapturedPasses(target.decoder, target.cache, compile=way == "compiled"),
                CapturedDFlash(net, target, target.head, compile=way == "compiled"),
            )
            for way in WAYS[1:]
        }
        gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else "no GPU: a rehearsal"
        self.name = f"{gpu}, torch {torch.__version__}, {cfg.dtype}, target {self.bytes / 1e9:.3g}"
        self.name += f" GB a pass, drafter {self.drafter_bytes / 1e9:.3g} GB"

    @torch.inference_mode()
    def start(self, context: int) -> None:
        """Put `context` tokens into both caches, and the drafter's twice: it has two ways."""
        taps = self._target.prefill([TOKEN] * context).taps
        self._taps = taps[:2].clone()  # two tokens a round
        self._drafter.reset()
        self._drafter.propose(TOKEN, taps)
        self._cache.reset()
        self._programs["captured"][1].draft(TOKEN, taps, self._cache, self._drafter.candidates)

    def verify(self, rows: int) -> Runs:
        """What runs a verification of so many rows, by way."""
        draft = random_draft(15, 64, min(self._target.vocab_size, 2000))
        tree = expand(draft, rows - 1)
        runs: Runs = {"eager": partial(self._target.verify, tree)}
        for way, (target, _) in self._programs.items():
            runs[way] = torch.inference_mode()(partial(target.verify, tree))
        return runs

    def draft(self) -> Runs:
        """What runs a pass of the drafter, by way."""
        runs: Runs = {"eager": partial(self._drafter.propose, TOKEN, self._taps)}
        arguments = TOKEN, self._taps, self._cache, self._drafter.candidates
        for way, (_, drafter) in self._programs.items():
            runs[way] = torch.inference_mode()(partial(drafter.draft, *arguments))
        return runs


def bandwidth(device: torch.device, nbytes: int, repeats: int) -> float:
    """Bytes a second that one large sum reads."""
    block = torch.zeros(nbytes // 4, device=device)
    return nbytes / medians({"read": block.sum}, repeats)["read"]


def size_of(module: torch.nn.Module) -> int:
    """Bytes of its weights."""
    return sum(parameter.nbytes for parameter in module.parameters())


def cells(lines: dict[tuple[str, int], Line]) -> Iterator[list[str]]:
    """The table's text."""
    for line in lines.values():
        took = [f"{line.ms[way]:.3g}" if way in line.ms else "-" for way in WAYS]
        yield [line.name, str(line.context), *took, f"{line.floor:.3g}"]


def keep(folder: Path, name: str, speed: float, lines: list[Line]) -> None:
    """Write what there is so far."""
    found = {"models": name, "bytes_per_second": speed, "passes": [asdict(x) for x in lines]}
    write_atomically(folder / "passes.json", json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
