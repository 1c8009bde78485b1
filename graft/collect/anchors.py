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
    Asker,
    Collected,
    LeaveOut,
    Messages,
    Skipped,
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

Talk = tuple[Prompt, Messages]  # a conversation so far


def collect_anchors(
    prompts: Sequence[Prompt],
    asker: Asker,
    drafter: DFlash,
    *,
    slots: int,
    replay: Replay,
    hidden: str | None = None,
    on_step: Callable[[int], None] = lambda tokens: None,
) -> Iterator[Collected | Skipped]:
    """Answer every turn of every prompt, and draft at every position of the answers.

    `replay` says what `committed` counts; `hidden` keeps the drafter's states as "int8" or
    "float16"; `on_step` is told how many tokens a step of the batch decoded.
    """
    beyond = drafter.depth - 1  # the last round's draft ends there
    talks: list[Talk] = [(prompt, []) for prompt in prompts]
    for turn in range(max(len(prompt.turns) for prompt in prompts)):
        asked: list[tuple[Talk, Request]] = []
        for prompt, messages in talks:
            if turn == len(prompt.turns):
                continue
            messages = [*messages, {"role": "user", "content": prompt.turns[turn]}]
            try:
                request = asker.request(prompt, turn, messages, beyond=beyond)
            except LeaveOut as reason:
                yield Skipped(prompt.key, turn, str(reason), len(prompt.turns) - turn)
            else:
                asked.append(((prompt, messages), request))
        talks = []
        order = {prompt.key: place for place, ((prompt, _), _) in enumerate(asked)}
        answers = answer_all(asked, asker, slots, beyond, on_step)
        for talk, request, answer in sorted(answers, key=lambda a: order[a[0][0].key]):
            prompt, messages = talk
            try:
                if isinstance(answer, LeaveOut):
                    raise answer
                if len(answer.tokens) == 1:
                    raise LeaveOut("the response is one token: nothing is drafted")
                with leaving_out_of_memory():
                    found = anchored(prompt, turn, request, answer, asker, drafter)
            except LeaveOut as reason:
                yield Skipped(prompt.key, turn, str(reason), len(prompt.turns) - turn)
                continue
            walk = replay(found.drafts, found.response, found.beyond, start=len(found.prompt))
            row = found.to_row(hidden)
            yield Collected(
                prompt.key, turn, [row], len(answer.tokens), walk.committed.tolist(), 0.0
            )
            talks.append((prompt, asker.answered(messages, answer.tokens)))


def answer_all(
    asked: Sequence[tuple[Talk, Request]],
    asker: Asker,
    slots: int,
    beyond: int,
    on_step: Callable[[int], None],
) -> list[tuple[Talk, Request, Answer | LeaveOut]]:
    """Answer side by side; a batch that runs out of memory is split, until one alone does."""
    if not asked:
        return []
    requests = dict(enumerate(asked))
    found: list[tuple[Talk, Request, Answer | LeaveOut]] = []
    try:
        with leaving_out_of_memory():
            batch = Slots(asker.target, min(slots, len(asked)))
            numbered = [(i, request) for i, (_, request) in requests.items()]
            for answer in respond(numbered, batch, beyond=beyond):
                if answer is None:
                    on_step(batch.occupied)
                else:
                    found.append((*requests[answer.key], answer))
        return found
    except LeaveOut as reason:
        if len(asked) == 1:
            return [(*asked[0], reason)]
    half = len(asked) // 2
    parts = (asked[:half], asked[half:])
    return [one for part in parts for one in answer_all(part, asker, half, beyond, on_step)]


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
