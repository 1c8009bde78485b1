"""DDTree as its authors run it: their loop on transformers, written anew from its description.

Nothing of ours is in it but the drafter's network, run in plain torch: the target is transformers'
own model with a `DynamicCache`, a 4-D mask a round and all hidden states kept, the tree comes from
a Python heap, and accepted cache rows are gathered behind the context. Their clock starts after the
first draft pass; here it counts, as for every other method.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from inspect import signature
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from transformers import DynamicCache, LlamaForCausalLM

from graft.core.clock import Clock
from graft.core.errors import InputError
from graft.core.linear import cast_parameters
from graft.core.types import Generation, Request
from graft.decode.response import Response, Rounds, check_fits, drain
from graft.drafters import dflash_checkpoint
from graft.eval.library import model_of
from graft.targets.hf import HFTarget

# transformers 5 renames the argument, and warns of the old name
KNOWN = signature(LlamaForCausalLM.forward).parameters
CACHE = "cache" if "cache" in KNOWN else "past_key_values"
Draft = Callable[[int, torch.Tensor], torch.Tensor]  # root, taps [n, n_taps * H] -> logits [D, V]


def generate(
    request: Request,
    *,
    target: HFTarget,
    checkpoint: str,
    nodes: int,
    on_tokens: Callable[[list[int]], None] | None = None,
) -> Generation:
    """Decode one response with trees of so many drafted nodes, at T = 0."""
    if request.temperature > 0:
        raise InputError("DDTree's published loop is raced at temperature=0 only")
    check_fits(request, target)
    model = model_of(target.name, target.dtype, str(target.device))
    drafter = _drafter(checkpoint, model)
    drafter.reset()
    rounds = stream(request, model=model, draft=drafter, taps=drafter.taps, budget=nodes)
    return drain(rounds, on_tokens)


def stream(
    request: Request, *, model: Any, draft: Draft, taps: Sequence[int], budget: int
) -> Rounds:
    """The loop, over a transformers model and the ids of its tapped blocks."""
    device, start = model.device, len(request.prompt)
    clock, response = Clock(device), Response(request)
    cache: Any = DynamicCache()
    committed, sizes = [], []
    with clock("prefill"), torch.inference_mode():
        ids = torch.tensor([request.prompt], device=device)
        step = model(ids, **{CACHE: cache}, logits_to_keep=1, output_hidden_states=True)
        root, hidden = int(step.logits[0, -1].argmax()), _tapped(step, taps)
        longest = start + request.max_new_tokens + budget + 1
        mask = torch.zeros(1, 1, budget + 1, longest, dtype=model.dtype, device=device)
    yield response.extend([root])
    while not response.finished:
        with torch.inference_mode():
            with clock("propose"):
                logits = draft(root, hidden)
            with clock("build"):
                tree = build(logits, budget)
                n = len(tree.tokens) + 1
                ids = torch.tensor([[root, *tree.tokens]], device=device)
                positions = start + torch.tensor([[0, *tree.depths]], device=device)
                block = mask[0, 0, :n, start : start + n]
                hides = torch.from_numpy(~tree.visible).to(device)
                block.masked_fill_(hides, torch.finfo(mask.dtype).min)
            with clock("verify"):
                step = model(
                    ids,
                    attention_mask=mask[:, :, :n, : start + n],
                    position_ids=positions,
                    **{CACHE: cache},
                    output_hidden_states=True,
                )
            with clock("accept"):
                wanted = step.logits[0].argmax(-1).tolist()
                path = [0]
                while (child := tree.children[path[-1]].get(wanted[path[-1]])) is not None:
                    path.append(child)
                accepted = [tree.tokens[node - 1] for node in path[1:]]
                root = wanted[path[-1]]
            with clock("commit"):
                rows = torch.tensor(path, device=device)
                hidden = _tapped(step, taps)[rows]
                _compact(cache, start, rows)
                block.zero_()
                start += len(path)
        committed.append(len(path))
        sizes.append(n - 1)
        yield response.extend([*accepted, root])
    return Generation(
        tokens=response.tokens,
        stopped=response.stopped,
        committed=committed,
        nodes=sizes,
        seconds=dict(clock.totals),
    )


@dataclass(frozen=True, slots=True, eq=False)
class Tree:
    """Drafted nodes as they were popped; node 0 is the root, which the lists leave out."""

    tokens: list[int]
    depths: list[int]
    children: list[dict[int, int]]  # of every node, root included: token -> node
    visible: np.ndarray  # [N, N] bool


def build(logits: torch.Tensor, budget: int) -> Tree:
    """The best prefixes under the product of marginals: logits [D, V] -> tree."""
    logits = logits.float()
    best = logits.topk(min(budget, logits.shape[-1]))
    log_probs = (best.values - logits.logsumexp(-1, keepdim=True)).cpu().numpy()
    candidates = best.indices.cpu().numpy()
    D, K = candidates.shape
    first = float(log_probs[0, 0])
    heap: list[tuple] = [(-first, (0,), 0, 1, 0, first)]  # the ranks break ties
    tokens: list[int] = []
    depths: list[int] = []
    children: list[dict[int, int]] = [{}]
    visible = np.eye(budget + 1, dtype=bool)
    while heap and len(tokens) < budget:
        _, ranks, parent, depth, rank, score = heapq.heappop(heap)
        token = int(candidates[depth - 1, rank])
        tokens.append(token)
        depths.append(depth)
        node = len(tokens)
        children[parent][token] = node
        children.append({})
        visible[node] |= visible[parent]
        if rank + 1 < K:
            sibling = score - float(log_probs[depth - 1, rank] - log_probs[depth - 1, rank + 1])
            ranked = (*ranks[:-1], rank + 1)
            heapq.heappush(heap, (-sibling, ranked, parent, depth, rank + 1, sibling))
        if depth < D:
            child = score + float(log_probs[depth, 0])
            heapq.heappush(heap, (-child, (*ranks, 0), node, depth + 1, 0, child))
    n = len(tokens) + 1
    return Tree(tokens, depths, children, visible[:n, :n])


def _tapped(step: Any, taps: Sequence[int]) -> torch.Tensor:
    """Outputs [n, n_taps * H] of blocks, counted from 0; the embedding stands before them."""
    return torch.cat([step.hidden_states[i + 1][0] for i in taps], -1)


def _compact(cache: Any, start: int, rows: torch.Tensor) -> None:
    """Gather accepted rows behind the context, layer by layer, and cut off the rest."""
    end = start + len(rows)
    rest = cache.layers[0].keys.shape[2] - end
    for layer in cache.layers:
        for kept in (layer.keys, layer.values):
            kept[:, :, start:end] = kept[:, :, start:].index_select(2, rows)
    if rest:
        cache.crop(-rest)


@lru_cache(maxsize=1)
def _drafter(checkpoint: str, model: Any) -> _Drafter:
    net = dflash_checkpoint.load(checkpoint)
    cast_parameters(net, model.device, model.dtype)
    return _Drafter(net, model)


class _Drafter:
    """DFlash's pass as published: its context in a `DynamicCache`, the block cropped away."""

    def __init__(self, net: Any, model: Any) -> None:
        self._net, self.taps = net, net.config.target_layer_ids
        self._embed, self._head = model.get_input_embeddings(), model.get_output_embeddings()
        self.reset()

    def reset(self) -> None:
        self._cache: Any = DynamicCache()
        self._length = 0

    def __call__(self, root: int, taps: torch.Tensor) -> torch.Tensor:
        config, new = self._net.config, len(taps)
        end = self._length + new + config.block_size
        positions = torch.arange(self._length, end, device=taps.device)[None]
        block = torch.full((1, config.block_size), config.mask_token_id, device=taps.device)
        block[0, 0] = root
        context = self._net.context(taps[None], positions[:, :new])
        self._length += new

        def attend(
            layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
        ) -> torch.Tensor:
            pairs = zip(context[layer], (keys, values), strict=True)
            keys, values = self._cache.update(*(torch.cat(pair, 2) for pair in pairs), layer)
            mask = self._net.decoding_mask(layer, self._length)
            return F.scaled_dot_product_attention(
                queries, keys, values, attn_mask=mask, enable_gqa=True
            )

        hidden = self._net(self._embed(block), positions[:, new:], attend)
        self._cache.crop(-config.block_size)
        return self._head(hidden[0, 1:])
