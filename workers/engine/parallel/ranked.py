"""What engines for CPUs and GPUs have in common: each may be one rank of several.

Shapes: T tokens, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from workers.engine.load.checkpoint import CheckpointInfo
from workers.engine.parallel.agreement import agree
from workers.engine.parallel.cuts import vocabulary_part
from workers.engine.parallel.group import Group
from workers.engine.self_test import rows_are_invariant
from workers.engine.slices import Slice


class RankedEngine(ABC):
    """An engine that holds a whole model, or with a `group` a rank's part of one.

    `batch_invariant`: whether a row's bits do not depend on other rows; None until it is known. For
    a rank it is known once the group has met.
    """

    info: CheckpointInfo
    max_model_len: int
    group: Group | None
    batch_invariant: bool | None
    _num_blocks: int

    @abstractmethod
    def step_part(self, slices: Sequence[Slice]) -> Tensor:
        """As `step`, but returns this rank's columns only."""

    @property
    @abstractmethod
    def block_size(self) -> int:
        """Positions of a KV block."""

    @property
    @abstractmethod
    def dtype(self) -> str:
        """The name of the dtype or form in which the model computes."""

    @property
    @abstractmethod
    def _form(self) -> str:
        """What ranks must have in common: how they compute."""

    @property
    @abstractmethod
    def _may_be_invariant(self) -> bool:
        """Whether batch invariance was requested."""

    @property
    @abstractmethod
    def _multi_threaded(self) -> bool:
        """Whether several CPU threads compute a product: a single thread adds in another order."""

    @property
    def num_blocks(self) -> int:
        """The number of KV blocks; their ids are 0 to num_blocks - 1."""
        return self._num_blocks

    @torch.inference_mode()
    def step(self, slices: Sequence[Slice]) -> Tensor:
        """Feed every slice's tokens, store their KV, return float32 logits [sum num_logits, V].

        Rows: for each slice in order, those after its last `num_logits` fed tokens. Slices must not
        be empty, and no two may write the same block. Ranks other than 0 get the same number of
        rows without columns. On a GPU the logits stay there, and may not be computed yet. Raises
        WorkerLostError if another rank is lost.
        """
        logits_TV = self.step_part(slices)
        return logits_TV if self.group is None else self.whole_rows(logits_TV)

    @torch.inference_mode()
    def whole_rows(self, part_TV: Tensor) -> Tensor:
        """At rank 0, all ranks' columns of rows that step_part gave; no columns at the others."""
        assert self.group is not None
        parts = self.group.gather(part_TV) if part_TV.shape[0] else [part_TV]
        if parts is None or self.group.place.rank:
            return part_TV[:, :0]
        return torch.cat(parts, dim=1)[:, : self.info.vocab_size]

    @torch.inference_mode()
    def check_computes(self) -> None:
        """Run a pass over two tokens, and raise what it raises. Block 0 is overwritten."""
        pieces = [Slice([0], 0, [0, 0], 1)]
        if self.group is None:
            self.step_part(pieces).cpu()
            return
        with self.group.alone():
            self.group.settle(self.step_part(pieces)).cpu()

    @property
    def token_ids_held(self) -> range:
        """The token ids of the columns that step_part returns; further columns are padding."""
        if self.group is None:
            return range(self.info.vocab_size)
        place = self.group.place
        return vocabulary_part(self.info.vocab_size, degree=place.degree, rank=place.rank)

    def agree(self) -> None:
        """Compare with the other ranks after a meeting. Test the group if a rank is new in it.

        Raises CheckpointError, on all ranks, if they did not load the same.
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
    """The group of an engine that is a rank, else None. Emulated devices are not ranks."""
    return engine.group if isinstance(engine, RankedEngine) else None
