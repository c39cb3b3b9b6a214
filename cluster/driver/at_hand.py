"""Drafters in the driver's own process: those that cost next to nothing.

Their candidates are there at the moment of a verdict: no process, no gRPC. An exception ends only
the drafter that raised it. It is made again after a while, but not for ever.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from cluster.decoding.at_hand import DraftAnswer, DraftersAtHand, tell
from cluster.decoding.events import DraftDeclined, DrafterJoined, DrafterLost, Proposal, Proposed
from cluster.decoding.instructions import Instruction, Suspect
from cluster.driver.meters import WorkerMeter
from workers.drafting.desk import Declined, DraftingDesk, DraftingSession
from workers.drafting.kind import DRAFTERS, DrafterOptions

IN_DRIVER = "in the driver"
"""What stands for the address of such a drafter."""

MOST_FAILURES, LASTING_SECONDS = 3, 60.0
"""After this many failures a drafter is not made again. One that worked for LASTING_SECONDS begins
to count anew."""

AGAIN_SECONDS = 1.0
"""Seconds until a drafter that failed is made again."""

_LATE = 2.0
"""A measured delay counts as at most this many times the mean, since the host may be busy."""
_KEPT = 0.8

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _AtHand:
    """One drafter. `desk` and `session` are None while it is not in use."""

    options: DrafterOptions
    meter: WorkerMeter
    desk: DraftingDesk | None = None
    session: DraftingSession | None = None
    failures: int = 0
    joined_at: float = 0.0


class AtHandListener(Protocol):
    """Hears what the scheduler does not learn from `heed`."""

    def drafter_joined(self, joined: DrafterJoined) -> None:
        """The drafter can be used, and knows no sequence."""

    def proposed_at_hand(self, name: str, proposals: Sequence[Proposal], seconds: float) -> None:
        """A pass of `seconds` drafted this."""


class OwnDrafters(DraftersAtHand):
    """All drafters of the driver's process. `options`: by name. Call `start` once.

    `clock`: seconds, by which passes and delays are measured.
    """

    def __init__(
        self,
        options: Mapping[str, DrafterOptions],
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._clock = clock
        self._all = {
            name: _AtHand(one, WorkerMeter(name, one.kind, IN_DRIVER))
            for name, one in options.items()
        }
        self._in_use: dict[str, _AtHand] = {}
        self._delay = 0.0
        self._loading: set[asyncio.Task[None]] = set()
        self._listener: AtHandListener

    @property
    def meters(self) -> list[WorkerMeter]:
        return [one.meter for one in self._all.values()]

    @property
    def names(self) -> Mapping[str, object]:
        return self._in_use

    @property
    def has_work(self) -> bool:
        return any(one.desk is not None and one.desk.has_work for one in self._in_use.values())

    @property
    def is_reading(self) -> bool:
        return any(one.desk is not None and one.desk.opening for one in self._in_use.values())

    @property
    def delay_seconds(self) -> float:
        return self._delay

    async def start(self, listener: AtHandListener) -> None:
        """Load all of them. One that cannot be loaded counts as failed, and is tried again."""
        self._listener = listener
        for name in self._all:
            await self._load(name)

    def stop(self) -> None:
        for task in self._loading:
            task.cancel()
        for one in self._in_use.values():
            one.meter.leave(asked=False)
        self._in_use.clear()

    @contextmanager
    def before_step(self, num_sequences: int) -> Iterator[None]:
        begin = self._clock()
        yield
        seconds = (self._clock() - begin) / num_sequences
        if self._delay:
            seconds = min(seconds, _LATE * self._delay)
            seconds = _KEPT * self._delay + (1 - _KEPT) * seconds
        self._delay = seconds

    def heed(self, now: float, instructions: Sequence[Instruction]) -> Sequence[DraftAnswer]:
        told: dict[str, list[Instruction]] = {name: [] for name in self._in_use}
        answers: list[DraftAnswer] = []
        for one in instructions:
            drafter = getattr(one, "drafter", "")
            if isinstance(one, Suspect):
                self._in_use[drafter].meter.suspect = True
                self._end(drafter, one.reason)
                told.pop(drafter)
            elif drafter in told:
                told[drafter].append(one)
        for name, own in told.items():
            try:
                answers += self._draft(name, now, own)
            except Exception as error:  # It ends this drafter only.
                _log.exception("drafter %s failed; it is ended", name)
                self._end(name, f"it failed: {error!r}")
                answers.append(DrafterLost(now, name))
        return answers

    def _draft(self, name: str, now: float, own: Sequence[Instruction]) -> list[DraftAnswer]:
        """Hand over instructions and run a pass. Raises whatever the drafter raises."""
        drafter = self._in_use[name]
        desk, session = drafter.desk, drafter.session
        assert desk is not None
        assert session is not None
        declined: list[Declined] = tell(session, own)
        session.handled(now)
        answers: list[DraftAnswer] = []
        if desk.has_work:
            begin = self._clock()
            news = desk.run_pass()
            seconds = self._clock() - begin
            desk.pass_took(1000 * seconds)
            drafter.meter.passed(seconds, 0.0)
            for one in news:
                declined += one.declined
                proposals = tuple(one.proposals)
                drafter.meter.tokens += sum(len(proposal.token_ids) for proposal in proposals)
                answers.append(Proposed(now, name, proposals, pass_seconds=seconds))
                self._listener.proposed_at_hand(name, proposals, seconds)
        for refusal in declined:
            _log.info(
                "drafter %s declines sequence %d: %s", name, refusal.sequence_id, refusal.reason
            )
            answers.append(DraftDeclined(now, name, refusal.sequence_id, for_good=refusal.for_good))
        return answers

    async def _load(self, name: str) -> None:
        """Make a drafter and have it join. A failure is logged, and it is tried again."""
        drafter = self._all[name]
        options = drafter.options
        kind = DRAFTERS.get(options.kind, field="kind")
        try:
            proposer = await kind.load(kind.with_defaults(options))
            drafter.desk = DraftingDesk(proposer, max_sequences=options.max_sequences)
            drafter.session = drafter.desk.open_session()
            info = proposer.info
        except Exception as error:  # It ends this drafter only.
            _log.exception("drafter %s cannot be started", name)
            self._failed(name, f"it cannot be started: {error!r}")
            return
        drafter.meter.join(kind=info.kind, pid=os.getpid(), model=info.model, rules=info.rules)
        drafter.joined_at = time.monotonic()
        self._in_use[name] = drafter
        self._listener.drafter_joined(
            DrafterJoined(
                drafter.joined_at,
                name,
                info.max_position,
                kind=info.kind,
                has_model=False,
                rules=info.rules,
                wants_top_tokens=info.wants_top_tokens,
                shares_host=True,  # Its drafts take the driver's own time.
            )
        )

    def _end(self, name: str, why: str) -> None:
        drafter = self._in_use.pop(name)
        drafter.desk = drafter.session = None
        drafter.meter.leave(asked=False)
        self._failed(name, why)

    def _failed(self, name: str, why: str) -> None:
        drafter = self._all[name]
        lasted = drafter.joined_at and time.monotonic() - drafter.joined_at > LASTING_SECONDS
        drafter.failures = 1 if lasted else drafter.failures + 1
        drafter.joined_at = 0.0
        drafter.meter.trouble = why
        if drafter.meter.suspect or drafter.failures >= MOST_FAILURES:
            _log.error("drafter %s is not used any more: %s", name, why)
            return

        async def again() -> None:
            await asyncio.sleep(AGAIN_SECONDS * 2 ** (drafter.failures - 1))
            await self._load(name)

        task = asyncio.get_running_loop().create_task(again())
        self._loading.add(task)
        task.add_done_callback(self._loading.discard)
