"""Going through the motions of an answer shortly before it comes.

Between two answers of a large target a driver sleeps, and what else runs on the host empties the
caches: the 0.05 ms from a verdict to the next step then take three times as long. So the same code
runs a moment before, on a sequence that nobody asked for, while the target computes
(docs/performance/lookahead.md).
"""

from __future__ import annotations

import asyncio
from itertools import count

from cluster.decoding.events import (
    Admitted,
    DrafterJoined,
    Proposal,
    Proposed,
    Request,
    StepDone,
    TargetJoined,
)
from cluster.decoding.instructions import CloseDraft, Grant, OpenDraft, RunStep, SendOutcome
from cluster.decoding.policies import PolicyName
from cluster.decoding.scheduler import Scheduler
from cluster.worker_wire import drafts_to_wire, step_messages, verdicts_from_wire
from paceline.prefix_hash import extend_hash, hash_prefix
from paceline.rules import Rule
from paceline.sampling import SamplingParams, SequenceSpec
from paceline.v1 import target_pb2
from workers.step_rehearsal import WORTH_SECONDS

_BEFORE_SECONDS = 0.0022
"""How long before the answer it begins. The event loop may wake a millisecond late."""
_MOST_SEQUENCES = 8
"""The first verdicts of a long answer are the rehearsal of all the others."""
_TOKEN, _VOCAB_SIZE = 1, 2
_PROMPT_LENGTH, _LENGTH, _WINDOW = 4, 256, 2
_STEP_SECONDS = 0.01
_DRAFTER = "nobody"


class Rehearsal:
    """A scheduler of its own, whose one sequence is the same token again and again.

    What it sends is put into messages that go nowhere.
    """

    def __init__(self) -> None:
        self._timer: asyncio.TimerHandle | None = None
        self._scheduler = Scheduler(prefix_cache=False)
        self._scheduler.handle(TargetJoined(0.0, _VOCAB_SIZE, 2 * _LENGTH, 16, 2 * _LENGTH))
        self._scheduler.handle(DrafterJoined(0.0, _DRAFTER, 2 * _LENGTH))
        self._sequence_ids = count(1)
        self._hashes = [hash_prefix(())]
        for _ in range(2 * _LENGTH):
            self._hashes.append(extend_hash(self._hashes[-1], _TOKEN))
        self._now = 0.0
        self._step: RunStep | None = None

    @property
    def expects(self) -> bool:
        """Whether a rehearsal is about to come."""
        return self._timer is not None

    @property
    def window(self) -> int:
        """Candidates of the step that is to be answered next."""
        return 0 if self._step is None else self._step.slices[0].window

    @property
    def num_finished(self) -> int:
        """Sequences that came to their end."""
        return self._scheduler.totals.finished

    def expect(self, seconds: float, *, sequences: int) -> None:
        """An answer about so many is expected in so long: rehearse before, where it is worth it."""
        worth = seconds >= WORTH_SECONDS and sequences <= _MOST_SEQUENCES
        if worth and self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(seconds - _BEFORE_SECONDS, self._on_time)

    def end(self) -> None:
        """Expect nothing any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def run(self) -> None:
        """An answer and what follows upon it, messages included."""
        if self._step is None:
            self._goes_on(self._scheduler.begin(Admitted(self._now, self._request())))
            return
        (part,) = self._step.slices
        response = target_pb2.StepResponse(step=self._step.step, step_seconds=_STEP_SECONDS)
        response.verdicts.add(
            sequence_id=part.sequence_id, num_accepted=part.window, token_id=_TOKEN
        )
        message = target_pb2.StepResponse.FromString(response.SerializeToString())
        self._now += _STEP_SECONDS
        verdicts = verdicts_from_wire(message)
        done = StepDone(self._now, message.step, verdicts, step_seconds=message.step_seconds)
        self._goes_on(self._scheduler.begin(done))

    def _on_time(self) -> None:
        self._timer = None
        self.run()

    def _request(self) -> Request:
        return Request(
            sequence_id=next(self._sequence_ids),
            prompt_token_ids=(_TOKEN,) * _PROMPT_LENGTH,
            spec=SequenceSpec(
                SamplingParams(temperature=0.0),
                seed=0,
                prompt_length=_PROMPT_LENGTH,
                rule=Rule.COUPLED,
            ),
            max_tokens=_LENGTH,
            policy=PolicyName.CHAIN,
            window=_WINDOW,
        )

    def _goes_on(self, steps: list[RunStep]) -> None:
        """Say what there is to say, and draft beyond the next step's window."""
        self._step = None
        for step in steps:
            for request in step_messages(step):
                request.SerializeToString()
            self._step = step
        rest = self._scheduler.rest()
        drafts = (OpenDraft, SendOutcome, Grant, CloseDraft)
        if for_drafter := [one for one in rest if isinstance(one, drafts)]:
            for message in drafts_to_wire(for_drafter):
                message.SerializeToString()
        for step in steps:
            (part,) = step.slices
            end = part.start + len(part.token_ids)
            ahead = (_TOKEN,) * (1 + _WINDOW)
            proposal = Proposal(part.sequence_id, end, self._hashes[end], ahead)
            self._scheduler.handle(
                Proposed(self._now, _DRAFTER, (proposal,), pass_seconds=_STEP_SECONDS)
            )

    def check_integrity(self) -> None:
        """Assert the invariants of its scheduler. For tests."""
        self._scheduler.check_integrity()
