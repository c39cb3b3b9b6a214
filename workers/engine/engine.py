"""The base class of the engines for CPUs (cpu/engine.py) and GPUs (cuda/engine.py).

An engine knows token ids, positions and KV blocks. Other code decides which sequence owns a block,
and which token is chosen. An engine may be one rank of several; then it holds a part of a model.

Shapes: T tokens, V vocabulary.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.errors import CheckpointError
from workers.engine.load.checkpoint import CheckpointInfo
from workers.engine.parallel.group import RankGroup
from workers.engine.self_test import rows_are_invariant
from workers.engine.slices import KvMoves, Slice


class Engine(ABC):
    """An engine that holds a whole model, or with a `group` a rank's part of one.

    Ranks load, meet, `agree`, and then step with the same slices.
    """

    info: CheckpointInfo
    max_model_len: int
    block_size: int
    """Positions of a KV block."""
    num_blocks: int
    """The number of KV blocks; their ids are 0 to num_blocks - 1."""
    dtype: str
    """The name of the dtype, or of the form of weights, in which the model computes."""
    group: RankGroup | None
    wants_invariance: bool
    """Whether the caller asked that a row's bits do not depend on other rows."""
    batch_invariant: bool | None
    """Whether a row's bits do not depend on other rows. A rank has None until it has agreed."""

    @abstractmethod
    def step_part(self, slices: Sequence[Slice]) -> Tensor:
        """As `step`, but returns this rank's columns only."""

    @property
    @abstractmethod
    def forward_seconds(self) -> float:
        """Seconds that the device took for the last step. Waits for its end."""

    @property
    @abstractmethod
    def forward_end(self) -> float:
        """When the last step ended, by time.perf_counter. Waits for its end."""

    @abstractmethod
    def move_kv(self, moves: Sequence[KvMoves]) -> None:
        """Copy KV from slot to slot of each sequence, in all layers.

        Each sequence occurs once. A key keeps the rotary position for which it was computed. So a
        tree's node must be moved to the slot whose number is the node's position.
        """

    def step(self, slices: Sequence[Slice]) -> Tensor:
        """Feed every slice's tokens, store their KV, return float32 logits [sum num_logits, V].

        The rows are, for each slice in order, those of its last `num_logits` fed tokens. Slices
        must not be empty, and no two may write the same block. Ranks other than 0 get the same
        number of rows without columns. On a GPU the logits stay there, and may not be computed yet.
        Raises WorkerLostError if another rank is lost.
        """
        logits_TV = self.step_part(slices)
        return logits_TV if self.group is None else self._whole_rows(logits_TV)

    @torch.inference_mode()
    def _whole_rows(self, part_TV: Tensor) -> Tensor:
        assert self.group is not None
        parts = self.group.gather(part_TV) if part_TV.shape[0] else [part_TV]
        if parts is None or self.group.place.rank:
            return part_TV[:, :0]
        return torch.cat(parts, dim=1)[:, : self.info.vocab_size]

    @torch.inference_mode()
    def check_computes(self) -> None:
        """Run a pass over two tokens. Raises the pass's error if it fails. Overwrites block 0."""
        pieces = [Slice([0], 0, [0, 0], 1)]
        if self.group is None:
            self.step_part(pieces).cpu()
            return
        with self.group.alone():
            self.group.settle(self.step_part(pieces)).cpu()

    def agree(self) -> None:
        """Compare with the other ranks after a meeting. Run the self-test if a rank is new.

        All ranks take the smallest number of blocks and the smallest max_model_len. Raises
        CheckpointError, on all ranks, if they did not load the same checkpoint in the same way.
        """
        assert self.group is not None
        form = self.dtype if self.wants_invariance else f"{self.dtype}, not batch-invariant"
        compared = {
            "checkpoint": int.from_bytes(self.info.digest[:7], "big"),
            "form of weights": int.from_bytes(hashlib.sha256(form.encode()).digest()[:7], "big"),
            # On a CPU, a single thread adds in another order than several.
            "choice of one thread": int(not self.group.queues and torch.get_num_threads() > 1),
        }
        rows = self.group.exchange([*compared.values(), self.num_blocks, self.max_model_len])
        for column, what in enumerate(compared):
            others = [rank for rank, row in enumerate(rows) if row[column] != rows[0][column]]
            if others:
                raise CheckpointError(
                    f"the shards differ in their {what}: rank {self.group.place.rank} has "
                    f"{self.info.name!r} as {form}; these differ from rank 0: rank "
                    f"{', '.join(map(str, others))}; give all hosts the same files and options "
                    "(config.json, tensors, file sizes and samples of the files are compared)"
                )
        self.num_blocks = min(row[-2] for row in rows)
        self.max_model_len = min(row[-1] for row in rows)
        self._after_meeting()
        self._test_together()

    def _after_meeting(self) -> None:
        """What an engine does on all ranks after each meeting."""
        return

    def _test_together(self) -> None:
        """Run the self-test, unless all ranks have the verdict of an earlier one."""
        assert self.group is not None
        known = -1 if self.batch_invariant is None else int(self.batch_invariant)
        if any(row != [known] for row in self.group.exchange([known])) or known < 0:
            verdict = int(self.wants_invariance and rows_are_invariant(self))
            self.batch_invariant = bool(self.group.exchange([verdict])[0][0])
            if self.batch_invariant:
                self._test_trees()

    def _test_trees(self) -> None:
        """Log if trees of candidates do not keep the text, where this depends on the worker."""
        return


def group_of(engine: object) -> RankGroup | None:
    """The group of an engine that is a rank, else None. Emulated devices are not ranks."""
    return engine.group if isinstance(engine, Engine) else None
