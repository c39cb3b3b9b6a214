"""The requests of one GenerateMany stream. Each is a generation; one writer answers them all."""

from __future__ import annotations

import asyncio
import uuid
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc

from cluster.driver.admission import Admission
from cluster.driver.generation import Generation
from cluster.driver.steady import Answer
from paceline.channel import MAX_REQUEST_BYTES
from paceline.errors import (
    InternalError,
    InvalidRequestError,
    OverloadedError,
    PacelineError,
    PromptTooLongError,
)
from paceline.generation import Finished, Started
from paceline.status import MAX_DETAILS_BYTES
from paceline.v1 import inference_pb2
from paceline.wire.answers import failure_to_wire, fill_response
from paceline.wire.requests import request_from_wire
from workers.process.server import unexpected
from workers.process.tracing import CALLER

USUAL_BYTES = 256 * 1024
"""Most bytes of a message with several answers. A single answer may have more. gRPC holds one such
message for a caller that does not read."""

MAX_REQUESTS_PER_STREAM = 2048
"""Open requests of a stream. Further ones are refused, each by itself, and the stream goes on. This
is more than a driver takes by default (server.max_waiting)."""

MAX_UNSENT_REFUSALS = 1024
"""Unsent refusals of requests that were never begun. With this many, the caller's messages are not
read until the caller has read some refusals."""


@dataclass(eq=False, slots=True)
class _Numbered:
    """A request of the stream, under the number that the caller gave it.

    `beginning`: the task that begins it; None: it was refused at once. `error`: why it was not
    begun. `queued`: it waits to be sent. `over`: it was cancelled, or its end was sent.
    """

    number: int
    beginning: asyncio.Task[None] | None = None
    generation: Generation | None = None
    error: PacelineError | None = None
    queued: bool = False
    over: bool = False

    @property
    def unread(self) -> Sequence[tuple[Answer, int]]:
        """Answers to send, each with its size (`generation.size_of`)."""
        if self.over:
            return ()
        if self.error is not None:
            return ((self.error, 0),)
        return () if self.generation is None else self.generation.unread

    def end(self) -> None:
        self.over = True
        if self.beginning is not None:
            self.beginning.cancel()
        if self.generation is not None:
            self.generation.cancel()


class ManyRequests:
    """The requests of one stream. Answers that come between two writes share a message."""

    def __init__(self, admission: Admission, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        self._admission = admission
        self._context = context
        self._begun: dict[int, _Numbered] = {}
        """Open requests, by number."""
        self._to_send: deque[_Numbered] = deque()
        self._num_refusals = 0
        """Refusals in `_to_send` of requests that were refused at once."""
        self._told = asyncio.Event()
        self._sent = asyncio.Event()
        self._ended = False

    async def serve(self, requests: AsyncIterator[inference_pb2.GenerateManyRequest]) -> None:
        """Serve until the caller ends the stream, which ends all of its requests.

        Raises InvalidRequestError for a message without meaning.
        """
        writer = asyncio.create_task(self._write())
        reader = asyncio.create_task(self._read(requests))
        try:
            await asyncio.wait((writer, reader), return_when=asyncio.FIRST_COMPLETED)
            self._end()
            # gRPC sends no status during a write, so the caller would wait for it forever.
            await writer
            if reader.done():
                reader.result()
        finally:
            self._end()
            writer.cancel()
            reader.cancel()
            await asyncio.gather(writer, reader, return_exceptions=True)

    def _end(self) -> None:
        """End all requests. An answer that is being written is the last."""
        for one in self._begun.values():
            one.end()
        self._begun.clear()
        self._ended = True
        self._told.set()

    async def _read(self, requests: AsyncIterator[inference_pb2.GenerateManyRequest]) -> None:
        async for message in requests:
            number = message.number
            match message.WhichOneof("message"):
                case "begin" if number in self._begun:
                    raise InvalidRequestError(
                        "number",
                        f"request number {number} is already in use on this stream; choose another",
                    )
                case "begin" if len(self._begun) >= MAX_REQUESTS_PER_STREAM:
                    await self._refuse(number)
                case "begin":
                    CALLER.set(message.traceparent)  # The task begins with what is set here.
                    one = self._begun[number] = _Numbered(number)
                    one.beginning = asyncio.create_task(self._begin(one, message.begin))
                case "cancel" if number in self._begun:
                    self._begun.pop(number).end()
                case "cancel":
                    pass  # It has ended by itself.
                case _:
                    raise InvalidRequestError("message", "expected begin or cancel, got neither")

    async def _refuse(self, number: int) -> None:
        """Refuse a request. First wait until fewer than MAX_UNSENT_REFUSALS wait to be sent."""
        while self._num_refusals >= MAX_UNSENT_REFUSALS:
            self._sent.clear()
            await self._sent.wait()
        self._num_refusals += 1
        error = OverloadedError(
            f"{MAX_REQUESTS_PER_STREAM} requests run on this stream, as many as may "
            "(MAX_REQUESTS_PER_STREAM); wait for one to end, or open another stream"
        )
        self._queue(_Numbered(number, error=error))

    async def _begin(self, one: _Numbered, request: inference_pb2.GenerateRequest) -> None:
        request.request_id = request.request_id or uuid.uuid4().hex
        try:
            one.generation = await self._admission.submit(*request_from_wire(request))
            one.generation.on_told(partial(self._queue, one))
        except PacelineError as error:
            one.error = error
            self._queue(one)
        except Exception:  # Otherwise the caller would wait forever.
            one.error = unexpected(request.request_id)
            self._queue(one)

    def _queue(self, one: _Numbered) -> None:
        if not one.queued:
            one.queued = True
            self._to_send.append(one)
            self._told.set()

    async def _write(self) -> None:
        while not self._ended:
            await self._told.wait()
            self._told.clear()
            while not self._ended:
                message = self._next_message()
                if not message.responses:
                    break
                await self._context.write(message)
                self._sent.set()

    def _next_message(self) -> inference_pb2.GenerateManyResponse:
        """The next answers, in turn, as many as fit into a message. Without answers: none wait."""
        message, room = inference_pb2.GenerateManyResponse(), USUAL_BYTES
        while self._to_send:
            one = self._to_send[0]
            unread = one.unread
            if not unread:
                one.queued = False
                self._to_send.popleft()
                continue
            answer, size = unread[0]
            most_bytes = size or _most_bytes(answer)
            if most_bytes > room and message.responses:
                break
            room -= most_bytes
            if one.error is None and one.generation is not None:
                one.generation.take()
            self._add(message, one, answer, most_bytes)
        return message

    def _add(
        self,
        message: inference_pb2.GenerateManyResponse,
        one: _Numbered,
        answer: Answer,
        most_bytes: int,
    ) -> None:
        """Add an answer. An answer that cannot be sent ends its request with the reason."""
        numbered = message.responses.add()
        numbered.number = one.number
        if not isinstance(answer, PacelineError):
            try:
                fill_response(numbered.response, answer)
                refusal = _refusal_of(answer, numbered) if most_bytes > MAX_REQUEST_BYTES else None
            except Exception:  # It fails this request only.
                assert one.generation is not None
                refusal = unexpected(one.generation.request_id)
            if refusal is None:
                if isinstance(answer, Finished) and one.generation and one.generation.is_done:
                    self._forget(one)
                return
            answer = refusal
        numbered.failed.CopyFrom(failure_to_wire(answer))  # Replaces a response.
        self._forget(one)

    def _forget(self, one: _Numbered) -> None:
        if one.beginning is None:
            self._num_refusals -= 1
        elif self._begun.get(one.number) is one:
            del self._begun[one.number]
        one.over = True
        if one.generation is not None:
            one.generation.cancel()


def _most_bytes(answer: Answer) -> int:
    """An upper bound of the bytes of an answer that is no chunk, cheap to compute."""
    if isinstance(answer, Started):
        return 1024 + 5 * len(answer.prompt_token_ids)
    return 2 * MAX_DETAILS_BYTES


def _refusal_of(answer: Answer, message: inference_pb2.NumberedResponse) -> PacelineError | None:
    """The error to send in place of an answer that no message can hold; None: the answer fits.

    gRPC would not send it, and would end the stream with all requests.
    """
    size = message.ByteSize()
    if size <= MAX_REQUEST_BYTES:
        return None
    most = f"an answer may have {MAX_REQUEST_BYTES:,} bytes on the wire, this one has {size:,}"
    if isinstance(answer, Started):
        return PromptTooLongError("prompt", f"{most}, since it repeats the prompt; shorten it")
    return InternalError(most)
