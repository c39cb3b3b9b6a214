"""The gRPC servicer of trace.proto around a driver."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import Any

import grpc

from cluster.driver.driver import Driver
from cluster.driver.round_tap import RoundTap
from paceline.errors import InternalError, OverloadedError, PacelineError
from paceline.status import status_of
from paceline.v1 import trace_pb2, trace_pb2_grpc

SERVICE_NAME = trace_pb2.DESCRIPTOR.services_by_name["TraceService"].full_name
MAX_UNREAD_BYTES = 1024 * 1024
"""Bytes of messages, some 2,000 steps of 40 sequences, that a caller may leave unread. Beyond that
nothing more is kept for it, and its stream ends once it reads again."""

_Context = grpc.aio.ServicerContext[Any, Any]


class TraceServicer(trace_pb2_grpc.TraceServiceServicer):
    """Keeps a tap on the driver for each open stream."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    async def Trace(  # type: ignore[override]  # a handler may write instead of yielding
        self, request: trace_pb2.TraceRequest, context: _Context
    ) -> None:
        try:
            model = self._driver.describe().model
        except PacelineError as error:
            code, details, metadata = status_of(error)
            await context.abort(code, details, metadata)
            return
        begun = trace_pb2.TraceBegun(now=time.monotonic(), model=model)
        messages = _Unread()
        tap = RoundTap(messages.put, time.monotonic, on_failure=messages.fail)
        try:
            with self._driver.tapped(tap):
                # Whoever has read this may start a request, of which no step must be missed.
                await context.write(trace_pb2.TraceResponse(begun=begun))
                while True:
                    await context.write(await messages.get())
        except PacelineError as error:
            code, details, metadata = status_of(error)
            await context.abort(code, details, metadata)


class _Unread:
    """Messages that a caller has not read yet. Raises OverloadedError if they become too many."""

    def __init__(self) -> None:
        self._messages: deque[trace_pb2.TraceResponse] = deque()
        self._bytes = 0
        self._error: PacelineError | None = None
        self._told = asyncio.Event()

    def put(self, message: trace_pb2.TraceResponse) -> None:
        self._bytes += message.ByteSize()
        if self._bytes > MAX_UNREAD_BYTES:
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
