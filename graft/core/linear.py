"""Linear layers as decoding wants them: weights fused along the output, and on a CPU packed once.

A decoding pass is a few rows against every weight of the model, so the time goes into reading
weights. They are packed for our kernels (`native`), which then run a whole pass in one call, or
this layer alone. Without those they are packed for oneDNN, which would reorder a plain weight at
every call; where the platform cannot do that either, this is `F.linear`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from graft.native.calls import Packed

ROWS_HINT = 16  # oneDNN picks the packed layout for this many rows: a small tree


def can_pack(weight: torch.Tensor) -> bool:
    """Whether oneDNN can hold this weight packed; its ops are private, so look for them first."""
    ops = torch.ops.mkldnn
    return (
        weight.device.type == "cpu"
        and torch.backends.mkldnn.is_available()
        and hasattr(ops, "_reorder_linear_weight")
        and hasattr(ops, "_linear_pointwise")
        and (
            weight.dtype == torch.float32
            or (weight.dtype == torch.bfloat16 and ops._is_mkldnn_bf16_supported())
        )
    )


class FusedLinear(nn.Module):
    """`F.linear` over the weights of several layers stacked along the output, for inference.

    Without `native` it does not use our kernels, even where they are.
    """

    def __init__(self, layers: Sequence[nn.Linear], *, native: bool = True) -> None:
        super().__init__()
        biases = [layer.bias.detach() for layer in layers if layer.bias is not None]
        assert len(biases) in (0, len(layers)), "layers with and without bias do not fuse"
        # Plain attributes, not parameters: a packed tensor has an opaque layout that state_dict
        # and .to() cannot handle.
        self.bias = torch.cat(biases) if biases else None
        weights = [layer.weight.detach() for layer in layers]
        self.weight = torch.cat(weights) if len(weights) > 1 else weights[0]
        self.native = None
        if native and Packed.can_hold(self.weight):
            self.native, self.weight = Packed(self.weight, self.bias), self.weight.new_empty(0)
        self.packed = self.native is None and can_pack(self.weight)
        if self.packed:
            self.weight = torch.ops.mkldnn._reorder_linear_weight(self.weight, ROWS_HINT)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., sum of outs]."""
        if self.native is not None:
            return self.native(x)
        if self.packed:
            return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return F.linear(x, self.weight, self.bias)


def pack_linears(module: nn.Module, *, native: bool = True) -> None:
    """Replace every `nn.Linear` below `module` by its packed twin, where the platform can."""
    for name, child in list(module.named_children()):
        if isinstance(child, nn.Linear):
            if can_pack(child.weight) or Packed.can_hold(child.weight):
                setattr(module, name, FusedLinear([child], native=native))
        else:
            pack_linears(child, native=native)


def cast_parameters(module: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Move a module and cast its parameters, in place; buffers keep their dtype.

    `module.to(dtype)` would cast RoPE's inverse frequencies too: in bf16 the angles are then off by
    radians after a few hundred tokens, and acceptance falls with the context while nothing fails.
    """
    module.to(device)
    for parameter in module.parameters():
        parameter.data = parameter.data.to(dtype)
