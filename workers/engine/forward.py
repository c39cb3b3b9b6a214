"""The two ways to run a step's tokens through a model: Hugging Face's code, and a lean equivalent.

The lean one computes what Llama, Mistral, Qwen2 and Qwen3 layers compute, from the modules of the
loaded model, with a third of the operations. It is not a port: a model with other parts, or with
other logits on a probe, runs through its own code.

Shapes: T tokens, N features, D head size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from workers.engine.attention import Step, StepContext
from workers.engine.cpu.kv_cache import KVCache
from workers.engine.cpu.linears import MIN_ROWS
from workers.engine.fusing import ProjectionPart
from workers.engine.layer_operations import (
    AttentionLayer,
    LayerOperations,
    Rotation,
    operations_for,
)
from workers.engine.load.checkpoint import sliding_window_of
from workers.engine.slices import Slice
from workers.engine.step_plan import make_plan

Forward = Callable[[Step], Tensor]
"""Maps a planned step to its logits [T, V], in the model's dtype."""

_UNUSED_MASK = torch.empty(1, 1, 1, 1)
_PROBE_LENGTH = 9
_TOLERANCE = {torch.float32: 1e-5, torch.float16: 0.004, torch.bfloat16: 0.03}
"""Largest difference on the probe, as a share of the largest logit: a few units of rounding."""


def hugging_face_forward(model: PreTrainedModel) -> Forward:
    """A forward pass by the model's own code."""

    def forward(step: Step) -> Tensor:
        result = model(
            input_ids=step.token_ids_T[None],
            position_ids=step.position_ids_T[None],
            # With four dimensions, transformers neither makes a mask nor examines positions for
            # one.
            attention_mask=_UNUSED_MASK,
            use_cache=False,
            logits_to_keep=step.logit_rows,
            paceline_step=step,
        )
        logits_TV: Tensor = result.logits[0]
        return logits_TV

    return forward


def choose_forward(model: PreTrainedModel, cache: KVCache) -> Forward:
    """The way to run a model on the CPU. Overwrites block 0 of `cache`."""
    num_kv_heads = cache.layers[0].keys_NHBD.shape[1]
    plan = make_plan(
        [probe_slice(int(model.config.vocab_size))],
        num_query_heads=model.config.num_attention_heads,
        num_kv_heads=num_kv_heads,
        min_tokens=max(MIN_ROWS.values()),
    )
    return choose_by_probe(model, StepContext(plan, cache.layers))


def probe_slice(vocab_size: int) -> Slice:
    """The slice for the step that choose_by_probe takes: a few tokens in block 0."""
    token_ids = [token % vocab_size for token in range(3, 3 + _PROBE_LENGTH)]
    return Slice([0], 0, token_ids, _PROBE_LENGTH)


def choose_by_probe(model: PreTrainedModel, step: Step) -> Forward:
    """The lean way if it gives the logits of the model's own code, else that code."""
    own = hugging_face_forward(model)
    try:
        lean = LeanForward(model)
    except _OtherLayoutError:
        return own
    expected_TV, logits_TV = own(step), lean(step)
    if logits_TV.shape != expected_TV.shape or logits_TV.dtype != expected_TV.dtype:
        return own
    bound = _TOLERANCE[model.dtype] * float(expected_TV.abs().max())
    return lean if float((logits_TV - expected_TV).abs().max()) <= bound else own


class _OtherLayoutError(Exception):
    """The model's parts are not those that the lean forward supports."""


class LeanForward:
    """Embedding, layers, final norm and LM head of a Llama-like model."""

    def __init__(self, model: PreTrainedModel, operations: LayerOperations | None = None) -> None:
        """`operations` None: those for the model's device. Raises _OtherLayoutError."""
        if sliding_window_of(model.config) is not None:
            raise _OtherLayoutError("sliding_window")  # the probe is too short to detect a window
        self._operations = operations or operations_for(model.device)
        base = _part(model, model.base_model_prefix)
        self._embed = _part(base, "embed_tokens")
        self._rotary = _part(base, "rotary_emb")
        self._norm = self._operations.add_and_norm(_part(base, "norm"))
        self._head = _part(model, "lm_head")
        self._layers = [
            _LeanLayer(layer, index, self._operations)
            for index, layer in enumerate(_part(base, "layers").children())
        ]

    def __call__(self, step: Step) -> Tensor:
        hidden_TN: Tensor = self._embed(step.token_ids_T)
        cos_1TD, sin_1TD = self._rotary(hidden_TN, step.position_ids_T[None])
        first = self._layers[0].attention
        rotation = self._operations.rotation(cos_1TD[0], sin_1TD[0], first)
        delta_TN: Tensor | None = None
        for layer in self._layers:
            delta_TN = layer.run(hidden_TN, delta_TN, rotation, step)
        kept_TN = self._norm(hidden_TN, delta_TN).index_select(0, step.logit_rows)
        logits_TV: Tensor = self._head(kept_TN)
        return logits_TV


class _LeanLayer:
    """One decoder layer: attention and gated feed-forward, each after a norm, each added."""

    def __init__(self, layer: nn.Module, index: int, operations: LayerOperations) -> None:
        attention, feed_forward = _part(layer, "self_attn"), _part(layer, "mlp")
        self.attention = _attention_layer(attention, index)
        self._input_norm = operations.add_and_norm(_part(layer, "input_layernorm"))
        self._project = _joined(attention, "q_proj", "k_proj", "v_proj")
        self._attend = operations.attend(self.attention)
        self._output = _part(attention, "o_proj").forward
        self._middle_norm = operations.add_and_norm(_part(layer, "post_attention_layernorm"))
        self._gate_and_up = _joined(feed_forward, "gate_proj", "up_proj")
        self._gate = operations.gate(_part(feed_forward, "act_fn"))
        self._down = _part(feed_forward, "down_proj").forward

    def run(
        self, hidden_TN: Tensor, delta_TN: Tensor | None, rotation: Rotation, step: Step
    ) -> Tensor:
        """Add `delta_TN`, the previous layer's last result, to `hidden_TN`, and this layer's
        attention.

        Returns the result of this layer's feed-forward, which the next norm adds.
        """
        rows = self._project(self._input_norm(hidden_TN, delta_TN))
        attended_TN = self._output(self._attend(rows, rotation, step))
        gate_and_up = self._gate_and_up(self._middle_norm(hidden_TN, attended_TN))
        result_TN: Tensor = self._down(self._gate(gate_and_up))
        return result_TN


def _attention_layer(attention: nn.Module, index: int) -> AttentionLayer:
    head_size = int(_value(attention, "head_dim"))
    widths = [_part(attention, name).out_features for name in ("q_proj", "k_proj", "v_proj")]
    num_queries, num_keys, num_values = (width // head_size for width in widths)
    if num_keys != num_values:
        raise _OtherLayoutError("v_proj")
    head_norms = [
        _part(attention, name) for name in ("q_norm", "k_norm") if hasattr(attention, name)
    ]
    if len(head_norms) == 1:
        raise _OtherLayoutError("q_norm")
    return AttentionLayer(
        index=index,
        num_queries=num_queries,
        num_keys=num_keys,
        head_size=head_size,
        scaling=float(_value(attention, "scaling")),
        head_norms=tuple(head_norms),
    )


def _value(owner: object, name: str) -> Any:
    value = getattr(owner, name, None)
    if value is None:
        raise _OtherLayoutError(name)
    return value


def _part(owner: nn.Module, name: str) -> Any:
    value = _value(owner, name)
    if not isinstance(value, nn.Module):
        raise _OtherLayoutError(name)
    return value


def _joined(owner: nn.Module, *names: str) -> Any:
    """The single product that replaces these linears of `owner` (fusing.py)."""
    parts = [_part(owner, name) for name in names]
    first = parts[0]
    if not all(isinstance(p, ProjectionPart) and p.shared is first.shared for p in parts):
        raise _OtherLayoutError(names[0])
    return first.shared.joined.forward
