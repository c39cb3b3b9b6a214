"""Linear layers in the two forms in which the engine keeps weights on a CPU.

PackedLinear  float32, laid out once for oneDNN's kernels: over twice as fast as nn.Linear for few
              rows, and with two rows or more a row's bits do not depend on the other rows.
Int8Linear    8-bit weights with one scale an output channel, bfloat16 activations; for drafters.

Shapes: T rows, N input features, M output features.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

WeightForm = Literal["float32", "int8"]

MIN_ROWS: dict[WeightForm, int] = {"float32": 2, "int8": 1}
"""Rows that a step's linears should get at least. For a single row oneDNN takes another kernel,
with other rounding."""
_MIN_ROWS = MIN_ROWS["float32"]
_UNPACK_ROWS = 32
"""From so many rows on it is faster to unpack int8 weights to bfloat16 and multiply those."""


class PackedLinear(nn.Module):
    """A float32 linear layer whose weight lies in oneDNN's own layout."""

    def __init__(self, source: nn.Linear) -> None:
        super().__init__()
        self.in_features = source.in_features
        self.out_features = source.out_features
        weight_MN = source.weight.detach().to(torch.float32)
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight_MN, 8)
        self._bias = None if source.bias is None else source.bias.detach().to(torch.float32)
        self._multiply = torch.ops.mkldnn._linear_pointwise.default

    def forward(self, rows_TN: Tensor) -> Tensor:
        """The product, of shape [..., M]."""
        num_rows = rows_TN.numel() // self.in_features
        if num_rows >= _MIN_ROWS:
            result: Tensor = self._multiply(
                rows_TN, self._packed, self._bias, "none", _NO_SCALARS, ""
            )
            return result
        if num_rows == 0:
            return rows_TN.new_empty((*rows_TN.shape[:-1], self.out_features))
        flat_TN = rows_TN.reshape(num_rows, self.in_features).expand(_MIN_ROWS, -1).contiguous()
        doubled = self._multiply(flat_TN, self._packed, self._bias, "none", _NO_SCALARS, "")
        single: Tensor = doubled[:1].reshape(*rows_TN.shape[:-1], self.out_features)
        return single


class Int8Linear(nn.Module):
    """A linear layer of 8-bit weights; activations and results are bfloat16."""

    weight_MN: Tensor
    scale_M: Tensor

    def __init__(self, source: nn.Linear) -> None:
        super().__init__()
        self.in_features = source.in_features
        self.out_features = source.out_features
        weight_MN, scale_M = quantise_channels(source.weight.detach())
        self.register_buffer("weight_MN", weight_MN, persistent=False)
        self.register_buffer("scale_M", scale_M, persistent=False)
        self._bias = None if source.bias is None else source.bias.detach().to(torch.bfloat16)

    def forward(self, rows_TN: Tensor) -> Tensor:
        """The product, of shape [..., M], in bfloat16."""
        flat_TN = rows_TN.reshape(-1, self.in_features)
        if flat_TN.shape[0] >= _UNPACK_ROWS:
            unpacked_MN = self.weight_MN.to(torch.bfloat16)
            result = nn.functional.linear(flat_TN, unpacked_MN) * self.scale_M
        else:
            result = torch._weight_int8pack_mm(flat_TN, self.weight_MN, self.scale_M)
        if self._bias is not None:
            result = result + self._bias
        return result.reshape(*rows_TN.shape[:-1], self.out_features)


_NO_SCALARS: list[float] = []


def quantise_channels(weight_MN: Tensor) -> tuple[Tensor, Tensor]:
    """8-bit weights [M, N] and bfloat16 scales [M]; weight is nearly int8 x scale.

    The scale is rounded to bfloat16 first and the weights are divided by the rounded one, so that
    rounding it costs no accuracy.
    """
    weight_MN = weight_MN.to(torch.float32)
    scale_M = (weight_MN.abs().amax(dim=1) / 127).clamp_min(1e-12).to(torch.bfloat16)
    steps_MN = (weight_MN / scale_M.to(torch.float32)[:, None]).round_().clamp_(-127, 127)
    return steps_MN.to(torch.int8).contiguous(), scale_M


def replace_linears(model: nn.Module, form: WeightForm) -> None:
    """Put the engine's linear layers in the place of every nn.Linear of `model`, LM head included.

    Originals are dropped one by one. An embedding that shared its weight with the LM head keeps it.
    """
    kind = PackedLinear if form == "float32" else Int8Linear
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear):
                setattr(parent, name, kind(child))


def quantise_model(model: nn.Module) -> None:
    """Turn a plain Hugging Face model into its int8 form, in place, for use as a peer.

    The same weights and arithmetic as Engine(weights="int8"): 8-bit linears, the rest bfloat16.
    """
    replace_linears(model, "int8")
    model.to(torch.bfloat16)
