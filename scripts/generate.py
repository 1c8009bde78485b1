"""Answer one prompt and say what it took.

python scripts/generate.py prompt="Why is the sky blue?"
python scripts/generate.py method=dflash compare=true temperature=0.7 seed=3
python scripts/generate.py +experiment=qwen3_8b method.budget.nodes=128 messages=conversation.json
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from launch import open_log, stage
from methods import bind, drafts, method_of
from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table

from graft.core.errors import InputError
from graft.core.types import Generation, Request
from graft.decode import autoregressive
from graft.decode.text import Detokenizer
from graft.eval.lossless import first_difference
from graft.eval.metrics import PARTS, parts_of


@stage("generate", literal=("prompt", "messages"))
def main(cfg: DictConfig) -> None:
    console = Console(highlight=False)
    name = HydraConfig.get().runtime.choices["method"]
    messages = read_messages(cfg)
    method = method_of(cfg.method)
    target = instantiate(cfg.target)
    drafter = instantiate(cfg.drafter, target=target) if drafts(cfg.method) else None
    request = Request(
        prompt=target.encode_chat(messages),
        max_new_tokens=cfg.max_new_tokens,
        temperature=cfg.temperature,
        top_p=cfg.top_p,
        top_k=cfg.top_k,
        seed=cfg.seed,
        stop_tokens=target.stop_tokens,
    )
    method = bind(method, target=target, drafter=drafter)
    methods = {name: method} | (
        {"ar": partial(autoregressive.generate, target=target)} if cfg.compare else {}
    )
    console.print(
        f"target {target.name}, {target.dtype}, {target.device}".replace("torch.", ""),
        style="dim",
        soft_wrap=True,
    )
    console.print(
        f"method {name}" + (f", {drafter.name}" if drafter else ""),
        style="dim",
        soft_wrap=True,
        end="\n\n",
    )

    if cfg.compare:  # kernels are chosen at their first use; time neither method for that
        warm_up = dataclasses.replace(request, max_new_tokens=min(8, cfg.max_new_tokens))
        for decode in methods.values():
            decode(warm_up)
    printer = Printer(target, console) if cfg.stream else None
    results = {name: method(request, on_tokens=printer)}
    if printer:
        printer.finish()
    else:
        console.out(target.decode(results[name].tokens), end="\n\n", highlight=False)
    results |= {other: decode(request) for other, decode in methods.items() if other != name}
    console.print(table(results))
    if cfg.compare:
        console.print(verdict(results[name], results["ar"]))

    log = open_log(cfg)
    for decoded_by, result in results.items():
        log.log({"method": decoded_by, **summary(result)})
    log.close()


def read_messages(cfg: DictConfig) -> list[dict[str, str]]:
    """The conversation of `messages=file.json`, or `prompt` as its only turn."""
    if cfg.messages is None:
        if not str(cfg.prompt or "").strip():
            raise InputError(
                'the prompt is empty; give one with prompt="..." or messages=file.json'
            )
        return [{"role": "user", "content": str(cfg.prompt)}]
    try:
        messages = json.loads(Path(cfg.messages).read_text())
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read messages={cfg.messages}: {error}") from error
    turns = messages if isinstance(messages, list) else []
    if not turns or not all(
        isinstance(t, dict) and isinstance(t.get("content"), str) and "role" in t for t in turns
    ):
        raise InputError(
            f'messages={cfg.messages} must be a JSON list of {{"role": ..., "content": ...}}'
        )
    return messages


class Printer:
    """Prints text as tokens arrive."""

    def __init__(self, target: Any, console: Console) -> None:
        self._text, self._console = Detokenizer(target.decode), console

    def __call__(self, tokens: list[int]) -> None:
        self._print(self._text.add(tokens))

    def finish(self) -> None:
        """Print what was held back and end the paragraph."""
        self._print(self._text.rest() + "\n\n")

    def _print(self, text: str) -> None:
        self._console.out(text, end="", highlight=False)
        self._console.file.flush()


def summary(result: Generation) -> dict[str, Any]:
    """The numbers of a response, for the table and the log."""
    return {
        "tokens": len(result.tokens),
        "rounds": len(result.committed),
        "mat": result.mat,
        "tokens_per_second": result.tokens_per_second,
        "seconds": {"decode": result.decode_seconds, **result.seconds},
    }


def table(results: dict[str, Generation]) -> Table:
    """One column a method: counts, MAT, speed, and milliseconds a round by part."""
    out = Table(box=None, pad_edge=False)
    for heading in ("", *results):
        out.add_column(heading, justify="right" if heading else "left")

    def row(label: str, form: str, value: Callable[[Generation], float | None]) -> None:
        values = [value(result) for result in results.values()]
        if any(v is not None for v in values):
            out.add_row(label, *("" if v is None else format(v, form) for v in values))

    def a_round(result: Generation, seconds: float) -> float:
        return 1e3 * seconds / max(len(result.committed), 1)

    def of_part(part: str, result: Generation) -> float | None:
        return a_round(result, parts_of(result.seconds)[part]) or None

    row("tokens", "d", lambda r: len(r.tokens))
    row("rounds", "d", lambda r: len(r.committed))
    row("MAT (tokens a round)", ".2f", lambda r: r.mat)
    row("tokens/s", ".1f", lambda r: r.tokens_per_second)
    row("prefill, ms", ".0f", lambda r: 1e3 * r.seconds["prefill"])
    for part in PARTS:
        row(f"{part}, ms a round", ".3f", partial(of_part, part))
    row("all but the passes", ".3f", lambda r: a_round(r, r.overhead_seconds))
    return out


def verdict(result: Generation, baseline: Generation) -> str:
    """Speedup over AR and whether the tokens are the same."""
    first = first_difference(result.tokens, baseline.tokens)
    same = "yes" if first is None else f"NO, from token {first} on (near-ties in bf16 can flip)"
    if len(result.tokens) < 2 or len(baseline.tokens) < 2:
        return f"\ntokens identical to AR: {same}"
    speedup = result.tokens_per_second / baseline.tokens_per_second
    return f"\nspeedup over AR: {speedup:.2f}x, tokens identical to AR: {same}"


if __name__ == "__main__":
    main()
