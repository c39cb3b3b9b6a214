"""Runs the steps of one Step stream: checks them, steps the engine, and answers with verdicts."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from paceline.errors import ProtocolError
from paceline.v1 import target_pb2
from workers.engine.engine import group_of
from workers.engine.load.checkpoint import CheckpointInfo
from workers.engine.slices import KvMoves, Slice
from workers.process.threads import WorkerClock
from workers.target.faults import MAX_REASON_CHARACTERS
from workers.target.step_sequences import EngineLimits, StepWork, TargetSession, VerdictTask
from workers.verification.grammars import Grammars


class StepEngine(Protocol):
    """The engine of a shard (workers/engine/open.py), or an emulated device in its place.

    Durations are in seconds; `forward_end` is a time of the worker's clock.
    """

    @property
    def info(self) -> CheckpointInfo: ...
    @property
    def max_model_len(self) -> int: ...
    @property
    def block_size(self) -> int: ...
    @property
    def num_blocks(self) -> int: ...
    @property
    def dtype(self) -> str: ...
    @property
    def batch_invariant(self) -> bool | None: ...
    @property
    def forward_seconds(self) -> float: ...
    @property
    def forward_end(self) -> float: ...

    def step(self, slices: Sequence[Slice]) -> Any:
        """Feed every slice. Returns the rows whose logits are needed, in order."""

    def move_kv(self, moves: Sequence[KvMoves]) -> None:
        """Copy KV from slot to slot of each sequence, each of which occurs once."""


MAX_STEP_BYTES = 1024 * 1024 * 1024
"""Maximum bytes of a step in several messages, which are kept here until the last one arrives. It
suffices for 1,000 sequences of 300,000 tokens; usually the sequences that a driver opens in a step
take some MB.
"""

VerdictsOf = Callable[[Any, Sequence[VerdictTask]], list[target_pb2.Verdict]]
"""Maps the rows of a step to its verdicts."""


class StepParts:
    """Joins the messages of a step, if there are several (target.proto, StepRequest.more)."""

    def __init__(self) -> None:
        self._joined: target_pb2.StepRequest | None = None
        self._num_bytes = 0

    def add(self, part: target_pb2.StepRequest) -> target_pb2.StepRequest | None:
        """The complete step, or None if more of it follows. Raises ProtocolError."""
        if self._joined is None and not part.more:
            return part
        self._num_bytes += part.ByteSize()
        if self._num_bytes > MAX_STEP_BYTES:
            raise ProtocolError(
                f"more: expected a step of at most {MAX_STEP_BYTES:,} bytes, got "
                f"{self._num_bytes:,} so far"
            )
        if self._joined is None:
            self._joined = part
        elif part.step != self._joined.step:
            raise ProtocolError(
                f"step: expected more of step {self._joined.step}, got one of {part.step}"
            )
        else:
            self._joined.MergeFrom(part)
        if part.more:
            return None
        joined, self._joined, self._num_bytes = self._joined, None, 0
        joined.more = False
        return joined


class Stepper:
    """Runs the steps of one stream."""

    def __init__(
        self,
        engine: StepEngine,
        verdicts_of: VerdictsOf,
        clock: WorkerClock,
        grammars: Grammars | None = None,
    ) -> None:
        self._engine = engine
        self._clock = clock
        self._verdicts_of = verdicts_of
        self._group = group_of(engine)
        self._session = TargetSession(
            EngineLimits(
                vocab_size=engine.info.vocab_size,
                max_model_len=engine.max_model_len,
                block_size=engine.block_size,
                num_blocks=engine.num_blocks,
            ),
            grammars,
        )
        self._forward_end: float | None = None

    def step(self, request: target_pb2.StepRequest) -> target_pb2.StepResponse:
        """Run one step. A fault of one sequence appears only in its verdict.

        Raises ProtocolError naming the field that is wrong; WorkerLostError if a rank of the group
        is lost or got another step; any other exception if the forward pass fails.
        """
        if self._group is not None:
            content = hashlib.blake2b(request.SerializeToString(deterministic=True), digest_size=7)
            self._group.compare(request.step, int.from_bytes(content.digest(), "big"))
        begin = self._clock.now()
        work = self._session.begin_step(request)
        response = target_pb2.StepResponse(step=request.step)
        if work.kv_moves:
            self._engine.move_kv(work.kv_moves)
        if work.slices:
            response.verdicts.extend(self._with_faults(self._verdicts(work), request, work))
            for task in work.tasks:
                if task.top_tokens and not task.has_verdict:
                    response.fed.add(sequence_id=task.sequence_id, top_tokens=task.top_tokens)
                if task.prompt_logprobs:
                    response.prompt_logprobs.add(
                        sequence_id=task.sequence_id, logprobs=task.prompt_logprobs
                    )
            # Only after the verdicts: until then a GPU is still computing.
            response.forward_seconds = self._engine.forward_seconds
            # The gap runs from the end of one forward pass to the start of the next. It includes
            # the engine's own work around them.
            end = self._engine.forward_end
            if self._forward_end is not None:
                gap = end - self._engine.forward_seconds - self._forward_end
                response.gap_seconds = max(gap, 0.0)
            self._forward_end = end
            response.overrun_seconds = self._clock.overrun_seconds
        response.step_seconds = self._clock.now() - begin
        return response

    def _with_faults(
        self, verdicts: list[target_pb2.Verdict], request: target_pb2.StepRequest, work: StepWork
    ) -> list[target_pb2.Verdict]:
        """All verdicts in the order of the slices, with an error for each sequence at fault."""
        if not work.faults or (self._group is not None and self._group.place.rank):
            return verdicts
        of_sequence = {verdict.sequence_id: verdict for verdict in verdicts}
        for sequence_id, fault in work.faults.items():
            of_sequence[sequence_id] = target_pb2.Verdict(
                sequence_id=sequence_id, error=fault[:MAX_REASON_CHARACTERS]
            )
        return [of_sequence[part.sequence_id] for part in request.slices if part.verdict]

    def _verdicts(self, work: StepWork) -> list[target_pb2.Verdict]:
        logits_TV = self._engine.step(work.slices)
        if self._group is not None:
            self._group.settle(logits_TV)
            if self._group.place.rank:
                return []
        return self._verdicts_of(logits_TV, work.tasks)
