"""A simulated driver: the real scheduler, with the time that its work and messages take."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from cluster.decoding.events import (
    Admitted,
    DraftDeclined,
    DrafterJoined,
    Event,
    Proposal,
    Proposed,
    Request,
    SequenceVerdict,
    StepDone,
    TargetJoined,
    Tick,
)
from cluster.decoding.instructions import (
    CloseDraft,
    DraftInstruction,
    Emit,
    Finish,
    Instruction,
    OpenDraft,
    Refuse,
    SendGrant,
    SendOutcome,
    WakeAt,
)
from cluster.decoding.scheduler import Scheduler
from cluster.simulation.clock import SimulatedLink, VirtualClock
from cluster.simulation.drafter import DraftAnswer, SimulatedDrafter
from cluster.simulation.layout import HostCosts
from cluster.simulation.target import SimulatedTarget
from workers.drafting.desk import DraftingSession
from workers.emulated.latency_profiles import LinkProfile

_MESSAGE_BYTES, _TOKEN_BYTES = 60, 4
"""Approximate bytes of a message without its tokens, and of a token."""


class Listener:
    """Hears what becomes of sequences. Base of the simulated gateway."""

    def emitted(self, emit: Emit) -> None:
        """Tokens came for a caller."""

    def finished(self, finish: Finish) -> None:
        """A sequence ended."""


@dataclass(slots=True)
class _DrafterEnd:
    drafter: SimulatedDrafter
    session: DraftingSession
    link: SimulatedLink


class SimulatedDriver:
    """One driver with its target groups and drafters. It does one thing at a time."""

    def __init__(
        self,
        clock: VirtualClock,
        scheduler: Scheduler,
        targets: Sequence[SimulatedTarget],
        listener: Listener,
        *,
        costs: HostCosts,
    ) -> None:
        self.scheduler = scheduler
        self._clock = clock
        self._costs = costs
        self._listener = listener
        self._targets = targets
        hop, local = costs.hop_ms / 1000, LinkProfile()
        self._to_target = [SimulatedLink(clock, local, hop_seconds=hop) for _ in targets]
        self._from_target = [SimulatedLink(clock, local, hop_seconds=hop) for _ in targets]
        self._drafters: dict[str, _DrafterEnd] = {}
        self._unread: deque[Callable[[float], Event]] = deque()
        self._free_at = 0.0
        self._worked = 0.0  # Seconds since the last answer was read.
        self._reads = False
        self._wake: float | None = None
        self._unfinished = 0
        for group, target in enumerate(targets):
            target.answer = partial(self._answered, group)

    def join_target(self, joined: TargetJoined) -> None:
        self.scheduler.handle(joined)

    def join_drafter(
        self, name: str, drafter: SimulatedDrafter, profile: LinkProfile, *, shares_host: bool
    ) -> None:
        """Join a drafter at the other end of a link. `shares_host`: with the target."""
        hop = self._costs.hop_ms / 1000
        back = SimulatedLink(self._clock, profile, hop_seconds=hop)

        def hear(answer: DraftAnswer) -> None:
            num_bytes = _num_bytes(answer.proposals) if back.is_bounded else 0
            back.send(self._clock.now, num_bytes, self._proposed, name, answer)

        session = drafter.connect(hear)
        there = SimulatedLink(self._clock, profile, hop_seconds=hop)
        self._drafters[name] = _DrafterEnd(drafter, session, there)
        info = drafter.info
        self._handle(
            DrafterJoined(
                self._clock.now,
                name,
                info.max_position,
                kind="model",
                rules=info.rules,
                wants_top_tokens=info.wants_top_tokens,
                shares_host=shares_host,
            )
        )

    def admit(self, request: Request) -> None:
        self._unfinished += 1
        for target in self._targets:
            target.has_work()
        self._hear(partial(Admitted, request=request))

    def _answered(
        self, group: int, step: int, verdicts: tuple[SequenceVerdict, ...], seconds: float
    ) -> None:
        def done(now: float) -> StepDone:
            worked, self._worked = self._worked, 0.0
            return StepDone(now, step, verdicts, seconds, worked, group)

        self._from_target[group].send(self._clock.now, 0, self._hear, done)

    def _proposed(self, name: str, answer: DraftAnswer) -> None:
        if answer.proposals or answer.pass_seconds:
            proposals, seconds = answer.proposals, answer.pass_seconds
            self._hear(lambda now: Proposed(now, name, proposals, seconds))
        for sequence_id in answer.declined:
            self._hear(partial(DraftDeclined, drafter=name, sequence_id=sequence_id))

    def _hear(self, event: Callable[[float], Event]) -> None:
        """Handle an event now, or once earlier events are handled."""
        self._unread.append(event)
        if self._reads:
            return
        self._reads = True
        if self._free_at > self._clock.now:
            self._clock.at(self._free_at, self._read)
        else:
            self._read()

    def _read(self) -> None:
        event = self._unread.popleft()(self._clock.now)
        self._handle(event)
        self._reads = bool(self._unread)
        if self._reads:
            self._clock.at(max(self._clock.now, self._free_at), self._read)

    def _handle(self, event: Event) -> None:
        """Pass an event to the scheduler. Send steps first, then to drafters, then to callers."""
        costs, scheduler = self._costs, self.scheduler
        done = self._clock.now + _before_ms(event, costs) / 1000
        for step in scheduler.steps_for(event):
            self._to_target[step.group].send(done, 0, self._targets[step.group].step, step)
        messages: dict[str, list[DraftInstruction]] = {}
        told = []
        for one in scheduler.messages():
            match one:
                case OpenDraft() | SendOutcome() | SendGrant() | CloseDraft():
                    messages.setdefault(one.drafter, []).append(one)
                case _:
                    told.append(one)
        done += _after_ms(event, costs) / 1000
        for name, message in messages.items():
            done += costs.tell_ms / 1000
            end = self._drafters[name]
            num_bytes = _num_bytes(message) if end.link.is_bounded else 0
            end.link.send(done, num_bytes, end.drafter.receive, end.session, message)
        self._worked += done - self._clock.now
        self._free_at = done
        if told:
            self._tell(told)

    def _tell(self, instructions: Sequence[Instruction]) -> None:
        for one in instructions:
            match one:
                case Emit():
                    self._listener.emitted(one)
                case Finish():
                    self._unfinished -= 1
                    if not self._unfinished:
                        for target in self._targets:
                            target.has_none()
                    self._listener.finished(one)
                case WakeAt(time):
                    self._wake = time
                    self._clock.at(max(time, self._clock.now), self._tick, time)
                case Refuse():
                    raise one.error
                case _:
                    raise AssertionError(f"nothing here breaks a contract: {one}")

    def _tick(self, time: float) -> None:
        if self._wake == time:
            self._wake = None
            self._hear(Tick)


def _before_ms(event: Event, costs: HostCosts) -> float:
    """Work of the driver on an event before a step can leave, in milliseconds."""
    match event:
        case StepDone():
            return costs.event_ms + costs.verdict_ms * len(event.verdicts)
        case Proposed():
            return costs.event_ms + costs.proposal_ms * len(event.proposals)
    return costs.event_ms + costs.verdict_ms


def _after_ms(event: Event, costs: HostCosts) -> float:
    """Work of the driver on an event afterwards, without messages to drafters, in milliseconds."""
    return costs.settle_ms * len(event.verdicts) if isinstance(event, StepDone) else 0.0


def _num_bytes(message: Sequence[DraftInstruction | Proposal]) -> int:
    with_tokens = (OpenDraft, SendOutcome, Proposal)
    tokens = sum(len(one.token_ids) for one in message if isinstance(one, with_tokens))
    return _MESSAGE_BYTES * (1 + len(message)) + _TOKEN_BYTES * tokens
