"""Measure this machine: tree building, passes of the target, plain decoding, overhead, memory.

    python scripts/bench.py
    python scripts/bench.py target.dtype=float32 rounds=0
    python scripts/bench.py +experiment=qwen3_8b

Repetitions are interleaved and medians reported, so that a busy neighbour slows every row alike.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from hydra.utils import instantiate
from launch import open_log, stage
from methods import bind, drafts, method_of
from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM

from graft.core.clock import Clock
from graft.core.errors import InputError
from graft.core.types import Draft, Request, Round
from graft.decode import autoregressive
from graft.eval.metrics import PARTS, parts_of
from graft.scorer.checkpoint import EdgeScorer
from graft.scorer.checkpoint import build as build_scorer
from graft.trees.best_first import expand, expand_reference
from graft.trees.tdes import TDES

DRAFTER = "the drafter, head and candidates included, ms"
ROWS = (1, 4, 8, 16, 32, 64, 128)  # of a verify pass, root included


@stage("bench")
def main(cfg: DictConfig) -> None:
    console = Console(highlight=False)
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

    sections: dict[str, Callable[[], dict[str, float]]] = {
        "tree building (D = 15, K = 64)": partial(tree_building, cfg.repeats),
        "edge scoring and tree building (D = 15, K = 32, random scorer)": partial(
            scored_trees, target, cfg.repeats
        ),
        f"passes at context {cfg.context}": partial(
            passes, target, drafter, cfg.context, cfg.repeats
        ),
        "plain decoding": partial(plain_decoding, cfg, target, prompt),
        "a round": partial(a_round, method, prompt, cfg.new_tokens),
        "memory": partial(memory, method, prompt, cfg.rounds),
    }
    for title, section in sections.items():
        if not (rows := section()):
            continue
        table = Table(title=title, title_justify="left", box=None, show_header=False)
        for label, value in rows.items():
            table.add_row(label, f"{value:.3g}")
        log.log({f"{title}/{label}": value for label, value in rows.items()})
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


def random_draft(depth: int, candidates: int, vocabulary: int) -> Draft:
    """Marginals about as peaked as a drafter's."""
    logits = 3 * torch.randn(depth, vocabulary, generator=torch.Generator().manual_seed(0))
    return Draft.from_logits(0, logits, torch.empty(depth, 0), candidates=candidates)


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
    """Scores of all edges of a draft, and the tree out of them, by the largest rung but r6."""
    model = {"term": "bilinear", "mode": "normalised", "depth": 15, "width": 64, "dropout": 0.0}
    model |= {"hidden_size": target.hidden_size, "state_size": target.hidden_size}
    net = build_scorer(model)
    every = torch.arange(target.vocab_size, device=target.device)
    tables = net.to(target.device).tables(target.embed(every))
    scorer = EdgeScorer(net, tables, {"depth": 15, "candidates": 32})
    draft = random_draft(15, 32, min(target.vocab_size, 2000))
    hidden = torch.randn(15, target.hidden_size, device=target.device)
    draft = dataclasses.replace(draft, hidden=hidden)
    builder = TDES(scorer)
    functions: dict[Any, Callable[[], object]] = {"scores": partial(scorer.edge_scores, draft)}
    functions |= {budget: partial(builder.build, draft, budget) for budget in (64, 256, 512)}
    took = medians(functions, 10 * repeats)
    rows = {"scores alone, us": 1e6 * took["scores"]}
    return rows | {f"budget {b}, us": 1e6 * took[b] for b in (64, 256, 512)}


def passes(target: Any, drafter: Any, context: int, repeats: int) -> dict[str, float]:
    """Verify passes by nodes (root included; one node is an AR step), and the drafter's pass."""
    drafter.reset()
    taps = target.prefill([100] * context).taps
    drafter.propose(100, taps)
    draft = random_draft(7, 64, min(target.vocab_size, 2000))
    functions: dict[Any, Callable[[], object]] = {
        n: partial(target.verify, expand(draft, n - 1)) for n in ROWS
    }
    functions["drafter"] = partial(drafter.propose, 100, taps[:2])  # two tokens a round
    took = medians(functions, repeats)
    rows = {DRAFTER: 1e3 * took["drafter"]}
    rows |= {f"{n} nodes, ms": 1e3 * took[n] for n in ROWS}
    return rows | {f"{n} nodes, AR steps": took[n] / took[1] for n in ROWS[1:]}


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
