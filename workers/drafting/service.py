"""The gRPC service of a drafter (drafting.proto): streams, and the loop that runs passes.

One event loop does everything. Each stream has a task that reads its messages and one that writes
its answers; a single task drafts for all streams. A pass blocks the loop. After it the loop runs
until all messages that have arrived are handled, so that an outcome ends useless work early.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import grpc

from paceline.errors import InternalError, PacelineError
from paceline.limits import MAX_NAME_LENGTH
from paceline.v1 import drafting_pb2, drafting_pb2_grpc, types_pb2
from workers.drafting.desk import (
    QUIET_SECONDS,
    QUIET_SECONDS_OF_MANY,
    DraftingDesk,
    DraftingSession,
)
from workers.drafting.fair_shares import ShareUse
from workers.drafting.wire import PARTY_KEY, apply_request, declined_to_wire, to_responses
from workers.process.handshake import Reception
from workers.process.server import status_code
from workers.process.threads import WorkerClock

SERVICE_NAME = drafting_pb2.DESCRIPTOR.services_by_name["DraftingService"].full_name
CATCH_UP_SECONDS = 0.01
"""Maximum seconds spent on messages between two passes, so that an endless flow of messages cannot
stop drafting.
"""
HAND_OVER_SECONDS = 0.001
"""Maximum seconds between two passes in which answers are handed to gRPC, since it can take none
during a pass. An answer that is still in the outbox then leaves one pass later.
"""

MAX_STREAMS = 256
"""Open streams of a drafter; further ones are refused."""

MAX_UNREAD = 10_000
"""Answers that a driver may leave unread; then its stream is ended. Drivers allow drafters as many
messages."""

HANDLING_SECONDS = 0.005
"""A stream whose messages took this long since the last pass is read on after the next pass, while
other streams have sequences: else a flood of messages would delay their drafts."""

BREATH_SECONDS = 0.0005
"""Seconds between two slices of learning in which messages are handled."""

MOST_FAILURES = 3
"""Number of failed passes in a row after which the process ends. The drafter has then lost its
device, or has state that makes every pass fail.
"""

_Context = grpc.aio.ServicerContext[Any, Any]
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Stream:
    """A stream's answers in order, the task that reads the stream, and the task of its call.

    An error in `outbox` aborts the stream; None ends it. `handled`: seconds that its messages took
    since the last pass.
    """

    outbox: asyncio.Queue[drafting_pb2.DraftResponse | PacelineError | None] = field(
        default_factory=asyncio.Queue
    )
    reader: asyncio.Task[None] | None = None
    call: asyncio.Task[Any] | None = None
    handled: float = 0.0

    def put(self, answer: drafting_pb2.DraftResponse) -> None:
        """Send an answer. End the stream if too many are unread."""
        self.outbox.put_nowait(answer)
        if self.outbox.qsize() > MAX_UNREAD and self.call is not None:
            # A driver that does not read gets no reason either: the call is blocked in its write.
            _log.warning("a driver left %d answers unread; its stream is ended", MAX_UNREAD)
            self.call.cancel()


class Drafter(drafting_pb2_grpc.DraftingServiceServicer):
    """The servicer. It answers UNAVAILABLE until `begin`."""

    def __init__(
        self, clock: WorkerClock | None = None, *, reception: Reception | None = None
    ) -> None:
        self.labels: Mapping[str, str] = {}
        """Where this drafter is."""
        self.reception = reception or Reception("drafter")
        self._desk: DraftingDesk | None = None
        self._clock = clock or WorkerClock()
        self.on_broken: Callable[[str], None] | None = None
        """Called with the reason when this process cannot work any more and should end."""
        self._failures = 0
        self._streams: dict[DraftingSession, _Stream] = {}
        self._woken = asyncio.Event()
        self._passed = asyncio.Event()
        # The number of handled messages, now and when messages were last counted between passes.
        self._handled = self._seen = 0
        self._drafting: asyncio.Task[None] | None = None

    def add_to(self, server: grpc.aio.Server) -> tuple[str]:
        drafting_pb2_grpc.add_DraftingServiceServicer_to_server(self, server)
        return (SERVICE_NAME,)

    def begin(self, desk: DraftingDesk) -> None:
        self._desk = desk
        self._drafting = asyncio.create_task(self._draft(desk))

    def uses(self) -> list[ShareUse]:
        """What each party that has a stream uses."""
        return [] if self._desk is None else self._desk.shares.uses

    async def end(self) -> None:
        if self._drafting is not None:
            self._drafting.cancel()
            await asyncio.gather(self._drafting, return_exceptions=True)

    async def DescribeDrafter(
        self, request: drafting_pb2.DescribeDrafterRequest, context: _Context
    ) -> drafting_pb2.DescribeDrafterResponse:
        if request.HasField("hello"):
            self.reception.check(request.hello, context.peer())
        info = (await self._loaded(context)).info
        return drafting_pb2.DescribeDrafterResponse(
            kind=info.kind,
            model=info.model,
            vocab_size=info.vocab_size,
            vocabulary_digest=info.vocabulary_digest,
            max_position=info.max_position,
            pid=os.getpid(),
            rules=sorted(info.rules),
            wants_top_tokens=info.wants_top_tokens,
            labels=self.labels,
            version=self.reception.version,
            life=self.reception.life,
        )

    # It writes to the context instead of yielding. A generator that is cancelled at a yield is
    # closed only when it is garbage-collected, and until then its sequences would hold memory.
    async def Draft(  # type: ignore[override]
        self, request_iterator: AsyncIterator[drafting_pb2.DraftRequest], context: _Context
    ) -> None:
        desk = await self._loaded(context)
        messages, peer = aiter(request_iterator), context.peer()
        hello = await self.reception.hear(_first_of(messages), peer)
        if len(self._streams) >= MAX_STREAMS:
            why = f"{MAX_STREAMS} streams of drivers are open, the most that this drafter takes"
            await context.abort(grpc.StatusCode.UNAVAILABLE, why)
        session = desk.open_session(_party_of(context), driver=hello.driver)
        stream = _Stream(call=asyncio.current_task())
        try:
            with self.reception.entered(hello, partial(self._end, desk, session, stream), peer):
                self._streams[session] = stream
                await context.send_initial_metadata(self.reception.welcome)
                stream.reader = asyncio.create_task(self._read(messages, session, stream))
                while (answer := await stream.outbox.get()) is not None:
                    if isinstance(answer, PacelineError):
                        await context.abort(status_code(answer), str(answer))
                    await context.write(answer)
        finally:
            if stream.reader is not None:
                stream.reader.cancel()
            self._streams.pop(session, None)
            desk.close_session(session)

    async def _loaded(self, context: _Context) -> DraftingDesk:
        if self._desk is None:
            await context.abort(
                grpc.StatusCode.UNAVAILABLE, "the drafter is still being loaded; try again"
            )
        assert self._desk is not None
        return self._desk

    async def _read(
        self,
        requests: AsyncIterator[drafting_pb2.DraftRequest],
        session: DraftingSession,
        stream: _Stream,
    ) -> None:
        """Handle a stream's messages until it ends. Then end its answers, with an error if any."""
        outbox = stream.outbox
        desk = self._desk
        assert desk is not None
        try:
            async for request in requests:
                began = time.perf_counter()
                for declined in apply_request(session, request):
                    stream.put(drafting_pb2.DraftResponse(declined=declined))
                self._tell_taken_back(desk)
                seconds = time.perf_counter() - began
                stream.handled += seconds
                desk.shares.spend(session.share, 1000 * seconds)
                session.handled(self._clock.now())
                self._handled += 1
                self._woken.set()
                while stream.handled > HANDLING_SECONDS and desk.shares.contended and desk.has_work:
                    await self._passed.wait()
        except PacelineError as error:
            outbox.put_nowait(error)
        except Exception as error:
            _log.exception("handling a driver's message failed; its stream is ended")
            outbox.put_nowait(InternalError(f"handling a message failed: {error!r}"))
        else:
            outbox.put_nowait(None)

    async def _draft(self, desk: DraftingDesk) -> None:
        """Run passes. A failed pass ends all streams; MOST_FAILURES in a row end the drafter."""
        reason = ""
        while self._failures < MOST_FAILURES:
            try:
                await self._draft_until_it_fails(desk)
            except Exception as error:
                self._failures += 1
                _log.exception("drafting failed; all streams are ended")
                self._end_streams(desk, InternalError(f"drafting failed: {error!r}"))
                reason = f"{MOST_FAILURES} drafting passes in a row failed, the last with {error!r}"
        _log.critical("%s; this drafter cannot work any more", reason)
        if self.on_broken is not None:
            self.on_broken(reason)

    def _end_streams(self, desk: DraftingDesk, error: PacelineError) -> None:
        """Forget all sequences, stop reading, and send each stream the error."""
        self._woken.clear()
        for session, stream in self._streams.items():
            self._end(desk, session, stream, error)

    def _end(
        self, desk: DraftingDesk, session: DraftingSession, stream: _Stream, error: PacelineError
    ) -> None:
        """Forget a stream's sequences, stop reading it, and send it the error."""
        if stream.reader is not None:
            stream.reader.cancel()
        stream.outbox.put_nowait(error)
        try:
            desk.close_session(session)
        except Exception:
            _log.exception("a sequence could not be closed properly")

    async def _draft_until_it_fails(self, desk: DraftingDesk) -> None:
        while True:
            if not self._woken.is_set() and desk.learn():
                await self._rest(self._clock.now() + BREATH_SECONDS)
            await self._woken.wait()
            self._woken.clear()
            await self._catch_up(desk)
            while desk.has_work:
                if (until := desk.hold_until(self._clock.now())) is not None:
                    await self._rest(until)
                else:
                    self._run_pass(desk)
                    self._read_on()
                    self._failures = 0
                await self._catch_up(desk)
            self._read_on()

    async def _rest(self, until: float) -> None:
        """Return when a message comes, but at time `until` of the worker's clock at the latest."""
        self._woken.clear()
        seconds = max(0.0, until - self._clock.now())
        alarm = asyncio.get_running_loop().call_later(seconds, self._woken.set)
        await self._woken.wait()
        alarm.cancel()

    def _run_pass(self, desk: DraftingDesk) -> None:
        begin = self._clock.now()
        news = desk.run_pass()
        pass_seconds = self._clock.now() - begin
        desk.pass_took(1000 * pass_seconds)
        shares = desk.shares.num_used
        for item in news:
            for answer in to_responses(
                item, pass_seconds, overrun_seconds=self._clock.overrun_seconds, shares=shares
            ):
                self._streams[item.session].put(answer)
        self._tell_taken_back(desk)

    def _read_on(self) -> None:
        """Let streams be read on that wait for a pass (HANDLING_SECONDS)."""
        for stream in self._streams.values():
            stream.handled = 0.0
        self._passed.set()
        self._passed = asyncio.Event()

    def _tell_taken_back(self, desk: DraftingDesk) -> None:
        """Tell drivers which of their sequences were closed for the sake of other drivers."""
        for session, declined in desk.taken_back():
            if (stream := self._streams.get(session)) is not None:
                stream.put(drafting_pb2.DraftResponse(declined=declined_to_wire(declined)))

    async def _catch_up(self, desk: DraftingDesk) -> None:
        """Let answers go out, and let messages that have arrived be handled.

        Two turns of the loop start the writes and resume the readers. A stream that is still busy
        with its last answer takes a few more turns. If messages were handled since the last call,
        more may be waiting inside gRPC: continue until none came for QUIET_SECONDS, but at most
        CATCH_UP_SECONDS.
        """
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        hand_over_until = time.perf_counter() + HAND_OVER_SECONDS
        while self._has_answers and time.perf_counter() < hand_over_until:
            await asyncio.sleep(0)
        quiet = QUIET_SECONDS if desk.num_open <= 1 else QUIET_SECONDS_OF_MANY
        end = time.perf_counter() + CATCH_UP_SECONDS
        while self._handled != self._seen and time.perf_counter() < end:
            self._seen = self._handled
            quiet_at = time.perf_counter() + quiet
            while self._handled == self._seen and time.perf_counter() < quiet_at:
                await asyncio.sleep(0)

    @property
    def _has_answers(self) -> bool:
        return any(not stream.outbox.empty() for stream in self._streams.values())


async def _first_of(
    messages: AsyncIterator[drafting_pb2.DraftRequest],
) -> tuple[str, types_pb2.Hello | None]:
    """What the first message of a stream is, and its hello, if it is one."""
    message = await anext(messages, None)
    if message is None:
        return "the end of the stream", None
    kind = message.WhichOneof("message")
    return kind or "an empty message", message.hello if kind == "hello" else None


def _party_of(context: _Context) -> str:
    """The name that the driver gave as its party's; "": none."""
    for key, value in context.invocation_metadata() or ():
        if key == PARTY_KEY and isinstance(value, str):
            return value[:MAX_NAME_LENGTH]
    return ""
