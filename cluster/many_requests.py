"""The requests of one GenerateMany stream: each a generation, all answered by one writer."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import grpc

from cluster.driver import Driver
from cluster.generation import Generation
from paceline.channel import MAX_REQUEST_BYTES
from paceline.errors import (
    InternalError,
    InvalidRequestError,
    PacelineError,
    PromptTooLongError,
)
from paceline.generation import Chunk, GenerateEvent, Started
from paceline.inference_wire import event_to_wire, failure_to_wire, fill_response
from paceline.request_wire import request_from_wire
from paceline.status import MAX_DETAILS_BYTES
from paceline.v1 import inference_pb2
from workers.server import unexpected

USUAL_BYTES = 1 << 20
"""Of a message, all answers in it together, unless a single answer has more."""

_Answer = tuple[int, GenerateEvent | PacelineError, int]
"""The request's number, what it is told, and how many bytes that takes at most."""


class ManyRequests:
    """One stream's. What is told between two writes goes out in one message."""

    def __init__(self, driver: Driver, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        self._driver = driver
        self._context = context
        self._begun: dict[int, asyncio.Task[None]] = {}
        self._generations: dict[int, Generation] = {}
        self._answers: list[_Answer] = []
        self._told = asyncio.Event()
        self._ended = False

    async def serve(self, requests: AsyncIterator[inference_pb2.GenerateManyRequest]) -> None:
        """Until the caller ends the stream, which ends all of its requests.

        Raises InvalidRequestError for a message that makes no sense.
        """
        writer = asyncio.create_task(self._write())
        reader = asyncio.create_task(self._read(requests))
        try:
            await asyncio.wait((writer, reader), return_when=asyncio.FIRST_COMPLETED)
            self._end()
            # gRPC sends no status beside a write: the caller would wait for it for ever.
            await writer
            if reader.done():
                reader.result()
        finally:
            self._end()
            writer.cancel()
            reader.cancel()

    def _end(self) -> None:
        """Of all requests; what is being written is the last answer."""
        while self._begun:
            self._cancel(next(iter(self._begun)))
        self._ended = True
        self._told.set()

    async def _read(self, requests: AsyncIterator[inference_pb2.GenerateManyRequest]) -> None:
        async for message in requests:
            number = message.number
            match message.WhichOneof("message"):
                case "begin" if number not in self._begun:
                    self._begun[number] = asyncio.create_task(self._begin(number, message.begin))
                case "begin":
                    raise InvalidRequestError(
                        "number", f"a request runs under {number}; choose another"
                    )
                case "cancel":
                    self._cancel(number)
                case _:
                    raise InvalidRequestError("message", "expected begin or cancel, got neither")

    async def _begin(self, number: int, request: inference_pb2.GenerateRequest) -> None:
        request.request_id = request.request_id or uuid.uuid4().hex
        try:
            generation = await self._driver.submit(*request_from_wire(request))
        except PacelineError as error:
            self._tell(number, error)
            return
        except Exception:  # else its caller would wait for ever
            self._tell(number, unexpected(request.request_id))
            return
        self._generations[number] = generation
        generation.pass_to(partial(self._tell, number))

    def _cancel(self, number: int) -> None:
        begun = self._begun.pop(number, None)
        if begun is not None:
            begun.cancel()
        generation = self._generations.pop(number, None)
        if generation is not None:
            generation.cancel()

    def _tell(self, number: int, answer: GenerateEvent | PacelineError) -> None:
        if number not in self._begun:
            return  # It was cancelled.
        most = _most_bytes(answer)
        if most > MAX_REQUEST_BYTES and (refusal := _refusal_of(answer)) is not None:
            # gRPC would not send it, and would end the stream of all.
            generation = self._generations[number]
            self._tell(number, refusal)
            generation.cancel()
            return
        if not isinstance(answer, Started | Chunk):
            del self._begun[number]
            self._generations.pop(number, None)
        self._answers.append((number, answer, most))
        self._told.set()

    async def _write(self) -> None:
        while not self._ended:
            await self._told.wait()
            self._told.clear()
            answers, self._answers = self._answers, []
            begin = 0
            while begin < len(answers) and not self._ended:
                end = _end_of_message(answers, begin)
                await self._context.write(_message_of(answers[begin:end]))
                begin = end


def _end_of_message(answers: list[_Answer], begin: int) -> int:
    room = USUAL_BYTES
    for index in range(begin, len(answers)):
        room -= answers[index][2]
        if room < 0:
            return max(index, begin + 1)
    return len(answers)


def _most_bytes(answer: GenerateEvent | PacelineError) -> int:
    """An upper bound that is quickly told."""
    if isinstance(answer, Chunk):
        # A token: its id, its origin, the length of its piece. A character is in text and pieces.
        return 64 + 16 * len(answer.token_ids) + 8 * len(answer.text)
    if isinstance(answer, Started):
        return 1024 + 5 * len(answer.prompt_token_ids)
    return 2 * MAX_DETAILS_BYTES


def _refusal_of(answer: GenerateEvent | PacelineError) -> PacelineError | None:
    """What is told in place of an answer that no message can hold; None: one can."""
    if isinstance(answer, PacelineError):
        return None
    size = event_to_wire(answer).ByteSize()
    if size <= MAX_REQUEST_BYTES:
        return None
    most = f"an answer may have {MAX_REQUEST_BYTES:,} bytes on the wire, this one has {size:,}"
    if isinstance(answer, Started):
        return PromptTooLongError("prompt", f"{most}, since it repeats the prompt; shorten it")
    return InternalError(most)


def _message_of(answers: list[_Answer]) -> inference_pb2.GenerateManyResponse:
    message = inference_pb2.GenerateManyResponse()
    for number, answer, _ in answers:
        numbered = message.responses.add()
        numbered.number = number
        if isinstance(answer, PacelineError):
            numbered.failed.CopyFrom(failure_to_wire(answer))
        else:
            fill_response(numbered.response, answer)
    return message
