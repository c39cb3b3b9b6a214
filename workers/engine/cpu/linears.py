"""The linear layers that replace nn.Linear on a CPU, by form of weights.

float32, bfloat16  PackedLinear: packed once for oneDNN's kernels, over twice as fast as nn.Linear
                   for few rows. With two rows or more, a row's bits do not depend on other rows.
float16            HalfLinear: half of float32's memory; only weights are rounded. The processor
                   needs F16C, which every processor with AVX2 has.
int8, int4         Int8Linear, Int4Linear: fewer bits, for drafters. The time of a step with few
                   rows is the time to read its weights, so fewer bits are faster. This matters even
                   more if a target reads its own weights from the same memory.

In Hugging Face's code the experts of a mixture are one stacked parameter. The bits of their
products, and of the router's, depend on the number of tokens. So each expert's matrices become
linears of the engine, and a router always gets the same number of rows.

Shapes: T rows or tokens, N input features, M output features, G groups of a row's weights, E
experts, K experts chosen for a token.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from paceline.errors import ConfigError
from workers.engine.cpu.native import GROUP_SIZE, PanelLinear, quantize_channels, quantize_groups
from workers.engine.options import WeightForm

MIN_ROWS: dict[WeightForm, int] = {
    "float32": 2,
    "bfloat16": 2,
    "float16": 1,
    "int8": 1,
    "int4": 1,
}
"""Minimum number of rows in a step's linears. For a single row oneDNN uses another kernel, which
rounds differently.
"""
_MIN_PACKED_ROWS = 2
_ROUTED_ROWS = 16
_NO_SCALARS: list[float] = []
_LARGEST_FLOAT16 = torch.finfo(torch.float16).max
_ROWS_A_BLOCK = 6
"""Rows in a full block of FBGEMM's AVX2 kernel. In blocks of 1 or 2 rows it sums in another order.
Its AVX-512 kernels always sum in the same order.
"""
_INT4_MULTIPLE = 16
"""torch's 4-bit kernel needs a multiple of this number of output features."""
_UNPACK_ROWS_INT4 = 128
"""From this number of rows on, unpacking 4-bit weights to bfloat16 and multiplying is faster."""


def activation_dtype(form: WeightForm) -> torch.dtype:
    """The dtype of activations, and of all parameters but the weights of linears."""
    return torch.float32 if form in ("float32", "float16") else torch.bfloat16


def convert_weights(model: nn.Module, form: WeightForm) -> None:
    """Convert a float32 Hugging Face model to `form` in place: linears and other parameters.

    Buffers stay as they are: rotary frequencies in bfloat16 would misplace distant tokens.
    """
    replace_linears(model, form)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(activation_dtype(form))


def replace_linears(model: nn.Module, form: WeightForm) -> None:
    """Replace every nn.Linear of `model`, LM head included, by the engine's own layer.

    Originals are dropped one by one. An embedding that shares its weight with the LM head keeps the
    weight. With int4 the LM head has 8 bits, since its errors go straight into the logits.
    """
    for parent in list(model.modules()):
        replace_linears_of(parent, form, is_head=parent is model)


def replace_linears_of(
    module: nn.Module, form: WeightForm, *, is_head: bool = False, native: bool = False
) -> None:
    """Replace the nn.Linears among the direct children of `module`. `native`: by PanelLinears."""
    for name, child in list(module.named_children()):
        if isinstance(child, nn.Linear):
            made = (
                PanelLinear(child, "int8" if form == "int4" and is_head else form)
                if native
                else make_linear(child, form, is_head=is_head)
            )
            setattr(module, name, made)


def make_linear(source: nn.Linear, form: WeightForm, *, is_head: bool = False) -> nn.Module:
    """The layer that replaces `source`. With int4 an LM head has 8 bits."""
    if form == "int4" and not is_head and fits_int4(source):
        return Int4Linear(source)
    if form in ("int4", "int8"):
        return Int8Linear(source)
    if form == "float16":
        return HalfLinear(source)
    return PackedLinear(source, activation_dtype(form))


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
        if num_rows >= _MIN_PACKED_ROWS:
            result: Tensor = self._multiply(
                rows_TN, self._packed, self._bias, "none", _NO_SCALARS, ""
            )
            return result
        if num_rows == 0:
            return rows_TN.new_empty((*rows_TN.shape[:-1], self.out_features))
        flat_TN = (
            rows_TN.reshape(num_rows, self.in_features).expand(_MIN_PACKED_ROWS, -1).contiguous()
        )
        doubled = self._multiply(flat_TN, self._packed, self._bias, "none", _NO_SCALARS, "")
        single: Tensor = doubled[:1].reshape(*rows_TN.shape[:-1], self.out_features)
        return single


def multiplies_bfloat16() -> bool:
    """Whether oneDNN's bfloat16 products run on this processor."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


class HalfLinear(nn.Module):
    """A linear layer with float16 weights, by FBGEMM; activations, sums and results are float32.

    A row's bits do not depend on the other rows: without AVX-512, rows are padded to whole blocks.
    """

    def __init__(self, source: nn.Linear) -> None:
        """Raises ConfigError if torch lacks this kernel, or a weight is too large for float16."""
        super().__init__()
        if "fbgemm" not in torch.backends.quantized.supported_engines:
            raise ConfigError(
                "target.dtype float16 on a CPU needs FBGEMM, which this torch lacks (it has it for "
                "x86 only); use float32 or bfloat16"
            )
        self.in_features = source.in_features
        self.out_features = source.out_features
        weight_MN = source.weight.detach().to(torch.float32).contiguous()
        largest = float(weight_MN.abs().max()) if weight_MN.numel() else 0.0
        if not largest <= _LARGEST_FLOAT16:
            raise ConfigError(
                f"a weight of {largest:g} cannot be held in float16, whose largest number is "
                f"{_LARGEST_FLOAT16:g}; use target.dtype bfloat16 or float32"
            )
        bias = None if source.bias is None else source.bias.detach().to(torch.float32)
        self._packed = torch.ops.quantized.linear_prepack_fp16(weight_MN, bias)
        self._multiply = torch.ops.quantized.linear_dynamic_fp16.default
        self._pads = not torch.backends.cpu.get_cpu_capability().startswith("AVX512")

    def forward(self, rows_TN: Tensor) -> Tensor:
        """The product, of shape [..., M]."""
        if not rows_TN.numel():
            return rows_TN.new_empty((*rows_TN.shape[:-1], self.out_features))
        if self._pads:
            return self._in_whole_blocks(rows_TN)
        result: Tensor = self._multiply(rows_TN, self._packed)
        return result

    def _in_whole_blocks(self, rows_TN: Tensor) -> Tensor:
        flat_TN = rows_TN.reshape(-1, self.in_features)
        num_rows = flat_TN.shape[0]
        padded_TN = nn.functional.pad(flat_TN, (0, 0, 0, -num_rows % _ROWS_A_BLOCK))
        result_TM: Tensor = self._multiply(padded_TN, self._packed)[:num_rows]
        return result_TM.reshape(*rows_TN.shape[:-1], self.out_features)


class Int8Linear(nn.Module):
    """A linear layer with 8-bit weights; activations and results are bfloat16.

    One kernel computes any number of rows, so a row's bits do not depend on the others. For
    hundreds of rows, unpacking the weights first would take less than half the time, but give other
    bits.
    """

    weight_MN: Tensor
    scale_M: Tensor

    def __init__(self, source: nn.Linear) -> None:
        super().__init__()
        self.in_features = source.in_features
        self.out_features = source.out_features
        weight_MN, scale_M = quantize_channels(source.weight.detach())
        self.register_buffer("weight_MN", weight_MN, persistent=False)
        self.register_buffer("scale_M", scale_M, persistent=False)
        self._bias = None if source.bias is None else source.bias.detach().to(torch.bfloat16)

    def forward(self, rows_TN: Tensor) -> Tensor:
        """The product, of shape [..., M], in bfloat16."""
        flat_TN = rows_TN.reshape(-1, self.in_features)
        result = torch._weight_int8pack_mm(flat_TN, self.weight_MN, self.scale_M)
        if self._bias is not None:
            result = result + self._bias
        return result.reshape(*rows_TN.shape[:-1], self.out_features)


class Int4Linear(nn.Module):
    """A linear layer with 4-bit weights: each counts the steps above its group's minimum.

    Activations, results, steps and minima are bfloat16.
    """

    packed: Tensor
    pairs: Tensor
    scale_and_middle_GM2: Tensor

    def __init__(self, source: nn.Linear) -> None:
        """Raises ValueError if the kernel does not support the layer's shape."""
        super().__init__()
        self.in_features = source.in_features
        self.out_features = source.out_features
        if not fits_int4(source):
            raise ValueError(f"no 4-bit linear of {source.out_features} x {source.in_features}")
        steps_MN, scale_MG, minimum_MG = quantize_groups(source.weight.detach())
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(steps_MN.to(torch.int32), 1)
        self.register_buffer("packed", packed, persistent=False)
        # Two weights per byte, which many rows unpack: the layout of `packed` is undocumented.
        pairs = steps_MN[:, ::2] | (steps_MN[:, 1::2] << 4)
        self.register_buffer("pairs", pairs, persistent=False)
        # The kernel counts steps from the middle of the 16.
        middle_MG = (minimum_MG.float() + 8 * scale_MG.float()).to(torch.bfloat16)
        both_GM2 = torch.stack([scale_MG.t(), middle_MG.t()], dim=2).contiguous()
        self.register_buffer("scale_and_middle_GM2", both_GM2, persistent=False)
        self._bias = None if source.bias is None else source.bias.detach().to(torch.bfloat16)

    def forward(self, rows_TN: Tensor) -> Tensor:
        """The product, of shape [..., M], in bfloat16."""
        flat_TN = rows_TN.reshape(-1, self.in_features)
        if flat_TN.shape[0] >= _UNPACK_ROWS_INT4:
            result = nn.functional.linear(flat_TN, self.unpacked_MN())
        else:
            result = torch.ops.aten._weight_int4pack_mm_for_cpu(
                flat_TN, self.packed, GROUP_SIZE, self.scale_and_middle_GM2
            )
        if self._bias is not None:
            result = result + self._bias
        return result.reshape(*rows_TN.shape[:-1], self.out_features)

    def unpacked_MN(self) -> Tensor:
        steps_MN = torch.stack([self.pairs & 15, self.pairs >> 4], dim=2)
        steps_MGS = steps_MN.view(self.out_features, -1, GROUP_SIZE).to(torch.bfloat16) - 8
        scale_MG1, middle_MG1 = self.scale_and_middle_GM2.transpose(0, 1).split(1, dim=2)
        return steps_MGS.mul_(scale_MG1).add_(middle_MG1).view(self.out_features, -1)


def fits_int4(source: nn.Linear) -> bool:
    """Whether torch's 4-bit kernel supports a layer of this shape."""
    return source.in_features % GROUP_SIZE == 0 and source.out_features % _INT4_MULTIPLE == 0


class PackedExperts(nn.Module):
    """Replaces a module that holds gate_up_proj [E, 2M, N] and down_proj [E, N, M]."""

    def __init__(self, source: nn.Module, form: WeightForm) -> None:
        super().__init__()
        gate_up_E2MN, down_ENM = source.gate_up_proj, source.down_proj
        assert isinstance(gate_up_E2MN, Tensor)
        assert isinstance(down_ENM, Tensor)
        self.act_fn = source.act_fn
        self.gate_up = nn.ModuleList(_linear(weight, form) for weight in gate_up_E2MN)
        self.down = nn.ModuleList(_linear(weight, form) for weight in down_ENM)

    def forward(self, rows_TN: Tensor, experts_TK: Tensor, shares_TK: Tensor) -> Tensor:
        """For each token, the sum of its experts' results times their shares, by expert number."""
        total_TN = torch.zeros_like(rows_TN)
        activation: Any = self.act_fn
        for expert in experts_TK.unique().tolist():
            tokens, places = torch.nonzero(experts_TK == expert, as_tuple=True)
            gate, up = self.gate_up[expert](rows_TN[tokens]).chunk(2, dim=-1)
            result = self.down[expert](activation(gate) * up)
            shares = shares_TK[tokens, places, None]
            total_TN.index_add_(0, tokens, (result * shares).to(total_TN.dtype))
        return total_TN


class EvenRouter(nn.Module):
    """A router that always gets 16 rows."""

    def __init__(self, router: nn.Module) -> None:
        super().__init__()
        self.router = router

    def forward(self, rows: Tensor) -> tuple[Tensor, ...]:
        """The router's results for all rows."""
        rows_TN = rows.reshape(-1, rows.shape[-1])
        padded = nn.functional.pad(rows_TN, (0, 0, 0, -rows_TN.shape[0] % _ROUTED_ROWS))
        parts = [self.router(piece) for piece in padded.split(_ROUTED_ROWS)]
        return tuple(torch.cat(part)[: rows_TN.shape[0]] for part in zip(*parts, strict=True))


def holds_experts(module: nn.Module) -> bool:
    """Whether the module has the stacked matrices of experts."""
    stacked = getattr(module, "gate_up_proj", None)
    return isinstance(stacked, Tensor) and stacked.dim() == 3


def replace_experts_of(module: nn.Module, form: WeightForm) -> None:
    """Replace the experts and the router among the direct children of `module`."""
    for name, child in list(module.named_children()):
        if holds_experts(child):
            setattr(module, name, PackedExperts(child, form))
        elif hasattr(child, "top_k") and isinstance(getattr(child, "weight", None), Tensor):
            setattr(module, name, EvenRouter(child))


def _linear(weight_MN: Tensor, form: WeightForm) -> nn.Module:
    linear = nn.Linear(weight_MN.shape[1], weight_MN.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight_MN, requires_grad=False)
    return make_linear(linear, form)
