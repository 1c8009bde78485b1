"""The configuration of a published DFlash checkpoint: both layouts in, one out.

`block_size` stands at the top level (Qwen3, Llama) or inside `dflash_config` (Qwen3.5 on);
`target_layer_ids` is given or follows the formula; RoPE is spelled `rope_theta` + `rope_scaling`
(transformers 4) or `rope_parameters` (5). Layers of type `sliding_attention` are causal inside the
block unless `is_causal` says otherwise, as in z-lab's own code.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from graft.core.errors import InputError

MOVED = ("block_size",)  # written at the top level, where every engine looks
NEUTRAL = {  # keys of DFlash 2 that change the arithmetic
    "input_embedding_scale": 1.0,
    "final_logit_softcapping": None,
    "output_multiplier": 1.0,
}


@dataclass(frozen=True)
class DFlashConfig:
    """Everything that the network and its decoding need."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    block_size: int  # D + 1: slot 0 is the root
    mask_token_id: int
    target_layer_ids: tuple[int, ...]  # 0-based block outputs (transformers' hidden_states[id + 1])
    num_target_layers: int
    layer_types: tuple[str, ...] = ()
    sliding_window: int | None = None
    is_causal: bool | None = None
    rope_theta: float = 10000.0
    rope_scaling: Mapping[str, Any] | None = None
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    hidden_act: str = "silu"
    max_position_embeddings: int = 32768
    # The file it came from; keys we do not interpret are written back when it is saved again.
    source: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def layer_type(self, layer: int) -> str:
        """full_attention or sliding_attention."""
        return self.layer_types[layer] if self.layer_types else "full_attention"

    def window(self, layer: int) -> int | None:
        """How far back a layer sees, None for everything."""
        return self.sliding_window if self.layer_type(layer) == "sliding_attention" else None

    def causal(self, layer: int) -> bool:
        """Whether a slot of the block sees only the slots before it in this layer."""
        if self.is_causal is not None:
            return self.is_causal
        return self.layer_type(layer) == "sliding_attention"


def default_target_layer_ids(num_target_layers: int, taps: int) -> tuple[int, ...]:
    """The published spacing: blocks 1 to L - 3, evenly, Python's rounding; one tap: the middle."""
    if taps == 1:
        return (num_target_layers // 2,)
    step = (num_target_layers - 4) / (taps - 1)
    return tuple(round(1 + i * step) for i in range(taps))


def for_target(
    target: Any, *, layers: int, block_size: int, mask_token_id: int, taps: int
) -> DFlashConfig:
    """A new drafter in the shape of a target's blocks, from its transformers config."""
    raw = target.to_dict()
    theta, scaling = rope_of(raw, "the target")
    heads = target.num_attention_heads
    return DFlashConfig(
        hidden_size=target.hidden_size,
        intermediate_size=target.intermediate_size,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=target.num_key_value_heads,
        head_dim=getattr(target, "head_dim", None) or target.hidden_size // heads,
        vocab_size=target.vocab_size,
        block_size=block_size,
        mask_token_id=mask_token_id,
        target_layer_ids=default_target_layer_ids(target.num_hidden_layers, taps),
        num_target_layers=target.num_hidden_layers,
        rope_theta=theta,
        rope_scaling=scaling,
        rms_norm_eps=target.rms_norm_eps,
        max_position_embeddings=target.max_position_embeddings,
    )


def parse(raw: Mapping[str, Any], name: str) -> DFlashConfig:
    """Read a checkpoint's config.json. Raises InputError naming what is missing or unsupported."""
    inner = raw.get("dflash_config") or {}
    architecture = (raw.get("architectures") or ["DFlashDraftModel"])[0]
    if architecture != "DFlashDraftModel":
        raise InputError(
            f"{name} is a {architecture}; this drafter loads DFlashDraftModel checkpoints"
        )
    for key, neutral in NEUTRAL.items():
        if inner.get(key, raw.get(key, neutral)) != neutral:
            raise InputError(
                f"{name} sets {key}, which changes the arithmetic and is not supported"
            )

    def need(key: str) -> Any:
        value = inner.get(key, raw.get(key))
        if value is None:
            raise InputError(f"{name}: config.json has no {key}; is this a DFlash drafter?")
        return value

    layers, target_layers = need("num_hidden_layers"), need("num_target_layers")
    ids = inner.get("target_layer_ids") or raw.get("target_layer_ids")
    theta, scaling = rope_of(raw, name)
    # As transformers reads a Qwen3 config: no window unless it is switched on, and then in the
    # layers from `max_window_layers` on where `layer_types` does not say.
    window = raw.get("sliding_window") if raw.get("use_sliding_window") else None
    first_sliding = raw.get("max_window_layers", 28) if window else layers
    default_types = ["full_attention"] * min(first_sliding, layers)
    default_types += ["sliding_attention"] * (layers - len(default_types))
    return DFlashConfig(
        hidden_size=need("hidden_size"),
        intermediate_size=need("intermediate_size"),
        num_layers=layers,
        num_heads=need("num_attention_heads"),
        num_kv_heads=raw.get("num_key_value_heads") or need("num_attention_heads"),
        head_dim=raw.get("head_dim") or need("hidden_size") // need("num_attention_heads"),
        vocab_size=need("vocab_size"),
        block_size=need("block_size"),
        mask_token_id=need("mask_token_id"),
        target_layer_ids=tuple(ids or default_target_layer_ids(target_layers, layers)),
        num_target_layers=target_layers,
        layer_types=tuple(raw.get("layer_types") or default_types),
        sliding_window=window,
        is_causal=raw.get("is_causal"),
        rope_theta=theta,
        rope_scaling=scaling,
        rms_norm_eps=raw.get("rms_norm_eps", 1e-6),
        attention_bias=raw.get("attention_bias", False),
        hidden_act=raw.get("hidden_act", "silu"),
        max_position_embeddings=raw.get("max_position_embeddings", 32768),
        source=dict(raw),
    )


def rope_of(raw: Mapping[str, Any], name: str) -> tuple[float, dict[str, Any] | None]:
    """RoPE's base and its scaling, None for plain RoPE, from either spelling."""
    new = dict(raw.get("rope_parameters") or {})
    if any(isinstance(value, Mapping) for value in new.values()):
        raise InputError(f"{name} gives RoPE parameters per layer type, which is not supported")
    theta = new.pop("rope_theta", raw.get("rope_theta", 10000.0))
    scaling = dict(raw.get("rope_scaling") or new)
    plain = scaling.get("rope_type", scaling.get("type", "default")) == "default"
    return theta, None if plain else scaling


def dump(config: DFlashConfig, dtype: str) -> dict[str, Any]:
    """The config.json that other engines read: RoPE in both spellings, unknown keys kept."""
    dropped = ("auto_map", "torch_dtype")  # no remote code lies beside our files
    kept = {key: value for key, value in config.source.items() if key not in dropped}
    inner = {k: v for k, v in (kept.get("dflash_config") or {}).items() if k not in MOVED}
    return kept | {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": config.block_size,
        "dflash_config": inner
        | {
            "mask_token_id": config.mask_token_id,
            "target_layer_ids": list(config.target_layer_ids),
        },
        "num_target_layers": config.num_target_layers,
        "num_hidden_layers": config.num_layers,
        "layer_types": [config.layer_type(i) for i in range(config.num_layers)],
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "hidden_act": config.hidden_act,
        "attention_bias": config.attention_bias,
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position_embeddings,
        "sliding_window": config.sliding_window,
        "is_causal": config.is_causal,
        "use_sliding_window": config.sliding_window is not None,
        "rope_theta": config.rope_theta,
        "rope_scaling": dict(config.rope_scaling) if config.rope_scaling else None,
        "rope_parameters": {
            "rope_type": "default",
            **(config.rope_scaling or {}),
            "rope_theta": config.rope_theta,
        },
        "tie_word_embeddings": False,
        "dtype": dtype,
    }
