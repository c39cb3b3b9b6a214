"""The operations between the products of a layer, by our own kernels (layer_kernels.py).

Import it only where kernels can run. Modules that the kernels do not support stay with torch.
"""

from __future__ import annotations

from torch import Tensor, nn
from transformers.activations import SiLUActivation

from workers.engine.attention import Step
from workers.engine.cuda import layer_kernels
from workers.engine.cuda.layer_kernels import LARGEST_ROW, HeadNorms
from workers.engine.cuda.step import DeviceStep
from workers.engine.fusing import NativeNorm
from workers.engine.layer_operations import (
    AddAndNorm,
    Attend,
    AttentionLayer,
    Gate,
    LayerOperations,
    Rotation,
    norm_heads,
)


class KernelOperations(LayerOperations):
    """Four kernels per layer in place of twelve or more. Steps are DeviceSteps."""

    def add_and_norm(self, norm: nn.Module) -> AddAndNorm:
        """Uses a kernel for a NativeNorm, else torch."""
        if not isinstance(norm, NativeNorm) or norm.weight.numel() > LARGEST_ROW:
            return super().add_and_norm(norm)
        weight_N, epsilon = norm.weight, norm.epsilon

        def run(hidden_TN: Tensor, delta_TN: Tensor | None) -> Tensor:
            return layer_kernels.add_and_norm(hidden_TN, delta_TN, weight_N, epsilon)

        return run

    def rotation(self, cos_TD: Tensor, sin_TD: Tensor, layer: AttentionLayer) -> Rotation:
        """The factors unchanged, [T, D]."""
        return cos_TD, sin_TD

    def attend(self, layer: AttentionLayer) -> Attend:
        """Norms, rotates and stores with one kernel. Norms other than NativeNorm run before it."""
        norms = _known_norms(layer)
        others = bool(layer.head_norms) and norms is None

        def run(rows: Tensor, rotation: Rotation, step: Step) -> Tensor:
            assert isinstance(step, DeviceStep)
            num_tokens = rows.shape[0]
            heads_TAD = rows.view(num_tokens, layer.num_heads, layer.head_size)
            if others:
                heads_TAD = norm_heads(heads_TAD, layer)
            pages = step.pages(layer.index)
            query_TAD = layer_kernels.rotate_and_store(
                heads_TAD, *rotation, step.slots_T, pages.keys_SHD, pages.values_SHD, norms
            )
            attended = step.attend_stored(query_TAD, layer.index, layer.scaling)
            return attended.view(num_tokens, -1)

        return run

    def gate(self, activation: nn.Module) -> Gate:
        """Uses a kernel for SiLU, else torch."""
        known = isinstance(activation, nn.SiLU | SiLUActivation)
        return layer_kernels.gate if known else super().gate(activation)


def _known_norms(layer: AttentionLayer) -> HeadNorms | None:
    if not layer.head_norms:
        return None
    queries, keys = layer.head_norms
    if not isinstance(queries, NativeNorm) or not isinstance(keys, NativeNorm):
        return None
    if {queries.weight.shape, keys.weight.shape} != {(layer.head_size,)}:
        return None
    return HeadNorms(queries.weight, keys.weight, queries.epsilon, keys.epsilon)
