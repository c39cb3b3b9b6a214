"""A simulated drafter: the real desk and its sequences, with passes in virtual time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cluster.decoding.at_hand import tell
from cluster.decoding.events import Proposal
from cluster.decoding.instructions import DraftInstruction
from cluster.simulation.clock import VirtualClock
from cluster.simulation.layout import HostCosts
from workers.drafting.desk import DraftingDesk, DraftingSession, SessionNews
from workers.drafting.kind import DrafterInfo
from workers.emulated.latency_profiles import DeviceProfile
from workers.emulated.replay_proposer import ReplayProposer
from workers.emulated.replay_text import Guess, ReplayText

MAX_SEQUENCES = 4096

DraftMessage = Sequence[DraftInstruction]
"""Instructions that a driver sends in one message."""


@dataclass(frozen=True, slots=True)
class DraftAnswer:
    """The answers of a pass to one driver. `declined`: sequences that it will not draft for."""

    proposals: tuple[Proposal, ...]
    declined: tuple[int, ...]
    pass_seconds: float


PassListener = Callable[[DraftAnswer], None]


@dataclass(slots=True)
class DrafterMeter:
    """Seconds that the device computed; passes; candidates that it proposed."""

    busy_seconds: float = 0.0
    passes: int = 0
    drafted: int = 0


class _PassClock:
    """Records how long a pass takes. The virtual clock does the waiting."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def now(self) -> float:
        return 0.0

    def finish(self, begin: float, seconds: float) -> float:
        self.seconds = seconds
        return begin + seconds


class SimulatedDrafter:
    """One drafter device, for the drivers that share it.

    As in workers/drafting/service.py, messages that arrive during a pass are read after it, once
    its answers have left. A pass begins when no further message came for a moment.
    """

    def __init__(
        self,
        clock: VirtualClock,
        profile: DeviceProfile,
        text: ReplayText,
        guess: Guess,
        *,
        max_position: int,
        costs: HostCosts,
        watch: Callable[[bool], None] | None = None,
    ) -> None:
        """`watch` hears when a pass begins (True) and when it ends."""
        self.meter = DrafterMeter()
        self._clock = clock
        self._costs = costs
        self._watch = watch
        self._pass_clock = _PassClock()
        proposer = ReplayProposer(max_position, profile, text, guess, self._pass_clock)
        self._desk = DraftingDesk(proposer, max_sequences=MAX_SEQUENCES)
        self._listeners: dict[DraftingSession, PassListener] = {}
        self._unread: deque[tuple[DraftingSession, DraftMessage]] = deque()
        self._is_busy = False  # Busy with a pass, answers or messages.
        self._held_until: float | None = None

    @property
    def info(self) -> DrafterInfo:
        return self._desk.info

    @property
    def num_open(self) -> int:
        return self._desk.num_open

    def connect(self, listener: PassListener) -> DraftingSession:
        """Open the stream of a driver. `listener` gets each pass the moment it ends."""
        session = self._desk.open_session()
        self._listeners[session] = listener
        return session

    def receive(self, session: DraftingSession, message: DraftMessage) -> None:
        self._unread.append((session, message))
        if not self._is_busy:
            self._read()

    def _read(self) -> None:
        """Handle all messages, wait a moment for more, then draft."""
        self._is_busy = bool(self._unread)
        if not self._is_busy:
            self._begin_pass()
            return
        costs, told = self._costs, 0
        while self._unread:
            session, message = self._unread.popleft()
            told += len(message)
            self._apply(session, message)
        quiet_ms = costs.quiet_ms if self._desk.num_open <= 1 else costs.quiet_of_many_ms
        self._clock.at(self._clock.now + (quiet_ms + costs.heed_ms * told) / 1000, self._read)

    def _begin_pass(self) -> None:
        if not self._desk.has_work:
            return
        until = self._desk.hold_until(self._clock.now)
        if until is not None:
            self._hold(until)
            return
        self._is_busy = True
        self._pass_clock.seconds = 0.0
        news = self._desk.run_pass()
        host_ms = self._costs.draft_ms * sum([len(one.proposals) for one in news])
        seconds = self._pass_clock.seconds + host_ms / 1000
        if self._watch is not None:
            self._watch(True)
        self._clock.at(self._clock.now + seconds, self._end_pass, news, seconds)

    def _hold(self, until: float) -> None:
        """Go on when a message comes, at the latest at `until`."""
        if self._held_until != until:
            self._held_until = until
            self._clock.at(max(until, self._clock.now), self._hold_over, until)

    def _hold_over(self, until: float) -> None:
        if self._held_until == until:
            self._held_until = None
            if not self._is_busy:
                self._begin_pass()

    def _end_pass(self, news: list[SessionNews], seconds: float) -> None:
        if self._watch is not None:
            self._watch(False)
        self._desk.pass_took(seconds * 1000)
        self.meter.busy_seconds += seconds
        self.meter.passes += 1
        for one in news:
            proposals = tuple(one.proposals)
            self.meter.drafted += sum([len(draft.token_ids) for draft in proposals])
            declined = tuple([refusal.sequence_id for refusal in one.declined])
            self._listeners[one.session](DraftAnswer(proposals, declined, seconds))
        pause_ms = self._costs.pause_ms + self._costs.draft_ms * sum(
            len(one.proposals) for one in news
        )
        self._clock.at(self._clock.now + pause_ms / 1000, self._read)

    def _apply(self, session: DraftingSession, message: DraftMessage) -> None:
        self._held_until = None
        declined = [one.sequence_id for one in tell(session, message)]
        session.handled(self._clock.now)
        if declined:
            self._listeners[session](DraftAnswer((), tuple(declined), 0.0))
        for lender, refusal in self._desk.taken_back():
            self._listeners[lender](DraftAnswer((), (refusal.sequence_id,), 0.0))
