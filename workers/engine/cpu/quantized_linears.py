"""Linear layers with weights of 8 or 4 bits and bfloat16 activations.

A step with few rows is as fast as its weights can be read. This matters even more beside a target
that reads its weights from the same memory.

Shapes: T rows, N input features, M output features, G groups of a row's weights.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

GROUP_SIZE = 32
"""Input features that share a scale and a minimum, as in the formats Q4_0 and Q4_1 of GGUF: weights
that came from these are recovered.
"""
_INT4_MULTIPLE = 16
"""torch's 4-bit kernel needs a multiple of this number of output features."""
_UNPACK_ROWS_INT4 = 128
"""From this number of rows on, unpacking 4-bit weights to bfloat16 and multiplying is faster."""


class Int8Linear(nn.Module):
    """A linear layer with 8-bit weights; activations and results are bfloat16.

    One kernel serves any number of rows, so that a row's bits do not depend on the others. With
    hundreds of rows, unpacking the weights would take less than half the time, but give other bits.
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
    """A linear layer with 4-bit weights, each a number of steps above its group's minimum.

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
        # Two weights per byte, for many rows: the layout of the kernel's `packed` is undocumented.
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
        """The weights in bfloat16."""
        steps_MN = torch.stack([self.pairs & 15, self.pairs >> 4], dim=2)
        steps_MGS = steps_MN.view(self.out_features, -1, GROUP_SIZE).to(torch.bfloat16) - 8
        scale_MG1, middle_MG1 = self.scale_and_middle_GM2.transpose(0, 1).split(1, dim=2)
        return steps_MGS.mul_(scale_MG1).add_(middle_MG1).view(self.out_features, -1)


def fits_int4(source: nn.Linear) -> bool:
    """Whether torch's 4-bit kernel supports a layer of this shape."""
    return source.in_features % GROUP_SIZE == 0 and source.out_features % _INT4_MULTIPLE == 0


def quantize_channels(weight_MN: Tensor) -> tuple[Tensor, Tensor]:
    """8-bit weights [M, N] and bfloat16 scales [M]; a weight is nearly int8 x scale.

    The scale is rounded to bfloat16 first, and the weights are divided by the rounded scale, so
    that rounding the scale costs no accuracy.
    """
    weight_MN = weight_MN.to(torch.float32)
    scale_M = (weight_MN.abs().amax(dim=1) / 127).clamp_min(1e-12).to(torch.bfloat16)
    steps_MN = (weight_MN / scale_M.to(torch.float32)[:, None]).round_().clamp_(-127, 127)
    return steps_MN.to(torch.int8).contiguous(), scale_M


def quantize_groups(weight_MN: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """4-bit steps [M, N] (uint8), bfloat16 scales [M, G] and minima [M, G], G = N / 32.

    A weight is nearly step x scale + minimum. Weights that have this form already, such as those
    from a 4-bit GGUF file, keep their steps.
    """
    weight_MGS = weight_MN.to(torch.float32).unflatten(1, (-1, GROUP_SIZE))
    minimum_MG1 = weight_MGS.amin(dim=2, keepdim=True).to(torch.bfloat16)
    range_MG1 = weight_MGS.amax(dim=2, keepdim=True) - minimum_MG1.float()
    scale_MG1 = (range_MG1 / 15).clamp_min(1e-12).to(torch.bfloat16)
    steps_MGS = (weight_MGS - minimum_MG1.float()).div_(scale_MG1.float()).round_().clamp_(0, 15)
    steps_MN = steps_MGS.flatten(1).to(torch.uint8)
    return steps_MN, scale_MG1.squeeze(2), minimum_MG1.squeeze(2)
