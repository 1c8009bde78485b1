"""Passes beside what the machine allows: no pass can be faster than reading its weights, nor than
its products.

    limit = max(bytes of weights / read bandwidth, FLOPs / rate of a large product)

Bandwidth and rate are measured in the same run as the passes, all taking turns, medians of each: a
busy neighbour slows both sides of a ratio. Only weights and their products count: attention over
the context, norms and the way into a pass come on top, and show as distance from the limit.
"""

from __future__ import annotations

import json
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from graft.core.clock import Clock
from graft.core.errors import InputError
from graft.core.runlog import write_atomically
from graft.core.types import Draft
from graft.drafters.dflash import DFlash
from graft.native.calls import Packed
from graft.targets.hf import HFTarget
from graft.trees.best_first import expand

ROWS = (1, 4, 8, 16, 32, 64, 128)  # of a verify pass, root included; one is a plain step
NEW = 2  # tokens that the drafter reads in a round
READ = {"cpu": 2**29, "cuda": 2**32}  # bytes, far more than caches hold
SIDE = {"cpu": 2048, "cuda": 8192}  # of a large square product
MODELS = ("target", "drafter", "dtype", "device", "threads")  # what passes depend on
AGAIN = "python scripts/bench.py what=passes measures it"


@dataclass(frozen=True, slots=True)
class Work:
    """What a pass cannot do without."""

    bytes: int  # of weights, each read once
    flops: int  # of their products


@dataclass(frozen=True, slots=True)
class Pass:
    """One kind of pass as measured."""

    kind: str  # verify or draft
    rows: int  # of a verify pass root and nodes, of the drafter's its block
    seconds: float
    eager: float | None  # the same through torch
    work: Work | None  # None where nobody knows it


@dataclass(frozen=True, eq=False)
class Passes:
    """Passes of one target and drafter on one machine, and what it can do."""

    context: int  # tokens in the cache
    bandwidth: float  # bytes a second
    rate: float  # FLOPs a second, the best product's
    passes: Sequence[Pass]
    made_by: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def reads(self, work: Work) -> bool:
        """Whether reading is the limit, or else arithmetic."""
        return work.bytes / self.bandwidth > work.flops / self.rate

    def limit(self, work: Work) -> float:
        """Seconds that a pass must take."""
        return max(work.bytes / self.bandwidth, work.flops / self.rate)

    @property
    def step(self) -> float:
        """Seconds of a plain step's pass."""
        return next(one.seconds for one in self.passes if (one.kind, one.rows) == ("verify", 1))

    def fits(self, models: Mapping[str, Any]) -> bool:
        """Whether these models on this machine were measured."""
        return all(self.made_by.get(key) == models.get(key) for key in MODELS)

    def save(self, path: Path) -> None:
        """Write it as JSON."""
        write_atomically(path, json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> Passes:
        """Raises InputError for a file that is not one."""
        try:
            found = json.loads(path.read_text())
            for one in found["passes"]:
                one["work"] = one["work"] and Work(**one["work"])
            return cls(**found | {"passes": [Pass(**one) for one in found["passes"]]})
        except (OSError, ValueError, KeyError, TypeError) as error:
            reason = str(error).strip().splitlines()[0]
            raise InputError(f"{path} holds no passes ({reason}); delete it, {AGAIN}") from error


def measure(
    target: Any,
    drafter: Any,
    *,
    eager: tuple[Any, Any] | None,
    context: int,
    repeats: int,
    made_by: Mapping[str, Any],
) -> Passes:
    """Verify passes by rows, the drafter's, and the machine. `eager`: the same two through torch.

    Raises InputError for a context that the target was not made for.
    """
    if context < 1 or context + max(ROWS) > target.max_context:
        raise InputError(f"context={context} must lie in 1..{target.max_context - max(ROWS)}")
    functions: dict[Any, Callable[[], object]] = {}
    for name, models in (("ours", (target, drafter)), ("eager", eager)):
        if models is not None:
            functions |= {(name, *key): f for key, f in passes_of(*models, context).items()}
    products = products_of(target)
    buffer = torch.ones(READ[target.device.type] // 4, device=target.device)  # written: all pages
    functions |= {product: product for product in products}
    took = medians({**functions, "read": buffer.sum}, repeats)
    rows = [("verify", n) for n in ROWS] + [("draft", drafter.depth + 1)]
    return Passes(
        context=context,
        bandwidth=4 * len(buffer) / took["read"],
        rate=max(flops / took[product] for product, flops in products.items()),
        passes=[
            Pass(
                kind,
                n,
                seconds=took["ours", kind, n],
                eager=took.get(("eager", kind, n)),
                work=verify_work(target, n) if kind == "verify" else draft_work(target, drafter),
            )
            for kind, n in rows
        ],
        made_by=made_by,
    )


def medians(functions: Mapping[Any, Callable[[], object]], repeats: int) -> dict[Any, float]:
    """Median seconds of each function; all take turns, in another order every time.

    What ran before one decides what caches hold.
    """
    clock = Clock(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    for function in functions.values():
        function()
    seconds: dict[Any, list[float]] = {key: [] for key in functions}
    shuffled = random.Random(0)
    for _ in range(repeats):
        for key in shuffled.sample(list(functions), len(functions)):
            start = clock.now()
            functions[key]()
            seconds[key].append(clock.now() - start)
    return {key: statistics.median(values) for key, values in seconds.items()}


def random_draft(depth: int, candidates: int, vocabulary: int) -> Draft:
    """Marginals about as peaked as a drafter's."""
    logits = 3 * torch.randn(depth, vocabulary, generator=torch.Generator().manual_seed(0))
    return Draft.from_logits(0, logits, torch.empty(depth, 0), candidates=candidates)


def passes_of(
    target: Any, drafter: Any, context: int
) -> dict[tuple[str, int], Callable[[], object]]:
    """The passes at this context length, by kind and rows."""
    drafter.reset()
    taps = target.prefill([100] * context).taps
    drafter.propose(100, taps)
    draft = random_draft(7, 64, min(target.vocab_size, 2000))
    found: dict[tuple[str, int], Callable[[], object]] = {
        ("verify", n): partial(target.verify, expand(draft, n - 1)) for n in ROWS
    }
    found["draft", drafter.depth + 1] = partial(drafter.propose, 100, taps[:NEW])
    return found


def products_of(target: Any) -> dict[Callable[[], object], int]:
    """Large products in the target's dtype, with their FLOPs: torch's and our kernels'."""
    like: Any = {"dtype": target.dtype, "device": target.device}
    side = SIDE[target.device.type]
    x, weight = torch.randn(side, side, **like), torch.randn(side, side, **like)
    found: list[Callable[[], object]] = [partial(torch.matmul, x, weight)]
    if Packed.can_hold(weight):
        found.append(partial(Packed(weight, None), x))
    return dict.fromkeys(found, 2 * side**3)


def verify_work(target: HFTarget, rows: int) -> Work:
    """Of a verify pass. Of a mixture the fewest experts: those of one row, shared by all."""
    config, H = target.config, target.hidden_size
    decoder = target.decoder
    attention = 2 * H * decoder.head_dim * (decoder.heads + decoder.kv_heads)
    weights = target.vocab_size * H
    for layer in range(target.num_layers):
        weights += attention + _feed_forward(config, layer)
    return Work(weights * target.dtype.itemsize, 2 * weights * rows)


def _feed_forward(config: Any, layer: int) -> int:
    """Weights that a row meets: of a mixture the router and its experts."""
    H, experts = config.hidden_size, getattr(config, "num_experts", None)
    sparse = experts and layer not in (getattr(config, "mlp_only_layers", None) or ())
    if not sparse or (layer + 1) % getattr(config, "decoder_sparse_step", 1):
        return 3 * H * config.intermediate_size
    return H * experts + 3 * H * config.moe_intermediate_size * config.num_experts_per_tok


def draft_work(target: Any, drafter: Any) -> Work | None:
    """Of a draft over NEW tokens' taps; None for what is no network of ours."""
    if not isinstance(drafter, DFlash):
        return None
    c, H = drafter.config, drafter.config.hidden_size
    keys_values = 2 * H * c.head_dim * c.num_kv_heads
    layer = 2 * H * c.head_dim * c.num_heads + keys_values + 3 * H * c.intermediate_size
    tokens = drafter.net.draft_tokens
    head = H * (c.vocab_size if tokens is None else len(tokens))
    fc = len(c.target_layer_ids) * H * H
    met = c.num_layers * (layer * c.block_size + keys_values * NEW) + fc * NEW
    met += head * drafter.depth
    weights = c.num_layers * layer + fc + head
    return Work(weights * target.dtype.itemsize, 2 * met)
