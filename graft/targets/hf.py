"""A transformers checkpoint as a `Target`: load it, refuse what cannot be verified exactly,
prefill, verify, commit.

Verification is one pass over root and nodes: position = context length + depth, and every node sees
the context, its ancestors and itself. On a CPU with a compiler every pass is one call
(`compiled.py`), on a GPU a verification is a captured graph (`captured.py`); else it goes through
torch, where a chain is plain causal attention and only a real tree gets a mask of its own.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from huggingface_hub.errors import HFValidationError
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from graft.core.clock import Part
from graft.core.errors import InputError
from graft.core.fingerprint import fingerprint
from graft.core.types import DraftTree, Step
from graft.native.calls import ROWS, Rows
from graft.targets.captured import CapturedPasses
from graft.targets.compiled import network_of
from graft.targets.decoder import Decoder
from graft.targets.family import family_of


class HFTarget:
    """A causal LM with one cache. Satisfies `Target` and `Backbone`.

    `passes` is auto, or eager: through torch, the reference that compiled passes are tested with.
    """

    def __init__(self, model: Any, tokenizer: Any, *, name: str, passes: str = "auto") -> None:
        if passes not in ("auto", "eager"):
            raise InputError(f"target.passes must be auto or eager, not {passes}")
        config = model.config
        self.config, family = config, family_of(config)
        _check_finite(model, name)
        self.name, self.tokenizer = name, tokenizer
        vocabulary = json.dumps(tokenizer.get_vocab(), sort_keys=True)
        self.fingerprint = fingerprint(model, vocabulary)
        self.hidden_size, self.max_context = config.hidden_size, config.max_position_embeddings
        self.stop_tokens = _stop_tokens(model, tokenizer)
        self._chat_options = family.chat_options
        self.decoder = Decoder(model, family, native=passes == "auto")
        self._network = network_of(self.decoder, config)
        self.num_layers = self.decoder.num_layers
        self.embedding = self.decoder.embedding.weight.detach()  # [V, H]
        self.head = self.decoder.head  # normalised hidden states [..., H] -> logits [..., V]
        self.vocab_size = len(self.embedding)
        self.device, self.dtype = self.embedding.device, self.embedding.dtype
        self.cache = self.decoder.new_cache()
        self.captures = passes == "auto" and self.device.type == "cuda"
        self._captured = CapturedPasses(self.decoder, self.cache) if self.captures else None

    @property
    def invariant(self) -> bool:
        """Whether a row's bits do not depend on the rows beside it: bf16 is then lossless too."""
        return self._network is not None

    @torch.inference_mode()
    def prefill(self, tokens: Sequence[int]) -> Step:
        """Start a response: tokens [T] -> logits [1, V] of the last one, taps [T, n_taps * H]."""
        if len(tokens) == 0:
            raise InputError("the prompt is empty")
        self.cache.reset()
        if self._network is not None:
            return self._prefill(np.asarray(tokens, np.int64))
        ids = torch.as_tensor(tokens, device=self.device)
        positions = torch.arange(len(ids), device=self.device)
        hidden, taps = self._run(ids, positions, mask=None)
        self.cache.commit(range(len(ids)))
        return Step(self.decoder.logits(hidden[-1:]), taps)

    @torch.inference_mode()
    def verify(self, tree: DraftTree) -> Step:
        """Logits [N, V] and taps [N, n_taps * H] of the nodes, each as if its path were decoded."""
        if self._network is not None:
            return self._pass(tree.tokens, tree.depths, tree.visible)
        if self._captured is not None and self._captured.take(len(tree)):
            return self._captured.verify(tree)
        with Part("masks"):
            ids = torch.from_numpy(tree.tokens).to(self.device)
            positions = torch.from_numpy(tree.depths).to(self.device) + self.cache.length
        hidden, taps = self._run(ids, positions, mask=self.mask(tree))
        return Step(self.decoder.logits(hidden), taps)

    @torch.inference_mode()
    def commit(self, path: Sequence[int]) -> None:
        """Keep the cache rows of these nodes of the last verified tree, root first."""
        self.cache.commit(path)

    @torch.no_grad()  # not inference mode: the taps go into a network that is being trained
    def read(self, texts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Taps [L_i, n_taps * H] of finished texts [L_i], run side by side without the cache."""
        return list(self._side_by_side(texts, 1 + max(self.decoder.tapped))[1])

    @torch.no_grad()
    def read_through(self, text: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """A finished text [L] through all blocks: what `logits` takes [L, H], and the taps."""
        (hidden,), (taps,) = self._side_by_side([text], None)
        return hidden, taps

    @torch.no_grad()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [n, V] behind positions of a text that was read through: hidden [n, H]."""
        return self.decoder.logits(hidden)

    @torch.no_grad()
    def choices(self, texts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The token that the target itself would put behind every position of texts [L_i]."""
        hidden, _ = self._side_by_side(texts, None)
        return [self.logits(states).argmax(-1) for states in hidden]

    def _side_by_side(
        self, texts: Sequence[torch.Tensor], blocks: int | None
    ) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
        lengths = [len(text) for text in texts]
        positions = torch.cat([torch.arange(n, device=self.device) for n in lengths])
        tokens = torch.cat(list(texts)).to(self.device)
        attend = self.decoder.side_by_side(lengths)
        hidden, taps = self.decoder.run(tokens, positions, attend, blocks=blocks)
        return hidden.split(lengths), taps.split(lengths)

    def _prefill(self, tokens: np.ndarray) -> Step:
        """A few rows at a time: a whole prompt's would not stay in the processor's cache."""
        taps = []
        for first in range(0, len(tokens), ROWS):
            part = tokens[first : first + ROWS]
            n, last = len(part), first + ROWS >= len(tokens)
            causal = np.tri(n, dtype=bool)
            step = self._pass(part, np.arange(n), causal, first=n - 1 if last else n)
            self.cache.commit(range(n))
            taps.append(step.taps)
        return Step(step.logits, torch.cat(taps), step.best)

    def _pass(
        self, tokens: np.ndarray, depths: np.ndarray, visible: np.ndarray, *, first: int = 0
    ) -> Step:
        """A compiled pass behind the cache's committed rows; logits of the rows from `first` on."""
        assert self._network is not None
        length = self.cache.length
        self.cache.reserve(len(tokens))
        with Part("masks"):
            positions, rows = depths + length, [Rows(self.cache.buffer, length, visible)]
        tapped = self.decoder.tapped
        logits, best, taps = self._network.decode(
            tokens, positions, rows, tapped=tapped, first=first
        )
        return Step(logits, taps, best)

    def _run(
        self, ids: torch.Tensor, positions: torch.Tensor, *, mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.cache.reserve(len(ids))
        return self.decoder.run(ids, positions, self.decoder.cached(self.cache, mask))

    @Part("masks")
    def mask(self, tree: DraftTree) -> torch.Tensor | None:
        """Additive mask [N, T + N]: 0 where visible, else the dtype's minimum, never -inf."""
        n, length = len(tree), self.cache.length
        flash = self.device.type == "cuda" and self.dtype != torch.float32
        if n == 1 or (tree.is_chain and flash):
            return None  # other kernels know no causality behind a context: give chains a triangle
        mask = torch.zeros(n, length + n, dtype=self.dtype, device=self.device)
        blocked = ~torch.from_numpy(tree.visible).to(self.device)
        mask[:, length:].masked_fill_(blocked, torch.finfo(self.dtype).min)
        return mask

    def tap(self, layer_ids: Sequence[int]) -> None:
        """Put the outputs of these blocks (0-based) into every `Step`. Raises InputError."""
        if bad := [i for i in layer_ids if not 0 <= i < self.num_layers]:
            raise InputError(f"{self.name} has blocks 0..{self.num_layers - 1}; cannot tap {bad}")
        self.decoder.tapped = list(layer_ids)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Input embeddings [..., H] of tokens [...]."""
        return self.decoder.embedding(tokens)

    def head_rows(self, tokens: torch.Tensor | None) -> torch.Tensor:
        """The head's weights [n, H] for tokens [n], or all of them [V, H]."""
        weight = self.decoder.head_weight
        return weight if tokens is None else weight[tokens.to(self.device)]

    def encode_chat(self, messages: Sequence[dict[str, str]], **options: Any) -> list[int]:
        """Prompt tokens of a conversation in the target's chat template, ready for its answer.

        `options` go to the template, over the family's own.
        """
        if not self.tokenizer.chat_template:
            raise InputError(
                f"{self.name} has no chat template; use an instruct checkpoint, not a base model"
            )
        text = self.tokenizer.apply_chat_template(
            list(messages),
            tokenize=False,
            add_generation_prompt=True,
            **{**self._chat_options, **options},
        )
        return self.tokenizer(text, add_special_tokens=False).input_ids

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of response tokens, control tokens left out."""
        return self.tokenizer.decode(
            tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )


def load(
    model: str, *, dtype: str = "float32", device: str = "auto", passes: str = "auto"
) -> HFTarget:
    """Load a hub id or a local transformers folder, safetensors only. Raises InputError."""
    transformers_logging.disable_progress_bar()
    path = Path(model).expanduser()
    if path.is_dir():
        model = str(path)
        if not any(path.glob("*.safetensors")):
            found = sorted(
                p.name for pattern in ("*.bin", "*.pt", "*.pth") for p in path.glob(pattern)
            )
            raise InputError(
                f"{path} holds no .safetensors weights"
                + (
                    f"; {found[0]} is a pickle, which can run code when read: convert it first"
                    if found
                    else ""
                )
            )
    elif path.is_absolute() or model.startswith("."):
        raise InputError(
            f"target folder {path} does not exist; `make setup` prepares the default target"
        )
    try:
        config = AutoConfig.from_pretrained(model)
        family_of(config)
        tokenizer = AutoTokenizer.from_pretrained(model)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            model, dtype=parse_dtype(dtype), use_safetensors=True, output_loading_info=True
        )
        hf, loading = loaded
        if missing := sorted(loading["missing_keys"]):  # transformers would draw them at random
            raise InputError(f"{model} lacks {len(missing)} weights, {missing[0]} among them")
    except InputError:
        raise
    except (OSError, ValueError, RuntimeError, HFValidationError, SafetensorError) as error:
        raise InputError(
            f"cannot load target {model}: {str(error).strip().splitlines()[0]}"
        ) from error
    return HFTarget(hf.eval().to(parse_device(device)), tokenizer, name=model, passes=passes)


def parse_dtype(name: str) -> torch.dtype:
    """'float32', 'bfloat16' or 'float16' as a torch dtype; InputError for anything else."""
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name not in dtypes:
        raise InputError(f"dtype must be one of {', '.join(dtypes)}, not {name}")
    return dtypes[name]


def parse_device(name: str) -> torch.device:
    """'auto' takes the GPU where there is one; InputError for a device that is not there."""
    if name == "auto":
        rank = os.environ.get("LOCAL_RANK", "0")  # of several processes, one a GPU
        name = f"cuda:{rank}" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise InputError(
            f"device {name} is not a device of torch: use auto, cpu or cuda"
        ) from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InputError("device cuda was asked for, but torch sees no GPU; use device auto or cpu")
    return device


def _stop_tokens(model: Any, tokenizer: Any) -> frozenset[int]:
    """Where the model's own `generate` stops: the EOS ids of its config and its tokenizer."""
    eos = getattr(model.generation_config, "eos_token_id", None)
    ids = list(eos) if isinstance(eos, (list, tuple)) else [eos]
    return frozenset(i for i in [*ids, tokenizer.eos_token_id] if i is not None)


def _check_finite(model: torch.nn.Module, name: str) -> None:
    for key, parameter in model.named_parameters():
        if not torch.isfinite(parameter).all():
            raise InputError(
                f"{name}: weight {key} holds NaN or infinity; the checkpoint is damaged"
            )
