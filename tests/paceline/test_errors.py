"""The error tree: its exports, and that every status of a server becomes one of its errors."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import grpc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import paceline
from paceline import (
    AsyncClient,
    Client,
    DeadlineError,
    InternalError,
    InvalidRequestError,
    OverloadedError,
    PacelineError,
    PermissionDeniedError,
    PromptTooLongError,
    ProtocolError,
    RateLimitedError,
    UnauthenticatedError,
    UnavailableError,
    WrongServerError,
    errors,
)
from paceline.errors import outward
from paceline.v1 import inference_pb2, inference_pb2_grpc
from paceline.wire.answers import failure_from_wire, failure_to_wire

pytestmark = pytest.mark.usefixtures("sent_once")

PUBLIC = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, PacelineError)
}
FEW_BYTES = 2000
"""Bytes of details and metadata together. gRPC refuses headers from 8 KB on, some at random."""


def made(kind: type[PacelineError]) -> PacelineError:
    return kind("seed", "a reason") if issubclass(kind, InvalidRequestError) else kind("a reason")


def test_every_error_is_exported() -> None:
    assert len(PUBLIC) >= 13
    assert PUBLIC.keys() <= set(paceline.__all__)
    assert all(getattr(paceline, name) is kind for name, kind in PUBLIC.items())


@pytest.mark.parametrize("kind", PUBLIC.values(), ids=PUBLIC)
def test_every_error_survives_the_wire_and_pickling(kind: type[PacelineError]) -> None:
    """Pickling matters: a pool of processes hangs on an exception that cannot be pickled."""
    error = made(kind)
    told = failure_from_wire(failure_to_wire(error), "here:1")
    for other in (told, pickle.loads(pickle.dumps(error))):
        assert type(other) is kind
        assert str(other) == str(error)
        assert getattr(other, "field", None) == getattr(error, "field", None)


def test_a_passed_timeout_has_its_row_in_the_table() -> None:
    row = outward(DeadlineError)
    assert (row.grpc_code, row.http_status, row.exit_code) == ("DEADLINE_EXCEEDED", 504, 3)
    assert not issubclass(DeadlineError, UnavailableError | OverloadedError), "callers retry those"


@pytest.mark.parametrize("wait", [None, 0.0, 2.5, 59.999])
def test_the_wait_of_an_overload_survives_the_wire_and_pickling(wait: float | None) -> None:
    error = RateLimitedError("a reason", wait)
    told = failure_from_wire(failure_to_wire(error), "here:1")
    for other in (told, pickle.loads(pickle.dumps(error))):
        assert isinstance(other, RateLimitedError)
        assert other.retry_seconds == wait


@pytest.mark.parametrize("wait", ["", "soon", "-1", "nan", "inf", "3601"])
def test_a_wait_that_makes_no_sense_is_not_believed(wait: str) -> None:
    failed = inference_pb2.RequestFailed(
        code=8,
        details="full",
        metadata={"paceline-error": "OverloadedError", "paceline-retry-after": wait},
    )
    told = failure_from_wire(failed, "here:1")
    assert isinstance(told, OverloadedError)
    assert told.retry_seconds is None


@dataclass
class Told:
    """How the server ends a request."""

    code: grpc.StatusCode = grpc.StatusCode.UNKNOWN
    details: str = ""
    metadata: Mapping[str, str | bytes] = field(default_factory=dict)

    def expected(self) -> type[PacelineError]:
        """The error class by the contract of RequestFailed in inference.proto, then by the code."""
        name = self.metadata.get("paceline-error", "")
        if isinstance(name, str) and name in PUBLIC:
            return PUBLIC[name]
        ours = "paceline-error" in self.metadata or "paceline-field" in self.metadata
        match self.code:
            case grpc.StatusCode.INVALID_ARGUMENT:
                return InvalidRequestError
            case grpc.StatusCode.UNAUTHENTICATED:
                return UnauthenticatedError
            case grpc.StatusCode.PERMISSION_DENIED:
                return PermissionDeniedError
            case grpc.StatusCode.RESOURCE_EXHAUSTED:
                return OverloadedError
            case grpc.StatusCode.UNAVAILABLE | grpc.StatusCode.CANCELLED:
                return UnavailableError
            case grpc.StatusCode.DEADLINE_EXCEEDED:
                return DeadlineError
            case grpc.StatusCode.UNIMPLEMENTED if not ours:
                return WrongServerError
            case _:
                return InternalError

    def size(self) -> int:
        pairs = sum(len(key) + len(value) for key, value in self.metadata.items())
        return 3 * len(self.details.encode("utf-8", "replace")) + pairs


class Telling(inference_pb2_grpc.InferenceServiceServicer):
    """Ends each call as `told` says, and a shared stream at its second request.

    With `alone`, it ends each request of a shared stream with `failed` instead.
    """

    def __init__(self) -> None:
        self.told = Told()
        self.alone = False
        self.failed = inference_pb2.RequestFailed()

    def Generate(self, request: Any, context: Any) -> Iterator[inference_pb2.GenerateResponse]:
        self._end(context)
        yield inference_pb2.GenerateResponse()  # Never reached: this makes it a stream.

    def GenerateMany(
        self, request_iterator: Any, context: Any
    ) -> Iterator[inference_pb2.GenerateManyResponse]:
        for message in request_iterator:
            if not self.alone:
                next(request_iterator)  # During a write, gRPC reports only its own status.
                self._end(context)
            answer = inference_pb2.GenerateManyResponse()
            answer.responses.add(number=message.number, failed=self.failed)
            yield answer

    def _end(self, context: Any) -> None:
        context.set_trailing_metadata(tuple(self.told.metadata.items()))
        context.abort(self.told.code, self.told.details)


@contextmanager
def served(servicer: Any) -> Iterator[str]:
    server = grpc.server(ThreadPoolExecutor(4))
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


CODES = st.sampled_from([code for code in grpc.StatusCode if code is not grpc.StatusCode.OK])
ASCII = st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=20)
NAMES = st.sampled_from([*PUBLIC, "Outward", "outward", "dataclass", "__name__", "_TABLE", "New"])
FIELDS = st.sampled_from(["seed", "prompt", "no such field"])
HEADERS = st.fixed_dictionaries(
    {},
    optional={
        "paceline-error": NAMES | ASCII,
        "paceline-field": FIELDS | ASCII,
        "paceline-error-bin": st.binary(max_size=20),
        "grpc-status-details-bin": st.binary(max_size=20),
        "else": ASCII | st.just("x" * 30_000),
    },
)
DETAILS = st.text(max_size=40) | st.sampled_from(["seed: wrong", "Ü" * 3000, "x" * 100_000])
BY_EXAMPLES = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))


def check(told: Told, error: BaseException | None) -> None:
    assert isinstance(error, PacelineError), f"{told} became {error!r}"
    assert str(error)
    if told.size() > FEW_BYTES:
        return  # gRPC itself may refuse it.
    assert type(error) is told.expected(), told
    if isinstance(error, InvalidRequestError):
        assert error.field == (told.metadata.get("paceline-field") or "request")


def test_whatever_a_call_ends_with_is_an_error_of_ours() -> None:
    telling = Telling()

    @BY_EXAMPLES
    @given(CODES, DETAILS, HEADERS)
    def holds(code: grpc.StatusCode, details: str, metadata: dict[str, str | bytes]) -> None:
        telling.told = Told(code, details, metadata)
        error: Exception | None = None
        try:
            client.generate("Say")
        except Exception as caught:
            error = caught
        check(telling.told, error)

    with served(telling) as address, Client(address) as client:
        holds()


async def test_whatever_a_shared_stream_ends_with_is_an_error_of_ours() -> None:
    """It ends all of its requests, and each gets its own error."""
    telling = Telling()
    loop = asyncio.get_running_loop()

    async def ask_twice(client: AsyncClient) -> tuple[Any, Any]:
        asked = (client.generate("Say"), client.generate("Say"))
        return await asyncio.gather(*asked, return_exceptions=True)

    @BY_EXAMPLES
    @given(CODES, DETAILS, HEADERS)
    def holds(code: grpc.StatusCode, details: str, metadata: dict[str, str | bytes]) -> None:
        telling.told = Told(code, details, metadata)
        one, other = asyncio.run_coroutine_threadsafe(ask_twice(client), loop).result(60)
        check(telling.told, one)
        check(telling.told, other)
        assert one is not other

    with served(telling) as address:
        async with AsyncClient(address) as client:
            await asyncio.to_thread(holds)


async def test_whatever_a_request_of_a_shared_stream_ends_with_is_an_error_of_ours() -> None:
    telling = Telling()
    telling.alone = True
    loop = asyncio.get_running_loop()
    numbers = {code.value[0]: code for code in grpc.StatusCode if code is not grpc.StatusCode.OK}
    keys = st.sampled_from(["paceline-error", "paceline-field"]) | st.text(max_size=10)
    metadata_maps = st.dictionaries(keys, NAMES | FIELDS | st.text(max_size=40), max_size=4)

    @BY_EXAMPLES
    @given(st.sampled_from([*numbers]) | st.integers(0, 2**32 - 1), DETAILS, metadata_maps)
    def holds(number: int, details: str, metadata: dict[str, str]) -> None:
        telling.failed = inference_pb2.RequestFailed(
            code=number, details=details, metadata=metadata
        )
        asked = asyncio.run_coroutine_threadsafe(client.generate("Say"), loop)
        error = asked.exception(60)
        told = Told(numbers.get(number, grpc.StatusCode.UNKNOWN), "", metadata)
        check(told, error)

    with served(telling) as address:
        async with AsyncClient(address) as client:
            await asyncio.to_thread(holds)


@pytest.mark.parametrize("name", ["InvalidRequestError", "PromptTooLongError"])
async def test_an_error_of_a_field_without_a_field_is_one_of_the_whole_request(name: str) -> None:
    """It is not a TypeError, which no caller expects."""
    telling = Telling()
    telling.alone = True
    telling.told = Told(grpc.StatusCode.INVALID_ARGUMENT, "wrong", {"paceline-error": name})
    telling.failed = inference_pb2.RequestFailed(
        code=3, details="wrong", metadata={"paceline-error": name}
    )
    with served(telling) as address:
        with Client(address) as client, pytest.raises(PUBLIC[name]) as caught:
            await asyncio.to_thread(client.generate, "Say")
        async with AsyncClient(address) as client_async:
            with pytest.raises(PUBLIC[name]) as caught_async:
                await client_async.generate("Say")
    for one in (caught.value, caught_async.value):
        assert isinstance(one, InvalidRequestError | PromptTooLongError)
        assert (one.field, str(one)) == ("request", "request: wrong")


def no_message(request: Any, context: Any) -> bytes:
    return b"\xff" * 40


async def test_bytes_that_are_no_message_are_an_error_of_ours() -> None:
    """asyncio's gRPC returns None in place of such bytes."""
    handlers = {
        "Generate": grpc.unary_stream_rpc_method_handler(lambda *_: iter([b"\xff" * 40])),
        "Stats": grpc.unary_unary_rpc_method_handler(no_message),
        "DescribeModel": grpc.unary_unary_rpc_method_handler(no_message),
    }
    handler = grpc.method_handlers_generic_handler("paceline.v1.InferenceService", handlers)
    server = grpc.server(ThreadPoolExecutor(4))
    server.add_generic_rpc_handlers([handler])
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    wrong = "sent bytes that are not a known message"
    try:
        with Client(address) as client:
            for call in (client.stats, client.describe, partial(client.generate, "Say")):
                with pytest.raises(ProtocolError, match=wrong):
                    await asyncio.to_thread(call)
        async with AsyncClient(address) as client_async:
            for call_async in (client_async.stats, client_async.describe):
                with pytest.raises(ProtocolError, match=wrong):
                    await call_async()
    finally:
        server.stop(None).wait()
