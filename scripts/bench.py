"""Measure this machine: passes, tree building, plain decoding, the parts of a round, memory.

    python scripts/bench.py
    python scripts/bench.py what=passes
    python scripts/bench.py target.dtype=float32 rounds=0
    python scripts/bench.py +experiment=qwen3_8b

Passes stand beside the machine's limit, the time to read their weights or to multiply them, as it
is measured in the same run (docs/passes.md); OUT/passes.json keeps them for scripts/report.py.
Repetitions are interleaved and medians reported, so that a busy neighbour slows every row alike.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from hydra.utils import instantiate
from launch import WIDTH, open_log, stage, table
from methods import bind, drafts, machine_of, method_of
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM

from graft.core.errors import InputError
from graft.core.runlog import provenance
from graft.core.types import Request, Round
from graft.decode import autoregressive
from graft.eval import limits, tables
from graft.eval.limits import medians, random_draft
from graft.eval.metrics import PARTS, parts_of
from graft.scorer.checkpoint import EdgeScorer
from graft.scorer.checkpoint import build as build_scorer
from graft.trees.best_first import expand
from graft.trees.blackboard import expand_reference
from graft.trees.tdes import TDES

RUNGS: dict[str, dict[str, bool]] = {"r5": {}, "r6": {"two_parents": True}}


@stage("bench")
def main(cfg: DictConfig) -> None:
    console = Console(highlight=False)
    console.width = max(console.width, WIDTH)
    if not drafts(cfg.method):
        raise InputError("bench measures a round of a method that drafts; choose another method")
    decode = method_of(cfg.method)
    log = open_log(cfg)
    target = instantiate(cfg.target)
    drafter = instantiate(cfg.drafter, target=target)
    method = bind(decode, target=target, drafter=drafter)
    name = f"{target.name}, {target.dtype}, {target.device}, {torch.get_num_threads()} threads"
    console.print(name.replace("torch.", ""), style="dim", soft_wrap=True)
    prompt = target.encode_chat([{"role": "user", "content": "Tell a long story about a ship."}])

    sections: dict[str, tuple[str, Callable[[], dict[str, float]]]] = {
        "trees": ("tree building (D = 15, K = 64)", partial(tree_building, cfg.repeats)),
        "scores": (
            "edge scoring and tree building (random scorers)",
            partial(scored_trees, target, cfg.repeats),
        ),
        "plain": ("plain decoding", partial(plain_decoding, cfg, target, prompt)),
        "round": ("a round", partial(a_round, method, prompt, cfg.new_tokens)),
        "memory": ("memory", partial(memory, method, prompt, cfg.rounds)),
    }
    wanted = parts_asked(cfg.what, ["passes", *sections])
    if "passes" in wanted:
        found = passes(cfg, target, drafter)
        shown = tables.passes(found)
        console.print(shown.caption, soft_wrap=True)
        console.print(table(shown.headings, shown.rows))
        log.log({f"passes/{p.kind} {p.rows}, ms": 1e3 * p.seconds for p in found.passes})
        Path(cfg.out).mkdir(parents=True, exist_ok=True)
        found.save(Path(cfg.out) / "passes.json")
        console.print(f"wrote {Path(cfg.out) / 'passes.json'}", style="dim", soft_wrap=True)
    for name, (title, section) in sections.items():
        if name not in wanted or not (rows := section()):
            continue
        out = Table(title=title, title_justify="left", box=None, show_header=False)
        for label, value in rows.items():
            out.add_row(label, f"{value:.3g}")
        log.log({f"{title}/{label}": value for label, value in rows.items()})
        console.print(out)
    log.close()


def parts_asked(what: Any, known: Sequence[str]) -> list[str]:
    """What to measure: `all` or some of the parts. Raises InputError."""
    wanted = [what] if isinstance(what, str) else list(what or [])
    if wanted == ["all"]:
        return list(known)
    if not wanted or set(wanted) - set(known):
        raise InputError(f"what must be all, or some of {', '.join(known)}, not {what}")
    return wanted


def tree_building(repeats: int) -> dict[str, float]:
    """From marginals on the host to tokens, parents, depths and mask."""
    draft = random_draft(15, 64, 2000)
    rows = {}
    for budget in (16, 64, 512):
        functions = {f: partial(f, draft, budget) for f in (expand, expand_reference)}
        took = medians(functions, 10 * repeats)
        rows[f"budget {budget}, us"] = 1e6 * took[expand]
        rows[f"budget {budget}, plain heap / ours"] = took[expand_reference] / took[expand]
    return rows


def scored_trees(target: Any, repeats: int) -> dict[str, float]:
    """Logits of a draft's edges, and the tree out of them, by the two largest rungs."""
    every = torch.arange(target.vocab_size, device=target.device)
    functions: dict[str, Callable[[], object]] = {}
    for (rung, more), (D, K) in product(RUNGS.items(), ((7, 16), (15, 32))):
        model = {"term": "bilinear", "mode": "normalised", "depth": D, "width": 64, "dropout": 0.0}
        model |= {"hidden_size": target.hidden_size, "state_size": target.hidden_size, **more}
        net = build_scorer(model).to(target.device)
        rows = net.tables(target.embed(every))
        scorer = EdgeScorer(net, rows, {"depth": D, "candidates": K}).compile()
        draft = random_draft(D, K, min(target.vocab_size, 2000))
        hidden = torch.randn(D, target.hidden_size, device=target.device)
        draft = dataclasses.replace(draft, hidden=hidden)
        label = f"{rung}, D = {D}, K = {K}"
        functions[f"{label}, logits alone, us"] = partial(scorer.edge_logits, draft)
        for budget in (64, 512):
            build = partial(TDES(scorer).build, draft, budget)
            functions[f"{label}, budget {budget}, us"] = build
    return {label: 1e6 * took for label, took in medians(functions, 10 * repeats).items()}


def passes(cfg: DictConfig, target: Any, drafter: Any) -> limits.Passes:
    """Passes beside the machine's limit, and the same through torch if that is asked for."""
    eager = None
    if cfg.eager and cfg.target.passes == "auto":
        other = instantiate(cfg.target, passes="eager")
        eager = other, instantiate(cfg.drafter, target=other)
    config: Any = OmegaConf.to_container(cfg, resolve=True)
    return limits.measure(
        target,
        drafter,
        eager=eager,
        context=cfg.context,
        repeats=cfg.repeats,
        made_by=machine_of(target, drafter) | provenance(config),
    )


def plain_decoding(cfg: DictConfig, target: Any, prompt: list[int]) -> dict[str, float]:
    """Our loop and the library's `generate`, on the same weights, prompt and threads."""
    if cfg.target._target_ != "graft.targets.hf.load":
        return {}  # a random model: nothing that the library could load
    model = AutoModelForCausalLM.from_pretrained(cfg.target.model, dtype=target.dtype)
    model = model.eval().to(target.device)
    ids = torch.tensor([prompt], device=target.device)
    greedy = {"attention_mask": torch.ones_like(ids), "do_sample": False}

    def library(new: int) -> None:
        model.generate(ids, **greedy, max_new_tokens=new, min_new_tokens=new)

    def ours(new: int) -> None:
        autoregressive.generate(Request(prompt, new), target=target)

    many = cfg.new_tokens + 1
    functions = {(f, n): partial(f, n) for n in (1, many) for f in (library, ours)}
    took = medians(functions, max(3, cfg.repeats // 4))
    speed = {f: cfg.new_tokens / (took[f, many] - took[f, 1]) for f in (library, ours)}
    return {
        "the library's generate, tokens/s": speed[library],
        "our loop, tokens/s": speed[ours],
        "ours / library": speed[ours] / speed[library],
    }


def a_round(method: Any, prompt: list[int], new_tokens: int) -> dict[str, float]:
    """What a round costs, part by part, and what of it is outside the two passes."""
    rounds: list[Round] = []
    method(Request(prompt, min(8, new_tokens)))
    method(Request(prompt, new_tokens), on_round=rounds.append)
    took = [parts_of(one.seconds) for one in rounds]
    parts = {part: statistics.median(one[part] for one in took) for part in PARTS}
    whole = sum(parts.values())
    outside = whole - parts["drafter's pass"] - parts["target's pass"]
    rows = {f"{part}, ms": 1e3 * seconds for part, seconds in parts.items()}
    return rows | {"overhead, ms": 1e3 * outside, "overhead, % of the round": 100 * outside / whole}


def memory(method: Any, prompt: list[int], rounds: int) -> dict[str, float]:
    """Growth of the resident set after the first hundred rounds."""
    import psutil

    done, resident = 0, []
    while done < rounds:
        done += len(method(Request(prompt, 100)).committed)
        if done >= 100:
            resident.append(psutil.Process().memory_info().rss)
    if not resident:
        return {}
    return {"rounds": done, "resident memory grew by, MB": (resident[-1] - resident[0]) / 1e6}


if __name__ == "__main__":
    main()
