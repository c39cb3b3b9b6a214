"""The client library: ask a Paceline server, from plain or from asyncio code.

    with Client("127.0.0.1:8001") as client:
        print(client.generate("The sea is", max_tokens=32).text)
        for event in client.stream([Message("user", "Tell me of the sea.")]):
            ...

How to decode is said by a `GenerateOptions`, by its fields as keywords, or by both, where the
keywords come first. Every error is one of `paceline.errors`. A client may be shared by threads
(`Client`) or by tasks of one event loop (`AsyncClient`).

A `timeout` is the time in seconds from the call to the end of its answer, connecting included; of
`stream` it begins when the first event is asked for. The one given with a call replaces that of
the client. When it has passed, the request is cancelled at the server and the call raises
DeadlineError. Nothing is sent twice by itself.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, contextmanager
from types import TracebackType
from typing import Self, TypeVar, Unpack

import grpc

from paceline.address import obstacle_at, parse_address
from paceline.channel import caller_options
from paceline.deadline import Deadline, checked_seconds
from paceline.errors import DeadlineError, PacelineError, UnavailableError
from paceline.generation import (
    CallerInput,
    Completion,
    CompletionBuilder,
    GenerateEvent,
    GenerateOptions,
    ModelDescription,
    Stats,
)
from paceline.inference_wire import EventReader, description_from_wire
from paceline.options import OptionFields, options_with
from paceline.request_wire import request_to_wire
from paceline.shared_stream import SharedStream
from paceline.stats_wire import stats_from_wire
from paceline.status import error_of, unreadable
from paceline.v1 import inference_pb2, inference_pb2_grpc

CONNECT_SECONDS = 10.0
"""How long a client tries to connect before its first call."""

UNARY_SECONDS = 10.0
"""Timeout of calls that answer at once, where the client has none of its own."""


_Response = TypeVar("_Response")


class _Caller:
    """What both clients have: an address, timeouts in seconds, errors of ours."""

    def __init__(self, address: str, *, timeout: float | None, connect_timeout: float) -> None:
        self._where = parse_address(address)
        self.address = address
        self._timeout = checked_seconds("timeout", timeout)
        self._connect_timeout = (
            checked_seconds("connect_timeout", connect_timeout) or CONNECT_SECONDS
        )
        self._connected = False
        self._closed = False

    def _deadline(self, timeout: float | None) -> Deadline:
        """Of a call that begins now."""
        return Deadline(self.address, checked_seconds("timeout", timeout) or self._timeout)

    @contextmanager
    def _errors_of_ours(self, deadline: Deadline) -> Iterator[None]:
        """Raise what a failed call means, in place of gRPC's error."""
        try:
            yield
        except grpc.RpcError as error:
            raised = error_of(error, self.address)
            if isinstance(raised, UnavailableError):
                # The next call finds out whether there still is a connection, and if not, why.
                self._connected = False
            if isinstance(raised, DeadlineError) and deadline.left() is not None:
                raised = deadline.error()
            raise raised from error

    def _check_open(self) -> None:
        if self._closed:
            raise UnavailableError("this client was closed; make another one")

    def _unreachable(self, obstacle: str) -> UnavailableError:
        return UnavailableError(f"no server could be reached at {self.address}: {obstacle}")

    def _raise_obstacle(self, seconds: float) -> None:
        """Raise UnavailableError where no connection can be made, however long one tries."""
        obstacle = obstacle_at(self._where, seconds)
        if obstacle is not None:
            raise self._unreachable(obstacle)

    def _patience(self, deadline: Deadline) -> tuple[float, PacelineError]:
        """Seconds for which to try to connect, and the error when they have passed."""
        left = deadline.left()
        if left is not None and left < self._connect_timeout:
            return left, deadline.error()
        return self._connect_timeout, self._unreachable(
            f"no answer within {self._connect_timeout:g} s; check the address, that the server is "
            "up and that no firewall is in between"
        )


class Client(_Caller):
    """Calls a server and blocks until it answers.

    `timeout` is that of each call that has none of its own; None: an answer may take any time.
    Nothing is sent before the first call.
    """

    def __init__(
        self,
        address: str,
        *,
        timeout: float | None = None,
        connect_timeout: float = CONNECT_SECONDS,
    ) -> None:
        super().__init__(address, timeout=timeout, connect_timeout=connect_timeout)
        self._channel = grpc.insecure_channel(address, options=caller_options(address))
        self._stub = inference_pb2_grpc.InferenceServiceStub(self._channel)

    def generate(
        self,
        generate_input: CallerInput,
        options: GenerateOptions | None = None,
        *,
        timeout: float | None = None,
        **fields: Unpack[OptionFields],
    ) -> Completion:
        """The whole answer. Fields of GenerateOptions may be given as keywords as well."""
        events = self.stream(generate_input, options, timeout=timeout, **fields)
        return CompletionBuilder().extend(events).build()

    def stream(
        self,
        generate_input: CallerInput,
        options: GenerateOptions | None = None,
        *,
        timeout: float | None = None,
        **fields: Unpack[OptionFields],
    ) -> Iterator[GenerateEvent]:
        """`Started`, any number of `Chunk`, `Finished`. Closing it cancels the request."""
        deadline = self._deadline(timeout)
        request = request_to_wire(generate_input, options_with(options, fields))
        self._connect(deadline)
        call = self._stub.Generate(request, timeout=deadline.left())
        reader = EventReader(self.address)
        try:
            with self._errors_of_ours(deadline):
                for response in call:
                    yield reader.read(response)
            reader.end()
        finally:
            call.cancel()  # type: ignore[no-untyped-call]

    def stats(self) -> Stats:
        """The server's counters and its workers."""
        deadline = self._deadline(None)
        self._connect(deadline)
        deadline = deadline.or_within(UNARY_SECONDS)
        with self._errors_of_ours(deadline):
            request = inference_pb2.StatsRequest()
            return stats_from_wire(self._stub.Stats(request, timeout=deadline.left()))

    def describe(self) -> ModelDescription:
        """What is served."""
        deadline = self._deadline(None)
        self._connect(deadline)
        deadline = deadline.or_within(UNARY_SECONDS)
        with self._errors_of_ours(deadline):
            request = inference_pb2.DescribeModelRequest()
            return description_from_wire(self._stub.DescribeModel(request, timeout=deadline.left()))

    def connect(self) -> None:
        """Connect now rather than at the first call. Raises UnavailableError with the cause."""
        self._connect(self._deadline(None))

    def close(self) -> None:
        """End the connection; running streams are cancelled. Closing twice is no error."""
        self._closed = True
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _connect(self, deadline: Deadline) -> None:
        """Wait for a connection. Raises UnavailableError, or DeadlineError.

        Any answer shows that there is one. gRPC's own way to ask is a thread for each channel,
        which prints a traceback where the channel is closed too soon.
        """
        self._check_open()
        if self._connected:
            return
        seconds, not_in_time = self._patience(deadline)
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
            self._raise_obstacle(left)
        self._connected = True


class AsyncClient(_Caller):
    """`Client` for asyncio: the same calls, to be awaited. Make it inside a running event loop.

    Close it before that loop ends, best with `async with`: what gRPC hears afterwards for a client
    that is still open it prints as "Event loop is closed".
    """

    def __init__(
        self,
        address: str,
        *,
        timeout: float | None = None,
        connect_timeout: float = CONNECT_SECONDS,
    ) -> None:
        super().__init__(address, timeout=timeout, connect_timeout=connect_timeout)
        self._channel = grpc.aio.insecure_channel(address, options=caller_options(address))
        self._stub = inference_pb2_grpc.InferenceServiceStub(self._channel)
        self._shared: SharedStream | None = None

    async def generate(
        self,
        generate_input: CallerInput,
        options: GenerateOptions | None = None,
        *,
        timeout: float | None = None,
        **fields: Unpack[OptionFields],
    ) -> Completion:
        """The whole answer. Fields of GenerateOptions may be given as keywords as well."""
        builder = CompletionBuilder()
        async for event in self.stream(generate_input, options, timeout=timeout, **fields):
            builder.add(event)
        return builder.build()

    async def stream(
        self,
        generate_input: CallerInput,
        options: GenerateOptions | None = None,
        *,
        timeout: float | None = None,
        **fields: Unpack[OptionFields],
    ) -> AsyncIterator[GenerateEvent]:
        """`Started`, any number of `Chunk`, `Finished`. Closing it cancels the request.

        All requests share one gRPC stream, which costs the server less. So a caller that leaves
        more than MAX_UNREAD_BYTES of its answer unread loses its request with OverloadedError.
        """
        deadline = self._deadline(timeout)
        request = request_to_wire(generate_input, options_with(options, fields))
        if self._shared is not None and self._shared.broken:
            self._shared, self._connected = None, False
        await self._connect(deadline)
        if self._shared is None or self._shared.broken:
            self._shared = SharedStream(self._stub, self.address)
        async with aclosing(self._shared.stream(request, deadline)) as events:
            async for event in events:
                yield event

    async def stats(self) -> Stats:
        """The server's counters and its workers."""
        deadline = self._deadline(None)
        await self._connect(deadline)
        deadline = deadline.or_within(UNARY_SECONDS)
        with self._errors_of_ours(deadline):
            request = inference_pb2.StatsRequest()
            response = await self._stub.Stats(request, timeout=deadline.left())
        return stats_from_wire(self._decoded(response))

    async def describe(self) -> ModelDescription:
        """What is served."""
        deadline = self._deadline(None)
        await self._connect(deadline)
        deadline = deadline.or_within(UNARY_SECONDS)
        with self._errors_of_ours(deadline):
            request = inference_pb2.DescribeModelRequest()
            response = await self._stub.DescribeModel(request, timeout=deadline.left())
        return description_from_wire(self._decoded(response))

    async def connect(self) -> None:
        """Connect now rather than at the first call. Raises UnavailableError with the cause."""
        await self._connect(self._deadline(None))

    async def close(self) -> None:
        """End the connection; running streams are cancelled. Closing twice is no error."""
        self._closed = True
        if self._shared is not None:
            await self._shared.close()
        await self._channel.close(None)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def _connect(self, deadline: Deadline) -> None:
        """Wait for a connection. Raises UnavailableError, or DeadlineError."""
        self._check_open()
        if self._connected:
            return
        seconds, not_in_time = self._patience(deadline)
        try:
            async with asyncio.timeout(seconds):
                while (state := self._state()) is not grpc.ChannelConnectivity.READY:
                    if state is grpc.ChannelConnectivity.TRANSIENT_FAILURE:
                        await asyncio.to_thread(self._raise_obstacle, seconds)
                    await self._channel.wait_for_state_change(state)
        except TimeoutError:
            raise not_in_time from None
        self._connected = True

    def _decoded(self, response: _Response | None) -> _Response:
        if response is None:
            raise unreadable(self.address)
        return response

    def _state(self) -> grpc.ChannelConnectivity:
        return self._channel.get_state(try_to_connect=True)
