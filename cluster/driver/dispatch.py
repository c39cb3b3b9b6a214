"""Connects the scheduler to the streams: events go in, instructions are carried out.

A step goes to its target group's stream at once. Everything else follows in later turns of the
event loop, in order, while the target computes: the scheduler's remaining work, messages to
drafters, text for callers.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence

from cluster.decoding.events import (
    Admitted,
    Cancelled,
    DraftDeclined,
    DrafterJoined,
    DrafterLost,
    Event,
    Paused,
    Proposal,
    Request,
    Resumed,
    StepDone,
    TargetJoined,
    TargetLost,
    TargetScaled,
    Tick,
)
from cluster.decoding.instructions import (
    DraftInstruction,
    Emit,
    Finish,
    Instruction,
    Refuse,
    RunStep,
    WakeAt,
)
from cluster.decoding.scheduler import Scheduler
from cluster.driver.fitting import Speculation
from cluster.driver.generation import Callers, Sample
from cluster.driver.meters import DriverTimeMeter, GapMeter
from cluster.driver.request_spans import RequestSpans
from cluster.driver.round_tap import RoundTap
from cluster.driver.target_groups import TargetGroups
from cluster.driver.worker_messages import (
    ReadBatch,
    draft_events,
    fed_from_wire,
    prompt_logprobs_from_wire,
    read_proposals,
    send_drafts,
    verdicts_from_wire,
)
from paceline.errors import InternalError, PacelineError, ProtocolError
from paceline.v1 import drafting_pb2, target_pb2

_log = logging.getLogger(__name__)


class Dispatch:
    """Feeds the scheduler and carries out its instructions.

    Implements `TargetListener`, `DrafterListener` and `CallerListener`. `target_patience`: seconds
    that requests wait for a target after its last group is lost; then they fail. `num_groups`:
    target groups. `on_change` is called whenever `can_serve` may have changed. `on_broken` is
    called once if a defect ends everything.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        *,
        target_patience: float,
        num_groups: int = 1,
        on_change: Callable[[], None] = lambda: None,
        on_broken: Callable[[], None] = lambda: None,
    ) -> None:
        self.scheduler = scheduler
        self.gaps = GapMeter()
        self.driver_time = DriverTimeMeter()
        self.groups = TargetGroups(num_groups, patience=target_patience, give_up=self.fail_all)
        self.unavailable: PacelineError | None = None
        """The reason why no request can be taken; None: requests can be taken."""
        self.taps: list[RoundTap] = []
        """The open traces. One that raises an error is removed, and gets it (`RoundTap.fail`)."""
        self.spans: RequestSpans | None = None
        """Hears of all requests if they are traced by OpenTelemetry."""
        self._loop = asyncio.get_running_loop()
        self._send_step: Callable[[RunStep], None]
        self._send_drafts: Callable[[str, list[DraftInstruction]], None]
        self._suspect: Callable[[str, str], None]
        self._callers = Callers()
        self._for_drafters: deque[list[Instruction]] = deque()
        self._has_messages = False
        self._will_tell = False
        self._wake: asyncio.TimerHandle | None = None
        self._stopped = False
        self._on_change = on_change
        self._on_broken = on_broken

    def connect(
        self,
        send_step: Callable[[RunStep], None],
        send_drafts: Callable[[str, list[DraftInstruction]], None],
        suspect: Callable[[str, str], None],
    ) -> None:
        """Set where instructions go. Call it before any event."""
        self._send_step = send_step
        self._send_drafts = send_drafts
        self._suspect = suspect

    def admit(self, request: Request, sample: Sample) -> None:
        """Begin a sequence. Everything about it is delivered to `sample`."""
        self._callers.add(sample)
        if self.spans is not None:
            target = self.groups.target
            model = "" if target is None else target.model
            self.spans.admitted(request, sample.request_id, model)
        self._handle(Admitted(time.monotonic(), request))

    def cancel(self, sequence_id: int) -> None:
        if self._callers.drop(sequence_id):
            self._handle(Cancelled(time.monotonic(), sequence_id))

    def pause(self, sequence_id: int) -> None:
        self._handle(Paused(time.monotonic(), sequence_id))

    def resume(self, sequence_id: int) -> None:
        self._handle(Resumed(time.monotonic(), sequence_id))

    @property
    def can_serve(self) -> bool:
        """Whether a new request could run now: some target group is there."""
        return self.groups.any_joined and self.unavailable is None and not self._stopped

    @property
    def num_open(self) -> int:
        """Number of sequences that have not ended."""
        return len(self._callers)

    def fail_all(self, error: PacelineError) -> None:
        """End every request with an error, and take no more."""
        self.unavailable = error
        if self.spans is not None:
            self.spans.failed(error)
        for sequence_id in self._callers.fail_all(error):
            self._handle(Cancelled(time.monotonic(), sequence_id))
        self._on_change()

    def stop(self, error: PacelineError) -> None:
        """`fail_all`, and ignore all further events."""
        self.fail_all(error)
        self._stopped = True
        self._on_change()
        self.groups.wait_no_more()
        if self._wake is not None:
            self._wake.cancel()

    def break_down(self, error: BaseException) -> None:
        """A defect left the state inconsistent: end all requests, and the process.

        The program that started the process then starts another one.
        """
        _log.critical("a defect ends the driver and all of its requests", exc_info=error)
        if not self._stopped:
            self._stopped = True  # The scheduler gets no further events.
            self.stop(
                InternalError(
                    "a defect ended the server while it worked; its log has the details. Send the "
                    "request again once the server is up"
                )
            )
            self._on_broken()

    # The target.

    def target_joined(self, joined: TargetJoined) -> None:
        if self._stopped:
            return
        self.groups.join(joined)
        self.unavailable = None
        self._on_change()
        self._handle(joined)

    def target_lost(self, group: int, reason: str) -> None:
        """A stream to a shard broke. Sequences of its group go to other groups.

        If there is no other group, requests wait for one to come back.
        """
        if self._stopped or not self.groups.lose(group, reason):
            return
        self._on_change()
        self._tell_taps(lambda tap: tap.target_lost(group))
        self._handle(TargetLost(time.monotonic(), group=group))

    def target_scaled(self, num_groups: int) -> None:
        self.groups.scale(num_groups)
        self._handle(TargetScaled(time.monotonic(), num_groups))

    def is_busy(self, group: int) -> bool:
        return self.scheduler.is_busy(group)

    def note_target(self, trouble: str) -> None:
        self.groups.note(trouble)
        if self.unavailable is not None and not self._stopped:
            self.fail_all(self.groups.lost_for_good(trouble))

    def step_answered(self, group: int, response: target_pb2.StepResponse) -> None:
        self.gaps.step_answered(group, response.gap_seconds)
        driver_seconds = self.driver_time.step_answered(time.thread_time())
        done = StepDone(
            time.monotonic(),
            response.step,
            verdicts_from_wire(response),
            step_seconds=response.step_seconds,
            driver_seconds=driver_seconds,
            group=group,
            fed=fed_from_wire(response) if response.fed else (),
            prompt_logprobs=prompt_logprobs_from_wire(response),
        )
        goes_on = group in self._handle(done)
        self.gaps.step_sent(group, upon_answer=goes_on)
        self._tell_taps(lambda tap: tap.step_answered(group, response, done.now))
        if not goes_on:
            self.driver_time.pause()

    # Drafters.

    def drafter_joined(self, joined: DrafterJoined) -> None:
        self._handle(joined)

    def drafter_lost(self, name: str) -> None:
        self._handle(DrafterLost(time.monotonic(), name))

    def proposed(self, name: str, batch: drafting_pb2.ProposalBatch, entries: int) -> int:
        read, target = ReadBatch(), self.groups.target
        totals = self.scheduler.totals
        malformed_before = totals.malformed_proposals
        if target is not None:
            read = read_proposals(
                batch, self._speculation_of, vocab_size=target.vocab_size, drafter=name
            )
        totals.dropped_proposals += read.dropped
        self._tell_taps(
            lambda tap: tap.proposed(
                name,
                read.proposals,
                pass_seconds=batch.pass_seconds,
                tokens_fed=batch.tokens_fed,
            )
        )
        for event in draft_events(time.monotonic(), name, batch, read, entries):
            self._handle(event)
        return totals.malformed_proposals - malformed_before

    def proposed_at_hand(self, name: str, proposals: Sequence[Proposal], seconds: float) -> None:
        """A drafter in this process drafted. The scheduler has its candidates already."""
        self._tell_taps(lambda tap: tap.proposed(name, proposals, pass_seconds=seconds))

    def _speculation_of(self, sequence_id: int) -> Speculation | None:
        sample = self._callers.get(sequence_id)
        return None if sample is None else sample.speculation

    def declined(self, name: str, sequence_id: int, reason: str, *, for_good: bool) -> None:
        _log.info("drafter %s declines sequence %d: %s", name, sequence_id, reason)
        self._handle(DraftDeclined(time.monotonic(), name, sequence_id, for_good=for_good))

    # Events in, instructions out.

    def _handle(self, event: Event) -> Sequence[int]:
        """Handle an event. Returns the groups that got steps. Raises ProtocolError (Scheduler)."""
        if self._stopped:
            return ()
        try:
            return self._carry_out(event)
        except ProtocolError:
            raise
        except Exception as error:  # A defect: all that wait must hear of it.
            self.break_down(error)
            return ()

    def _carry_out(self, event: Event) -> Sequence[int]:
        self._take_messages()
        steps = self.scheduler.steps_for(event)
        self._has_messages = True
        for step in steps:
            self._send(step)
        if not steps:
            self._take_messages()
        if (self._has_messages or self._for_drafters) and not self._will_tell:
            self._will_tell = True
            self._loop.call_soon(self._guarded, self._tell_drafters)
        return [step.group for step in steps]

    def _send(self, step: RunStep) -> None:
        self._send_step(step)
        if self.spans is not None:
            self.spans.sent(step)
        self._tell_taps(lambda tap: tap.step_sent(step))

    def _take_messages(self) -> None:
        """Have the scheduler do the work that it left until the step was sent."""
        if self._has_messages:
            self._has_messages = False
            if instructions := self.scheduler.messages():
                self._for_drafters.append(instructions)

    def _tell_drafters(self) -> None:
        """Send messages to drafters. Messages for callers follow in the next turn of the loop."""
        self._will_tell = False
        self._take_messages()
        self._loop.call_soon(self._guarded, self._tell_callers)
        for_drafters: list[Instruction] = []
        for instructions in self._for_drafters:
            for instruction in instructions:
                if isinstance(instruction, (Emit, Finish, Refuse)):
                    self._callers.later(instruction)
                    if self.spans is not None:
                        self.spans.told(instruction)
                elif isinstance(instruction, WakeAt):
                    self._wake_at(instruction.time)
                elif not isinstance(instruction, RunStep):
                    for_drafters.append(instruction)
        self._for_drafters.clear()
        send_drafts(for_drafters, self._send_drafts, self._suspect)

    def _tell_callers(self) -> None:
        self._callers.tell()

    def _guarded(self, work: Callable[[], None]) -> None:
        """Do the work of a later turn of the loop, where no caller would see an exception."""
        try:
            work()
        except Exception as error:  # As above.
            self.break_down(error)

    def _tell_taps(self, tell: Callable[[RoundTap], None]) -> None:
        for tap in tuple(self.taps):
            try:
                tell(tap)
            except Exception as error:  # It ends this tap only.
                self.taps.remove(tap)
                tap.fail(error)

    def _wake_at(self, when: float) -> None:
        if self._wake is not None:
            self._wake.cancel()
        self._wake = self._loop.call_at(when, self._tick)

    def _tick(self) -> None:
        self._wake = None
        self._handle(Tick(time.monotonic()))
