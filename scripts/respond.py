"""Let the target answer prompts, as training data for a drafter.

    python scripts/respond.py prompts=path/to/prompts out=data/responses/smollm2
    python scripts/respond.py dataset=gsm8k dataset.split=train out=data/responses/gsm8k
    python scripts/respond.py prompts=... out=... temperature=0.7 slots=128
    python scripts/respond.py prompts=... out=... '+templates.humaneval="Complete this:\\n{turn}"'

Interrupt it at any time: run again, it goes on behind the last whole shard.
"""

from __future__ import annotations

import random
import time
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
from hydra.utils import instantiate
from launch import open_log, progress_bar, prompts_of, stage
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from graft.core.runlog import provenance
from graft.core.types import Request
from graft.data.prompts import Prompt
from graft.data.responses import SCHEMA, finished_ids
from graft.data.shards import next_shard, write_shard
from graft.decode.batched import Answer, respond
from graft.targets.slots import Slots


@stage("respond", literal=("prompts",))
def main(cfg: DictConfig) -> None:
    console = Console(highlight=False)
    prompts = prompts_of(cfg)
    random.Random(cfg.seed).shuffle(prompts)  # so that an interrupted run has some of every set
    target = instantiate(cfg.target)
    config: Any = OmegaConf.to_container(cfg, resolve=True)
    folder = Path(cfg.out)
    done = finished_ids(folder, target.fingerprint)
    missing = [prompt for prompt in prompts if prompt.key not in done]
    log = open_log(cfg, folder)
    made_by = {
        "kind": "responses",
        "target": {"name": target.name, "fingerprint": target.fingerprint},
        **provenance(config),
    }
    console.print(
        f"{target.name} answers {len(missing)} prompts ({len(done)} done before) into {folder}",
        style="dim",
        soft_wrap=True,
    )

    too_long: list[str] = []
    counts: Counter[str] = Counter()
    pending: list[dict[str, Any]] = []
    requests = make_requests(missing, target, cfg, too_long)
    started, decoded, rate = time.perf_counter(), 0, 0.0
    with progress_bar(console, "answers", "{task.fields[note]}") as progress:
        task = progress.add_task("answers", total=len(missing), note="")
        slots = Slots(target, cfg.slots)
        try:
            for answer in respond(requests, slots, cut_loops=True):
                if answer is None:
                    decoded += slots.occupied
                    continue
                pending.append(row_of(answer))
                counts.update(
                    answers=1,
                    tokens=len(answer.tokens),
                    stopped=answer.stopped,
                    looped=answer.looped,
                )
                rate = decoded / (time.perf_counter() - started)  # unfinished ones included
                note = f"{counts['tokens']} tokens, {rate:.0f} tokens/s, {counts['looped']} loops"
                progress.update(task, completed=counts["answers"] + len(too_long), note=note)
                if len(pending) == cfg.shard_size:
                    pending = save(folder, pending, made_by)
                    log.log({**counts, "tokens_per_second": rate})
        finally:  # what is finished is kept, whatever stops the run
            save(folder, pending, made_by)
    seconds = time.perf_counter() - started
    log.log({**counts, "too_long": len(too_long), "seconds": seconds})
    log.close()
    console.print(
        f"{counts['answers']} answers, {counts['tokens']} tokens in {seconds:.0f} s: "
        f"{counts['tokens'] / seconds:.0f} tokens/s. {counts['stopped']} ended by themselves, "
        f"{counts['looped']} looped and were cut; {len(too_long)} prompts were too long"
    )


def make_requests(
    prompts: list[Prompt], target: Any, cfg: DictConfig, too_long: list[str]
) -> Iterator[tuple[tuple[Prompt, list[int]], Request]]:
    """First turns through the chat template; long ones are left out."""
    for prompt in prompts:
        tokens = target.encode_chat([{"role": "user", "content": prompt.turns[0]}])
        if len(tokens) > cfg.max_prompt_tokens:
            too_long.append(prompt.key)
            continue
        yield (
            (prompt, tokens),
            Request(
                prompt=tokens,
                max_new_tokens=cfg.max_new_tokens,
                temperature=cfg.temperature,
                top_p=cfg.top_p,
                top_k=cfg.top_k,
                seed=zlib.crc32(f"{cfg.seed} {prompt.key}".encode()),  # the same in a resumed run
                stop_tokens=target.stop_tokens,
            ),
        )


def row_of(answer: Answer) -> dict[str, Any]:
    prompt, tokens = answer.key
    return {
        "prompt_id": prompt.key,
        "source": prompt.source,
        "prompt_token_ids": tokens,
        "response_token_ids": answer.tokens,
        "stopped": answer.stopped,
        "looped": answer.looped,
    }


def save(folder: Path, rows: list[dict[str, Any]], made_by: dict[str, Any]) -> list[dict[str, Any]]:
    """Write the next shard; gives the empty list that collects the one after it."""
    if rows:
        write_shard(next_shard(folder), pa.Table.from_pylist(rows, SCHEMA), made_by)
    return []


if __name__ == "__main__":
    main()
