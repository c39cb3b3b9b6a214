"""One stream for all requests of a client, and a server that breaks the contract on it.

Each time, a bystander begins before the fault, runs through it, and ends as it should.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from paceline import (
    AsyncClient,
    Chunk,
    GenerateEvent,
    InternalError,
    OverloadedError,
    PacelineError,
    ProtocolError,
    UnavailableError,
)
from paceline.channel import MAX_MESSAGE_BYTES
from paceline.shared_stream import MAX_UNREAD_BYTES
from paceline.v1 import inference_pb2
from paceline.wire.answers import event_to_wire
from tests.paceline.scripted import EVENTS

pytestmark = pytest.mark.usefixtures("sent_once")

Answer = inference_pb2.GenerateManyResponse
STARTED, CHUNK, LAST_CHUNK, FINISHED = (event_to_wire(event) for event in EVENTS)
END = object()
"""In place of an answer: the server ends the stream in good order."""


def answer(number: int, *responses: inference_pb2.GenerateResponse) -> Answer:
    message = Answer()
    for response in responses:
        message.responses.add(number=number, response=response)
    return message


def failed(number: int, code: int) -> Answer:
    message = Answer()
    message.responses.add(number=number, failed=inference_pb2.RequestFailed(code=code))
    return message


def nothing(number: int) -> Answer:
    message = Answer()
    message.responses.add(number=number)
    return message


def far_too_much(number: int) -> Answer:
    chunk = inference_pb2.Chunk(text="x" * MAX_MESSAGE_BYTES)
    return answer(number, inference_pb2.GenerateResponse(chunk=chunk))


def of_others(number: int) -> Answer:
    message = Answer()
    for other in (0, 1 << 40, number + 1):
        message.responses.add(number=other, response=CHUNK)
        message.responses.add(number=other, failed=inference_pb2.RequestFailed(code=13))
    message.responses.add(number=number, failed=inference_pb2.RequestFailed(code=14))
    return message


Wrong = Callable[[int], Any]
WRONG: dict[str, Wrong] = {
    "a chunk before started": lambda number: answer(number, CHUNK),
    "finished before started": lambda number: answer(number, FINISHED),
    "started twice": lambda number: answer(number, STARTED, STARTED),
    "a chunk twice": lambda number: answer(number, STARTED, CHUNK, CHUNK),
    "a chunk left out": lambda number: answer(number, STARTED, LAST_CHUNK),
    "an answer without a kind": lambda number: answer(number, inference_pb2.GenerateResponse()),
    "an answer without a message": nothing,
    "a failure with code OK": lambda number: failed(number, 0),
    "a failure with a code that none has": lambda number: failed(number, 4_000_000_000),
    "answers to requests that nobody sent": of_others,
    "the end of the stream": lambda number: END,
    "a message beyond any limit": far_too_much,
    "bytes that are no message": lambda number: b"\xff" * 40,
}


class Hostile:
    """Answers prompts that are keys of `WRONG` with these answers, and "flood" without end.

    It begins to answer any other prompt, and ends these answers at "release".
    """

    def __init__(self) -> None:
        self.cancelled: set[int] = set()
        self.flooded = 0

    def generate_many(self, requests: Iterator[Any], context: Any) -> Iterator[Any]:
        begun: list[int] = []
        for message in requests:
            number = message.number
            if message.HasField("cancel"):
                self.cancelled.add(number)
                continue
            prompt = message.begin.prompt
            if prompt == "flood":
                yield answer(number, STARTED)
                yield from self._flood(number)
                yield answer(number, FINISHED)
            elif prompt == "release":
                yield answer(number, STARTED, FINISHED)
                for one in begun:
                    yield answer(one, LAST_CHUNK, FINISHED)
            elif prompt in WRONG:
                wrong = WRONG[prompt](number)
                if wrong is END:
                    return
                yield wrong
            else:
                begun.append(number)
                yield answer(number, STARTED, CHUNK)

    def _flood(self, number: int) -> Iterator[Answer]:
        """Four times the amount that a caller may leave unread."""
        text = "x" * 100_000
        for index in range(4 * MAX_UNREAD_BYTES // len(text)):
            chunk = Chunk(index, (7,), ("target",), text, (text,))
            yield answer(number, event_to_wire(chunk))
            self.flooded += 1


@asynccontextmanager
async def served(hostile: Hostile) -> AsyncIterator[AsyncClient]:
    service = "paceline.v1.InferenceService"
    handler = grpc.stream_stream_rpc_method_handler(
        hostile.generate_many,
        request_deserializer=inference_pb2.GenerateManyRequest.FromString,
        response_serializer=lambda one: one if isinstance(one, bytes) else one.SerializeToString(),
    )
    server = grpc.server(
        ThreadPoolExecutor(4), options=[("grpc.max_send_message_length", 4 * MAX_MESSAGE_BYTES)]
    )
    server.add_generic_rpc_handlers(
        [grpc.method_handlers_generic_handler(service, {"GenerateMany": handler})]
    )
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        async with asyncio.timeout(240), AsyncClient(f"127.0.0.1:{port}") as client:
            yield client
    finally:
        server.stop(None).wait()


async def begun(client: AsyncClient) -> AsyncIterator[GenerateEvent]:
    """A request that has its first answers."""
    stream = client.stream("bystander")
    assert [await anext(stream), await anext(stream)] == list(EVENTS[:2])
    return stream


async def rest(stream: AsyncIterator[GenerateEvent]) -> list[GenerateEvent]:
    return [event async for event in stream]


async def read_into(read: list[GenerateEvent], stream: AsyncIterator[GenerateEvent]) -> None:
    """Read a stream into `read`, including what comes before an error."""
    async for event in stream:
        read.append(event)


ALONE = {
    "a chunk before started": (ProtocolError, "expected started as the first answer"),
    "finished before started": (ProtocolError, "expected started as the first answer"),
    "started twice": (ProtocolError, "expected chunk or finished .*, got started after 0 tokens"),
    "a chunk twice": (ProtocolError, "expected token 2 next .*, got token 0 after 2 tokens"),
    "a chunk left out": (ProtocolError, "expected token 0 next .*, got token 2 after 0 tokens"),
    "an answer without a kind": (ProtocolError, "expected started as the first answer"),
    "an answer without a message": (ProtocolError, "expected started as the first answer"),
    "a failure with code OK": (InternalError, "answered OK"),
    "a failure with a code that none has": (InternalError, "answered UNKNOWN"),
    "answers to requests that nobody sent": (UnavailableError, "broke"),
}
ALL: dict[str, tuple[type[PacelineError], str]] = {
    "the end of the stream": (UnavailableError, "ended the stream"),
    "a message beyond any limit": (ProtocolError, "sent more than a client accepts"),
    "bytes that are no message": (ProtocolError, "sent bytes that are not a known message"),
}


def test_each_kind_of_wrong_answer_is_tried() -> None:
    assert ALONE.keys() | ALL.keys() == WRONG.keys()
    assert not ALONE.keys() & ALL.keys()


@pytest.mark.parametrize("prompt", ALONE)
async def test_a_wrong_answer_ends_its_request_alone(prompt: str) -> None:
    kind, said = ALONE[prompt]
    hostile = Hostile()
    async with served(hostile) as client:
        bystander = await begun(client)
        with pytest.raises(kind, match=said):
            await client.generate(prompt)
        await client.generate("release")
        assert await rest(bystander) == list(EVENTS[2:])
        expected = {2} if kind is ProtocolError else set()
        assert hostile.cancelled == expected, "a server that goes on is told to stop, no other"


@pytest.mark.parametrize("prompt", ALL)
async def test_what_ends_the_stream_ends_its_requests_and_no_later_one(prompt: str) -> None:
    kind, said = ALL[prompt]
    async with served(Hostile()) as client:
        waiting = [await begun(client), await begun(client)]
        with pytest.raises(kind, match=said):
            await client.generate(prompt)
        for stream in waiting:
            with pytest.raises(kind, match=said):
                await rest(stream)
        bystander = await begun(client)
        await client.generate("release")
        assert await rest(bystander) == list(EVENTS[2:])


async def test_a_caller_that_does_not_read_loses_its_request_and_harms_no_other() -> None:
    hostile = Hostile()
    async with served(hostile) as client:
        bystander = await begun(client)
        slow = client.stream("flood")
        await anext(slow)
        # This answer comes after the flood, so the flood was taken off the stream.
        await client.generate("release")
        assert await rest(bystander) == list(EVENTS[2:])
        assert hostile.flooded * 100_000 >= 3 * MAX_UNREAD_BYTES
        read: list[GenerateEvent] = []
        with pytest.raises(OverloadedError, match="left 8,388,608 bytes of the answer unread"):
            await read_into(read, slow)
        texts = [event.text for event in read if isinstance(event, Chunk)]
        num_characters = 2 * sum(map(len, texts))  # Each has the same one piece.
        assert MAX_UNREAD_BYTES / 2 < num_characters <= MAX_UNREAD_BYTES
        await client.generate("release")
        assert hostile.cancelled == {2}


async def test_a_caller_that_reads_gets_an_answer_of_any_length() -> None:
    async with served(Hostile()) as client:
        completion = await client.generate("flood")
    assert len(completion.text) > 3 * MAX_UNREAD_BYTES
