"""Answer one prompt and say what it took.

python scripts/generate.py prompt="Why is the sky blue?"
python scripts/generate.py method=dflash compare=true temperature=0.7 seed=3
python scripts/generate.py +experiment=qwen3_8b method.budget.nodes=128 messages=conversation.json
"""

from __future__ import annotations

import dataclasses
import json
from functools import partial
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from launch import stage
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.table import Table

from graft.core.errors import InputError
from graft.core.runlog import RunLog
from graft.core.types import Generation, Request
from graft.decode import autoregressive

VERBS = ("propose", "allocate", "build", "trim", "verify", "accept", "commit")


@stage("generate", literal=("prompt", "messages"))
def main(cfg: DictConfig) -> None:
    console = Console(highlight=False)
    name = HydraConfig.get().runtime.choices["method"]
    messages = read_messages(cfg)
    method = instantiate(cfg.method)
    target = instantiate(cfg.target)
    drafter = instantiate(cfg.drafter, target=target) if "builder" in cfg.method else None
    request = Request(
        prompt=target.encode_chat(messages),
        max_new_tokens=cfg.max_new_tokens,
        temperature=cfg.temperature,
        top_p=cfg.top_p,
        top_k=cfg.top_k,
        seed=cfg.seed,
        stop_tokens=target.stop_tokens,
    )
    method = partial(method, target=target, **({"drafter": drafter} if drafter else {}))
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
        console.print(target.decode(results[name].tokens), markup=False, end="\n\n")
    results |= {other: decode(request) for other, decode in methods.items() if other != name}
    console.print(table(results))
    if cfg.compare:
        console.print(verdict(results[name], results["ar"]))

    config: Any = OmegaConf.to_container(cfg, resolve=True)
    log = RunLog(
        Path(HydraConfig.get().runtime.output_dir), config, stage=cfg.stage, wandb=cfg.logger.wandb
    )
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
    """Prints text as tokens arrive, holding back characters whose bytes are not complete yet."""

    def __init__(self, target: Any, console: Console) -> None:
        self._target, self._console = target, console
        self._tokens: list[int] = []
        self._printed = 0

    def __call__(self, tokens: list[int]) -> None:
        self._tokens += tokens
        text = self._target.decode(self._tokens)
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):
            self._print(text)

    def finish(self) -> None:
        """Print what was held back and end the paragraph."""
        self._print(self._target.decode(self._tokens) + "\n\n")

    def _print(self, text: str) -> None:
        self._console.out(text[self._printed :], end="", highlight=False)
        self._console.file.flush()
        self._printed = len(text)


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
    """One column a method: counts, MAT, speed, and milliseconds a round by stage."""
    out = Table(box=None, pad_edge=False)
    for heading in ("", *results):
        out.add_column(heading, justify="right" if heading else "left")
    rows = list(results.values())
    out.add_row("tokens", *(str(len(r.tokens)) for r in rows))
    out.add_row("rounds", *(str(len(r.committed)) for r in rows))
    out.add_row("MAT (tokens a round)", *(f"{r.mat:.2f}" for r in rows))
    out.add_row("tokens/s", *(f"{r.tokens_per_second:.1f}" for r in rows))
    out.add_row("prefill, ms", *(f"{1e3 * r.seconds['prefill']:.0f}" for r in rows))
    for verb in VERBS:
        cells = [
            1e3 * r.seconds[verb] / max(len(r.committed), 1) if verb in r.seconds else None
            for r in rows
        ]
        if any(cell is not None for cell in cells):
            out.add_row(
                f"{verb}, ms a round", *("" if cell is None else f"{cell:.2f}" for cell in cells)
            )
    return out


def verdict(result: Generation, baseline: Generation) -> str:
    """Speedup over AR and whether the tokens are the same."""
    speedup = result.tokens_per_second / baseline.tokens_per_second
    pairs = enumerate(zip(result.tokens, baseline.tokens, strict=False))
    shorter = min(len(result.tokens), len(baseline.tokens))
    if result.tokens == baseline.tokens:
        same = "tokens identical to AR: yes"
    else:
        first = next((i for i, (a, b) in pairs if a != b), shorter)
        same = f"tokens identical to AR: NO, they part at token {first} (near-ties in bf16 can)"
    return f"\nspeedup over AR: {speedup:.2f}x, {same}"


if __name__ == "__main__":
    main()
