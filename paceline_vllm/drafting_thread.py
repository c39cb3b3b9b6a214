"""The thread that talks to drafters, beside the thread in which vLLM computes.

vLLM's thread reports a step and takes what has arrived, under a lock that nobody holds while they
wait for a network. Everything else happens in this thread, on an event loop of its own, while vLLM
computes the next step.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from cluster.decoding.events import DraftDeclined, DrafterJoined, DrafterLost, DraftEvent
from cluster.decoding.instructions import Instruction
from cluster.decoding.policy import Wait
from cluster.decoding.reported_target import ReportedOptions, ReportedTarget
from cluster.driver.drafter_links import DrafterLink, DrafterPool, TargetVocabulary
from cluster.driver.fitting import Speculation
from cluster.driver.pool_lookup import Nearness, SharedDrafters
from cluster.driver.worker_messages import draft_events, read_proposals, send_drafts
from paceline.errors import PacelineError
from paceline.generation import Stats
from paceline.prefix_hash import hash_prefix
from paceline.v1 import drafting_pb2
from paceline_vllm.rows import Rows, Table, Text
from paceline_vllm.settings import MOST_WAIT_MS, Settings
from workers.process.handshake import DriverIdentity
from workers.process.mutual_tls import WorkerTls

JOIN_SECONDS = 5.0
"""How long vLLM's start waits for the first try of each drafter."""

IDLE_SECONDS = 2.0
"""After this time without a step, all texts are closed at the drafters."""

PROBE_SECONDS = 10.0
"""Seconds that a drafter has to answer that it is still alive. While vLLM loads or compiles, this
thread may not run for seconds."""

_STOP_SECONDS = 3.0
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Counts:
    """What is counted beside the statistics of speculation. Times are seconds.

    `calls`: of the hook. `seconds`, `longest`: time that they took, together and at most. `missed`:
    calls that found the lock taken for longer than MOST_WAIT_MS, and proposed nothing. `failed`:
    calls that a defect ended.
    """

    calls: int = 0
    seconds: float = 0.0
    longest: float = 0.0
    missed: int = 0
    failed: int = 0
    recent: list[float] = field(default_factory=list)

    def took(self, seconds: float) -> None:
        self.calls += 1
        self.seconds += seconds
        self.longest = max(self.longest, seconds)
        if len(self.recent) < 1000:
            self.recent.append(seconds)
        else:
            self.recent[self.calls % 1000] = seconds


class DraftingThread:
    """Drafters, the sequences that they draft for, and the thread that serves both.

    Implements `DrafterListener`. `vocabulary`: of vLLM's model. `max_num_seqs`: of vLLM.
    `shares_host`: whether drafters on this host compute on the processor that vLLM computes on.
    """

    def __init__(
        self,
        settings: Settings,
        options: ReportedOptions,
        vocabulary: TargetVocabulary,
        *,
        max_num_seqs: int,
        shares_host: bool,
    ) -> None:
        self._settings = settings
        self._vocabulary = vocabulary
        self._vocab_size, self._max_model_len = options.vocab_size, options.max_model_len
        self._own_addresses = ("127.0.0.1:0",) if shares_host else ()
        self._tls = WorkerTls.of(settings.tls)
        self._speculation = Speculation(policy=options.policy, window=options.window)
        self.counts = Counts()
        self._lock = threading.Lock()
        self._news = threading.Condition(self._lock)
        # Under the lock:
        self._target = ReportedTarget(options)
        self._rows = Rows(2 * max_num_seqs)
        self._untold: list[Instruction] = []
        self._num_joined = 0
        self._opening: dict[int, Text] = {}
        self._proposed_at: float | None = None
        self._called_at = self._began = time.monotonic()
        self._has_work = False
        # Of the thread:
        self._loop = asyncio.new_event_loop()
        self._pool: DrafterPool
        self._ready = threading.Event()
        self._stopping: asyncio.Event
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="paceline-drafters", daemon=True)

    # Called in vLLM's thread.

    def start(self) -> None:
        """Begin to connect, and wait until each drafter was tried once, at most JOIN_SECONDS.

        Raises PacelineError if the thread cannot be started.
        """
        self._thread.start()
        self._ready.wait(JOIN_SECONDS + 1)
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        """End all streams and the thread. Stopping twice is no error."""
        if self._thread.is_alive() and self._ready.is_set():
            with suppress(RuntimeError):  # The loop was closed just now.
                self._loop.call_soon_threadsafe(self._stopping.set)
            self._thread.join(_STOP_SECONDS)

    def propose(
        self, lengths: Sequence[int], table: Table, num_sampled: Sequence[int]
    ) -> list[tuple[int, ...]]:
        """Report a step (Rows.match) and take the candidates of the next, for each row.

        Waits for drafters only under a policy that waits, at most `wait_ms`.
        """
        nothing: list[tuple[int, ...]] = [()] * len(lengths)
        if not self._num_joined or not self._lock.acquire(timeout=MOST_WAIT_MS / 1000):
            self.counts.missed += self._num_joined > 0
            self._proposed_at = None
            return nothing
        try:
            now = self._called_at = time.monotonic()
            texts = self._rows.match(lengths, table, num_sampled)
            ids = self._report(now, texts, num_sampled)
            windows = self._target.windows(now, ids)
            self._wake_thread()
            if isinstance(windows, Wait):
                windows = self._wait_for(windows, ids)
            self._proposed_at = time.monotonic()
        finally:
            self._lock.release()
        return [
            nothing[0]
            if text is None or not num_sampled[row] or text.sequence_id is None
            else windows.get(text.sequence_id, ())
            for row, text in enumerate(texts)
        ]

    def _report(
        self, now: float, texts: Sequence[Text | None], num_sampled: Sequence[int]
    ) -> list[int]:
        """Tell what the step committed. Returns the sequences that take part in the next one."""
        target = self._target
        self._untold += target.messages()  # Of the last step, if the thread had no time for it.
        committed: dict[int, tuple[int, ...]] = {}
        members: dict[int, None] = {}
        has_prompts = False
        for text, sampled in zip(texts, num_sampled, strict=True):
            if text is None:
                continue
            sequence_id = text.sequence_id
            has_prompts |= not sampled
            if sequence_id is None:
                has_prompts |= id(text) not in self._opening
                if text.length < self._max_model_len:
                    self._opening[id(text)] = text
                continue
            if text.told < text.length:
                committed[sequence_id] = text.new_tokens
                text.told = text.length
            if sampled:
                members[sequence_id] = None
        seconds = None
        if self._proposed_at is not None and committed and not has_prompts:
            seconds = now - self._proposed_at
        for text in self._rows.take_gone():
            self._close(now, text)
        target.step_done(now, committed, seconds)
        return list(members)

    def _close(self, now: float, text: Text) -> None:
        self._opening.pop(id(text), None)
        if text.sequence_id is not None:
            self._target.close(now, text.sequence_id)
            text.sequence_id = None

    def _wait_for(self, windows: Wait, ids: Sequence[int]) -> Mapping[int, tuple[int, ...]]:
        """The windows once they are full, or when the wait is over."""
        give_up = time.monotonic() + self._settings.wait_ms / 1000
        found: Mapping[int, tuple[int, ...]] | Wait = windows
        while isinstance(found, Wait):
            now = time.monotonic()
            self._news.wait(max(0.0, min(found.until, give_up) - now))
            now = time.monotonic()
            found = self._target.windows(now, ids, may_wait=now < give_up)
        return found

    def _wake_thread(self) -> None:
        if not self._has_work:
            self._has_work = True
            self._loop.call_soon_threadsafe(self._work)

    def stats(self) -> Stats:
        """What was counted since the start, in the form of a driver's statistics."""
        with self._lock:
            totals, running = self._target.totals, self._target.num_sequences
            speculation = self._target.speculation()
            workers = tuple(meter.stats() for meter in self._pool.meters)
        counts, recent = totals.counts, sorted(self.counts.recent)
        return Stats(
            uptime_seconds=time.monotonic() - self._began,
            steps=totals.steps,
            committed_tokens=counts.committed,
            drafted=counts.drafted,
            accepted=counts.accepted,
            verdicts=counts.verdicts,
            requests_finished=totals.finished,
            sequences_running=running,
            sequences_waiting=0,
            gap_ms_p50=0.0,
            driver_ms_p50=1000 * recent[len(recent) // 2] if recent else 0.0,
            speculation=speculation,
            workers=workers,
        )

    # The thread.

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve())
        except BaseException as error:  # It must reach vLLM's start, or the log.
            self._failure = error
            _log.exception("the thread of the drafters ended; vLLM decodes plainly from now on")
        finally:
            with self._lock:
                self._num_joined = 0  # Nobody wakes the loop from now on.
                self._news.notify_all()
            self._loop.close()
            self._ready.set()

    async def _serve(self) -> None:
        settings = self._settings
        self._stopping = asyncio.Event()
        new_link = partial(
            DrafterLink,
            listener=self,
            target=self._vocabulary,
            identity=DriverIdentity(),
            party=settings.pool.party or "",
            nearness=Nearness(settings.pool.near, settings.pool.labels),
            target_addresses=lambda: self._own_addresses,
            probe_timeout=PROBE_SECONDS,
            tls=self._tls,
        )
        self._pool = DrafterPool(new_link)
        shared = SharedDrafters(settings.addresses)
        await shared.look()
        with suppress(PacelineError):  # The link has logged it, and tries again.
            await self._pool.start(shared.addresses, JOIN_SECONDS)
        self._tell_who_joined()
        self._ready.set()
        follow = asyncio.create_task(shared.follow(lambda: self._pool.update(shared.addresses)))
        tick = asyncio.create_task(self._tick())
        try:
            await self._stopping.wait()
        finally:
            for task in (follow, tick):
                task.cancel()
            await asyncio.gather(follow, tick, return_exceptions=True)
            await self._pool.stop()

    def _tell_who_joined(self) -> None:
        meters = self._pool.meters
        for meter in meters:
            if meter.connected:
                _log.warning(
                    "drafter %s (%s, %s) is in use", meter.name, meter.model or "-", meter.kind
                )
        if not any(meter.connected for meter in meters):
            _log.warning(
                "no drafter is in use yet: vLLM decodes plainly until one is (%s)",
                "; ".join(f"{one.name}: {one.trouble or 'no answer yet'}" for one in meters)
                or "no address could be looked up",
            )

    async def _tick(self) -> None:
        """Close what is not seen any more, while no step says so."""
        while True:
            await asyncio.sleep(IDLE_SECONDS / 2)
            with self._lock:
                now = time.monotonic()
                if now - self._called_at < IDLE_SECONDS or not len(self._rows):
                    continue
                self._rows.forget_all()
                for text in self._rows.take_gone():
                    self._close(now, text)
            self._work()

    def _work(self) -> None:
        """Do what the step did not need: counts, grants, and messages to drafters."""
        try:
            with self._lock:
                self._has_work = False
                self._untold += self._target.messages()
                opening = [
                    (one, one.tokens[: one.length].tolist()) for one in self._opening.values()
                ]
                self._opening.clear()
            self._send()
            for text, token_ids in opening:
                self._open(text, token_ids, hash_prefix(token_ids))
        except Exception as error:
            self._break_down(error)

    def _open(self, text: Text, token_ids: list[int], prefix_hash: int) -> None:
        with self._lock:
            if text.sequence_id is not None or not self._rows.has(text):
                return
            self._untold += self._target.messages()
            text.sequence_id = self._target.open(time.monotonic(), token_ids, prefix_hash)
            text.told = len(token_ids)
            self._untold += self._target.messages()
        self._send()

    def _send(self) -> None:
        with self._lock:
            untold, self._untold = self._untold, []
        if untold:
            send_drafts(untold, self._pool.send, self._pool.suspect)

    def _break_down(self, error: BaseException) -> None:
        """A defect left the state inconsistent: draft no more. vLLM goes on plainly."""
        with self._lock:
            self._num_joined = 0
            self.counts.failed += 1
            self._news.notify_all()
        _log.critical("a defect ended drafting; vLLM decodes plainly from now on", exc_info=error)
        self._stopping.set()

    # Of `DrafterListener`, in the thread.

    def drafter_joined(self, joined: DrafterJoined) -> None:
        self._take([joined])
        with self._lock:
            self._num_joined += 1

    def drafter_lost(self, name: str) -> None:
        self._take([DrafterLost(time.monotonic(), name)])
        with self._lock:
            self._num_joined = max(0, self._num_joined - 1)

    def proposed(self, name: str, batch: drafting_pb2.ProposalBatch, entries: int) -> int:
        """A drafter's message. Drops what breaks the contract; returns how many proposals did."""
        totals = self._target.totals
        before = totals.malformed_proposals
        read = read_proposals(
            batch, self._speculation_of, vocab_size=self._vocab_size, drafter=name
        )
        totals.dropped_proposals += read.dropped
        self._take(draft_events(time.monotonic(), name, batch, read, entries))
        return totals.malformed_proposals - before

    def declined(self, name: str, sequence_id: int, reason: str, *, for_good: bool) -> None:
        _log.info("drafter %s declines sequence %d: %s", name, sequence_id, reason)
        self._take([DraftDeclined(time.monotonic(), name, sequence_id, for_good=for_good)])

    def _speculation_of(self, sequence_id: int) -> Speculation | None:
        return self._speculation if self._target.has(sequence_id) else None

    def _take(self, events: Sequence[DraftEvent]) -> None:
        """Take in what a drafter did, and tell drafters what follows."""
        try:
            with self._lock:
                for event in events:
                    self._untold += self._target.handle(event)
                self._news.notify_all()
            self._send()
        except Exception as error:
            self._break_down(error)
