"""Start a drafter from its target's own last blocks instead of from noise.

The drafter's layers have the target's shape, so layer i takes the weights of block L - n + i. Their
keys and values then read the context through `fc`, which starts as the identity on the last tap,
scaled to the size that the block's input norm expects, and nearly zero on the others. A target
without query and key norms gives the drafter's the mean size of its own queries and keys as gains,
which keeps the attention logits about as large as they were.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from graft.core.errors import InputError
from graft.drafters.dflash_net import DFlashNet

SMALL = 0.02  # deviation of fc beside the identity, in units of 1 / sqrt(fan-in)


@torch.no_grad()
def warm_start(net: DFlashNet, model_name: str, text: torch.Tensor) -> None:
    """Overwrite the network's weights; `text` [L] is what sizes are measured on.

    Raises InputError where the target has no blocks to give.
    """
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(model_name, dtype=torch.float32).eval()
    except OSError as error:
        raise InputError(
            f"model.warm needs the target's checkpoint, but {model_name} is none: set it to false"
        ) from error
    if len(net.layers) > len(model.model.layers):
        raise InputError(
            f"model.warm: {model_name} has {len(model.model.layers)} blocks, fewer than "
            f"model.layers={len(net.layers)}"
        )
    blocks = list(model.model.layers)[-len(net.layers) :]
    states, sizes = _measure(model, blocks, text)
    for layer, block, (query_size, key_size) in zip(net.layers, blocks, sizes, strict=True):
        own: Any = layer
        source = block.state_dict()
        known = {key: value for key, value in source.items() if key in own.state_dict()}
        own.load_state_dict(known, strict=False)
        if "self_attn.q_norm.weight" not in known:
            own.self_attn.q_norm.weight.fill_(query_size)
            own.self_attn.k_norm.weight.fill_(key_size)
    net.norm.load_state_dict(model.model.norm.state_dict())
    net.hidden_norm.load_state_dict(blocks[0].input_layernorm.state_dict())

    tap = states[net.config.target_layer_ids[-1] + 1][1:]  # without the first token, an outlier
    size = tap.pow(2).mean(-1).sqrt().median()
    width = net.config.hidden_size
    nn.init.normal_(net.fc.weight, std=SMALL / net.fc.in_features**0.5)
    net.fc.weight[:, -width:] += torch.eye(width) / size


def _measure(
    model: Any, blocks: list[Any], text: torch.Tensor
) -> tuple[tuple[torch.Tensor, ...], list[tuple[float, float]]]:
    """Hidden states [L, H] after every block, and each given block's query and key RMS."""
    outputs: list[torch.Tensor] = []
    hooks = [
        projection.register_forward_hook(lambda _m, _x, out: outputs.append(out))
        for block in blocks
        for projection in (block.self_attn.q_proj, block.self_attn.k_proj)
    ]
    states = model(text[None].cpu(), output_hidden_states=True).hidden_states
    for hook in hooks:
        hook.remove()
    sizes = [float(out[0, 1:].pow(2).mean().sqrt()) for out in outputs]
    return tuple(state[0] for state in states), list(zip(sizes[::2], sizes[1::2], strict=True))
