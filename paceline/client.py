"""The two clients of a Paceline server: `Client` for plain code, `AsyncClient` for asyncio.

    with Client("127.0.0.1:8001") as client:
        print(client.generate("The sea is", max_tokens=32).text)
        for event in client.stream([Message("user", "Tell me of the sea.")]):
            ...

A call takes a `GenerateOptions`, or its fields as keywords, or both; then the keywords win. Every
error is one of `paceline.errors`. Threads may share a `Client`, and tasks of one event loop an
`AsyncClient`.

With `samples=N`, `generate` returns a tuple of N answers, and the events of a stream say which
sample they belong to.

A `timeout` is the time in seconds from the call to the end of its answer, connecting included. For
`stream` it starts when the first event is asked for. The timeout of a call replaces the client's.
When it has passed, the client cancels the request at the server and the call raises DeadlineError.
`key` is an API key of the server; `ca=FILE`, or `tls=True`, has the connection use TLS
(docs/security.md).

A client that was connected once sends a request again by itself when the connection or the server
is lost (`retries`), or when the server is full and says when to come back. It continues an answer
after the last token that it has, so nothing is lost or repeated. Any other error is raised at once.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Sequence
from contextlib import aclosing, closing, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Generic, Self, TypeVar, Unpack, overload

from google.protobuf.message import Message

from paceline.access import Connector, Credentials
from paceline.address import parse_address
from paceline.channel import trace_metadata
from paceline.errors import (
    DeadlineError,
    InvalidRequestError,
    PacelineError,
    UnavailableError,
)
from paceline.generation import (
    CallerInput,
    Completion,
    CompletionBuilder,
    GenerateEvent,
    ModelDescription,
    Stats,
    Tokens,
    Topology,
)
from paceline.options import GenerateOptions, OptionFields, check_option, options_with
from paceline.quiet_grpc import grpc
from paceline.retries import DEFAULT_RETRIES, Answering, Deadline, Retries, checked_seconds
from paceline.shared_stream import SharedStream
from paceline.status import error_of, unreadable
from paceline.v1 import inference_pb2, inference_pb2_grpc
from paceline.wire.answers import EventReader
from paceline.wire.requests import detokenize_to_wire, request_to_wire, tokenize_to_wire
from paceline.wire.server import (
    description_from_wire,
    stats_from_wire,
    tokens_from_wire,
    topology_from_wire,
)

CONNECT_SECONDS = 10.0
"""Default of `connect_timeout`: how long a client tries to connect before its first call."""

UNARY_SECONDS = 10.0
"""Timeout of `stats`, `describe` and `describe_topology` if the client has none."""

_Answer = TypeVar("_Answer")


class _Server:
    """The server as a client sees it: its address, timeouts in seconds, and errors in words."""

    def __init__(
        self,
        address: str,
        credentials: Credentials,
        timeout: float | None,
        connect_timeout: float,
        retries: Retries | None,
    ) -> None:
        self._where = parse_address(address)
        self.address = address
        self._credentials = credentials
        self._timeout = checked_seconds("timeout", timeout)
        self._connect_timeout = (
            checked_seconds("connect_timeout", connect_timeout) or CONNECT_SECONDS
        )
        self._retries = DEFAULT_RETRIES if retries is None else retries
        self.connected = False
        """Whether calls find a connection, as far as the client knows."""
        self.was_connected = False
        """Whether there ever was a connection."""
        self.closed = False
        """Whether the client was closed."""

    def deadline(self, timeout: float | None) -> Deadline:
        return Deadline(self.address, checked_seconds("timeout", timeout) or self._timeout)

    def answering(self, generate_input: CallerInput, options: GenerateOptions) -> Answering:
        return Answering(generate_input, options, self._retries)

    def pause_after(self, error: PacelineError, answering: Answering, deadline: Deadline) -> float:
        """Seconds to wait before the next attempt. Raises `error` if there is to be none."""
        if self.closed or not self.was_connected:
            raise error
        return answering.pause_after(error, deadline)

    @contextmanager
    def own_errors(self, deadline: Deadline) -> Iterator[None]:
        try:
            yield
        except grpc.RpcError as error:
            raised = error_of(error, self.address)
            if isinstance(raised, UnavailableError):
                # The next call checks whether there is still a connection.
                self.connected = False
            if isinstance(raised, DeadlineError) and deadline.left() is not None:
                raised = deadline.error()
            raise raised from error

    def check_open(self) -> None:
        if self.closed:
            raise UnavailableError("this client was closed; make another one")

    def _unreachable(self, obstacle: str) -> UnavailableError:
        return UnavailableError(f"no server could be reached at {self.address}: {obstacle}")

    def raise_obstacle(self, seconds: float) -> None:
        """Raise UnavailableError if no connection can be made, however long the client tries."""
        obstacle = self._credentials.obstacle(self._where, seconds)
        if obstacle is not None:
            raise self._unreachable(obstacle)

    def patience(self, deadline: Deadline) -> tuple[float, PacelineError]:
        """How many seconds to try to connect, and the error to raise after that."""
        left = deadline.left()
        if left is not None and left < self._connect_timeout:
            return left, deadline.error()
        return self._connect_timeout, self._unreachable(
            f"no answer within {self._connect_timeout:g} s; check the address, whether the server "
            "is up, and whether a firewall is in between"
        )


def _asked(
    options: GenerateOptions | None,
    samples: int | None,
    fields: OptionFields,
    *,
    whole: bool = False,
) -> GenerateOptions:
    """The options of a call, checked as far as the client itself uses them.

    `whole`: the call returns whole answers, so its own parameter decides whether there are several.
    """
    asked = options_with(options, fields)
    if samples is not None:
        asked = replace(asked, samples=samples)
    elif whole and asked.samples is not None:
        why = "expected as a keyword of `generate`, which then returns a tuple of answers"
        raise InvalidRequestError("samples", why)
    if asked.samples is not None:
        if not isinstance(asked.samples, int):
            raise InvalidRequestError("samples", f"expected an integer, got {asked.samples!r:.200}")
        check_option("samples", asked.samples)
    return asked


@dataclass(frozen=True, slots=True)
class _Question(Generic[_Answer]):
    """A call with one answer. `rpc`: its name. `read` reads the message of the answer.

    `is_quick`: it has UNARY_SECONDS if neither the call nor the client has a timeout.
    """

    rpc: str
    request: Message
    read: Callable[[Any], _Answer]
    is_quick: bool = False


_STATS = _Question("Stats", inference_pb2.StatsRequest(), stats_from_wire, is_quick=True)
_DESCRIBE = _Question(
    "DescribeModel", inference_pb2.DescribeModelRequest(), description_from_wire, is_quick=True
)
_DESCRIBE_TOPOLOGY = _Question(
    "DescribeTopology", inference_pb2.DescribeTopologyRequest(), topology_from_wire, is_quick=True
)


def _tokenize(
    given: CallerInput, add_special_tokens: bool | None, return_token_strings: bool
) -> _Question[Tokens]:
    request = tokenize_to_wire(
        given, add_special_tokens=add_special_tokens, return_token_strings=return_token_strings
    )
    return _Question("Tokenize", request, tokens_from_wire)


def _detokenize(token_ids: Sequence[int]) -> _Question[str]:
    return _Question("Detokenize", detokenize_to_wire(token_ids), lambda answer: str(answer.text))


class Client:
    """Calls a server and blocks until it answers.

    `timeout` applies to each call that has none of its own; None means no limit. The client sends
    nothing before the first call.
    """

    def __init__(
        self,
        address: str,
        *,
        timeout: float | None = None,
        connect_timeout: float = CONNECT_SECONDS,
        retries: Retries | None = None,
        key: str | None = None,
        ca: str | os.PathLike[str] | None = None,
        tls: bool = False,
    ) -> None:
        credentials = Credentials.of(key, ca, tls)
        self._server = _Server(address, credentials, timeout, connect_timeout, retries)
        self.address = address
        self._channel = credentials.channel(address)
        self._stub = credentials.stub(inference_pb2_grpc.InferenceServiceStub, self._channel)

    @overload
    def generate(
        self,
        generate_input: CallerInput,
        options: GenerateOptions | None = None,
        *,
        timeout: float | None = None,
        samples: None = None,
        **fields: Unpack[OptionFields],
    ) -> Completion: ...

    @overload
    def generate(
        self,
        generate_input: CallerInput,
        options: GenerateOptions | None = None,
        *,
        timeout: float | None = None,
        samples: int,
        **fields: Unpack[OptionFields],
    ) -> tuple[Completion, ...]: ...

    def generate(
        self,
        generate_input: CallerInput,
        options: GenerateOptions | None = None,
        *,
        timeout: float | None = None,
        samples: int | None = None,
        **fields: Unpack[OptionFields],
    ) -> Completion | tuple[Completion, ...]:
        """The whole answer. Keywords are fields of GenerateOptions.

        With `samples`: that many answers, in order.
        """
        asked = _asked(options, samples, fields, whole=True)
        events = self.stream(generate_input, asked, timeout=timeout)
        completions = CompletionBuilder(asked.samples or 1).extend(events).build_all()
        return completions[0] if samples is None else completions

    def stream(
        self,
        generate_input: CallerInput,
        options: GenerateOptions | None = None,
        *,
        timeout: float | None = None,
        samples: int | None = None,
        **fields: Unpack[OptionFields],
    ) -> Generator[GenerateEvent]:
        """`Started`, any number of `Chunk`, `Finished`. Closing it cancels the request."""
        deadline = self._server.deadline(timeout)
        answering = self._server.answering(generate_input, _asked(options, samples, fields))
        while True:
            try:
                with closing(self._attempt(answering, deadline)) as events:
                    for event in events:
                        if answering.take(event):
                            yield event
                return
            except PacelineError as error:
                pause = self._server.pause_after(error, answering, deadline)
            time.sleep(pause)

    def _attempt(self, answering: Answering, deadline: Deadline) -> Generator[GenerateEvent]:
        request = request_to_wire(answering.input, answering.options)
        answering.reached = False
        self._connect(deadline)
        answering.reached = True
        call = self._stub.Generate(request, timeout=deadline.left(), metadata=trace_metadata())
        reader = EventReader(self.address, request)
        try:
            with self._server.own_errors(deadline):
                for response in call:
                    yield reader.read(response)
            reader.end()
        finally:
            call.cancel()  # type: ignore[no-untyped-call]  # in gRPC's stubs

    def stats(self) -> Stats:
        """The server's counters and its workers."""
        return self._ask(_STATS)

    def describe(self) -> ModelDescription:
        """What is served."""
        return self._ask(_DESCRIBE)

    def describe_topology(self) -> Topology:
        """The layout of the deployment: its workers, and what runs on them."""
        return self._ask(_DESCRIBE_TOPOLOGY)

    def tokenize(
        self,
        given: CallerInput,
        *,
        add_special_tokens: bool | None = None,
        return_token_strings: bool = False,
        timeout: float | None = None,
    ) -> Tokens:
        """Token ids of a text, or of a chat in the checkpoint's template.

        `add_special_tokens`: those of the tokenizer; None: to a text, not to a chat.
        """
        return self._ask(_tokenize(given, add_special_tokens, return_token_strings), timeout)

    def detokenize(self, token_ids: Sequence[int], *, timeout: float | None = None) -> str:
        """The text of token ids, with the names of special tokens."""
        return self._ask(_detokenize(token_ids), timeout)

    def _ask(self, question: _Question[_Answer], timeout: float | None = None) -> _Answer:
        deadline = self._server.deadline(timeout)
        self._connect(deadline)
        if question.is_quick:
            deadline = deadline.or_within(UNARY_SECONDS)
        with self._server.own_errors(deadline):
            call = getattr(self._stub, question.rpc)
            return question.read(call(question.request, timeout=deadline.left()))

    def connect(self) -> None:
        """Connect now rather than at the first call. Raises UnavailableError with the cause."""
        self._connect(self._server.deadline(None))

    def close(self) -> None:
        """End the connection; running streams are cancelled. Closing twice is no error."""
        self._server.closed = True
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _connect(self, deadline: Deadline) -> None:
        """Wait for a connection. Raises UnavailableError or DeadlineError.

        Any answer to a call shows that there is a connection. gRPC's own check starts a thread per
        channel, which prints a traceback if the channel is closed too soon.
        """
        self._server.check_open()
        if self._server.connected:
            return
        seconds, not_in_time = self._server.patience(deadline)
        give_up_at = time.monotonic() + seconds
        for wait_for_ready in (False, True):
            left = max(0.0, give_up_at - time.monotonic())
            request = inference_pb2.DescribeModelRequest()
            try:
                self._stub.DescribeModel(request, timeout=left, wait_for_ready=wait_for_ready)
                break
            except grpc.RpcError as error:
                code = error.code()
            if code is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise not_in_time
            if code is not grpc.StatusCode.UNAVAILABLE:
                break
            self._server.raise_obstacle(left)
        self._server.connected = self._server.was_connected = True


class AsyncClient:
    """`Client` for asyncio: the same calls, awaited. Make it inside a running event loop.

    `connector`: for processes of a deployment, which reach each other in their own way.

    Close it before that loop ends, best with `async with`. If a client is still open then, gRPC
    prints "Event loop is closed".
    """

    def __init__(
        self,
        address: str,
        *,
        timeout: float | None = None,
        connect_timeout: float = CONNECT_SECONDS,
        retries: Retries | None = None,
        key: str | None = None,
        ca: str | os.PathLike[str] | None = None,
        tls: bool = False,
        connector: Connector | None = None,
    ) -> None:
        credentials = Credentials.of(key, ca, tls, connector)
        self._server = _Server(address, credentials, timeout, connect_timeout, retries)
        self.address = address
        self._channel = credentials.async_channel(address)
        stub: Any = credentials.stub(inference_pb2_grpc.InferenceServiceStub, self._channel)
        self._stub: inference_pb2_grpc.InferenceServiceAsyncStub = stub
        self._shared: SharedStream | None = None

    @overload
    async def generate(
        self,
        generate_input: CallerInput,
        options: GenerateOptions | None = None,
        *,
        timeout: float | None = None,
        samples: None = None,
        **fields: Unpack[OptionFields],
    ) -> Completion: ...

    @overload
    async def generate(
        self,
        generate_input: CallerInput,
        options: GenerateOptions | None = None,
        *,
        timeout: float | None = None,
        samples: int,
        **fields: Unpack[OptionFields],
    ) -> tuple[Completion, ...]: ...

    async def generate(
        self,
        generate_input: CallerInput,
        options: GenerateOptions | None = None,
        *,
        timeout: float | None = None,
        samples: int | None = None,
        **fields: Unpack[OptionFields],
    ) -> Completion | tuple[Completion, ...]:
        """The whole answer. Keywords are fields of GenerateOptions.

        With `samples`: that many answers, in order.
        """
        asked = _asked(options, samples, fields, whole=True)
        builder = CompletionBuilder(asked.samples or 1)
        async for event in self.stream(generate_input, asked, timeout=timeout):
            builder.add(event)
        completions = builder.build_all()
        return completions[0] if samples is None else completions

    async def stream(
        self,
        generate_input: CallerInput,
        options: GenerateOptions | None = None,
        *,
        timeout: float | None = None,
        samples: int | None = None,
        **fields: Unpack[OptionFields],
    ) -> AsyncGenerator[GenerateEvent]:
        """`Started`, any number of `Chunk`, `Finished`. Closing it cancels the request.

        All requests share one gRPC stream, which costs the server less. Therefore a caller that
        leaves more than MAX_UNREAD_BYTES of its answer unread gets an OverloadedError.
        """
        deadline = self._server.deadline(timeout)
        answering = self._server.answering(generate_input, _asked(options, samples, fields))
        while True:
            try:
                async with aclosing(self._attempt(answering, deadline)) as events:
                    async for event in events:
                        if answering.take(event):
                            yield event
                return
            except PacelineError as error:
                pause = self._server.pause_after(error, answering, deadline)
            await asyncio.sleep(pause)

    async def _attempt(
        self, answering: Answering, deadline: Deadline
    ) -> AsyncGenerator[GenerateEvent]:
        request = request_to_wire(answering.input, answering.options)
        if self._shared is not None and self._shared.broken:
            self._shared, self._server.connected = None, False
        answering.reached = False
        await self._connect(deadline)
        answering.reached = True
        if self._shared is None or self._shared.broken:
            self._shared = SharedStream(self._stub, self.address)
        async with aclosing(self._shared.stream(request, deadline)) as events:
            async for event in events:
                yield event

    async def stats(self) -> Stats:
        """The server's counters and its workers."""
        return await self._ask(_STATS)

    async def describe(self) -> ModelDescription:
        """What is served."""
        return await self._ask(_DESCRIBE)

    async def describe_topology(self) -> Topology:
        """The layout of the deployment: its workers, and what runs on them."""
        return await self._ask(_DESCRIBE_TOPOLOGY)

    async def tokenize(
        self,
        given: CallerInput,
        *,
        add_special_tokens: bool | None = None,
        return_token_strings: bool = False,
        timeout: float | None = None,
    ) -> Tokens:
        """Token ids of a text, or of a chat in the checkpoint's template.

        `add_special_tokens`: those of the tokenizer; None: to a text, not to a chat.
        """
        return await self._ask(_tokenize(given, add_special_tokens, return_token_strings), timeout)

    async def detokenize(self, token_ids: Sequence[int], *, timeout: float | None = None) -> str:
        """The text of token ids, with the names of special tokens."""
        return await self._ask(_detokenize(token_ids), timeout)

    async def _ask(self, question: _Question[_Answer], timeout: float | None = None) -> _Answer:
        deadline = self._server.deadline(timeout)
        await self._connect(deadline)
        if question.is_quick:
            deadline = deadline.or_within(UNARY_SECONDS)
        with self._server.own_errors(deadline):
            call = getattr(self._stub, question.rpc)
            response = await call(question.request, timeout=deadline.left())
        if response is None:  # gRPC could not decode it.
            raise unreadable(self.address)
        return question.read(response)

    async def connect(self) -> None:
        """Connect now rather than at the first call. Raises UnavailableError with the cause."""
        await self._connect(self._server.deadline(None))

    async def close(self) -> None:
        """End the connection; running streams are cancelled. Closing twice is no error."""
        self._server.closed = True
        if self._shared is not None:
            await self._shared.close()
        await self._channel.close(None)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _connect(self, deadline: Deadline) -> None:
        """Wait for a connection. Raises UnavailableError or DeadlineError."""
        self._server.check_open()
        if self._server.connected:
            return
        seconds, not_in_time = self._server.patience(deadline)
        try:
            async with asyncio.timeout(seconds):
                while (state := self._state()) is not grpc.ChannelConnectivity.READY:
                    if state is grpc.ChannelConnectivity.TRANSIENT_FAILURE:
                        await asyncio.to_thread(self._server.raise_obstacle, seconds)
                    await self._channel.wait_for_state_change(state)
        except TimeoutError:
            raise not_in_time from None
        self._server.connected = self._server.was_connected = True

    def _state(self) -> grpc.ChannelConnectivity:
        return self._channel.get_state(try_to_connect=True)
