"""Decode prompts end to end, method beside method, and say what each is worth here.

    python scripts/eval.py
    python scripts/eval.py prompts=path/to/prompts per_set=16 out=data/results/mine
    python scripts/eval.py +method@methods.mine=ddtree methods.mine.budget.nodes=24

Methods take turns prompt by prompt, in an order that rotates, so that a busy neighbour slows all of
them alike. OUT/metrics.jsonl gets a row for every response as it is finished: kill it at any time
and run it again, it goes on where it was.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from hydra.utils import instantiate
from launch import (
    WIDTH,
    bind,
    cost_of,
    drafts,
    machine_of,
    method_of,
    progress_bar,
    prompts_of,
    stage,
    table,
)
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.table import Table

from graft.collect.asking import Asker, LeaveOut, leaving_out_of_memory
from graft.core.errors import InputError
from graft.core.runlog import RunLog, provenance, write_atomically
from graft.core.types import Generation, Request
from graft.data.collected import difference
from graft.data.prompts import Prompt
from graft.eval.benchmark import Measured, measure, summarise

SAMPLING = ("max_new_tokens", "temperature", "top_p", "top_k")
WARM_UP = 16  # tokens by every method before the first row
ALIKE = ("settings", "methods", "models", "git", "versions")


@stage("eval", literal=("prompts",))
def main(cfg: DictConfig) -> None:
    console = Console(highlight=False)
    console.width = max(console.width, WIDTH)
    prompts = prompts_of(cfg)
    config: Any = OmegaConf.to_container(cfg, resolve=True)
    decoders = {name: method_of(method) for name, method in cfg.methods.items()}
    if cfg.baseline not in decoders:
        raise InputError(f"baseline={cfg.baseline} is no method; there are {', '.join(decoders)}")
    target = instantiate(cfg.target)
    drafter = instantiate(cfg.drafter, target=target)
    methods = {
        name: bind(decode, target=target, drafter=drafter if drafts(cfg.methods[name]) else None)
        for name, decode in decoders.items()
    }
    log = results(Path(cfg.out), config, decoders, target, drafter)
    done: dict[tuple[str, int], dict[str, Any]] = {}
    for row in log.rows():
        done.setdefault((row["prompt"], row["turn"]), {})[row["method"]] = row
    if done:
        console.print(f"going on after {len(done)} responses of an earlier run", style="dim")
    sampling = {key: cfg[key] for key in SAMPLING}
    asker = Asker(target, sampling, cfg.max_prompt_tokens, seed=cfg.seed, beyond=0)
    for decode in methods.values():
        decode(Request(target.encode_chat([{"role": "user", "content": "Hi!"}]), WARM_UP))
    budgets = [
        decode.keywords["budget"] for name, decode in decoders.items() if drafts(cfg.methods[name])
    ]
    longest = min((budget.max_context for budget in budgets), default=target.max_context)
    with progress_bar(console, "prompts") as progress:
        for place, prompt in enumerate(progress.track(prompts)):
            order = [list(methods)[(place + i) % len(methods)] for i in range(len(methods))]
            try:
                answer(prompt, order, methods, asker, longest, cfg.baseline, done, log)
            except LeaveOut as reason:
                console.print(f"left out: {prompt.key}: {reason}", style="dim", soft_wrap=True)
    log.close()
    wanted = {prompt.key for prompt in prompts}
    rows = [row for row in log.rows() if row["prompt"] in wanted and row["method"] in methods]
    costs = [cost for cost in map(cost_of, decoders.values()) if cost is not None]
    found = summarise(rows, baseline=cfg.baseline, cost=costs[0] if costs else None, seed=cfg.seed)
    console.print(overview(found, cfg.baseline), end="\n\n")
    console.print(by_set(found, cfg.baseline))


def results(
    folder: Path, config: dict[str, Any], methods: Mapping[str, Any], target: Any, drafter: Any
) -> RunLog:
    """The log of rows in `folder`. Raises InputError for one that was made otherwise."""
    made_by = provenance(config) | {
        "settings": {key: config[key] for key in (*SAMPLING, "seed", "baseline")},
        "methods": {
            name: {"config": config["methods"][name], "files": digests(config["methods"][name])}
            for name in methods
        },
        "models": machine_of(target, drafter),
    }
    file = folder / "made_by.json"
    if file.exists():
        theirs = json.loads(file.read_text())
        both = made_by["methods"].keys() & theirs["methods"].keys()  # methods may be added
        mine = made_by | {"methods": {name: made_by["methods"][name] for name in both}}
        old = theirs | {"methods": {name: theirs["methods"][name] for name in both}}
        if apart := difference(old, mine, ALIKE):
            raise InputError(f"{folder} was measured with another {apart}; choose another out=")
        made_by["methods"] = theirs["methods"] | made_by["methods"]
    log = RunLog(folder, config, stage=config["stage"], wandb=config["logger"]["wandb"])
    write_atomically(file, json.dumps(made_by, indent=1) + "\n")
    return log


def digests(method: Mapping[str, Any]) -> dict[str, str]:
    """Of what a method reads: its scorer and its constants, which may be made anew in place."""
    found = {}
    for part in ("builder", "budget"):
        for key, value in method.get(part, {}).items():
            path = Path(str(value))
            for file in [path, *sorted(path.glob("*.json")), *sorted(path.glob("*.safetensors"))]:
                if file.is_file():
                    content = hashlib.sha256(file.read_bytes()).hexdigest()[:12]
                    found[f"{part}.{key}/{file.name}"] = content
    return found


def answer(
    prompt: Prompt,
    order: Sequence[str],
    methods: Mapping[str, partial[Generation]],
    asker: Asker,
    longest: int,
    baseline: str,
    done: dict[tuple[str, int], dict[str, Any]],
    log: RunLog,
) -> None:
    """Every turn of a prompt by every method, one after the other.

    Later turns follow the baseline's answers, so that all methods decode the same text. A turn that
    lacks a method is decoded by all of them again: times are compared within a run. Raises LeaveOut
    for a turn that is too long or too much for the memory.
    """
    messages: list[dict[str, str]] = []
    for turn, text in enumerate(prompt.turns):
        messages.append({"role": "user", "content": text})
        mine = done.setdefault((prompt.key, turn), {})
        request = asker.request(prompt, turn, messages)
        if (needed := len(request.prompt) + request.max_new_tokens) > longest:
            raise LeaveOut(f"{needed} tokens, the budget policies know costs up to {longest}")
        if any(row["digest"] != prompt.digest for row in mine.values()):
            raise InputError(
                f"prompt {prompt.key} was measured with another text; choose another out="
            )
        if not methods.keys() <= mine.keys():
            for name in order:
                with leaving_out_of_memory():
                    row = measure(request, methods[name])
                about = {"source": prompt.source, "digest": prompt.digest, "method": name}
                mine[name] = {"prompt": prompt.key, "turn": turn, **about, **row}
                log.log(mine[name])
        messages = asker.answered(messages, mine[baseline]["response"])


def overview(found: Sequence[Measured], baseline: str) -> Table:
    """A line a method."""
    base = next(one for one in found if one.name == baseline)
    headings = ["method", "MAT", "nodes (sd)", "tok/s", f"over {baseline} [95 %]", "median"]
    timed = base.predicted is not None
    headings += ["predicted", "off by"] if timed else []
    lines = []
    for one in found:
        line = [
            one.name,
            f"{one.mat:.2f}",
            f"{one.nodes.mean():.1f} ({one.nodes.std():.1f})",
            f"{1 / one.pace:.1f}",
            "{:.2f}x [{:.2f}, {:.2f}]".format(one.speedup, *one.speedup_interval),
            f"{one.median:.2f}x",
        ]
        if one.predicted is not None and base.predicted is not None:
            # The machine may be faster or slower by now: compare what both say in plain steps.
            said, was = one.predicted / base.predicted, one.pace / base.pace
            line += [f"{1 / said:.2f}x", f"{100 * (said / was - 1):+.1f} %"]
        lines.append([*line, f"{100 * one.overhead:.1f} %", f"{one.parted} of {one.responses}"])
    return table([*headings, "overhead", f"unlike {baseline}"], lines)


def by_set(found: Sequence[Measured], baseline: str) -> Table:
    """Speedups, set by set."""
    sets = list(found[0].by_source)
    lines = [[one.name, *(f"{one.by_source[s]:.2f}x" for s in sets)] for one in found]
    return table([f"over {baseline}", *sets], lines)


if __name__ == "__main__":
    main()
