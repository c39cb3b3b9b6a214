"""How a model is divided among ranks, by the plan in Hugging Face's configuration.

`base_model_tp_plan` says of each linear whether it is cut by its outputs ("colwise") or by its
inputs ("rowwise"; its results are then added over the ranks). The linear's name, which all
architectures share, tells what the cut dimension is: heads, or the inner width of a feed-forward. A
rank builds Hugging Face's model from a configuration with its own numbers of heads and widths, so
that the model code needs no change.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from dataclasses import dataclass

from transformers import PreTrainedConfig

from paceline.errors import CheckpointError
from workers.engine.kv_sizes import head_size_of, num_kv_heads_of
from workers.engine.parallel.cuts import (
    Cut,
    HeadSplit,
    even_cut,
    even_part,
    head_cut,
    join_cuts,
    split_heads,
    vocabulary_cut,
)

_COLUMN_STYLES = {"colwise", "colwise_gather_output", "packed_colwise"}
_ROW_STYLES = {"rowwise", "rowwise_split_input"}
_SUMMED_EXPERTS = "moe_tp_experts"
_WHOLE_STYLES = {"replicated_with_grad_allreduce"}
_WIDTHS = ("intermediate_size", "moe_intermediate_size")
_VOCABULARY = ("embed_tokens", "lm_head")
_PACKED = {"gate_up_proj": 2}


@dataclass(frozen=True, slots=True)
class Place:
    """A rank's number, and the number of ranks."""

    rank: int = 0
    degree: int = 1


class Sharding:
    """What one rank holds of a model."""

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
        """How this rank's part of the parameter `name` is cut; None: it is whole.

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
