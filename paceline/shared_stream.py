"""All requests of an `AsyncClient` over one GenerateMany stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from itertools import count
from typing import Any

from paceline.channel import traceparent
from paceline.errors import (
    InternalError,
    OverloadedError,
    PacelineError,
    UnavailableError,
)
from paceline.generation import Finished, GenerateEvent
from paceline.quiet_grpc import grpc
from paceline.retries import Deadline
from paceline.status import error_of, unreadable
from paceline.v1 import inference_pb2, inference_pb2_grpc
from paceline.wire.answers import EventReader, failure_from_wire

CLOSE_SECONDS = 1.0
"""How long `close` waits for the server to end the stream."""

MAX_UNREAD_BYTES = 8 * 1024 * 1024
"""Most bytes of answers to one request, per sample, that its caller has not read. Beyond that the
request ends: if the client stopped reading, the answers to all other requests on the stream would
stop too."""

EVENT_BYTES = 512
"""Approximate memory of an event beyond its bytes on the wire."""


class _Answers:
    """Answers to one request that its caller has not read yet."""

    def __init__(self, address: str, request: inference_pb2.GenerateRequest) -> None:
        self.reader = EventReader(address, request)
        self.unread_bytes = 0
        # MAX_UNREAD_BYTES bounds it. An asyncio.Queue could only bound the number of entries.
        self._waiting: asyncio.Queue[tuple[GenerateEvent | PacelineError, int]] = asyncio.Queue()

    def put(self, answer: GenerateEvent | PacelineError, num_bytes: int = 0) -> None:
        self.unread_bytes += num_bytes
        self._waiting.put_nowait((answer, num_bytes))

    async def next_event(self) -> GenerateEvent:
        """Raises the error with which the request ended."""
        answer, num_bytes = await self._waiting.get()
        self.unread_bytes -= num_bytes
        if isinstance(answer, PacelineError):
            raise answer
        return answer


class SharedStream:
    """One stream to a server. Once it is `broken`, the client opens another."""

    def __init__(self, stub: inference_pb2_grpc.InferenceServiceAsyncStub, address: str) -> None:
        self.broken = False
        self._why_broken: Callable[[], PacelineError]
        self._address = address
        open_call: Any = stub.GenerateMany
        self._call = open_call()
        self._numbers = count(1)
        self._answers: dict[int, _Answers] = {}
        # By the number of the request. It is no longer than the list of running requests: one that
        # ends before it was sent is removed. A separate task sends them, because a cancelled
        # write would end the stream.
        self._unsent: dict[int, inference_pb2.GenerateManyRequest] = {}
        self._something_unsent = asyncio.Event()
        self._tasks = (asyncio.create_task(self._read()), asyncio.create_task(self._write()))

    async def stream(
        self, request: inference_pb2.GenerateRequest, deadline: Deadline
    ) -> AsyncGenerator[GenerateEvent]:
        """The events of a request. Closing the iterator cancels the request; so does the deadline.

        Raises the PacelineError with which the request or the stream ended.
        """
        if self.broken:
            raise self._why_broken()
        number = next(self._numbers)
        answers = self._answers[number] = _Answers(self._address, request)
        begin = inference_pb2.GenerateManyRequest(
            number=number, begin=request, traceparent=traceparent()
        )
        self._send(begin)
        timer = None
        if (seconds := deadline.left()) is not None:
            loop = asyncio.get_running_loop()
            timer = loop.call_later(seconds, lambda: self._end(number, deadline.error()))
        left = answers.reader.num_samples
        try:
            while left:
                event = await answers.next_event()
                yield event
                left -= isinstance(event, Finished)
        finally:
            if timer is not None:
                timer.cancel()
            self._cancel(number)

    async def close(self) -> None:
        """End the stream and its requests. Waits at most CLOSE_SECONDS for the server."""
        self._break(lambda: UnavailableError("the client was closed"))
        await asyncio.wait(self._tasks, timeout=CLOSE_SECONDS)
        self._call.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _send(self, message: inference_pb2.GenerateManyRequest) -> None:
        self._unsent[message.number] = message
        self._something_unsent.set()

    def _cancel(self, number: int) -> None:
        """Forget a request. If it was sent, tell the server to cancel it."""
        if self._answers.pop(number, None) is None or self.broken:
            return  # The request has ended already.
        if self._unsent.pop(number, None) is None:
            cancel = inference_pb2.CancelRequest()
            self._send(inference_pb2.GenerateManyRequest(number=number, cancel=cancel))

    def _end(self, number: int, error: PacelineError) -> None:
        answers = self._answers.get(number)
        if answers is not None:
            answers.put(error)
            self._cancel(number)

    async def _write(self) -> None:
        try:
            while not self.broken:
                await self._something_unsent.wait()
                self._something_unsent.clear()
                while self._unsent:
                    await self._call.write(self._unsent.pop(next(iter(self._unsent))))
            await self._call.done_writing()
        except (grpc.RpcError, asyncio.InvalidStateError):
            pass  # The reading task gets the cause.
        except Exception as error:
            said = f"a request could not be sent to the server at {self._address}: {error!r}"
            self._break(lambda: InternalError(said))

    async def _read(self) -> None:
        try:
            async for message in self._call:
                if message is None:  # gRPC could not decode the message.
                    self._break(lambda: unreadable(self._address))
                    return
                for numbered in message.responses:
                    self._take(numbered)
            self._break(lambda: UnavailableError(f"the server at {self._address} ended the stream"))
        except grpc.RpcError as error:
            status = error  # `error` is gone when the block ends.
            self._break(lambda: error_of(status, self._address))
        except Exception as error:
            said = f"an answer of the server at {self._address} could not be taken: {error!r}"
            self._break(lambda: InternalError(said))
        finally:
            self._break(lambda: UnavailableError("the client's event loop is ending"))
            self._call.cancel()

    def _take(self, numbered: inference_pb2.NumberedResponse) -> None:
        """Hand an answer to its request. Drop it if the request has ended."""
        number = numbered.number
        answers = self._answers.get(number)
        if answers is None:
            return
        if numbered.HasField("failed"):
            del self._answers[number]
            answers.put(failure_from_wire(numbered.failed, self._address))
            return
        try:
            event = answers.reader.read(numbered.response)
        except PacelineError as error:
            self._end(number, error)
            return
        num_bytes = numbered.ByteSize() + EVENT_BYTES
        most = MAX_UNREAD_BYTES * answers.reader.num_samples
        if answers.unread_bytes and answers.unread_bytes + num_bytes > most:
            said = f"the caller left {most:,} bytes of the answer unread; read faster"
            self._end(number, OverloadedError(said))
            return
        answers.put(event, num_bytes)
        if answers.reader.is_over:
            del self._answers[number]

    def _break(self, why: Callable[[], PacelineError]) -> None:
        """End all requests, each with its own error object, and accept no more."""
        if self.broken:
            return
        self.broken, self._why_broken = True, why
        self._unsent.clear()
        self._something_unsent.set()
        for answers in self._answers.values():
            answers.put(why())
        self._answers.clear()
