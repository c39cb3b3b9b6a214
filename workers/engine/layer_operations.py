"""The operations between the products of a Llama-like layer, as a lean forward calls them.

An operation is bound to a layer's modules once, when the forward is made. This file has torch's
operations, for any device; workers/engine/cuda/kernel_operations.py has kernels, each of which
replaces several.

Shapes: T tokens, N features, F features of the feed-forward, A heads of a token (queries, keys,
values), D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from workers.engine.attention import Step
from workers.process.kernels import can_run_kernels

Rotation = tuple[Tensor, Tensor]
"""The rotary factors of a step, in a form for the operations that made it."""
AddAndNorm = Callable[[Tensor, Tensor | None], Tensor]
"""Adds the second tensor, if any, to the first [T, N] in place; returns the norm of the sum."""
Attend = Callable[[Tensor, Rotation, Step], Tensor]
"""Takes the joined product [T, A x D]: norms and rotates heads, stores keys and values, attends.

Returns [T, query heads x D]. It may write into the product.
"""
Gate = Callable[[Tensor], Tensor]
"""Takes [T, 2 x F], gates before ups; returns activated gates times ups, [T, F]."""


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """A layer's attention, as the operations see it. `head_norms`: of queries and of keys."""

    index: int
    num_queries: int
    num_keys: int
    head_size: int
    scaling: float
    head_norms: tuple[nn.Module, ...] = ()

    @property
    def num_rotated(self) -> int:
        """The number of queries and keys."""
        return self.num_queries + self.num_keys

    @property
    def num_heads(self) -> int:
        """The number of queries, keys and values. There are as many values as keys."""
        return self.num_rotated + self.num_keys


class LayerOperations:
    """torch's operations."""

    def add_and_norm(self, norm: nn.Module) -> AddAndNorm:
        """The operation with this norm."""
        normed = _forward_of(norm)

        def run(hidden_TN: Tensor, delta_TN: Tensor | None) -> Tensor:
            if delta_TN is not None:
                hidden_TN.add_(delta_TN)
            return normed(hidden_TN)

        return run

    def rotation(self, cos_TD: Tensor, sin_TD: Tensor, layer: AttentionLayer) -> Rotation:
        """Factors [T, A, D] for heads and for their swapped halves; values are not rotated."""
        half = cos_TD.shape[1] // 2
        signed_TD = torch.cat([-sin_TD[:, :half], sin_TD[:, half:]], dim=1)
        shape = (cos_TD.shape[0], layer.num_heads, cos_TD.shape[1])
        cos_TAD, sin_TAD = cos_TD.new_ones(shape), cos_TD.new_zeros(shape)
        cos_TAD[:, : layer.num_rotated] = cos_TD[:, None]
        sin_TAD[:, : layer.num_rotated] = signed_TD[:, None]
        return cos_TAD, sin_TAD

    def attend(self, layer: AttentionLayer) -> Attend:
        """The attention of this layer."""

        def run(rows: Tensor, rotation: Rotation, step: Step) -> Tensor:
            cos_TAD, sin_TAD = rotation
            heads_TAD = rows.view(cos_TAD.shape)
            if layer.head_norms:
                heads_TAD = norm_heads(heads_TAD, layer)
            num_tokens, num_heads, head_size = heads_TAD.shape
            swapped = heads_TAD.view(num_tokens, num_heads, 2, head_size // 2).flip(2)
            swapped_TAD = swapped.view(cos_TAD.shape).mul_(sin_TAD)
            heads_TAD.mul_(cos_TAD).add_(swapped_TAD)
            return step.attend(heads_TAD, layer.index, layer.scaling).view(num_tokens, -1)

        return run

    def gate(self, activation: nn.Module) -> Gate:
        """The operation with this activation."""
        activated = _forward_of(activation)

        def run(gate_and_up: Tensor) -> Tensor:
            gate, up = gate_and_up.chunk(2, dim=-1)
            return activated(gate).mul_(up)

        return run


def operations_for(device: torch.device) -> LayerOperations:
    """Kernels where they can run, else torch's operations."""
    if not can_run_kernels(device):
        return LayerOperations()
    from workers.engine.cuda.kernel_operations import KernelOperations

    return KernelOperations()


def norm_heads(heads_TAD: Tensor, layer: AttentionLayer) -> Tensor:
    """Queries and keys normed head by head, as Qwen3 does. Values are unchanged."""
    parts = heads_TAD.split([layer.num_queries, layer.num_keys, layer.num_keys], dim=1)
    queries, keys = (norm(part) for norm, part in zip(layer.head_norms, parts, strict=False))
    return torch.cat([queries, keys, parts[2]], dim=1)


def _forward_of(module: nn.Module) -> Callable[[Tensor], Tensor]:
    """The module's forward without torch's hooks, which are unused here but take time."""
    forward: Any = module.forward
    result: Callable[[Tensor], Tensor] = forward
    return result
