"""Parts that the links to targets and drafters share: channels, streams, retries, errors."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Generic, TypeVar

import grpc
from google.protobuf.message import Message

from cluster.driver.meters import WorkerMeter
from paceline.channel import MAX_MESSAGE_BYTES, client_options
from paceline.errors import (
    PacelineError,
    UnavailableError,
    VersionMismatchError,
    WorkerLostError,
)
from paceline.status import ERROR_KEY, error_of
from workers.process.handshake import LIFE_KEY
from workers.process.mutual_tls import WorkerTls, why_refused
from workers.process.threads import Begun

DESCRIBE_SECONDS = 5.0
"""Deadline for a worker's description, connecting included."""
_FIRST_WAIT = 0.1
_LONGEST_WAIT = 0.5
_EXPECTED = (PacelineError, grpc.aio.AioRpcError, asyncio.InvalidStateError)
MessageT = TypeVar("MessageT", bound=Message)
_log = logging.getLogger(__name__)


async def keep_open(
    serve: Callable[[], Coroutine[Any, Any, None]],
    meters: Sequence[WorkerMeter],
    worker: str,
    failed: Callable[[Exception, str], float],
    *,
    is_over: Callable[[], bool] = lambda: False,
) -> None:
    """Connect and serve, again whenever that fails, until cancelled or over.

    `failed` gets each error and its reason, and returns the least seconds until the next try. These
    are 100 ms at first, then doubling, at most 500 ms. A reason is logged when it changes.
    """
    wait, said = _FIRST_WAIT, ""
    while not is_over():
        joins, least = meters[0].joins, 0.0
        try:
            await serve()
        except Exception as error:
            reason = one_line(error)
            if not isinstance(error, _EXPECTED):  # It ends these streams; they are opened again.
                _log.exception("a defect ended the stream to %s", worker)
            for meter in meters:
                meter.trouble = reason
            if reason != said:
                _log.warning("%s is not in use: %s", worker, reason)
                said = reason
            least = failed(error, reason)
        if meters[0].joins > joins:
            wait = _FIRST_WAIT
        await asyncio.sleep(max(wait, least))
        wait = min(2 * wait, _LONGEST_WAIT)


@asynccontextmanager
async def open_channel(
    address: str, tls: WorkerTls | None = None, *, max_receive_bytes: int = MAX_MESSAGE_BYTES
) -> AsyncIterator[grpc.aio.Channel]:
    """A channel to a worker. It is closed at the end, with all its calls.

    `max_receive_bytes`: limit of a message. A larger one is dropped unread and ends its call. If
    one side refuses the other by TLS, the block raises UnavailableError with the reason.
    """
    options = [*client_options(), ("grpc.max_receive_message_length", max_receive_bytes)]
    if tls is None:
        channel = grpc.aio.insecure_channel(address, options=options)
    else:
        channel = tls.channel(address, options)
    try:
        yield channel
    except grpc.aio.AioRpcError as error:
        reason = await why_refused(error, address, tls)
        if reason is not None:
            raise UnavailableError(reason) from error
        raise
    finally:
        await channel.close(None)


async def run_until_one_ends(*parts: Coroutine[Any, Any, None]) -> None:
    """Run all parts. When the first ends, cancel the rest and raise what it raised."""
    tasks = [asyncio.create_task(part) for part in parts]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()


def start_heard(
    part: Coroutine[Any, Any, None], on_defect: Callable[[BaseException], None]
) -> asyncio.Task[None]:
    """Run `part` in a task. If it raises, call `on_defect`; cancelling it is no defect."""

    def hear(task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            on_defect(error)

    task = asyncio.create_task(part)
    task.add_done_callback(hear)
    return task


def open_stream(method: Any, *, metadata: Sequence[tuple[str, str]] = ()) -> Any:
    """Start a bidirectional call and write to it later. (The stub asks for an iterator.)"""
    return method(metadata=tuple(metadata))


async def say_hello(call: Any, message: Message, worker: str) -> None:
    """Write the first message of a stream. Returns once the worker has let the stream in.

    Raises what gRPC raises, with the worker's reason, if it refuses; or WorkerLostError.
    """
    try:
        async with asyncio.timeout(DESCRIBE_SECONDS):
            await call.write(message)
            if LIFE_KEY in dict(await call.initial_metadata() or ()):
                return
            await call.read()  # Raises the reason.
    except TimeoutError:
        raise WorkerLostError(
            f"{worker} did not answer a hello within {DESCRIBE_SECONDS:g} s"
        ) from None
    raise WorkerLostError(f"{worker} did not answer a hello")


def one_line(error: BaseException) -> str:
    """An error in words, for a log and for callers. Unexpected errors show no details."""
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name} {error.details() or ''}".rstrip()
    if isinstance(error, _EXPECTED):
        return str(error) or type(error).__name__
    return "an unexpected error, which the driver's log tells"


@contextmanager
def named_mismatch(worker: str) -> Iterator[None]:
    """Raise VersionMismatchError if `worker` refuses the driver's version."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        metadata: Any = error.trailing_metadata()
        if dict(metadata or ()).get(ERROR_KEY) == VersionMismatchError.__name__:
            raise error_of(error, worker) from error
        raise


class Outbox(Generic[MessageT]):
    """Takes messages without waiting and writes them one after the other.

    `run` is the stream's writer. The reader of the stream may `begin` and `flush` instead of waking
    the writer, which saves turns of the event loop. No other task may, because a cancelled write
    ends the stream.
    """

    def __init__(self, write: Callable[[MessageT], Coroutine[Any, Any, None]]) -> None:
        self._write = write
        # Each message with its size. The size of a message that need not wait is not computed.
        self._messages: deque[tuple[MessageT, int]] = deque()
        self.num_bytes = 0
        """Bytes of the messages that wait behind another."""
        self._woken = asyncio.Event()
        self._writing = False
        self._begun: Begun[None] | None = None

    def __len__(self) -> int:
        return len(self._messages)

    def put(self, message: MessageT) -> None:
        """Append a message. `wake`, `begin` or `flush` must follow."""
        size = message.ByteSize() if self._messages else 0
        self.num_bytes += size
        self._messages.append((message, size))

    def _next(self) -> MessageT:
        message, size = self._messages.popleft()
        self.num_bytes -= size
        return message

    def wake(self) -> None:
        self._woken.set()

    def begin(self) -> None:
        """Hand the first message to gRPC, unless one is being written. `flush` must follow."""
        if not self._writing:
            self._writing = True
            self._begun = Begun(self._write(self._next()))

    async def flush(self) -> None:
        """Write all messages, unless that is being done already."""
        begun, self._begun = self._begun, None
        if self._writing and begun is None:
            return
        self._writing = True
        try:
            if begun is not None:
                await begun
            while self._messages:
                await self._write(self._next())
        finally:
            self._writing = False

    async def run(self) -> None:
        """Write whenever woken, forever."""
        while True:
            await self._woken.wait()
            self._woken.clear()
            await self.flush()
