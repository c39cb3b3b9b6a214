"""Modules in a rank's model that combine the results of several ranks.

Shapes: T tokens, N features, V vocabulary.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from workers.engine.parallel.group import Group


class SummedOutput(nn.Module):
    """A module whose result is added over all ranks, in the order of the ranks."""

    def __init__(self, part: nn.Module, group: Group) -> None:
        super().__init__()
        self.part = part
        self._group = group

    def forward(self, *inputs: Any) -> Tensor:
        """The result of the whole module."""
        return self._group.sum(self.part(*inputs))


class VocabularyEmbedding(nn.Module):
    """An embedding of which this rank holds the rows of some token ids."""

    def __init__(self, part: nn.Embedding, token_ids: range, group: Group) -> None:
        super().__init__()
        part.padding_idx = None  # it matters only for gradients, and belongs to one rank
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
