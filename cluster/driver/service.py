"""The gRPC servicers of inference.proto and trace.proto around a driver."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc

from cluster.access.gate import CallGuard, Gate
from cluster.driver.admission import Admission
from cluster.driver.driver import Driver, DriverOptions
from cluster.driver.many_requests import ManyRequests
from cluster.driver.round_tap import RoundTap
from paceline.channel import CALLERS, MAX_MESSAGE_BYTES
from paceline.errors import InternalError, OverloadedError, PacelineError, PromptTooLongError
from paceline.options import check_count
from paceline.v1 import inference_pb2, inference_pb2_grpc, trace_pb2, trace_pb2_grpc
from paceline.wire.answers import event_to_wire
from paceline.wire.requests import detokenize_from_wire, request_from_wire, tokenize_input_from_wire
from paceline.wire.server import (
    description_to_wire,
    stats_to_wire,
    tokens_to_wire,
    topology_to_wire,
)
from workers.process.certificate import Certificate
from workers.process.server import RunningServer, start_server
from workers.process.tracing import note_caller

SERVICE_NAME = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name
TRACE_SERVICE = trace_pb2.DESCRIPTOR.services_by_name["TraceService"].full_name
MAX_UNREAD_TRACE_BYTES = 1024 * 1024
"""Bytes of messages, some 2,000 steps of 40 sequences, that a caller may leave unread. Beyond that
nothing more is kept for it, and its stream ends once it reads again."""
_LAST_WORD_SECONDS = 0.5
"""Time for the last messages to reach callers."""
_Context = grpc.aio.ServicerContext[Any, Any]


class InferenceServicer(inference_pb2_grpc.InferenceServiceServicer):
    """Translates between messages and the driver, which does the work.

    A PacelineError becomes the status of its call outside of it (workers/process/server.py).
    """

    def __init__(self, driver: Driver, admission: Admission) -> None:
        self._driver = driver
        self._admission = admission

    async def Generate(  # type: ignore[override]  # a handler may write instead of yielding
        self, request: inference_pb2.GenerateRequest, context: _Context
    ) -> None:
        note_caller(context.invocation_metadata())
        request.request_id = request.request_id or uuid.uuid4().hex
        generation = await self._admission.submit(*request_from_wire(request))
        try:
            async for event in generation:
                await context.write(event_to_wire(event))
        finally:
            # Also when the call was cancelled, which cancels this task.
            generation.cancel()

    async def GenerateMany(  # type: ignore[override]  # a handler may write instead of yielding
        self,
        request_iterator: AsyncIterator[inference_pb2.GenerateManyRequest],
        context: _Context,
    ) -> None:
        await ManyRequests(self._admission, context).serve(request_iterator)

    async def DescribeModel(
        self, request: inference_pb2.DescribeModelRequest, context: _Context
    ) -> inference_pb2.DescribeModelResponse:
        return description_to_wire(self._driver.describe())

    async def Stats(
        self, request: inference_pb2.StatsRequest, context: _Context
    ) -> inference_pb2.StatsResponse:
        return stats_to_wire(self._driver.stats())

    async def DescribeTopology(
        self, request: inference_pb2.DescribeTopologyRequest, context: _Context
    ) -> inference_pb2.DescribeTopologyResponse:
        return topology_to_wire(self._driver.topology())

    async def Tokenize(
        self, request: inference_pb2.TokenizeRequest, context: _Context
    ) -> inference_pb2.TokenizeResponse:
        special = request.add_special_tokens if request.HasField("add_special_tokens") else None
        with self._admission.place():
            tokens = await self._driver.tokenize(
                tokenize_input_from_wire(request),
                special_tokens=special,
                strings=request.return_token_strings,
            )
        response = tokens_to_wire(tokens)
        _check_answer("prompt", response.ByteSize())
        return response

    async def Detokenize(
        self, request: inference_pb2.DetokenizeRequest, context: _Context
    ) -> inference_pb2.DetokenizeResponse:
        with self._admission.place():
            text = await self._driver.detokenize(detokenize_from_wire(request))
        response = inference_pb2.DetokenizeResponse(text=text)
        _check_answer("token_ids", response.ByteSize())
        return response


def _check_answer(field: str, num_bytes: int) -> None:
    """gRPC would refuse a larger answer without a reason that helps."""
    check_count(field, num_bytes, MAX_MESSAGE_BYTES, "bytes of answer", PromptTooLongError)


class TraceServicer(trace_pb2_grpc.TraceServiceServicer):
    """Keeps a tap on the driver for each open stream."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    async def Trace(  # type: ignore[override]  # a handler may write instead of yielding
        self, request: trace_pb2.TraceRequest, context: _Context
    ) -> None:
        model = self._driver.describe().model
        begun = trace_pb2.TraceBegun(now=time.monotonic(), model=model)
        messages = _Unread()
        tap = RoundTap(messages.put, time.monotonic, on_failure=messages.fail)
        with self._driver.tapped(tap):
            # A caller that has read this may start a request, whose steps must all be traced.
            await context.write(trace_pb2.TraceResponse(begun=begun))
            while True:
                await context.write(await messages.get())


class _Unread:
    """Messages that a caller has not read yet. Raises OverloadedError if they become too many."""

    def __init__(self) -> None:
        self._messages: deque[trace_pb2.TraceResponse] = deque()
        self._bytes = 0
        self._error: PacelineError | None = None
        self._told = asyncio.Event()

    def put(self, message: trace_pb2.TraceResponse) -> None:
        self._bytes += message.ByteSize()
        if self._bytes > MAX_UNREAD_TRACE_BYTES:
            raise OverloadedError(f"the caller left {self._bytes:,} bytes of messages unread")
        self._messages.append(message)
        self._told.set()

    def fail(self, error: Exception) -> None:
        """Deliver no more messages. Unread ones are dropped."""
        self._messages.clear()
        if not isinstance(error, PacelineError):
            error = InternalError("a defect ended the trace; the server's log tells more")
        self._error = error
        self._told.set()

    async def get(self) -> trace_pb2.TraceResponse:
        """The next message. Raises the error given to `fail`."""
        while not self._messages:
            if self._error is not None:
                raise self._error
            await self._told.wait()
            self._told.clear()
        message = self._messages.popleft()
        self._bytes -= message.ByteSize()
        return message


async def serve_driver(
    options: DriverOptions,
    *,
    host: str,
    port: int = 0,
    on_made: Callable[[Driver], None] | None = None,
    gate: Gate | None = None,
    certificate: Certificate | None = None,
    inner_host: str | None = None,
) -> tuple[Driver, RunningServer]:
    """Listen and start a driver. Stopping the server stops the driver.

    The server's health is SERVING while requests can be served. A defect that ends the driver ends
    the server. `on_made` gets the driver before it starts, since its workers may move meanwhile.
    `gate`: who may call; None: everybody. `certificate`: for TLS; None: plain text.
    `inner_host`: where it also listens for its own gateway, with the TLS of workers if it has it;
    None: nowhere.
    Raises UnavailableError if the port cannot be bound, and what `Driver.start` raises.
    """
    driver = Driver(options)
    if on_made is not None:
        on_made(driver)

    def add(server: grpc.aio.Server) -> tuple[str, ...]:
        servicer = InferenceServicer(driver, Admission(driver, gate))
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(servicer, server)
        trace_pb2_grpc.add_TraceServiceServicer_to_server(TraceServicer(driver), server)
        return (SERVICE_NAME, TRACE_SERVICE)

    try:
        server = await start_server(
            add,
            host=host,
            port=port,
            serving=False,
            keepalive=CALLERS,
            interceptors=() if gate is None else (CallGuard(gate),),
            credentials=None if certificate is None else certificate.for_grpc(),
            inner_host=inner_host,
            tls=options.tls if inner_host else None,
        )
    except BaseException:
        await driver.stop()
        raise
    server.on_stop(driver.stop)
    driver.on_serving = lambda serving: server.report(serving=serving)
    driver.on_broken = lambda: server.stop_soon(_LAST_WORD_SECONDS)
    try:
        await driver.start()
    except BaseException:
        await server.stop()
        raise
    return driver, server
