"""The linear layers that replace nn.Linear on a CPU, by form of weights.

float32, bfloat16  PackedLinear: packed once for oneDNN's kernels, over twice as fast as nn.Linear
                   for few rows. With two rows or more, a row's bits do not depend on other rows.
float16            half of the memory with float32 arithmetic (half_linear.py).
int8, int4         fewer bits for drafters, bfloat16 activations (quantized_linears.py).

Shapes: T rows, N input features, M output features.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from paceline.errors import ConfigError
from workers.engine.cpu.half_linear import HalfLinear
from workers.engine.cpu.quantized_linears import Int4Linear, Int8Linear, fits_int4
from workers.engine.load.weight_form import WeightForm

MIN_ROWS: dict[WeightForm, int] = {
    "float32": 2,
    "bfloat16": 2,
    "float16": 1,
    "int8": 1,
    "int4": 1,
}
"""Minimum number of rows in a step's linears. For a single row oneDNN takes another kernel, which
rounds differently.
"""
_PACKED_ROWS = 2

_NO_SCALARS: list[float] = []


class PackedLinear(nn.Module):
    """A linear layer whose weight is in oneDNN's own layout, in float32 or bfloat16."""

    def __init__(self, source: nn.Linear, dtype: torch.dtype = torch.float32) -> None:
        """Raises ConfigError for bfloat16 if the processor lacks the instructions for it."""
        super().__init__()
        if dtype == torch.bfloat16 and not multiplies_bfloat16():
            raise ConfigError(
                "bfloat16 weights need a processor with AVX-512 (or AVX-NE-CONVERT), which this "
                'one lacks: set target.dtype = "float16", "int8" or "float32"'
            )
        self.in_features = source.in_features
        self.out_features = source.out_features
        weight_MN = source.weight.detach().to(dtype)
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight_MN, 8)
        self._bias = None if source.bias is None else source.bias.detach().to(dtype)
        self._multiply = torch.ops.mkldnn._linear_pointwise.default

    def forward(self, rows_TN: Tensor) -> Tensor:
        """The product, of shape [..., M]."""
        num_rows = rows_TN.numel() // self.in_features
        if num_rows >= _PACKED_ROWS:
            result: Tensor = self._multiply(
                rows_TN, self._packed, self._bias, "none", _NO_SCALARS, ""
            )
            return result
        if num_rows == 0:
            return rows_TN.new_empty((*rows_TN.shape[:-1], self.out_features))
        flat_TN = rows_TN.reshape(num_rows, self.in_features).expand(_PACKED_ROWS, -1).contiguous()
        doubled = self._multiply(flat_TN, self._packed, self._bias, "none", _NO_SCALARS, "")
        single: Tensor = doubled[:1].reshape(*rows_TN.shape[:-1], self.out_features)
        return single


def multiplies_bfloat16() -> bool:
    """Whether oneDNN's bfloat16 products run on this processor."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def activation_dtype(form: WeightForm) -> torch.dtype:
    """The dtype of everything but the weights of linears."""
    return torch.float32 if form in ("float32", "float16") else torch.bfloat16


def replace_linears(model: nn.Module, form: WeightForm) -> None:
    """Replace every nn.Linear of `model`, LM head included, by the engine's own layer.

    Originals are dropped one by one. An embedding that shares its weight with the LM head keeps the
    weight. With int4 the LM head has 8 bits, since its errors go straight into the logits.
    """
    for parent in list(model.modules()):
        replace_linears_of(parent, form, is_head=parent is model)


def replace_linears_of(module: nn.Module, form: WeightForm, *, is_head: bool = False) -> None:
    """The same for the direct children of `module` only."""
    for name, child in list(module.named_children()):
        if isinstance(child, nn.Linear):
            setattr(module, name, packed_linear(child, form, is_head=is_head))


def packed_linear(source: nn.Linear, form: WeightForm, *, is_head: bool = False) -> nn.Module:
    """The layer that replaces `source`."""
    if form == "int4" and not is_head and fits_int4(source):
        return Int4Linear(source)
    if form in ("int4", "int8"):
        return Int8Linear(source)
    if form == "float16":
        return HalfLinear(source)
    return PackedLinear(source, activation_dtype(form))


def convert_weights(model: nn.Module, form: WeightForm) -> None:
    """Convert a float32 Hugging Face model to `form` in place: linears and other parameters.

    Buffers stay as they are: rotary frequencies in bfloat16 would misplace distant tokens.
    """
    replace_linears(model, form)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(activation_dtype(form))
