"""What a GPU engine puts in the place of linears and norms, so that a row's bits are its own.

cuBLAS takes another kernel, with another order of sums, for another number of rows. Here every
product has the same number of rows: fewer are padded, more are cut. The weights are then read once
for each 64 rows, which slows long prefills down: they are bound by memory. That is the price of
batch invariance on a GPU.

Shapes: T rows, N input features, M output features.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from workers.engine.fusing import NativeNorm, join_projections

FIXED_ROWS = 64
"""Rows of every product: few enough that a decoding step stays bound by memory."""
_NORM_TOLERANCE = {torch.float32: 1e-5, torch.float16: 0.003, torch.bfloat16: 0.02}
"""Of the largest value: a rounding more or less, before the weight is multiplied."""


class FixedRowsLinear(nn.Module):
    """A linear layer that only ever multiplies FIXED_ROWS rows at once."""

    def __init__(self, source: nn.Linear) -> None:
        super().__init__()
        self.in_features = source.in_features
        self.out_features = source.out_features
        self.weight = source.weight
        self.bias = source.bias

    def forward(self, rows_TN: Tensor) -> Tensor:
        """The product, of shape [..., M]."""
        flat_TN = rows_TN.reshape(-1, self.in_features)
        num_rows = flat_TN.shape[0]
        missing = -num_rows % FIXED_ROWS
        if missing:
            flat_TN = nn.functional.pad(flat_TN, (0, 0, 0, missing))
        parts = [
            nn.functional.linear(tile, self.weight, self.bias) for tile in flat_TN.split(FIXED_ROWS)
        ]
        joined = parts[0] if len(parts) == 1 else torch.cat(parts)
        return joined[:num_rows].reshape(*rows_TN.shape[:-1], self.out_features)


def adapt_model(model: nn.Module, *, batch_invariant: bool) -> None:
    """Join projections, and make norms one kernel; with `batch_invariant` fix products' rows too.

    The model may be a rank's part, and is where it is going to run.
    """
    for module in list(model.modules()):
        join_projections(module)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if batch_invariant and type(child) is nn.Linear:
                setattr(parent, name, FixedRowsLinear(child))
            elif (norm := _native_norm(child)) is not None:
                setattr(parent, name, norm)


def _native_norm(module: nn.Module) -> NativeNorm | None:
    """torch's own norm where it computes what an RMS norm of a model computes, else None."""
    weight = getattr(module, "weight", None)
    epsilon = getattr(module, "variance_epsilon", None)
    if not isinstance(weight, Tensor) or not isinstance(epsilon, float):
        return None
    native = NativeNorm(weight, epsilon)
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(4, *weight.shape, generator=generator).to(weight)
    expected = module(rows)
    bound = _NORM_TOLERANCE[weight.dtype] * float(expected.abs().max())
    return native if float((native(rows) - expected).abs().max()) <= bound else None
