"""The package from plain Python: load a target with its drafter, stream text, look at the numbers.

Scripts compose the same parts from conf/; whoever wants another tree or budget policy than `load`
chooses makes an `Engine` of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from graft.budgets.fixed import Fixed
from graft.core.errors import InputError
from graft.core.interfaces import BudgetPolicy, Drafter, TreeBuilder
from graft.core.types import Generation, Request
from graft.decode import loop
from graft.decode.response import Rounds, check_fits, drain
from graft.decode.text import Detokenizer
from graft.drafters import dflash
from graft.targets import hf
from graft.trees import tdes
from graft.trees.ddtree import DDTree

DATA = Path(__file__).resolve().parents[1] / "data"
SCORER = str(DATA / "scorers/smollm2-135m-tdes")  # made for the first pair
PAIRS = {  # name -> target and drafter, each a hub id or a folder; those of conf/experiment
    "smollm2": (
        str(DATA / "targets/smollm2-135m-instruct"),
        str(DATA / "drafters/smollm2-135m-dflash"),
    ),
    "qwen3_4b": ("Qwen/Qwen3-4B", "z-lab/Qwen3-4B-DFlash-b16"),
    "qwen3_8b": ("Qwen/Qwen3-8B", "z-lab/Qwen3-8B-DFlash-b16"),
    "qwen3_coder_30b_a3b": (
        "Qwen/Qwen3-Coder-30B-A3B-Instruct",
        "z-lab/Qwen3-Coder-30B-A3B-DFlash",
    ),
    "llama31_8b": (
        "meta-llama/Llama-3.1-8B-Instruct",
        "z-lab/LLaMA3.1-8B-Instruct-DFlash-UltraChat",
    ),
}

Messages = str | Sequence[Mapping[str, str]]  # a conversation; a string is its only turn


class Engine:
    """The four parts of the loop, asked with messages. It makes one response at a time.

    `last` is the latest finished response with its numbers (`mat`, `tokens_per_second`, ...), None
    before the first and while one is under way.
    """

    def __init__(
        self, target: hf.HFTarget, drafter: Drafter, *, builder: TreeBuilder, budget: BudgetPolicy
    ) -> None:
        self.target, self.drafter, self.builder, self.budget = target, drafter, builder, budget
        self.last: Generation | None = None
        self._asked: Request | None = None

    def stream(
        self,
        messages: Messages,
        *,
        max_new_tokens: int = 256,
        temperature: float = 0.0,
        top_p: float = 1.0,
        top_k: int = 0,
        seed: int = 0,
    ) -> Iterator[str]:
        """Text as it is decoded, a piece a token; closing the iterator ends the response.

        A character whose bytes come in several tokens comes with the last of them. Raises
        InputError, at once for what was asked, later if another response was begun meanwhile.
        """
        request = self._request(
            messages,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            seed=seed,
        )
        return self._pieces(request)

    def generate(
        self,
        messages: Messages,
        *,
        max_new_tokens: int = 256,
        temperature: float = 0.0,
        top_p: float = 1.0,
        top_k: int = 0,
        seed: int = 0,
    ) -> Generation:
        """The whole response as tokens and numbers; `target.decode` makes text of the tokens.

        Raises InputError.
        """
        request = self._request(
            messages,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            seed=seed,
        )
        return drain(self._rounds(request), None)

    def _pieces(self, request: Request) -> Iterator[str]:
        text = Detokenizer(self.target.decode)
        for tokens in self._rounds(request):
            for token in tokens:
                if piece := text.add([token]):
                    yield piece
                    if self._asked is not request:  # the cache holds the other response now
                        raise InputError(
                            "this stream cannot go on, another response was begun on its engine: "
                            "finish one before the next, or load a second engine"
                        )
        if rest := text.rest():
            yield rest

    def _rounds(self, request: Request) -> Rounds:
        self._asked, self.last = request, None
        self.last = yield from loop.stream(
            request,
            target=self.target,
            drafter=self.drafter,
            builder=self.builder,
            budget=self.budget,
        )
        return self.last

    def _request(self, messages: Messages, **settings: Any) -> Request:
        turns = _conversation(messages)
        try:
            prompt = self.target.encode_chat(turns)
        except TemplateError as error:  # such as roles that must alternate
            raise InputError(
                f"the chat template of {self.target.name} refuses these messages: {error}"
            ) from error
        request = Request(prompt, stop_tokens=self.target.stop_tokens, **settings)
        check_fits(request, self.target, self.budget)
        return request


def load(
    name: str = "smollm2",
    *,
    drafter: str | None = None,
    scorer: str | None = None,
    nodes: int | None = None,
    dtype: str = "bfloat16",
    device: str = "auto",
) -> Engine:
    """An engine for a pair by name (`PAIRS`), or for any target, a hub id or a folder.

    `drafter`, a hub id or a folder of a DFlash checkpoint, replaces the pair's; another target
    needs one. `scorer`, a folder, makes TDES trees, which "smollm2" has its own for; without one
    trees are DDTree's. Rounds draft `nodes` tokens: 7 on a CPU, where more than 8 rows cost, 15 on
    a GPU. The tokens are those of plain decoding; where passes are not compiled for a CPU,
    bfloat16 can flip near-ties, and float32 does not. Raises InputError.
    """
    if name not in PAIRS and not drafter:
        raise InputError(
            f"{name} is none of {', '.join(PAIRS)}; another target needs drafter=, a hub id or "
            "folder of a DFlash checkpoint that was made for it"
        )
    if name == "smollm2" and not drafter and scorer is None:
        scorer = SCORER
    checkpoint, own_drafter = PAIRS.get(name, (name, ""))
    on_gpu = hf.parse_device(device).type == "cuda"  # what is cheap to refuse comes first
    budget = Fixed(nodes if nodes is not None else 15 if on_gpu else 7)
    builder = DDTree() if scorer is None else tdes.load(scorer)
    target = hf.load(checkpoint, dtype=dtype, device=device)
    bound = dflash.load(drafter or own_drafter, target)
    if isinstance(builder, tdes.TDES):
        builder.scorer.check_fits(target.fingerprint, bound.fingerprint)
        builder.scorer.to(target.device)
    return Engine(target, bound, builder=builder, budget=budget)


def _conversation(messages: Messages) -> list[dict[str, str]]:
    """Messages as the chat template wants them. Raises InputError."""
    if isinstance(messages, str):
        if not messages.strip():
            raise InputError("the prompt is empty; ask something")
        return [{"role": "user", "content": messages}]
    if not isinstance(messages, Sequence) or not messages:
        raise InputError(f"messages must be a string or a list of turns, not {messages!r}")
    turns = []
    for turn in messages:
        if not isinstance(turn, Mapping) or not all(
            isinstance(turn.get(key), str) for key in ("role", "content")
        ):
            raise InputError(
                f'a message must be {{"role": "user", "content": "..."}}, not {turn!r}'
            )
        turns.append(dict(turn))
    return turns
