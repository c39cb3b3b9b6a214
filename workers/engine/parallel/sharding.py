"""Divides a model among ranks, loads a rank's part, and connects it to the other ranks.

`Sharding` follows a plan, `base_model_tp_plan` in Hugging Face's configuration. The plan says for
each linear whether its outputs ("colwise") or its inputs ("rowwise") are divided; the results of
the latter are added over the ranks. The linear's name, which all architectures share, says what the
divided dimension is: heads, or the inner width of a feed-forward.

A rank builds Hugging Face's model from a configuration with its own numbers of heads and widths, so
that the model code needs no change. `RankParts` fills this model with the rank's part of the stored
tensors. `join_ranks` inserts the modules that add up the ranks' results.

Shapes: T tokens, N features, V vocabulary.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from paceline.errors import CheckpointError
from workers.engine.load.stored_tensors import Fp8Weight, StoredTensors
from workers.engine.memory import head_size_of, num_kv_heads_of
from workers.engine.parallel.group import RankGroup
from workers.engine.parallel.weight_cuts import (
    Cut,
    HeadSplit,
    Place,
    even_cut,
    even_part,
    head_cut,
    join_cuts,
    split_heads,
    vocabulary_cut,
    vocabulary_part,
)

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

Progress = Callable[[int, int], None]
"""Called with the number of bytes loaded, and the number of bytes that the rank loads in total."""
_COLUMN_STYLES = {"colwise", "colwise_gather_output", "packed_colwise"}
_ROW_STYLES = {"rowwise", "rowwise_split_input"}
_SUMMED_EXPERTS = "moe_tp_experts"
_WHOLE_STYLES = {"replicated_with_grad_allreduce"}
_WIDTHS = ("intermediate_size", "moe_intermediate_size")
_VOCABULARY = ("embed_tokens", "lm_head")
_PACKED = {"gate_up_proj": 2}


class Sharding:
    """The part of a model that one rank holds."""

    def __init__(self, config: PreTrainedConfig, base_prefix: str, place: Place) -> None:
        """Raises ConfigError for too many ranks, CheckpointError if the plan does not suffice."""
        self._place = place
        self._config = config
        self._prefix = f"{base_prefix}."
        self._plan = _read_plan(config, place)
        self._head_size = head_size_of(config)
        self._query_heads = int(config.num_attention_heads)
        self._kv_heads = num_kv_heads_of(config)
        self._heads: HeadSplit = split_heads(
            self._query_heads, self._kv_heads, degree=place.degree, rank=place.rank
        )

    def local_config(self) -> PreTrainedConfig:
        """The configuration of this rank's model. The vocabulary stays whole."""
        if self._place.degree == 1:
            return self._config
        local = copy.deepcopy(self._config)
        local.head_dim = self._head_size
        local.num_attention_heads = len(self._heads.query_heads)
        local.num_key_value_heads = len(self._heads.kv_heads)
        for name in _WIDTHS:
            width = getattr(local, name, None)
            if width is not None:
                setattr(local, name, len(even_part(int(width), **self._where)))
        return local

    def cut(self, name: str, whole_shape: tuple[int, ...]) -> Cut | None:
        """The cut for this rank's part of the parameter `name`; None: the rank has all of it.

        Raises CheckpointError if the plan cuts a tensor for which there is no rule here.
        """
        if self._place.degree == 1:
            return None
        module, _, kind = name.rpartition(".")
        leaf = module.rpartition(".")[2]
        if leaf in _VOCABULARY:
            return vocabulary_cut(whole_shape[0], **self._where)
        style = self._style(name)  # experts' weights are parameters, not modules
        if style is None:
            style = self._style(module)
        else:
            leaf = kind
        if style is None or style in _WHOLE_STYLES or style == _SUMMED_EXPERTS:
            return None
        outputs, inputs = len(whole_shape) - 2, len(whole_shape) - 1
        if kind == "bias":
            if style in _ROW_STYLES:  # rank 0 adds it once
                return None if self._place.rank == 0 else Cut(0, whole_shape[0], ())
            return self._dimension(name, leaf, whole_shape[0], 0)
        dim = inputs if style in _ROW_STYLES else outputs
        return self._dimension(name, leaf, whole_shape[dim], dim)

    def adds_up(self, module: str) -> bool:
        """Whether the results of this module must be added over the ranks."""
        style = self._style(module)
        return self._place.degree > 1 and (style in _ROW_STYLES or style == _SUMMED_EXPERTS)

    @property
    def kv_heads(self) -> tuple[int | None, ...]:
        """The key/value heads of the whole model that this rank holds; None: padding."""
        return self._heads.kv_heads

    @property
    def _where(self) -> dict[str, int]:
        return {"degree": self._place.degree, "rank": self._place.rank}

    def _style(self, module: str) -> str | None:
        path = module.removeprefix(self._prefix)
        return self._plan.get(re.sub(r"\.\d+\.", ".*.", path))

    def _dimension(self, name: str, leaf: str, whole: int, dim: int) -> Cut:
        size = self._head_size
        queries = head_cut(self._heads.query_heads, head_size=size, dim=dim)
        keys = head_cut(self._heads.kv_heads, head_size=size, dim=dim)
        if leaf in ("q_proj", "o_proj"):
            return queries
        if leaf in ("k_proj", "v_proj"):
            return keys
        if leaf == "qkv_proj":
            sizes = [self._query_heads * size, *[self._kv_heads * size] * 2]
            return join_cuts([queries, keys, keys], sizes)
        if leaf in ("gate_proj", "up_proj", "down_proj", "gate_up_proj"):
            copies = _PACKED.get(leaf, 1)
            return even_cut(whole // copies, dim=dim, copies=copies, **self._where)
        raise CheckpointError(
            f"tensor {name}: the architecture's plan cuts {leaf}, for which tensor parallelism has "
            "no rule here: use tensor_parallel = 1 (docs/models.md lists what is tested)"
        )


def _read_plan(config: PreTrainedConfig, place: Place) -> Mapping[str, str]:
    plan: Mapping[str, str] = getattr(config, "base_model_tp_plan", None) or {}
    if place.degree == 1:
        return plan
    known = _COLUMN_STYLES | _ROW_STYLES | _WHOLE_STYLES | {_SUMMED_EXPERTS}
    strange = sorted({style for style in plan.values() if style not in known})
    if not plan or strange:
        reason = f"cuts in a way not known here ({', '.join(strange)})" if plan else "has no plan"
        raise CheckpointError(
            f"tensor_parallel is {place.degree}, but transformers' architecture "
            f"{config.model_type!r} {reason}: use tensor_parallel = 1"
        )
    return plan


class RankParts:
    """Fills an empty model with a rank's part of a checkpoint, one module after the other.

    `shapes`: the whole parameters' shapes by name. `num_weights`: the number of elements that the
    rank holds.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        stored: StoredTensors,
        shapes: Mapping[str, tuple[int, ...]],
        sharding: Sharding,
    ) -> None:
        self._stored = stored
        self._shapes = shapes
        self._sharding = sharding
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        # Weights of embeddings may be shared with another module.
        self._kept = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
        self._shared: dict[tuple[int, torch.dtype], nn.Parameter] = {}
        self.num_weights = sum(self._numel(name) for name in self._names.values())
        self._progress: Progress | None = None
        self._itemsize = self._done = 0

    def report_to(self, progress: Progress | None, dtype: torch.dtype) -> None:
        """Call `progress` after each tensor from now on. All tensors count as if of `dtype`."""
        self._progress = progress
        self._itemsize = dtype.itemsize

    def fill(self, module: nn.Module, dtype: torch.dtype, *, skip: str | None = None) -> None:
        """Read a module's own parameters, but not the one named `skip`. Raises CheckpointError."""
        for leaf, empty in list(module.named_parameters(recurse=False)):
            if leaf == skip:
                continue
            filled = self._shared.get((id(empty), dtype))
            if filled is None:
                filled = nn.Parameter(self._read(empty, dtype), requires_grad=False)
                if id(empty) in self._kept:
                    self._shared[id(empty), dtype] = filled
            setattr(module, leaf, filled)
        # Modules of the vocabulary are built whole, all others by the local configuration.
        if isinstance(module, nn.Linear) and skip is None:
            module.out_features = module.weight.shape[0]
        elif isinstance(module, nn.Embedding):
            module.num_embeddings = module.weight.shape[0]

    def read_fp8(self, linear: nn.Linear) -> Fp8Weight | None:
        """The rank's part of a linear's weight as stored, or None (StoredTensors.read_fp8)."""
        name = self._names[id(linear.weight)]
        whole = self._shapes[name]
        weight = self._stored.read_fp8(name, whole, self._sharding.cut(name, whole))
        if weight is not None:
            self._count(weight.steps_MN)
        return weight

    def close(self) -> None:
        self._stored.close()

    def _numel(self, name: str) -> int:
        whole = self._shapes[name]
        cut = self._sharding.cut(name, whole)
        numel = math.prod(whole)
        return numel if cut is None else numel // whole[cut.dim] * cut.size

    def _read(self, empty: Tensor, dtype: torch.dtype) -> Tensor:
        name = self._names[id(empty)]
        whole = self._shapes[name]
        cut = self._sharding.cut(name, whole)
        tensor = self._stored.read(name, whole, cut, dtype)
        vocabulary = cut is not None and tensor.shape[1:] == empty.shape[1:] and cut.dim == 0
        if tensor.shape != empty.shape and not (vocabulary and _is_vocabulary(name)):
            raise CheckpointError(
                f"tensor {name} {whole} cannot be divided: the model's part has shape "
                f"{tuple(empty.shape)}, the plan gives {tuple(tensor.shape)}; use "
                "tensor_parallel = 1"
            )
        self._count(tensor)
        return tensor

    def _count(self, tensor: Tensor) -> None:
        self._done += tensor.numel()
        if self._progress is not None:
            done = min(self._done, self.num_weights)  # a shared weight may be read in two dtypes
            self._progress(done * self._itemsize, self.num_weights * self._itemsize)


def _is_vocabulary(name: str) -> bool:
    return name.endswith(("embed_tokens.weight", "lm_head.weight", "lm_head.bias"))


class SummedOutput(nn.Module):
    """A module whose result is added over all ranks, in the order of the ranks."""

    def __init__(self, part: nn.Module, group: RankGroup) -> None:
        super().__init__()
        self.part = part
        self.group = group

    def forward(self, *inputs: Any) -> Tensor:
        """The result of the whole module."""
        return self.group.sum(self.part(*inputs))


class VocabularyEmbedding(nn.Module):
    """An embedding whose rows are divided: this rank holds those of some token ids."""

    def __init__(self, part: nn.Embedding, token_ids: range, group: RankGroup) -> None:
        super().__init__()
        part.padding_idx = None  # needed for gradients only, and may be an id of another rank
        self.part = part
        self._token_ids = token_ids
        self._group = group

    def forward(self, token_ids: Tensor) -> Tensor:
        """The rows of all `token_ids`, including those that other ranks hold."""
        local_ids = token_ids - self._token_ids.start
        if self._group.is_alone:
            rows: Tensor = self.part(local_ids % self.part.num_embeddings)
            return rows
        held = (local_ids >= 0) & (local_ids < len(self._token_ids))
        rows = self.part(local_ids * held)
        return self._group.sum(rows * held.unsqueeze(-1))


def join_ranks(model: PreTrainedModel, sharding: Sharding, group: RankGroup) -> None:
    """Insert the modules that add up the ranks' results."""
    place = group.place
    for path, parent in list(model.named_modules()):
        for name, child in list(parent.named_children()):
            if sharding.adds_up(f"{path}.{name}"):
                setattr(parent, name, SummedOutput(child, group))
            elif isinstance(child, nn.Embedding):
                ids = vocabulary_part(
                    int(model.config.vocab_size), degree=place.degree, rank=place.rank
                )
                setattr(parent, name, VocabularyEmbedding(child, ids, group))
