"""Decode prompts and keep every round, as rows of `data/rounds.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

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
from graft.core.clock import by_verb
from graft.core.types import Generation, Round
from graft.data.prompts import Prompt


def collect_rounds(
    prompts: Sequence[Prompt],
    asker: Asker,
    decode: Callable[..., Generation],
    *,
    hist_window: int,
) -> Iterator[Collected | Skipped]:
    """Answer every turn of every prompt with `decode`, the target's own answers fed back."""
    for prompt in prompts:
        messages: Messages = []
        for turn, text in enumerate(prompt.turns):
            messages.append({"role": "user", "content": text})
            recorder = Recorder(prompt, turn, hist_window)
            try:
                request = asker.request(prompt, turn, messages)
                with leaving_out_of_memory():
                    result = decode(request, on_round=recorder)
            except LeaveOut as reason:
                yield Skipped(prompt.key, turn, str(reason), len(prompt.turns) - turn)
                free_memory()
                break
            if recorder.rows:
                seconds = sum(result.seconds.values())
                yield Collected(
                    prompt.key, turn, recorder.rows, len(result.tokens), result.committed, seconds
                )
            else:
                yield Skipped(prompt.key, turn, ONE_TOKEN, 1)
            messages = asker.answered(messages, result.tokens)


class Recorder:
    """The on-round hook: keeps the rounds of one response in `rows`, outside the verbs' times."""

    def __init__(self, prompt: Prompt, turn: int, hist_window: int) -> None:
        self.rows: list[dict[str, Any]] = []
        self._response = {"prompt_id": prompt.key, "source": prompt.source, "turn": turn}
        self._window = hist_window

    def __call__(self, done: Round) -> None:
        state, draft, tree = done.state, done.state.draft, done.tree
        over, norm, best = judgements(done)
        self.rows.append(
            {
                **self._response,
                "round": done.index,
                "context_length": state.context_length,
                "root": draft.root,
                "candidates": draft.tokens.ravel(),
                "log_probs": draft.log_probs.ravel(),
                "cosines": draft.cosines,
                "conf": state.conf,
                "degen": state.degen,
                "hist": state.hist(self._window),
                "budget": done.budget,
                "tokens": tree.tokens,
                "parents": tree.parents,
                "depths": tree.depths,
                "log_scores": tree.log_scores,
                "target_logits": over.ravel(),
                "target_log_norm": norm,
                "target_argmax": best,
                "path": done.path,
                "bonus": done.bonus,
                "seconds": by_verb(done.seconds),
            }
        )


def judgements(done: Round) -> tuple[Any, Any, Any]:
    """What the target said in a round, as arrays.

    Its logits [N, K] behind each node over the candidates of the next depth (0 behind the deepest),
    their log-normalisers [N] over the vocabulary, and their argmaxes [N].
    """
    logits = done.step.logits
    depths = torch.from_numpy(done.tree.depths)
    candidates = torch.from_numpy(done.state.draft.tokens)
    D = len(candidates)
    wanted = candidates[depths.clamp_max(D - 1)].to(logits.device)  # [N, K]
    over = logits.gather(1, wanted).float()
    over[(depths == D).to(logits.device)] = 0
    norms = torch.logsumexp(logits.float(), -1)
    return over.cpu().numpy(), norms.cpu().numpy(), logits.argmax(-1).cpu().numpy()
