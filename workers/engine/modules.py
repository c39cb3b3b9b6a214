"""Modules that replace Hugging Face's in a loaded model, on any device.

- Projections that read the same input (query, key and value; gate and up) become one matrix
  product, with the same bits.
- A norm becomes torch's own rms_norm, which is one operation.
- An activation of an element becomes independent of the other elements. torch's vectorized kernels
  compute the last elements of an array, and of each thread's part, with scalar code that rounds
  differently (silu, gelu). Which elements these are depends on the batch and on the number of
  threads. So activations run over slabs: one thread computes a slab, and its size is a multiple of
  the vector width.

Linears depend on the device: cpu/linears.py, cuda/linears.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor, nn

_PROJECTIONS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names of linears of one module that are called with the same input, in this order."""
_SLAB = 32768
"""Up to this number of elements torch uses one thread (at::internal::GRAIN_SIZE)."""
_ALIGNMENT = 64
"""A multiple of the elements that a vector loop computes at once (2 x 16 float32 for AVX-512)."""


class SharedProjection(nn.Module):
    """One product in place of several linears that are called with the same input.

    The first part computes the product for all. The other parts, called later, take their columns.
    """

    def __init__(self, joined: nn.Module, widths: list[int]) -> None:
        super().__init__()
        self.joined = joined
        self._widths = widths
        self._left: list[Tensor] = []

    def part(self, index: int, rows_TN: Tensor) -> Tensor:
        """The result of linear `index`. Index 0 must be called first."""
        if index == 0:
            self._left = list(torch.split(self.joined(rows_TN), self._widths, dim=-1))
        result = self._left[index]
        if index == len(self._widths) - 1:
            self._left = []
        return result


class ProjectionPart(nn.Module):
    """Replaces one of the joined linears in its module."""

    def __init__(self, shared: SharedProjection, index: int, width: int) -> None:
        super().__init__()
        self.shared = shared
        self.index = index
        self.out_features = width

    def forward(self, rows_TN: Tensor) -> Tensor:
        return self.shared.part(self.index, rows_TN)


def join_projections(module: nn.Module) -> None:
    """Join the linears of `module` that are called with the same input, if they are plain."""
    for names in _PROJECTIONS:
        _join(module, names)


def _join(module: nn.Module, names: tuple[str, ...]) -> None:
    linears = [linear for name in names if (linear := getattr(module, name, None)) is not None]
    if len(linears) < len(names):
        return
    joined = _concatenate(linears)
    if joined is None:
        return
    widths = [linear.out_features for linear in linears]
    shared = SharedProjection(joined, widths)
    for index, name in enumerate(names):
        setattr(module, name, ProjectionPart(shared, index, widths[index]))


def _concatenate(linears: list[nn.Module]) -> nn.Module | None:
    """One layer with the outputs of all, in order; None if they cannot be one.

    A layer that is not torch's may have a method `joined`, which gets the others.
    """
    plain = [linear for linear in linears if type(linear) is nn.Linear]
    if not plain:
        join = getattr(linears[0], "joined", None)
        result: nn.Module | None = None if join is None else join(linears[1:])
        return result
    if len(plain) < len(linears) or len({linear.bias is None for linear in plain}) > 1:
        return None
    first = plain[0]
    joined = nn.Linear(
        first.in_features,
        sum(linear.out_features for linear in plain),
        bias=first.bias is not None,
        device="meta",
    )
    joined.weight = nn.Parameter(
        torch.cat([linear.weight.detach() for linear in plain]), requires_grad=False
    )
    if first.bias is not None:
        joined.bias = nn.Parameter(
            torch.cat([linear.bias.detach() for linear in plain]), requires_grad=False
        )
    return joined


class NativeNorm(nn.Module):
    """torch's rms_norm with the weight and epsilon of an equivalent module."""

    def __init__(self, weight: Tensor, epsilon: float) -> None:
        super().__init__()
        self._weight = weight.detach()
        self._epsilon = epsilon
        self._shape = tuple(weight.shape)

    @property
    def weight(self) -> Tensor:
        return self._weight

    @property
    def epsilon(self) -> float:
        return self._epsilon

    def forward(self, rows: Tensor) -> Tensor:
        return torch.rms_norm(rows, self._shape, self._weight, self._epsilon)


def replace_norms(
    model: nn.Module, tolerances: Mapping[torch.dtype, float] = MappingProxyType({})
) -> None:
    """Replace the RMS norms of `model` for which a NativeNorm gives nearly the same results.

    `tolerances`: by dtype, the largest difference on random rows, as a share of the largest value.
    A dtype without a tolerance must have the same bits.
    """
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            weight = getattr(child, "weight", None)
            epsilon = getattr(child, "variance_epsilon", None)
            if not isinstance(weight, Tensor) or not isinstance(epsilon, float):
                continue
            native = NativeNorm(weight, epsilon)
            generator = torch.Generator().manual_seed(0)
            rows = torch.randn(64, *weight.shape, generator=generator).to(weight)
            expected = child(rows)
            bound = tolerances.get(weight.dtype, 0.0) * float(expected.abs().max())
            if float((native(rows) - expected).abs().max()) <= bound:
                setattr(parent, name, native)


class SlabActivation(nn.Module):
    """An elementwise activation whose result for an element depends on that element only."""

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.activation = activation

    def forward(self, values: Tensor) -> Tensor:
        count = values.numel()
        # If rows are not contiguous, torch goes row by row.
        piece = count if values.is_contiguous() else values.shape[-1]
        if count <= _SLAB and piece % _ALIGNMENT == 0:
            result: Tensor = self.activation(values)
            return result
        flat = nn.functional.pad(values.reshape(-1), (0, -count % _ALIGNMENT))
        slabs = [self.activation(slab) for slab in torch.split(flat, _SLAB)]
        return torch.cat(slabs)[:count].view(values.shape)


def replace_activations(model: nn.Module) -> None:
    """Wrap every activation module of `model` in a SlabActivation."""
    for parent in list(model.modules()):
        if isinstance(parent, SlabActivation):
            continue
        for name, child in list(parent.named_children()):
            if _is_activation(child):
                setattr(parent, name, SlabActivation(child))


def _is_activation(module: nn.Module) -> bool:
    home = type(module).__module__
    return home in ("transformers.activations", "torch.nn.modules.activation")
