"""Decode prompts end to end, method beside method, and say what each is worth here.

    python scripts/eval.py
    python scripts/eval.py prompts=path/to/prompts per_set=16 out=data/results/mine
    python scripts/eval.py +method@methods.mine=ddtree methods.mine.budget.nodes=24
    python scripts/eval.py +experiment=qwen3_8b methods=paper dataset=paper per_set=null
    CUDA_VISIBLE_DEVICES=3 python scripts/eval.py +experiment=qwen3_8b ... shard=3/8   # GPU 3 of 8

method=graft needs the constants of scripts/fit.py; without them leave it out: '~methods.graft'.
Methods take turns prompt by prompt, in an order that rotates, so that a busy neighbour slows all of
them alike. OUT gets a row for every response as soon as all methods have given it: kill it at any
time and run it again, it goes on where it was. scripts/report.py makes tables and pictures.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from hydra.utils import instantiate
from launch import WIDTH, keep_tokenizer, open_log, part_of, progress_bar, prompts_of, stage, table
from methods import bind, cost_of, drafts, machine_of, method_of, versions_of
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.table import Table

from graft.collect.asking import SAMPLING, Asker, LeaveOut, free_memory, leaving_out_of_memory
from graft.core.errors import InputError
from graft.core.runlog import provenance
from graft.core.types import Generation, Request
from graft.data.prompts import Prompt
from graft.data.results import Results
from graft.eval.benchmark import Row, measure
from graft.eval.lossless import logit_gap
from graft.eval.metrics import Method, ratio, summarise

WARM_UP = 16  # tokens by every method before the first row
Done = dict[tuple[str, int], dict[str, Row]]  # rows by (prompt, turn) and method


@stage("eval", literal=("prompts",))
def main(cfg: DictConfig) -> None:
    console = Console(highlight=False)
    console.width = max(console.width, WIDTH)
    part, parts = part_of(cfg)
    if not isinstance(cfg.trees, int) or cfg.trees < 0:
        raise InputError(f"trees must be a number of prompts a set, from 0 on, not {cfg.trees}")
    prompts = prompts_of(cfg)
    rank, turn = places(prompts)
    shown = {key for key, place in rank.items() if place < cfg.trees}
    prompts = [prompt for prompt in prompts if turn[prompt.key] % parts == part]
    prompts.sort(key=lambda prompt: rank[prompt.key])  # some of every set early on
    decoders = {name: method_of(method) for name, method in cfg.methods.items()}
    if cfg.baseline not in decoders:
        raise InputError(f"baseline={cfg.baseline} is no method; there are {', '.join(decoders)}")
    target = instantiate(cfg.target)
    drafter = instantiate(cfg.drafter, target=target)
    methods = {
        name: bind(decode, target=target, drafter=drafter if drafts(cfg.methods[name]) else None)
        for name, decode in decoders.items()
    }
    made_by = describe(cfg, methods, target, drafter)
    results = Results(Path(cfg.out), made_by, part, parts)
    keep_tokenizer(target.tokenizer, Path(cfg.out))
    log = open_log(cfg)
    done: Done = {}
    for row in results.rows():
        done.setdefault((row["prompt"], row["turn"]), {})[row["method"]] = row
    header = f"{target.name}, {target.dtype}; {drafter.name}; into {cfg.out}"
    console.print(header.replace("torch.", ""), style="dim", soft_wrap=True)
    if done:
        console.print(f"going on after {len(done)} responses of an earlier run", style="dim")
    longest = min(
        (d.keywords["budget"].max_context for d in decoders.values() if "budget" in d.keywords),
        default=target.max_context,
    )
    sampling = {key: cfg[key] for key in SAMPLING}
    race = Race(
        methods,
        {name for name in methods if drafts(cfg.methods[name])},
        Asker(target, sampling, cfg.max_prompt_tokens, seed=cfg.seed, beyond=0),
        longest=longest,
        baseline=cfg.baseline,
        shown=shown,
        results=results,
        done=done,
    )
    race.warm_up()
    with progress_bar(console, "prompts", "{task.fields[note]}") as progress:
        task = progress.add_task("prompts", total=len(prompts), note="")
        for prompt in prompts:
            try:
                race.run(prompt, turn[prompt.key])
            except LeaveOut as reason:
                console.print(f"left out: {prompt.key}: {reason}", style="dim", soft_wrap=True)
                free_memory()
            progress.update(task, advance=1, note=race.rate())
    wanted = {prompt.key for prompt in prompts}
    rows = [row for key, mine in done.items() if key[0] in wanted for row in mine.values()]
    costs = [cost for cost in map(cost_of, decoders.values()) if cost is not None]
    found = summarise(
        [row for row in rows if row["method"] in methods],
        baseline=cfg.baseline,
        cost=costs[0] if costs else None,
        seed=cfg.seed,
    )
    for value in ("speedup", "mat", "tokens_per_second"):
        log.log({f"{value}/{name}": getattr(m.mean, value) for name, m in found.items()})
    sets = found[cfg.baseline].sets
    for value in ("speedup", "mat", "mismatch"):
        lines = [[n, *(getattr(m.cells[s], value) for s in sets)] for n, m in found.items()]
        log.table(value, ["method", *sets], lines)
    log.artifact("results", Path(cfg.out))
    log.close()
    console.print(overview(found, cfg.baseline), end="\n\n")
    console.print(by_set(found, cfg.baseline))


def describe(
    cfg: DictConfig, methods: Mapping[str, Any], target: Any, drafter: Any
) -> dict[str, Any]:
    """What makes these results; `run` tells rows of other models and settings apart."""
    config: Any = OmegaConf.to_container(cfg, resolve=True)
    settings = {key: config[key] for key in (*SAMPLING, "seed", "baseline")}
    settings["candidates"] = drafter.candidates
    models = machine_of(target, drafter)
    made_by = provenance(config)
    for name in methods:
        made_by["versions"] |= versions_of(config["methods"][name])
    return made_by | {
        "run": hashlib.sha256(json.dumps([settings, models]).encode()).hexdigest()[:8],
        "names": {"target": target.name, "drafter": drafter.name},
        "settings": settings,
        "models": models,
        "methods": {
            name: {"config": config["methods"][name], "files": digests(config["methods"][name])}
            for name in methods
        },
    }


def digests(method: Mapping[str, Any]) -> dict[str, str]:
    """Of the weights and constants that a method reads, which may be made anew in place."""
    found = {}
    for part in ("builder", "budget"):
        for key, value in method.get(part, {}).items():
            path = Path(str(value))
            for file in [*path.glob("constants.json"), *sorted(path.glob("*.safetensors"))]:
                content = hashlib.sha256(file.read_bytes()).hexdigest()[:12]
                found[f"{part}.{key}/{file.name}"] = content
    return found


def places(prompts: Sequence[Prompt]) -> tuple[dict[str, int], dict[str, int]]:
    """The place of every prompt in its set, and that plus the number of the set, by key.

    Orders of methods and processes rotate with the latter: in every set each has its turn.
    """
    before: Counter[str] = Counter()
    rank, turn = {}, {}
    sets = list(dict.fromkeys(prompt.source for prompt in prompts))
    for prompt in prompts:
        rank[prompt.key] = before[prompt.source]
        turn[prompt.key] = before[prompt.source] + sets.index(prompt.source)
        before[prompt.source] += 1
    return rank, turn


class Race:
    """Every turn of a prompt by every method, one after the other.

    Later turns follow the baseline's answers, so that all methods decode the same text. A turn that
    lacks a method is decoded by all of them again: times are compared within a run.
    """

    def __init__(
        self,
        methods: Mapping[str, partial[Generation]],
        drafting: set[str],
        asker: Asker,
        *,
        longest: int,
        baseline: str,
        shown: set[str],
        results: Results,
        done: Done,
    ) -> None:
        self._methods, self._drafting = methods, drafting
        self._asker, self._longest = asker, longest
        self._baseline, self._shown, self._results, self._done = baseline, shown, results, done
        self._tokens = self._seconds = 0.0

    def warm_up(self) -> None:
        """Kernels are chosen and compiled at their first use."""
        target = self._asker.target
        prompt = target.encode_chat([{"role": "user", "content": "Hi!"}])
        for decode in self._methods.values():
            decode(Request(prompt, WARM_UP))

    def run(self, prompt: Prompt, place: int) -> None:
        """Raises LeaveOut for a turn that is too long or too much for the memory."""
        messages: list[dict[str, str]] = []
        for turn, text in enumerate(prompt.turns):
            messages.append({"role": "user", "content": text})
            mine = self._done.setdefault((prompt.key, turn), {})
            if any(row["digest"] != prompt.digest for row in mine.values()):
                raise InputError(
                    f"prompt {prompt.key} was measured with another text; choose another out="
                )
            request = self._asker.request(prompt, turn, messages)
            if (needed := len(request.prompt) + request.max_new_tokens) > self._longest:
                raise LeaveOut(
                    f"{needed} tokens, the budget policies know costs to {self._longest}"
                )
            if not self._methods.keys() <= mine.keys():
                about = {"prompt": prompt.key, "turn": turn, "source": prompt.source}
                about |= {"digest": prompt.digest, "text": text}
                with leaving_out_of_memory():
                    rows = self._decode(request, place, trees=prompt.key in self._shown)
                mine |= {row["method"]: about | row for row in rows}
                self._results.append([mine[name] for name in self._methods])
            messages = self._asker.answered(messages, mine[self._baseline]["response"])

    def _decode(self, request: Request, place: int, *, trees: bool) -> list[dict[str, Any]]:
        """The rows of a turn, in an order that rotates from prompt to prompt."""
        names, rows = list(self._methods), []
        for i in range(len(names)):
            name = names[(place + i) % len(names)]
            row = measure(request, self._methods[name], drafts=name in self._drafting, trees=trees)
            rows.append({"method": name, **row})
            self._tokens += len(row["response"])
            self._seconds += sum(row["seconds"].values())
        if request.temperature == 0:
            plain = next(row["response"] for row in rows if row["method"] == self._baseline)
            for row in rows:
                gap = logit_gap(request, plain, row["response"], self._asker.target)
                row |= {"logit_gap": gap} if gap is not None else {}
        return rows

    def rate(self) -> str:
        """For the bar: over all methods."""
        return f"{self._tokens / self._seconds:.0f} tokens/s" if self._seconds else ""


def overview(found: Mapping[str, Method], baseline: str) -> Table:
    """A line a method; means over sets."""
    base = found[baseline]
    over = f"over {baseline} [95 %]"
    headings = ["mean over sets", "MAT", "nodes (sd)", "tok/s", over, "median"]
    headings += ["predicted", "off by"] if base.predicted is not None else []
    lines = []
    for method in found.values():
        cell, (speedup, bounds) = method.mean, ratio(method, base)
        line = [method.name, f"{cell.mat:.2f}", f"{cell.nodes:.1f} ({cell.nodes_sd:.1f})"]
        line += [
            f"{cell.tokens_per_second:.1f}",
            "{:.2f}x [{:.2f}, {:.2f}]".format(speedup, *bounds),
        ]
        line += [f"{cell.median:.2f}x"]
        if base.predicted is not None and method.predicted is not None:
            # The machine may be faster or slower by now: compare what both say in plain steps.
            said, was = method.predicted / base.predicted, method.pace / base.pace
            line += [f"{1 / said:.2f}x", f"{100 * (said / was - 1):+.1f} %"]
        elif base.predicted is not None:
            line += ["", ""]
        other = f"{100 * cell.other / cell.verify:.1f} %" if cell.draft else ""
        lines.append([*line, other, f"{method.parted} of {method.responses}"])
    return table([*headings, "overhead/verify", f"unlike {baseline}"], lines)


def by_set(found: Mapping[str, Method], baseline: str) -> Table:
    """Speedups, set by set."""
    sets = found[baseline].sets
    lines = [[m.name, *(f"{m.cells[s].speedup:.2f}x" for s in sets)] for m in found.values()]
    return table([f"over {baseline}", *sets], lines)


if __name__ == "__main__":
    main()
