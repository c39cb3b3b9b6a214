"""What a client does by itself when an answer breaks off or a server is full."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from paceline import (
    AsyncClient,
    Chunk,
    Client,
    Finished,
    GenerateEvent,
    GenerateOptions,
    InternalError,
    InvalidRequestError,
    OverloadedError,
    PacelineError,
    ProtocolError,
    RequestFaultError,
    RequestStats,
    Retries,
    Started,
    UnavailableError,
    WorkerLostError,
)
from paceline.retries import Answering, Deadline
from paceline.status import status_of
from paceline.v1 import inference_pb2, inference_pb2_grpc
from paceline.wire.answers import event_to_wire, failure_to_wire
from paceline.wire.server import description_to_wire
from tests.held_ports import held_port
from tests.paceline.scripted import DESCRIPTION

TOKENS = tuple(range(100, 110))
TEXT = "abcdefghij"
QUICK = Retries(attempts=3, first_seconds=0.001, most_seconds=0.01)
Part = tuple[int, PacelineError | None]
"""How many tokens an attempt brings, and how it ends; None: it is the last one."""
LOST = WorkerLostError("the target went away")


class Breaking(inference_pb2_grpc.InferenceServiceServicer):
    """Answers each attempt by the next of `parts`."""

    def __init__(self) -> None:
        self.parts: list[Part] = []
        self.requests: list[inference_pb2.GenerateRequest] = []
        self.port = 0
        self.may_end = threading.Event()
        """Answers that break off wait for it."""
        self.may_end.set()
        self.breaks_streams = False
        """Whether a shared stream ends together with an attempt, instead of the request alone."""

    def _answer(
        self, request: inference_pb2.GenerateRequest
    ) -> tuple[list[GenerateEvent], PacelineError | None]:
        self.requests.append(request)
        count, error = self.parts.pop(0)
        events: list[GenerateEvent] = [Started("mine", 5, (1, 2))]
        for offset in range(len(request.resume), len(request.resume) + count):
            one = TOKENS[offset : offset + 1]
            events.append(Chunk(offset, one, ("target",), TEXT[offset], (TEXT[offset],)))
        if error is None:
            events.append(Finished("length", RequestStats(1, 0, 0, 1.0, 0.1, 0.1)))
        return events, error

    def Generate(
        self, request: inference_pb2.GenerateRequest, context: Any
    ) -> Iterator[inference_pb2.GenerateResponse]:
        events, error = self._answer(request)
        yield from map(event_to_wire, events)
        if error is not None:
            self.may_end.wait(30)
            _abort(context, error)

    def GenerateMany(
        self, request_iterator: Iterator[inference_pb2.GenerateManyRequest], context: Any
    ) -> Iterator[inference_pb2.GenerateManyResponse]:
        for message in request_iterator:
            if not message.HasField("begin"):
                continue
            events, error = self._answer(message.begin)
            answer = inference_pb2.GenerateManyResponse()
            for event in events:
                answer.responses.add(number=message.number, response=event_to_wire(event))
            if error is not None and not self.breaks_streams:
                answer.responses.add(number=message.number, failed=failure_to_wire(error))
            yield answer
            if error is not None:
                self.may_end.wait(30)
            if error is not None and self.breaks_streams:
                _abort(context, error)

    def DescribeModel(self, request: Any, context: Any) -> inference_pb2.DescribeModelResponse:
        return description_to_wire(DESCRIPTION)


def _abort(context: Any, error: PacelineError) -> None:
    code, details, metadata = status_of(error)
    context.set_trailing_metadata(metadata)
    context.abort(code, details)


@pytest.fixture
def breaking() -> Breaking:
    return Breaking()


def serving(breaking: Breaking, port: int) -> grpc.Server:
    server = grpc.server(ThreadPoolExecutor(4))
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(breaking, server)
    breaking.port = server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    return server


@pytest.fixture
def address(breaking: Breaking) -> Iterator[str]:
    server = serving(breaking, 0)
    yield f"127.0.0.1:{breaking.port}"
    server.stop(None).wait()


Ask = Callable[..., Coroutine[Any, Any, list[GenerateEvent]]]


async def _blocking(address: str, **options: Any) -> list[GenerateEvent]:
    def ask() -> list[GenerateEvent]:
        with Client(address, retries=options.pop("retries", QUICK)) as client:
            return list(client.stream("hello", **options))

    return await asyncio.to_thread(ask)


async def _async(address: str, **options: Any) -> list[GenerateEvent]:
    async with AsyncClient(address, retries=options.pop("retries", QUICK)) as client:
        return [event async for event in client.stream("hello", **options)]


both = pytest.mark.parametrize("ask", [_blocking, _async])


@both
@pytest.mark.parametrize("breaks_streams", [False, True])
async def test_an_answer_that_breaks_off_is_continued(
    address: str, breaking: Breaking, ask: Ask, breaks_streams: bool
) -> None:
    breaking.breaks_streams = breaks_streams
    # Three attempts may follow without a new token. After a new one, three more may.
    breaking.parts = [(3, LOST), (0, LOST), (0, LOST), (4, LOST), (0, LOST), (0, LOST), (3, None)]
    started, *chunks, finished = await ask(address, max_tokens=10, temperature=0.5)
    assert started == Started("mine", 5, (1, 2))
    assert all(isinstance(chunk, Chunk) for chunk in chunks)
    assert [chunk.token_ids for chunk in chunks if isinstance(chunk, Chunk)] == [
        (token_id,) for token_id in TOKENS
    ]
    assert "".join(chunk.text for chunk in chunks if isinstance(chunk, Chunk)) == TEXT
    assert isinstance(finished, Finished)
    first, *others = breaking.requests
    assert (first.prompt, list(first.resume), first.HasField("seed")) == ("hello", [], False)
    assert [len(one.resume) for one in others] == [3, 3, 3, 7, 7, 7]
    for one in others:
        assert tuple(one.resume) == TOKENS[: len(one.resume)]
        assert (tuple(one.prompt_token_ids.token_ids), one.seed) == ((1, 2), 5)
        assert (one.max_tokens, one.sampling.temperature, one.request_id) == (10, 0.5, "mine")


@both
@pytest.mark.parametrize("given", [(), (100, 101)])
async def test_a_caller_resumes_what_broke_off_in_another_process(
    address: str, breaking: Breaking, ask: Ask, given: tuple[int, ...]
) -> None:
    breaking.parts = [(3, LOST), (7 - len(given), None)]
    events = await ask(address, resume=given, seed=5)
    token_ids = [one for event in events if isinstance(event, Chunk) for one in event.token_ids]
    assert tuple(token_ids) == TOKENS[len(given) :]


@both
async def test_it_gives_up(address: str, breaking: Breaking, ask: Ask) -> None:
    breaking.parts = [(2, LOST), *[(0, LOST)] * 4]
    with pytest.raises(WorkerLostError, match="the target went away"):
        await ask(address)
    assert len(breaking.requests) == 4  # The first one brought something new.
    breaking.parts = [(0, LOST)]
    with pytest.raises(WorkerLostError):
        await ask(address, retries=Retries(attempts=0))


NEVER_AGAIN = [
    OverloadedError("the caller left 9 bytes unread"),
    InvalidRequestError("top_p", "expected less"),
    RequestFaultError("the target fails on it"),
    InternalError("a defect"),
    ProtocolError("a broken contract"),
]


@both
@pytest.mark.parametrize("error", NEVER_AGAIN, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("count", [0, 2])
async def test_what_would_come_again_is_raised_at_once(
    address: str, breaking: Breaking, ask: Ask, error: PacelineError, count: int
) -> None:
    breaking.parts = [(count, error)]
    with pytest.raises(type(error)):
        await ask(address)
    assert len(breaking.requests) == 1


@both
async def test_a_full_server_says_when_to_come_back(
    address: str, breaking: Breaking, ask: Ask
) -> None:
    breaking.parts = [(0, OverloadedError("full", retry_seconds=0.3)), (10, None)]
    begin = time.monotonic()
    assert len(await ask(address)) == 12
    assert time.monotonic() - begin >= 0.3


@pytest.mark.timing
@both
async def test_a_timeout_is_for_all_attempts_together(
    address: str, breaking: Breaking, ask: Ask
) -> None:
    breaking.parts = [(0, OverloadedError("full", retry_seconds=60.0))]
    begin = time.monotonic()
    with pytest.raises(OverloadedError) as caught:
        await ask(address, timeout=20.0)
    assert time.monotonic() - begin < 20
    assert caught.value.retry_seconds == 60.0


@pytest.mark.timing
@both
async def test_a_server_that_was_never_there_is_told_at_once(ask: Ask) -> None:
    with held_port() as port:
        begin = time.monotonic()
        with pytest.raises(UnavailableError, match="connection refused"):
            await ask(f"127.0.0.1:{port}", retries=Retries(8, 60.0, 60.0))
        assert time.monotonic() - begin < 30


@both
async def test_a_server_that_is_away_costs_no_attempt(ask: Ask) -> None:
    """It is away for longer than all attempts with their pauses would take."""
    breaking = Breaking()
    breaking.parts = [(3, LOST), (7, None)]
    with held_port() as port:
        address = f"127.0.0.1:{port}"
        server = serving(breaking, port)
        # The server stops within the first pause.
        asking = asyncio.create_task(ask(address, retries=Retries(1, 0.5, 0.5)))
        while not breaking.requests:
            await asyncio.sleep(0.001)
        await asyncio.to_thread(server.stop(None).wait)
        await asyncio.sleep(1.5)
        assert not asking.done()
        server = serving(breaking, port)
        events = await asking
        await asyncio.to_thread(server.stop(None).wait)
    token_ids = [one for event in events if isinstance(event, Chunk) for one in event.token_ids]
    first, last = breaking.requests
    assert (len(first.resume), len(last.resume)) == (0, len(token_ids) - 7)
    assert tuple(token_ids) == TOKENS[: len(token_ids)]


@pytest.mark.timing
@both
async def test_it_gives_up_on_a_server_that_stays_away(ask: Ask) -> None:
    breaking = Breaking()
    breaking.parts = [(3, LOST), (7, None)]
    with held_port() as port:
        server = serving(breaking, port)
        patience = Retries(100, 0.5, 0.5, away_seconds=1.0)
        asking = asyncio.create_task(ask(f"127.0.0.1:{port}", retries=patience))
        while not breaking.requests:
            await asyncio.sleep(0.001)
        await asyncio.to_thread(server.stop(None).wait)
        begin = time.monotonic()
        with pytest.raises(UnavailableError):
            await asking
    assert 0.5 < time.monotonic() - begin < 15


def test_many_attempts_are_no_overflow() -> None:
    answering = Answering("hello", GenerateOptions(), Retries(5000, 0.1, 0.8))
    assert all(answering.pause_after(LOST) <= 0.8 for _ in range(5000))


def test_pauses_grow_and_differ() -> None:
    for _ in range(20):
        answering = Answering("hello", GenerateOptions(), Retries(6, 0.1, 0.8))
        pauses = [answering.pause_after(LOST) for _ in range(6)]
        for pause, longest in zip(pauses, [0.1, 0.2, 0.4, 0.8, 0.8, 0.8], strict=True):
            assert longest / 2 <= pause <= longest
        assert len(set(pauses)) == 6
        with pytest.raises(WorkerLostError):
            answering.pause_after(LOST)
    hurried = Answering("hello", GenerateOptions(), Retries(6, 1.0, 1.0))
    with pytest.raises(WorkerLostError):  # There is no time for another attempt.
        hurried.pause_after(LOST, Deadline("here:1", 0.3))


def test_retries_that_make_no_sense_are_refused() -> None:
    for wrong in (
        {"attempts": -1},
        {"first_seconds": 9.0},
        {"most_seconds": -1.0},
        {"away_seconds": -1.0},
    ):
        with pytest.raises(InvalidRequestError, match="retries: expected"):
            Retries(**wrong)
