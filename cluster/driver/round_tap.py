"""Reports what the devices do, round by round, to callers of TraceService (trace.proto)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

from cluster.decoding.events import Proposal
from cluster.decoding.instructions import RunStep, Slice
from paceline.errors import PacelineError
from paceline.v1 import target_pb2, trace_pb2
from workers.verification.candidates import depths_of

KEPT_CANDIDATES, _KEPT_POSITIONS = 2048, 256
"""Most candidates of a sequence whose passes are remembered, and the positions that they may span.
The latest are kept."""

KEPT_SEQUENCES = 4096
"""Most sequences whose candidates are remembered. The oldest are forgotten first."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _SentStep:
    """A step in flight. `passes`: for each slice, the passes that proposed its candidates."""

    sent_at: float
    step: RunStep
    passes: tuple[list[int], ...]


class RoundTap:
    """Hears what the driver sends and receives, and reports it as messages of trace.proto.

    It finds the pass of a candidate by position and token id, since the driver goes by content too.
    If several passes proposed the same candidate, the last one counts.
    """

    def __init__(
        self,
        tell: Callable[[trace_pb2.TraceResponse], None],
        now: Callable[[], float],
        *,
        on_failure: Callable[[Exception], None],
    ) -> None:
        """`now`: the driver's clock. `on_failure`: called once with the error that ends the tap."""
        self._tell = tell
        self._now = now
        self._on_failure = on_failure
        self._num_passes = 0
        self._sent: dict[tuple[int, int], _SentStep] = {}
        self._origins: dict[int, dict[tuple[int, int], int]] = {}

    def step_sent(self, step: RunStep) -> None:
        passes = tuple(self._passes_of(piece) for piece in step.slices)
        self._sent[step.group, step.step] = _SentStep(self._now(), step, passes)
        for sequence_id in step.close:
            self._origins.pop(sequence_id, None)

    def step_answered(
        self, group: int, response: target_pb2.StepResponse, answered_at: float
    ) -> None:
        sent = self._sent.pop((group, response.step), None)
        if sent is None:
            return  # It was sent before the trace began.
        verdicts = {verdict.sequence_id: verdict for verdict in response.verdicts}
        windows = []
        for piece, passes in zip(sent.step.slices, sent.passes, strict=True):
            verdict = verdicts.get(piece.sequence_id)
            accepted = verdict.num_accepted if verdict is not None else 0
            windows.append(
                trace_pb2.TracedWindow(
                    sequence_id=piece.sequence_id,
                    start=piece.start,
                    fed=len(piece.token_ids),
                    window=piece.window,
                    accepted=accepted,
                    committed=accepted + 1 if verdict is not None else 0,
                    passes=passes,
                )
            )
        traced = trace_pb2.TracedStep(
            step=response.step,
            group=group,
            sent_at=sent.sent_at,
            answered_at=answered_at,
            forward_seconds=response.forward_seconds,
            step_seconds=response.step_seconds,
            windows=windows,
        )
        self._tell(trace_pb2.TraceResponse(step=traced))

    def proposed(
        self,
        drafter: str,
        proposals: Sequence[Proposal],
        *,
        pass_seconds: float,
        tokens_fed: int = 0,
    ) -> None:
        """A drafting pass arrived. `proposals`: the usable ones."""
        self._num_passes += 1
        for proposal in proposals:
            origins = self._origins.setdefault(proposal.sequence_id, {})
            base = proposal.base_length
            depths = depths_of(proposal.parents or range(len(proposal.token_ids)))[1:]
            for depth, token_id in zip(depths, proposal.token_ids, strict=True):
                origins[base + depth - 1, token_id] = self._num_passes
            self._forget_some(origins, before=base - _KEPT_POSITIONS)
        traced = trace_pb2.TracedPass(
            number=self._num_passes,
            drafter=drafter,
            received_at=self._now(),
            pass_seconds=pass_seconds,
            tokens_fed=tokens_fed,
            proposals=[
                trace_pb2.TracedProposal(
                    sequence_id=one.sequence_id,
                    base_length=one.base_length,
                    num_candidates=len(one.token_ids),
                )
                for one in proposals
            ],
        )
        self._tell(trace_pb2.TraceResponse(drafting=traced))

    def target_lost(self, group: int) -> None:
        """A group was lost. Its steps will not be answered, and their numbers start afresh."""
        for key in [key for key in self._sent if key[0] == group]:
            del self._sent[key]

    def fail(self, error: Exception) -> None:
        if not isinstance(error, PacelineError):
            _log.error("a defect ended a trace", exc_info=error)
        self._on_failure(error)

    def _forget_some(self, origins: dict[tuple[int, int], int], *, before: int) -> None:
        """Bound the memory: drafters may send anything, and the end of a sequence is not seen."""
        if len(origins) > KEPT_CANDIDATES:
            for key in [key for key in origins if key[0] < before]:
                del origins[key]
            for key in list(islice(origins, max(0, len(origins) - KEPT_CANDIDATES))):
                del origins[key]
        if len(self._origins) > KEPT_SEQUENCES:
            del self._origins[next(iter(self._origins))]

    def _passes_of(self, piece: Slice) -> list[int]:
        origins = self._origins.get(piece.sequence_id, {})
        first = len(piece.token_ids) - piece.window
        found = {
            origins.get((piece.start + first + depth - 1, token_id))
            for depth, token_id in zip(
                depths_of(piece.parents or range(piece.window))[1:],
                piece.token_ids[first:],
                strict=True,
            )
        }
        return sorted(number for number in found if number is not None)
