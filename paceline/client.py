"""The client library: ask a Paceline server, from plain or from asyncio code.

    with Client("127.0.0.1:8001") as client:
        print(client.generate("The sea is", max_tokens=32).text)
        for event in client.stream([Message("user", "Tell me of the sea.")]):
            ...

How to decode is said by a `GenerateOptions`, by its fields as keywords, or by both, where the
keywords come first. Every error is one of `paceline.errors`. A client may be shared by threads
(`Client`) or by tasks of one event loop (`AsyncClient`).
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing, contextmanager
from types import TracebackType
from typing import Self, Unpack

import grpc

from paceline.channel import caller_options
from paceline.errors import InvalidRequestError, UnavailableError
from paceline.generation import (
    CallerInput,
    Completion,
    CompletionBuilder,
    GenerateEvent,
    GenerateOptions,
    ModelDescription,
    Stats,
)
from paceline.inference_wire import description_from_wire, event_from_wire
from paceline.options import OptionFields, options_with
from paceline.request_wire import request_to_wire
from paceline.shared_stream import SharedStream
from paceline.stats_wire import stats_from_wire
from paceline.status import error_of, unreachable
from paceline.v1 import inference_pb2, inference_pb2_grpc

CONNECT_SECONDS = 10.0
"""How long a client tries to connect before its first call."""

UNARY_SECONDS = 10.0
"""Deadline of calls that answer at once, where the client has none of its own."""


class _Caller:
    """What both clients have: an address, deadlines in seconds, errors of ours."""

    def __init__(self, address: str, *, timeout: float | None, connect_timeout: float) -> None:
        if ":" not in address:
            raise InvalidRequestError(
                "address", f"expected HOST:PORT such as 127.0.0.1:8001, got {address!r}"
            )
        self.address = address
        self._timeout = timeout
        self._unary_timeout = timeout or UNARY_SECONDS
        self._connect_timeout = connect_timeout
        self._connected = False

    @contextmanager
    def _errors_of_ours(self) -> Iterator[None]:
        """Raise what a failed call means, in place of gRPC's error."""
        try:
            yield
        except grpc.RpcError as error:
            raise error_of(error, self.address) from error

    def _refused(self, reason: str) -> UnavailableError:
        return unreachable(self.address, self._connect_timeout, reason)


class Client(_Caller):
    """Calls a server and blocks until it answers.

    `timeout` is the deadline of each call, in seconds; None: streams have none. Nothing is sent
    before the first call.
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
        self._connecting = threading.Lock()

    def generate(
        self,
        generate_input: CallerInput,
        options: GenerateOptions | None = None,
        **fields: Unpack[OptionFields],
    ) -> Completion:
        """The whole answer. Fields of GenerateOptions may be given as keywords as well."""
        return CompletionBuilder().extend(self.stream(generate_input, options, **fields)).build()

    def stream(
        self,
        generate_input: CallerInput,
        options: GenerateOptions | None = None,
        **fields: Unpack[OptionFields],
    ) -> Iterator[GenerateEvent]:
        """`Started`, any number of `Chunk`, `Finished`. Closing it cancels the request."""
        request = request_to_wire(generate_input, options_with(options, fields))
        self._connect()
        call = self._stub.Generate(request, timeout=self._timeout)
        try:
            with self._errors_of_ours():
                for response in call:
                    yield event_from_wire(response)
        finally:
            call.cancel()  # type: ignore[no-untyped-call]

    def stats(self) -> Stats:
        """The server's counters and its workers."""
        self._connect()
        with self._errors_of_ours():
            request = inference_pb2.StatsRequest()
            return stats_from_wire(self._stub.Stats(request, timeout=self._unary_timeout))

    def describe(self) -> ModelDescription:
        """What is served."""
        self._connect()
        with self._errors_of_ours():
            request = inference_pb2.DescribeModelRequest()
            return description_from_wire(
                self._stub.DescribeModel(request, timeout=self._unary_timeout)
            )

    def close(self) -> None:
        """End the connection; running streams are cancelled. Closing twice is no error."""
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

    def _connect(self) -> None:
        """Wait for the first connection. Raises UnavailableError when it is refused or too slow."""
        with self._connecting:
            if self._connected:
                return
            states: queue.SimpleQueue[grpc.ChannelConnectivity] = queue.SimpleQueue()
            self._channel.subscribe(states.put, try_to_connect=True)
            try:
                self._await_ready(states)
            finally:
                self._channel.unsubscribe(states.put)
            self._connected = True

    def _await_ready(self, states: queue.SimpleQueue[grpc.ChannelConnectivity]) -> None:
        give_up_at = time.monotonic() + self._connect_timeout
        while True:
            try:
                state = states.get(timeout=max(0.0, give_up_at - time.monotonic()))
            except queue.Empty:
                raise self._refused("no answer") from None
            if state is grpc.ChannelConnectivity.READY:
                return
            if state is grpc.ChannelConnectivity.TRANSIENT_FAILURE:
                raise self._refused("connection refused")


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
        **fields: Unpack[OptionFields],
    ) -> Completion:
        """The whole answer. Fields of GenerateOptions may be given as keywords as well."""
        builder = CompletionBuilder()
        async for event in self.stream(generate_input, options, **fields):
            builder.add(event)
        return builder.build()

    async def stream(
        self,
        generate_input: CallerInput,
        options: GenerateOptions | None = None,
        **fields: Unpack[OptionFields],
    ) -> AsyncIterator[GenerateEvent]:
        """`Started`, any number of `Chunk`, `Finished`. Closing it cancels the request.

        Where the client has no deadline its requests share a stream, which costs the server less.
        """
        request = request_to_wire(generate_input, options_with(options, fields))
        await self._connect()
        with self._errors_of_ours():
            # A deadline is gRPC's, so a request that has one needs a call of its own.
            own = self._timeout is not None
            async with aclosing(self._own(request) if own else self._share(request)) as events:
                async for event in events:
                    yield event

    async def _own(self, request: inference_pb2.GenerateRequest) -> AsyncGenerator[GenerateEvent]:
        call = self._stub.Generate(request, timeout=self._timeout)
        try:
            async for response in call:
                yield event_from_wire(response)
        finally:
            call.cancel()

    def _share(self, request: inference_pb2.GenerateRequest) -> AsyncGenerator[GenerateEvent]:
        if self._shared is None or self._shared.broken is not None:
            self._shared = SharedStream(self._stub, self.address)
        return self._shared.stream(request)

    async def stats(self) -> Stats:
        """The server's counters and its workers."""
        await self._connect()
        with self._errors_of_ours():
            request = inference_pb2.StatsRequest()
            return stats_from_wire(await self._stub.Stats(request, timeout=self._unary_timeout))

    async def describe(self) -> ModelDescription:
        """What is served."""
        await self._connect()
        with self._errors_of_ours():
            request = inference_pb2.DescribeModelRequest()
            return description_from_wire(
                await self._stub.DescribeModel(request, timeout=self._unary_timeout)
            )

    async def close(self) -> None:
        """End the connection; running streams are cancelled. Closing twice is no error."""
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

    async def _connect(self) -> None:
        """Wait for the first connection. Raises UnavailableError when it is refused or too slow."""
        if self._connected:
            return
        try:
            async with asyncio.timeout(self._connect_timeout):
                state = self._channel.get_state(try_to_connect=True)
                while state is not grpc.ChannelConnectivity.READY:
                    if state is grpc.ChannelConnectivity.TRANSIENT_FAILURE:
                        raise self._refused("connection refused")
                    await self._channel.wait_for_state_change(state)
                    state = self._channel.get_state(try_to_connect=True)
        except TimeoutError:
            raise self._refused("no answer") from None
        self._connected = True
