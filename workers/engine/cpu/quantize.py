"""Weights in 8 and 4 bits.

Shapes: M output features, N input features, G groups of a row's weights, S weights of a group.
"""

from __future__ import annotations

import torch
from torch import Tensor

GROUP_SIZE = 32
"""Number of input features that share a scale and a minimum, as in the formats Q4_0 and Q4_1 of
GGUF. So weights that were read from these formats keep their 4-bit values.
"""


def quantize_channels(weight_MN: Tensor) -> tuple[Tensor, Tensor]:
    """8-bit weights [M, N] and bfloat16 scales [M]; a weight is nearly int8 x scale.

    The scale is first rounded to bfloat16, and weights are divided by the rounded scale. So the
    rounding of the scale costs no accuracy.
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
