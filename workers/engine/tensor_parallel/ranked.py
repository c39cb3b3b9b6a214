"""What engines for CPUs and for GPUs have in common: each may be one rank of several.

Shapes: T tokens, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from workers.engine.checkpoint import CheckpointInfo
from workers.engine.self_test import rows_are_invariant
from workers.engine.slices import Slice
from workers.engine.tensor_parallel.agreement import agree
from workers.engine.tensor_parallel.cuts import vocabulary_part
from workers.engine.tensor_parallel.group import Group


class RankedEngine(ABC):
    """An engine that holds a whole model, or with a `group` a rank's part of one.

    `batch_invariant`: whether rows do not depend on their company, once that is known; of a rank it
    is known when the group has met.
    """

    info: CheckpointInfo
    max_model_len: int
    group: Group | None
    batch_invariant: bool | None
    _num_blocks: int

    @abstractmethod
    def step_part(self, slices: Sequence[Slice]) -> Tensor:
        """As `step`, but with this rank's columns alone."""

    @property
    @abstractmethod
    def block_size(self) -> int:
        """Positions of a KV block."""

    @property
    @abstractmethod
    def dtype(self) -> str:
        """What the model computes in, by name."""

    @property
    @abstractmethod
    def _form(self) -> str:
        """What ranks must have in common of how they compute."""

    @property
    @abstractmethod
    def _may_be_invariant(self) -> bool:
        """Whether it was asked to be."""

    @property
    @abstractmethod
    def _multi_threaded(self) -> bool:
        """Whether several CPU threads compute a product: one thread adds up in another order."""

    @property
    def num_blocks(self) -> int:
        """KV blocks there are; ids go from 0 to this less 1."""
        return self._num_blocks

    @torch.inference_mode()
    def step(self, slices: Sequence[Slice]) -> Tensor:
        """Feed every slice's tokens, store their KV, return float32 logits [sum num_logits, V].

        Rows: for each slice in order, those after its last `num_logits` fed tokens. Slices must not
        be empty, and no two may write the same block. Ranks other than 0 get as many rows without
        columns. On a GPU the logits are there, and may still be in the making. Raises
        WorkerLostError when another rank is lost.
        """
        logits_TV = self.step_part(slices)
        return logits_TV if self.group is None else self.whole_rows(logits_TV)

    @torch.inference_mode()
    def whole_rows(self, part_TV: Tensor) -> Tensor:
        """All ranks' columns of rows that step_part gave, at rank 0; no columns at the others."""
        assert self.group is not None
        parts = self.group.gather(part_TV) if part_TV.shape[0] else [part_TV]
        if parts is None or self.group.place.rank:
            return part_TV[:, :0]
        return torch.cat(parts, dim=1)[:, : self.info.vocab_size]

    @torch.inference_mode()
    def check_computes(self) -> None:
        """Raise what a pass over two tokens raises, if it does. Block 0 is overwritten."""
        pieces = [Slice([0], 0, [0, 0], 1)]
        if self.group is None:
            self.step_part(pieces).cpu()
            return
        with self.group.alone():
            self.group.settle(self.step_part(pieces)).cpu()

    @property
    def token_ids_held(self) -> range:
        """The columns of what step_part returns; further ones are padding."""
        if self.group is None:
            return range(self.info.vocab_size)
        place = self.group.place
        return vocabulary_part(self.info.vocab_size, degree=place.degree, rank=place.rank)

    def agree(self) -> None:
        """Compare with the other ranks after a meeting, and test the group if one is new in it.

        Raises CheckpointError, on all ranks, when they did not load the same.
        """
        assert self.group is not None
        agreed = agree(
            self.group,
            self.info,
            self._form,
            self.num_blocks,
            self.max_model_len,
            multi_threaded=self._multi_threaded,
        )
        self._num_blocks, self.max_model_len = agreed.num_blocks, agreed.max_model_len
        known = -1 if self.batch_invariant is None else int(self.batch_invariant)
        if any(row != [known] for row in self.group.exchange([known])) or known < 0:
            verdict = int(self._may_be_invariant and rows_are_invariant(self))
            self.batch_invariant = bool(self.group.exchange([verdict])[0][0])


def group_of(engine: object) -> Group | None:
    """The group of an engine that is a rank of one; emulated devices are none."""
    return engine.group if isinstance(engine, RankedEngine) else None
