"""Measure this machine: tree building, passes of the target, plain decoding, overhead, memory.

    python scripts/bench.py
    python scripts/bench.py target.dtype=float32 rounds=0
    python scripts/bench.py +experiment=qwen3_8b

Repetitions are interleaved and medians reported, so that a busy neighbour slows every row alike.
"""

from __future__ import annotations

import resource
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from launch import stage
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM

from graft.core.clock import Clock
from graft.core.runlog import RunLog
from graft.core.types import Draft, Request
from graft.decode import autoregressive
from graft.drafters.dflash import DFlash
from graft.trees.best_first import expand, expand_reference

ROWS = (1, 8, 16, 32, 64)


@stage("bench")
def main(cfg: DictConfig) -> None:
    console = Console(highlight=False)
    config: Any = OmegaConf.to_container(cfg, resolve=True)
    log = RunLog(
        Path(HydraConfig.get().runtime.output_dir), config, stage=cfg.stage, wandb=cfg.logger.wandb
    )
    target = instantiate(cfg.target)
    drafter = instantiate(cfg.drafter, target=target)
    method = partial(instantiate(cfg.method), target=target, drafter=drafter)
    name = f"{target.name}, {target.dtype}, {target.device}, {torch.get_num_threads()} threads"
    console.print(name.replace("torch.", ""), style="dim", soft_wrap=True)
    prompt = target.encode_chat([{"role": "user", "content": "Tell a long story about a ship."}])

    sections: dict[str, Callable[[], list[tuple[str, str]]]] = {
        "tree building (D = 15, K = 64)": partial(tree_building, cfg.repeats),
        f"passes at context {cfg.context}": partial(passes, target, cfg.context, cfg.repeats),
        "plain decoding": partial(plain_decoding, cfg, target, prompt),
        "a DDTree round": partial(overhead, target, method, prompt, cfg.new_tokens),
        "memory": partial(memory, method, prompt, cfg.rounds),
    }
    for title, section in sections.items():
        rows = section()
        table = Table(title=title, title_justify="left", box=None, show_header=False)
        for label, value in rows:
            table.add_row(label, value)
            log.log({"section": title, "row": label, "value": value})
        console.print(table)
    log.close()


def medians(functions: Mapping[Any, Callable[[], object]], repeats: int) -> dict[Any, float]:
    """Median seconds of each function, all of them run in turn."""
    clock = Clock(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    for function in functions.values():
        function()
    seconds: dict[Any, list[float]] = {key: [] for key in functions}
    for _ in range(repeats):
        for key, function in functions.items():
            start = clock.now()
            function()
            seconds[key].append(clock.now() - start)
    return {key: statistics.median(values) for key, values in seconds.items()}


def random_draft(depth: int, candidates: int) -> Draft:
    """Marginals about as peaked as a drafter's."""
    logits = 3 * torch.randn(depth, 2000, generator=torch.Generator().manual_seed(0))
    best = logits.log_softmax(-1).topk(candidates)
    return Draft(0, best.indices.numpy(), best.values.numpy(), torch.empty(depth, 0))


def tree_building(repeats: int) -> list[tuple[str, str]]:
    draft = random_draft(15, 64)
    rows = []
    for budget in (16, 64, 512):
        functions = {
            "fast": partial(expand, draft, budget),
            "plain": partial(expand_reference, draft, budget),
        }
        took = medians(functions, 10 * repeats)
        ratio = took["plain"] / took["fast"]
        rows.append(
            (f"budget {budget}", f"{1e6 * took['fast']:.0f} us, {ratio:.0f}x the plain heap")
        )
    return rows


def passes(target: Any, context: int, repeats: int) -> list[tuple[str, str]]:
    target.prefill(np.random.default_rng(0).integers(100, target.vocab_size, context).tolist())
    draft = random_draft(7, 64)
    functions = {n: partial(target.verify, expand(draft, n - 1)) for n in ROWS}
    took = medians(functions, repeats)
    return [
        (f"{n} nodes", f"{1e3 * took[n]:.1f} ms, {took[n] / took[1]:.2f} AR steps") for n in ROWS
    ]


def plain_decoding(cfg: DictConfig, target: Any, prompt: list[int]) -> list[tuple[str, str]]:
    """Our loop and the library's `generate`, on the same weights, prompt and threads."""
    if cfg.target._target_ != "graft.targets.hf.load":
        return [("", "only for targets that the library can load")]
    model = AutoModelForCausalLM.from_pretrained(cfg.target.model, dtype=target.dtype)
    model = model.eval().to(target.device)
    ids = torch.tensor([prompt], device=target.device)

    def library(new: int) -> None:
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=new,
            min_new_tokens=new,
        )

    def ours(new: int) -> None:
        autoregressive.generate(Request(prompt, new), target=target)

    many = cfg.new_tokens + 1
    took = medians(
        {(f, n): partial(f, n) for n in (1, many) for f in (library, ours)},
        max(3, cfg.repeats // 4),
    )
    speed = {f: cfg.new_tokens / (took[f, many] - took[f, 1]) for f in (library, ours)}
    return [
        ("the library's generate", f"{speed[library]:.1f} tokens/s"),
        ("our loop", f"{speed[ours]:.1f} tokens/s, {speed[ours] / speed[library]:.2f}x"),
    ]


def overhead(target: Any, method: Any, prompt: list[int], new_tokens: int) -> list[tuple[str, str]]:
    """What a round costs outside the two forward passes.

    Choosing the candidates (inside `propose`) and the mask (inside `verify`) are part of it.
    """
    rounds: list[Any] = []
    method(Request(prompt, 8))
    method(Request(prompt, new_tokens), on_round=rounds.append)
    parts = {"mask": partial(target.mask, rounds[-1].tree)}
    drafter = method.keywords["drafter"]
    if isinstance(drafter, DFlash):
        hidden = rounds[-1].draft.hidden
        logits = target.unembed(hidden)
        parts["candidates"] = partial(
            Draft.from_logits, 0, logits, hidden, candidates=drafter.candidates
        )
    inside = medians(parts, 50)
    verbs = {v: statistics.median(r.seconds[v] for r in rounds) for v in rounds[0].seconds}
    whole = sum(verbs.values())
    host = whole - verbs["propose"] - verbs["verify"] + sum(inside.values())
    rows = [(verb, f"{1e3 * seconds:.2f} ms") for verb, seconds in verbs.items()]
    rows += [(f"of it {part}", f"{1e3 * seconds:.2f} ms") for part, seconds in inside.items()]
    return [*rows, ("overhead", f"{1e3 * host:.2f} ms, {100 * host / whole:.1f} % of the round")]


def memory(method: Any, prompt: list[int], rounds: int) -> list[tuple[str, str]]:
    """Growth of the resident set after the first hundred rounds."""
    done, baseline = 0, 0
    start = time.perf_counter()
    while done < rounds:
        done += len(method(Request(prompt, 100)).committed)
        if baseline == 0 and done >= 100:
            baseline = resident()
    if rounds == 0:
        return [("", "skipped (rounds=0)")]
    grown = (resident() - baseline) / 1e6
    return [(f"{done} rounds, {time.perf_counter() - start:.0f} s", f"{grown:+.1f} MB resident")]


def resident() -> int:
    """Bytes of resident memory now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


if __name__ == "__main__":
    main()
