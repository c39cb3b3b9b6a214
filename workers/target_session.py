"""What a target shard knows over one Step stream: sequences, their tokens and their KV blocks.

No I/O and no tensors here: a step is checked and turned into slices for the engine, and what must
be verified afterwards is handed back. A step that breaks the contract of target.proto raises
ProtocolError naming the field; the session is of no use after that, since its stream ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from paceline.convert import spec_from_wire
from paceline.errors import InvalidRequestError, ProtocolError
from paceline.sampling import SequenceSpec
from paceline.v1 import target_pb2
from workers.engine.engine import Slice


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """The numbers that a step is checked against."""

    vocab_size: int
    max_model_len: int
    block_size: int
    num_blocks: int


@dataclass(slots=True)
class _Sequence:
    spec: SequenceSpec
    token_ids: list[int] = field(default_factory=list)
    block_table: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class VerdictTask:
    """A slice that asks for a verdict: `prefix` is every token before the first candidate."""

    sequence_id: int
    spec: SequenceSpec
    prefix: Sequence[int]
    candidates: Sequence[int]


class TargetSession:
    """The sequences of one stream. Not thread-safe."""

    def __init__(self, limits: EngineLimits) -> None:
        self._limits = limits
        self._sequences: dict[int, _Sequence] = {}
        self._held_blocks: set[int] = set()
        self._last_step = 0

    def begin_step(self, request: target_pb2.StepRequest) -> tuple[list[Slice], list[VerdictTask]]:
        """Apply a step's closes and opens, check its slices and return the work.

        The engine's rows of the slices that ask for a verdict (1 + window each, none for others)
        come in the order of the tasks.
        """
        expected = self._last_step + 1
        if request.step != expected:
            raise ProtocolError(f"step: expected {expected}, got {request.step}")
        self._last_step = expected
        for sequence_id in request.close:
            self._close(sequence_id)
        for opened in request.open:
            self._open(opened)
        slices: list[Slice] = []
        tasks: list[VerdictTask] = []
        seen: set[int] = set()
        for index, message in enumerate(request.slices):
            try:
                self._apply_slice(message, seen, slices, tasks)
            except ProtocolError as error:
                raise ProtocolError(f"slices[{index}].{error}") from None
        return slices, tasks

    def check_integrity(self) -> None:
        """Assert that no block is in two block tables and that all are counted."""
        tables = [block for sequence in self._sequences.values() for block in sequence.block_table]
        assert len(tables) == len(set(tables)), "a KV block is in two block tables"
        assert set(tables) == self._held_blocks, "held KV blocks and block tables differ"

    def _close(self, sequence_id: int) -> None:
        sequence = self._sequences.pop(sequence_id, None)
        if sequence is None:
            raise ProtocolError(f"close: sequence {sequence_id} is not open")
        self._held_blocks.difference_update(sequence.block_table)

    def _open(self, opened: target_pb2.TargetSequence) -> None:
        if opened.sequence_id in self._sequences:
            raise ProtocolError(f"open: sequence {opened.sequence_id} is open already")
        try:
            spec = spec_from_wire(opened.spec, vocab_size=self._limits.vocab_size)
        except InvalidRequestError as error:
            raise ProtocolError(f"open: sequence {opened.sequence_id}: spec.{error}") from error
        self._sequences[opened.sequence_id] = _Sequence(spec)

    def _apply_slice(
        self,
        message: target_pb2.Slice,
        seen: set[int],
        slices: list[Slice],
        tasks: list[VerdictTask],
    ) -> None:
        sequence_id = message.sequence_id
        sequence = self._sequences.get(sequence_id)
        if sequence is None:
            raise ProtocolError(f"sequence_id: sequence {sequence_id} is not open")
        if sequence_id in seen:
            raise ProtocolError(f"sequence_id: sequence {sequence_id} has a slice in this step")
        seen.add(sequence_id)
        start, window = message.start, message.window
        fed = list(message.token_ids)
        self._check_tokens(sequence, start, fed)
        _check_window(window, len(fed), message.verdict)
        if message.new_blocks:
            self._append_blocks(sequence, message.new_blocks)
        end = start + len(fed)
        capacity = len(sequence.block_table) * self._limits.block_size
        if end > capacity:
            raise ProtocolError(
                f"new_blocks: {end} tokens need blocks for as many positions, "
                f"the block table has {capacity}"
            )
        del sequence.token_ids[start:]
        sequence.token_ids += fed
        num_logits = 0
        if message.verdict:
            num_logits = 1 + window
            first = end - window
            tasks.append(
                VerdictTask(
                    sequence_id,
                    sequence.spec,
                    sequence.token_ids[:first],
                    sequence.token_ids[first:],
                )
            )
        slices.append(Slice(sequence.block_table, start, fed, num_logits))

    def _check_tokens(self, sequence: _Sequence, start: int, fed: Sequence[int]) -> None:
        if not fed:
            raise ProtocolError("token_ids: expected at least one token")
        if max(fed) >= self._limits.vocab_size:
            raise ProtocolError(
                f"token_ids: expected ids below {self._limits.vocab_size}, got {max(fed)}"
            )
        if start > len(sequence.token_ids):
            raise ProtocolError(
                f"start: expected at most {len(sequence.token_ids)}, the number of tokens that the "
                f"sequence holds here, got {start}"
            )
        if start + len(fed) > self._limits.max_model_len:
            raise ProtocolError(
                f"token_ids: {start + len(fed)} tokens exceed max_model_len, "
                f"{self._limits.max_model_len}"
            )

    def _append_blocks(self, sequence: _Sequence, new_blocks: Iterable[int]) -> None:
        for block in new_blocks:
            if block >= self._limits.num_blocks:
                raise ProtocolError(
                    f"new_blocks: expected ids below {self._limits.num_blocks}, got {block}"
                )
            if block in self._held_blocks:
                raise ProtocolError(f"new_blocks: block {block} is in a block table already")
            self._held_blocks.add(block)
            sequence.block_table.append(block)


def _check_window(window: int, num_fed: int, verdict: bool) -> None:
    if not verdict and window:
        raise ProtocolError(f"window: expected 0 where no verdict is asked for, got {window}")
    if window >= num_fed:
        raise ProtocolError(
            f"window: expected less than the {num_fed} token_ids, the first of which is "
            f"committed, got {window}"
        )
