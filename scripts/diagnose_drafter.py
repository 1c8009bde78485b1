"""Say how well a drafter fits its target, and if badly, why.

    python scripts/diagnose_drafter.py
    python scripts/diagnose_drafter.py drafter=dflash drafter.checkpoint=path/to/drafter
    python scripts/diagnose_drafter.py prompts=path/to/prompts per_set=16 readings=false

The target answers the prompts; the answers are replayed with the drafter, which gives tokens a
round by set; then the drafter is asked at the same places under every classic mistake (tap offset,
shifted labels, anchor in context, template, mask row, RoPE, draft cache), and the one that fits is
named.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from hydra.utils import instantiate
from launch import open_log, progress_bar, prompts_of, stage
from methods import method_of
from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table

from graft.core.errors import InputError
from graft.core.runlog import write_atomically
from graft.core.types import Request
from graft.data.prompts import Prompt
from graft.decode.batched import respond
from graft.decode.replay import Replay
from graft.drafters.anchors import drafts_along
from graft.drafters.dflash import DFlash
from graft.eval.doctor import (
    Answered,
    Doctor,
    Finding,
    Reading,
    cache_disagreement,
    diagnosis,
    readings,
)
from graft.targets.slots import Slots

OTHER_TEXT = 1.5  # other answers may be easier by themselves: ask more of a template
SECTION = "## MAT on benchmark prompts"
CACHE_TEXTS = 4  # decoded again round by round to check the draft cache


@stage("diagnose_drafter", literal=("prompts",))
def main(cfg: DictConfig) -> None:
    console = Console(highlight=False)
    prompts = prompts_of(cfg)
    target = instantiate(cfg.target)
    drafter = instantiate(cfg.drafter, target=target)
    if not isinstance(drafter, DFlash):
        raise InputError(f"{drafter.name} is not a DFlash drafter; only those can be diagnosed")
    replays = {name: Replay.of(method_of(method)) for name, method in cfg.methods.items()}
    header = f"{target.name}, {target.dtype}; {drafter.name}".replace("torch.", "")
    console.print(header, style="dim", soft_wrap=True)

    answers = answer(prompts, target, cfg, console)
    rows = replay(answers, drafter, target, replays, console)
    log = open_log(cfg)
    for row in rows:
        log.log(row)
    table = by_set(rows, list(replays))
    console.print(as_table(table))
    if cfg.card:
        into_card(Path(cfg.drafter.checkpoint), table, cfg)
    if cfg.readings:
        texts = [text for _, text in answers]
        doctor = Doctor(drafter.net, target, texts)
        own, others = doctor.measure(Reading()), []
        for reading in progress_bar(console, "readings").track(readings(drafter.net, target)):
            others.append(doctor.measure(reading))
        others += other_templates(prompts, drafter, target, cfg, console)
        disagreement = cache_disagreement(drafter, target, texts[:CACHE_TEXTS])
        console.print(compared(own, others))
        words = diagnosis(own, others, disagreement)
        console.print(f"\n{words}", soft_wrap=True)
        log.log({"diagnosis": words, "accuracy": own.accuracy, "accepted": own.accepted})
    log.close()


def answer(
    prompts: list[Prompt],
    target: Any,
    cfg: DictConfig,
    console: Console,
    **template: Any,
) -> list[tuple[Prompt, Answered]]:
    """The target's greedy answers, in the order they end. `template` goes to `encode_chat`."""
    requests = []
    for prompt in prompts:
        tokens = target.encode_chat([{"role": "user", "content": prompt.turns[0]}], **template)
        if len(tokens) <= cfg.max_prompt_tokens:
            request = Request(tokens, cfg.max_new_tokens, stop_tokens=target.stop_tokens)
            requests.append(((prompt, tokens), request))
    found = []
    with progress_bar(console, "answers") as progress:
        task = progress.add_task("answers", total=len(requests))
        for done in respond(requests, Slots(target, cfg.slots), cut_loops=True):
            if done is not None:
                prompt, tokens = done.key
                text = torch.tensor([*tokens, *done.tokens])
                found.append((prompt, Answered(text, len(tokens))))
                progress.advance(task)
    return found


def replay(
    answers: list[tuple[Prompt, Answered]],
    drafter: DFlash,
    target: Any,
    replays: dict[str, Replay],
    console: Console,
) -> list[dict[str, Any]]:
    """Tokens a round of each answer by method; answers too short for a round are left out."""
    rows = []
    for prompt, text in progress_bar(console, "replays").track(answers):
        drafts = drafts_along(
            drafter.net, target, text.tokens, start=text.start, candidates=drafter.candidates
        )
        response = text.tokens[text.start :].tolist()
        row: dict[str, Any] = {"prompt": prompt.id, "source": prompt.source}
        for name, method in replays.items():
            walk = method(drafts, response)
            if len(walk.roots):
                row[name] = walk.mat
        if len(row) > 2:
            rows.append(row)
    if not rows:
        raise InputError("no answer is long enough for a round; raise max_new_tokens")
    return rows


def other_templates(
    prompts: list[Prompt], drafter: DFlash, target: Any, cfg: DictConfig, console: Console
) -> list[Finding]:
    """The engine's reading on answers to the same prompts in other templates."""
    tried: dict[str, dict[str, Any]] = {
        "without the chat template": {"chat_template": "{{ messages[0]['content'] }}"}
    }
    if "enable_thinking" in (target.tokenizer.chat_template or ""):
        tried["with thinking on"] = {"enable_thinking": True}
    found = []
    for words, template in tried.items():
        answers = answer(prompts, target, cfg, console, **template)
        try:
            doctor = Doctor(drafter.net, target, [text for _, text in answers])
        except InputError:
            continue  # answers too short to say anything
        reading = Reading(
            f"template: it was trained on answers to prompts {words}",
            "train it on the template it is used with, or use it with that one",
            margin=OTHER_TEXT,
        )
        found.append(dataclasses.replace(doctor.measure(Reading()), reading=reading))
    return found


def by_set(rows: list[dict[str, Any]], methods: list[str]) -> list[list[str]]:
    """Mean over answers of the tokens a round, by set and over all; the heading first."""
    sets = defaultdict(list)
    for row in rows:
        sets[row["source"]].append(row)
    lines = [["set", "answers", *methods]]
    for name, mine in [*sorted(sets.items()), ("all", rows)]:
        values = [f"{mean(row[method] for row in mine):.2f}" for method in methods]
        lines.append([name, str(len(mine)), *values])
    return lines


def as_table(lines: list[list[str]]) -> Table:
    out = Table(box=None, pad_edge=False, title="MAT by replay", title_justify="left")
    for place, heading in enumerate(lines[0]):
        out.add_column(heading, justify="right" if place else "left")
    for line in lines[1:]:
        out.add_row(*line)
    return out


def into_card(folder: Path, lines: list[list[str]], cfg: DictConfig) -> None:
    """Put the table behind the card's last section, in place of an earlier one."""
    card = folder / "README.md"
    if not card.is_file():
        raise InputError(f"card=true: {folder} has no README.md to write the table into")
    text = card.read_text().split(SECTION)[0].rstrip()
    rule = ["---"] * len(lines[0])
    table = "\n".join("| " + " | ".join(line) + " |" for line in [lines[0], rule, *lines[1:]])
    words = (
        f"Tokens a round, bonus included, by replay of the target's greedy answers "
        f"({cfg.target.dtype}, at most\n{cfg.max_new_tokens} new tokens), mean over answers. None "
        "of these prompts was trained on."
    )
    write_atomically(card, f"{text}\n\n{SECTION}\n\n{words}\n\n{table}\n")


def compared(own: Finding, others: list[Finding]) -> Table:
    """The engine's reading and the five best others."""
    out = Table(box=None, pad_edge=False, title="readings", title_justify="left")
    out.add_column("read as")
    out.add_column("accepted", justify="right")
    out.add_column("accuracy by slot")
    best = sorted(others, key=lambda finding: -finding.accepted)[:5]
    for finding in (own, *best):
        name = finding.reading.fault.split(":")[0] if finding.reading.fault else "the engine does"
        detail = finding.reading.fault.partition(": ")[2]
        slots = " ".join(f"{value:.2f}" for value in finding.accuracy)
        out.add_row(f"{name}{': ' + detail if detail else ''}", f"{finding.accepted:.2f}", slots)
    return out


if __name__ == "__main__":
    main()
