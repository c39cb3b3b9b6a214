"""The client library: ask a Paceline server, from plain or from asyncio code.

    with Client("127.0.0.1:8001") as client:
        print(client.generate("The sea is", GenerateOptions(max_tokens=32)).text)
        for event in client.stream([Message("user", "Tell me of the sea.")]):
            ...

Every error is one of `paceline.errors`. A client may be shared by threads (`Client`) or by tasks of
one event loop (`AsyncClient`).
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import AsyncIterator, Iterator
from types import TracebackType
from typing import Self

import grpc

from paceline.channel import client_options
from paceline.generation import (
    Completion,
    CompletionBuilder,
    GenerateEvent,
    GenerateInput,
    GenerateOptions,
    ModelDescription,
    Stats,
)
from paceline.inference_wire import (
    description_from_wire,
    event_from_wire,
    request_to_wire,
    stats_from_wire,
)
from paceline.status import error_of, unreachable
from paceline.v1 import inference_pb2, inference_pb2_grpc

CONNECT_SECONDS = 10.0
"""How long a client tries to connect before its first call."""

UNARY_SECONDS = 10.0
"""Deadline of calls that answer at once, where the client has none of its own."""

DEFAULT_OPTIONS = GenerateOptions()


class Client:
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
        self.address = address
        self._timeout = timeout
        self._connect_timeout = connect_timeout
        self._channel = grpc.insecure_channel(address, options=client_options())
        self._stub = inference_pb2_grpc.InferenceServiceStub(self._channel)
        self._connected = False
        self._connecting = threading.Lock()

    def generate(
        self, generate_input: GenerateInput, options: GenerateOptions = DEFAULT_OPTIONS
    ) -> Completion:
        """The whole answer."""
        return CompletionBuilder().extend(self.stream(generate_input, options)).build()

    def stream(
        self, generate_input: GenerateInput, options: GenerateOptions = DEFAULT_OPTIONS
    ) -> Iterator[GenerateEvent]:
        """`Started`, any number of `Chunk`, `Finished`. Closing it cancels the request."""
        request = request_to_wire(generate_input, options)
        self._connect()
        call = self._stub.Generate(request, timeout=self._timeout)
        try:
            for response in call:
                yield event_from_wire(response)
        except grpc.RpcError as error:
            raise error_of(error, self.address) from error
        finally:
            call.cancel()  # type: ignore[no-untyped-call]

    def stats(self) -> Stats:
        """The server's counters and its workers."""
        self._connect()
        try:
            response = self._stub.Stats(
                inference_pb2.StatsRequest(), timeout=self._timeout or UNARY_SECONDS
            )
        except grpc.RpcError as error:
            raise error_of(error, self.address) from error
        return stats_from_wire(response)

    def describe(self) -> ModelDescription:
        """What is served."""
        self._connect()
        try:
            response = self._stub.DescribeModel(
                inference_pb2.DescribeModelRequest(), timeout=self._timeout or UNARY_SECONDS
            )
        except grpc.RpcError as error:
            raise error_of(error, self.address) from error
        return description_from_wire(response)

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
                raise unreachable(self.address, self._connect_timeout, "no answer") from None
            if state is grpc.ChannelConnectivity.READY:
                return
            if state is grpc.ChannelConnectivity.TRANSIENT_FAILURE:
                raise unreachable(self.address, self._connect_timeout, "connection refused")


class AsyncClient:
    """`Client` for asyncio: the same calls, to be awaited. Make it inside a running event loop."""

    def __init__(
        self,
        address: str,
        *,
        timeout: float | None = None,
        connect_timeout: float = CONNECT_SECONDS,
    ) -> None:
        self.address = address
        self._timeout = timeout
        self._connect_timeout = connect_timeout
        self._channel = grpc.aio.insecure_channel(address, options=client_options())
        self._stub = inference_pb2_grpc.InferenceServiceStub(self._channel)
        self._connected = False

    async def generate(
        self, generate_input: GenerateInput, options: GenerateOptions = DEFAULT_OPTIONS
    ) -> Completion:
        """The whole answer."""
        builder = CompletionBuilder()
        async for event in self.stream(generate_input, options):
            builder.add(event)
        return builder.build()

    async def stream(
        self, generate_input: GenerateInput, options: GenerateOptions = DEFAULT_OPTIONS
    ) -> AsyncIterator[GenerateEvent]:
        """`Started`, any number of `Chunk`, `Finished`. Closing it cancels the request."""
        request = request_to_wire(generate_input, options)
        await self._connect()
        call = self._stub.Generate(request, timeout=self._timeout)
        try:
            async for response in call:
                yield event_from_wire(response)
        except grpc.RpcError as error:
            raise error_of(error, self.address) from error
        finally:
            call.cancel()

    async def stats(self) -> Stats:
        """The server's counters and its workers."""
        await self._connect()
        try:
            response = await self._stub.Stats(
                inference_pb2.StatsRequest(), timeout=self._timeout or UNARY_SECONDS
            )
        except grpc.RpcError as error:
            raise error_of(error, self.address) from error
        return stats_from_wire(response)

    async def describe(self) -> ModelDescription:
        """What is served."""
        await self._connect()
        try:
            response = await self._stub.DescribeModel(
                inference_pb2.DescribeModelRequest(), timeout=self._timeout or UNARY_SECONDS
            )
        except grpc.RpcError as error:
            raise error_of(error, self.address) from error
        return description_from_wire(response)

    async def close(self) -> None:
        """End the connection; running streams are cancelled. Closing twice is no error."""
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
                        raise unreachable(self.address, self._connect_timeout, "connection refused")
                    await self._channel.wait_for_state_change(state)
                    state = self._channel.get_state(try_to_connect=True)
        except TimeoutError:
            raise unreachable(self.address, self._connect_timeout, "no answer") from None
        self._connected = True
