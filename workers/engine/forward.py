"""The two ways to run a step's tokens through a model: Hugging Face's code, and a lean forward.

The lean forward computes the layers of Llama, Mistral, Qwen2 and Qwen3 with a third of the
operations, from the modules of the loaded model. It is not a port of each model: a model with other
parts, or with other logits on a probe, runs through its own code.

Both ways call the step's attention, which depends on the device: cpu/attention.py, cuda/step.py.
The lean forward also takes the operations between a layer's products as an argument.
`LayerOperations` has torch's operations, for any device; cuda/layer_kernels.py has kernels, each of
which replaces several of these.

Shapes: T tokens, N features, F features of the feed-forward, A heads of a token (queries, keys,
values), D head size, V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from paceline.errors import CheckpointError
from workers.engine.load.checkpoint import sliding_window_of
from workers.engine.modules import ProjectionPart
from workers.engine.parallel.group import RankGroup
from workers.engine.parallel.sharding import SummedOutput
from workers.engine.slices import Slice

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_log = logging.getLogger(__name__)
ATTENTION = "paceline"
"""The name of our attention among transformers' attention functions."""
_HARMLESS = ("position_ids", "cache_position")
"""Tensors that model code passes on to attention, and that attention does not use."""
_UNUSED_MASK = torch.empty(1, 1, 1, 1)
_PROBE_LENGTH = 9
_TOLERANCE = {torch.float32: 1e-5, torch.float16: 0.004, torch.bfloat16: 0.03}
"""Largest difference allowed on the probe, as a share of the largest logit: a few roundings."""


class Step(Protocol):
    """A step as model code sees it: the tokens to feed, and the attention over their KV."""

    @property
    def token_ids_T(self) -> Tensor: ...

    @property
    def position_ids_T(self) -> Tensor: ...

    @property
    def logit_rows(self) -> Tensor: ...

    def attend(
        self,
        rows_TAD: Tensor,
        layer: int,
        scaling: float,
        *,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """Store a layer's keys and values, attend, and return [T x query heads, D].

        `rows_TAD`: a token's queries, keys and values, one head after another. `window`: the number
        of positions that a row sees, its own included. `softcap`: the bound within which tanh keeps
        a score.
        """


Forward = Callable[[Step], Tensor]
"""Maps a planned step to its logits [T, V], in the model's dtype."""


def probe_slice(vocab_size: int) -> Slice:
    """The slice that the step of `choose_forward` feeds: a few tokens, with KV in block 0."""
    token_ids = [token % vocab_size for token in range(3, 3 + _PROBE_LENGTH)]
    return Slice([0], 0, token_ids, _PROBE_LENGTH)


def choose_forward(
    model: PreTrainedModel, step: Step, operations: LayerOperations | None = None
) -> Forward:
    """The lean forward if it gives the logits of the model's own code on a probe, else that code.

    `step`: feeds `probe_slice`. `operations`: those of the lean forward; None: torch's.
    """
    own = hugging_face_forward(model)
    try:
        lean = LeanForward(model, operations)
    except OtherLayoutError as error:
        _log.info("the model runs through transformers' code: it has another layout (%s)", error)
        return own
    expected_TV, logits_TV = own(step), lean(step)
    same_dtype = logits_TV.dtype == expected_TV.dtype
    if same_dtype and agrees(logits_TV, expected_TV, _TOLERANCE[model.dtype]):
        return lean
    _log.warning(
        "the model runs through transformers' code, which is slower: on a probe the lean forward "
        "gave %s",
        _described(logits_TV, expected_TV),
    )
    return own


def agrees(logits_TV: Tensor, expected_TV: Tensor, tolerance: float) -> bool:
    """Whether logits differ from the expected ones by at most this share of the largest."""
    if logits_TV.shape != expected_TV.shape:
        return False
    bound = tolerance * float(expected_TV.abs().max())
    return float((logits_TV - expected_TV).abs().max()) <= bound


def _described(logits_TV: Tensor, expected_TV: Tensor) -> str:
    if logits_TV.shape != expected_TV.shape or logits_TV.dtype != expected_TV.dtype:
        return f"logits of shape {tuple(logits_TV.shape)} and {logits_TV.dtype}"
    apart = float((logits_TV - expected_TV).abs().max())
    return (
        f"logits that differ by {apart:.2g}, the largest being {float(expected_TV.abs().max()):.2g}"
    )


def hugging_face_forward(model: PreTrainedModel) -> Forward:
    def forward(step: Step) -> Tensor:
        result = model(
            input_ids=step.token_ids_T[None],
            position_ids=step.position_ids_T[None],
            # Given a mask with four dimensions, transformers neither makes one nor examines
            # positions to make one.
            attention_mask=_UNUSED_MASK,
            use_cache=False,
            logits_to_keep=step.logit_rows,
            paceline_step=step,
        )
        logits_TV: Tensor = result.logits[0]
        return logits_TV

    return forward


def _step_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    paceline_step: Step,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """The step's attention as a function of transformers.

    Query, key and value [1, heads, T, D] in, [1, T, heads, D] out. Raises CheckpointError if the
    model gives it something to attend with that it would ignore (sinks, biases), or values of
    another width than keys.
    """
    strange = sorted(name for name, value in others.items() if isinstance(value, Tensor))
    if strange := [name for name in strange if name not in _HARMLESS]:
        raise CheckpointError(
            f"{type(module).__name__} attends with {', '.join(strange)}, which is not supported: "
            "expected queries, keys and values alone"
        )
    if not query.shape[3] == key.shape[3] == value.shape[3]:
        raise CheckpointError(
            f"{type(module).__name__} has queries, keys and values of widths {query.shape[3]}, "
            f"{key.shape[3]}, {value.shape[3]}, which is not supported: expected one width"
        )
    rows_TAD = torch.cat([query[0], key[0], value[0]]).transpose(0, 1).contiguous()
    layer = module.layer_idx
    assert isinstance(layer, int)
    rows = paceline_step.attend(rows_TAD, layer, scaling, window=sliding_window, softcap=softcap)
    return rows.view(1, query.shape[2], query.shape[1], query.shape[3]), None


def _no_mask(*_: Any, **__: Any) -> None:
    """No mask: our attention has its own."""


def register_attention() -> None:
    """Make ATTENTION known to transformers. Repeated calls do no harm."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(ATTENTION, _step_attention)
    AttentionMaskInterface.register(ATTENTION, _no_mask)


Rotation = tuple[Tensor, Tensor]
"""The rotary factors of a step, in a form that only the operations that made it can read."""
ProductInput = Any
"""The rows that a product takes: a tensor [T, N], or where operations round them for a float8
product, what only this product can read.
"""
AddAndNorm = Callable[[Tensor, Tensor | None], ProductInput]
"""Adds the second tensor, if any, to the first [T, N] in place; returns the norm of the sum."""
Attend = Callable[[Tensor, Rotation, Step], ProductInput]
"""Takes the joined product [T, A x D]: norms and rotates heads, stores keys and values, attends.

Returns [T, query heads x D]. It may write into the product.
"""
Gate = Callable[[Tensor], ProductInput]
"""Takes [T, 2 x F], gates before ups; returns activated gates times ups, [T, F]."""


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """Sizes of a layer's attention. `head_norms`: the norms of queries and of keys, if any."""

    index: int
    num_queries: int
    num_keys: int
    head_size: int
    scaling: float
    head_norms: tuple[nn.Module, ...] = ()

    @property
    def num_rotated(self) -> int:
        return self.num_queries + self.num_keys

    @property
    def num_heads(self) -> int:
        """The number of queries, keys and values. There is one value per key."""
        return self.num_rotated + self.num_keys


class LayerOperations:
    """The operations between the products of a Llama-like layer, by torch.

    Each is bound to a layer's modules once, when the forward is made. `into`: the linear whose
    product takes the result, and nothing else does.
    """

    def add_and_norm(
        self, norm: nn.Module, group: RankGroup | None = None, into: nn.Module | None = None
    ) -> AddAndNorm:
        """The operation with this norm. With a `group`, deltas are first added over its ranks."""
        normed = _forward_of(norm)

        def run(hidden_TN: Tensor, delta_TN: Tensor | None) -> Tensor:
            if delta_TN is not None:
                hidden_TN.add_(delta_TN if group is None else group.sum(delta_TN))
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

    def attend(self, layer: AttentionLayer, into: nn.Module | None = None) -> Attend:
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

    def gate(self, activation: nn.Module, into: nn.Module | None = None) -> Gate:
        activated = _forward_of(activation)

        def run(gate_and_up: Tensor) -> Tensor:
            gate, up = gate_and_up.chunk(2, dim=-1)
            return activated(gate).mul_(up)

        return run


def norm_heads(heads_TAD: Tensor, layer: AttentionLayer) -> Tensor:
    """Norm queries and keys head by head, as Qwen3 does. Values are unchanged."""
    parts = heads_TAD.split([layer.num_queries, layer.num_keys, layer.num_keys], dim=1)
    queries, keys = (norm(part) for norm, part in zip(layer.head_norms, parts, strict=False))
    return torch.cat([queries, keys, parts[2]], dim=1)


def _forward_of(module: nn.Module) -> Callable[[Tensor], Tensor]:
    """The module's forward without torch's hooks, which are not used here and take time."""
    forward: Any = module.forward
    result: Callable[[Tensor], Tensor] = forward
    return result


class OtherLayoutError(Exception):
    """The model has other parts than this way to run a step supports."""


class LeanForward:
    """Embedding, layers, final norm and LM head of a Llama-like model."""

    def __init__(self, model: PreTrainedModel, operations: LayerOperations | None = None) -> None:
        """`operations` None: torch's. Raises OtherLayoutError."""
        if sliding_window_of(model.config) is not None:
            raise OtherLayoutError("sliding_window")  # the probe is too short to notice a window
        self._operations = operations or LayerOperations()
        base = _part(model, model.base_model_prefix)
        self._embed = _part(base, "embed_tokens")
        self._rotary = _part(base, "rotary_emb")
        self._head = _part(model, "lm_head")
        self._layers: list[_LeanLayer] = []
        group: RankGroup | None = None
        for index, layer in enumerate(_part(base, "layers").children()):
            self._layers.append(_LeanLayer(layer, index, self._operations, group))
            group = self._layers[-1].group
        self._norm = self._operations.add_and_norm(_part(base, "norm"), group)

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
    """One decoder layer: attention and gated feed-forward. Each follows a norm, and is added.

    `group`: the ranks over which this layer's result must be added, if it is a rank's part.
    """

    def __init__(
        self,
        layer: nn.Module,
        index: int,
        operations: LayerOperations,
        group_before: RankGroup | None,
    ) -> None:
        """`group_before`: the `group` of the previous layer."""
        attention, feed_forward = _part(layer, "self_attn"), _part(layer, "mlp")
        self.attention = _attention_layer(attention, index)
        project = _joined(attention, "q_proj", "k_proj", "v_proj")
        gate_and_up = _joined(feed_forward, "gate_proj", "up_proj")
        output, group = _unsummed(_part(attention, "o_proj"))
        down, self.group = _unsummed(_part(feed_forward, "down_proj"))
        self._project, self._gate_and_up, self._output, self._down = (
            one.forward for one in (project, gate_and_up, output, down)
        )
        norms = _part(layer, "input_layernorm"), _part(layer, "post_attention_layernorm")
        self._input_norm = operations.add_and_norm(norms[0], group_before, project)
        self._attend = operations.attend(self.attention, output)
        self._middle_norm = operations.add_and_norm(norms[1], group, gate_and_up)
        self._gate = operations.gate(_part(feed_forward, "act_fn"), down)

    def run(
        self, hidden_TN: Tensor, delta_TN: Tensor | None, rotation: Rotation, step: Step
    ) -> Tensor:
        """Add to `hidden_TN` first `delta_TN`, then this layer's attention.

        `delta_TN`: the result of the previous layer's feed-forward. Returns that of this layer's,
        which the next norm adds. Of a rank, both are not yet added over the ranks.
        """
        rows = self._project(self._input_norm(hidden_TN, delta_TN))
        attended_TN = self._output(self._attend(rows, rotation, step))
        gate_and_up = self._gate_and_up(self._middle_norm(hidden_TN, attended_TN))
        result_TN: Tensor = self._down(self._gate(gate_and_up))
        return result_TN


def _unsummed(module: Any) -> tuple[Any, RankGroup | None]:
    """The module; of a SummedOutput the rank's part, and the group to sum it."""
    if isinstance(module, SummedOutput):
        return module.part, module.group
    return module, None


def _attention_layer(attention: nn.Module, index: int) -> AttentionLayer:
    head_size = int(_value(attention, "head_dim"))
    widths = [_part(attention, name).out_features for name in ("q_proj", "k_proj", "v_proj")]
    num_queries, num_keys, num_values = (width // head_size for width in widths)
    if num_keys != num_values:
        raise OtherLayoutError("v_proj")
    head_norms = [
        _part(attention, name) for name in ("q_norm", "k_norm") if hasattr(attention, name)
    ]
    if len(head_norms) == 1:
        raise OtherLayoutError("q_norm")
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
        raise OtherLayoutError(name)
    return value


def _part(owner: nn.Module, name: str) -> Any:
    value = _value(owner, name)
    if not isinstance(value, nn.Module):
        raise OtherLayoutError(name)
    return value


def _joined(owner: nn.Module, *names: str) -> Any:
    """The single product that replaces these linears of `owner` (modules.py)."""
    parts = [_part(owner, name) for name in names]
    first = parts[0]
    if not all(isinstance(p, ProjectionPart) and p.shared is first.shared for p in parts):
        raise OtherLayoutError(names[0])
    return first.shared.joined
