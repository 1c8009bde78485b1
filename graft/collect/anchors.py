"""Answer prompts side by side, and look at every position of the answers, as rows of
`data/anchors.py`.

Nothing is decoded twice: the target answers in batches, reads each finished response once, and the
drafter's blocks at all its positions run through a few block-masked passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from graft.collect.asking import (
    ONE_TOKEN,
    Asker,
    Collected,
    LeaveOut,
    Messages,
    Skipped,
    free_memory,
    leaving_out_of_memory,
)
from graft.core.types import Request
from graft.data.anchors import AnchoredResponse
from graft.data.prompts import Prompt
from graft.decode.batched import Answer, respond
from graft.decode.replay import Replay
from graft.drafters.anchors import judged_drafts
from graft.drafters.dflash import DFlash
from graft.targets.slots import Slots

OnStep = Callable[[int], None]  # is told how many tokens a step of the batch decoded


def collect_anchors(
    prompts: Sequence[Prompt],
    asker: Asker,
    drafter: DFlash,
    *,
    slots: int,
    replay: Replay,
    hidden: str | None = None,
    on_step: OnStep = lambda tokens: None,
) -> Iterator[Collected | Skipped]:
    """Answer every turn of every prompt, and draft at every position of the answers.

    `replay` says what `committed` counts; `hidden` keeps the drafter's states as "int8" or
    "float16".
    """
    talks: dict[str, tuple[Prompt, Messages]] = {p.key: (p, []) for p in prompts}
    for turn in range(max(len(prompt.turns) for prompt in prompts)):
        requests: dict[str, Request] = {}
        for key, (prompt, messages) in list(talks.items()):
            if turn == len(prompt.turns):
                del talks[key]
                continue
            messages.append({"role": "user", "content": prompt.turns[turn]})
            try:
                requests[key] = asker.request(prompt, turn, messages)
            except LeaveOut as reason:
                del talks[key]
                yield Skipped(key, turn, str(reason), len(prompt.turns) - turn)
        answers = answer_all(requests, asker, slots, on_step)
        for key, request in requests.items():
            prompt, messages = talks[key]
            answer = answers[key]
            try:
                if isinstance(answer, str):
                    raise LeaveOut(answer)
                if len(answer.tokens) > 1:
                    with leaving_out_of_memory():
                        found = anchored(prompt, turn, request, answer, asker, drafter)
            except LeaveOut as reason:
                del talks[key]
                yield Skipped(key, turn, str(reason), len(prompt.turns) - turn)
                free_memory()
                continue
            talks[key] = prompt, asker.answered(messages, answer.tokens)
            if len(answer.tokens) == 1:
                yield Skipped(key, turn, ONE_TOKEN, 1)
                continue
            walk = replay(found.drafts, found.response, found.beyond, start=len(found.prompt))
            committed = walk.committed.tolist()
            yield Collected(key, turn, [found.to_row(hidden)], len(answer.tokens), committed, 0.0)


def answer_all(
    requests: dict[str, Request], asker: Asker, slots: int, on_step: OnStep
) -> dict[str, Answer | str]:
    """The answer to each request, or why there is none.

    A batch that runs out of memory is split, until a request alone does; what it had finished is
    kept.
    """
    found: dict[str, Answer | str] = {}
    groups = [list(requests)]
    while groups:
        group = groups.pop()
        answers, reason = _attempt({key: requests[key] for key in group}, asker, slots, on_step)
        found |= answers
        if reason is None:
            continue
        free_memory()
        rest = [key for key in group if key not in found]
        if len(group) == 1:
            found[rest[0]] = reason
        else:
            half = (len(rest) + 1) // 2
            groups += [part for part in (rest[half:], rest[:half]) if part]
    return found


def _attempt(
    requests: dict[str, Request], asker: Asker, slots: int, on_step: OnStep
) -> tuple[dict[str, Answer], str | None]:
    """Answers until all are there or the memory is full; the batch itself ends with this frame."""
    found: dict[str, Answer] = {}
    if not requests:
        return found, None
    try:
        with leaving_out_of_memory():
            batch = Slots(asker.target, min(slots, len(requests)))
            for answer in respond(requests.items(), batch, beyond=asker.beyond):
                if answer is None:
                    on_step(batch.occupied)
                else:
                    found[answer.key] = answer
    except LeaveOut as reason:
        return found, str(reason)
    return found, None


def anchored(
    prompt: Prompt, turn: int, request: Request, answer: Answer, asker: Asker, drafter: DFlash
) -> AnchoredResponse:
    """What the drafter proposes along an answer and what the target makes of it."""
    text = torch.tensor([*request.prompt, *answer.tokens, *answer.beyond])
    start = len(request.prompt)
    drafts, over, norms, best = judged_drafts(
        drafter.net, asker.target, text, start=start, candidates=drafter.candidates
    )
    return AnchoredResponse(
        prompt_id=prompt.key,
        source=prompt.source,
        turn=turn,
        prompt=np.array(request.prompt, np.int64),
        response=np.array(answer.tokens, np.int64),
        beyond=np.array(answer.beyond, np.int64),
        stopped=answer.stopped,
        drafts=drafts,
        target_logits=over,
        target_log_norm=norms,
        target_argmax=best,
    )
