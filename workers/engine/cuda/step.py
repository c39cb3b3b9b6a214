"""A step on the device: what model code reads, and the attention that it calls."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from workers.engine.cuda.attention import attend, attend_trees
from workers.engine.cuda.kv_cache import LayerPages, PagedKV
from workers.engine.cuda.layout import DeviceInputs


@dataclass(frozen=True, slots=True)
class Heads:
    """The heads of a token on this rank: queries, then keys, then values (as many as keys)."""

    num_queries: int
    num_keys: int


class DeviceStep:
    """One step (attention.Step). `logit_rows`: indices among the T tokens, int64, on the device."""

    def __init__(
        self,
        inputs: DeviceInputs,
        logit_rows: Tensor,
        cache: PagedKV,
        heads: Heads,
    ) -> None:
        self._inputs = inputs
        self._logit_rows = logit_rows
        self._cache = cache
        self._heads = heads

    @property
    def token_ids_T(self) -> Tensor:
        return self._inputs.token_ids_T

    @property
    def position_ids_T(self) -> Tensor:
        return self._inputs.position_ids_T

    @property
    def logit_rows(self) -> Tensor:
        return self._logit_rows

    @property
    def slots_T(self) -> Tensor:
        """The slot of each token's keys and values, int64. All padding shares one slot."""
        return self._inputs.slots_T

    def pages(self, layer: int) -> LayerPages:
        """A layer's keys and values."""
        return self._cache.layers[layer]

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

        `window` has no effect, and `softcap` must be None: models that need them are refused at
        load.
        """
        assert softcap is None, softcap
        pages = self.pages(layer)
        num_queries, num_keys = self._heads.num_queries, self._heads.num_keys
        query_TAD, keys_THD, values_THD = rows_TAD.split((num_queries, num_keys, num_keys), dim=1)
        pages.keys_SHD.index_copy_(0, self.slots_T, keys_THD)
        pages.values_SHD.index_copy_(0, self.slots_T, values_THD)
        return self.attend_stored(query_TAD, layer, scaling)

    def attend_stored(self, query_TAD: Tensor, layer: int, scaling: float) -> Tensor:
        """Attend to keys and values that are already stored. Returns [T x query heads, D]."""
        inputs, pages = self._inputs, self.pages(layer)
        parts: list[Tensor] = []
        num_chained = query_TAD.shape[0]
        if inputs.trees is not None:
            num_trees, width, _ = inputs.trees.seen_BWK.shape
            num_chained -= num_trees * width
        if inputs.chains is not None:
            output, _ = attend(query_TAD[:num_chained], pages, inputs.chains, scaling, causal=True)
            parts.append(output)
        if inputs.trees is not None:
            output = attend_trees(
                query_TAD[num_chained:].contiguous(), pages, inputs.trees, scaling
            )
            parts.append(output)
        joined = parts[0] if len(parts) == 1 else torch.cat(parts)
        return joined.reshape(-1, joined.shape[2])
