"""Linear layers with 16-bit weights and float32 arithmetic, by FBGEMM's kernel.

They read half as much memory, and only the weights are rounded. The processor needs F16C, which all
those with AVX2 have, whereas bfloat16 needs special AVX-512 instructions.

Shapes: T rows, N input features, M output features.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from paceline.errors import ConfigError

_LARGEST = torch.finfo(torch.float16).max
_ROWS_A_BLOCK = 6
"""FBGEMM's AVX2 kernel takes blocks of at most 6 rows. In blocks of 1 or 2 rows it sums in another
order. Its AVX-512 kernels always sum in the same order.
"""


class HalfLinear(nn.Module):
    """A linear layer with float16 weights; activations, sums and results are float32.

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
        if not largest <= _LARGEST:
            raise ConfigError(
                f"a weight of {largest:g} cannot be held in float16, whose largest number is "
                f"{_LARGEST:g}; use target.dtype bfloat16 or float32"
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
