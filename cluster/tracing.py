"""The gRPC servicer of trace.proto around a driver."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc

from cluster.driver import Driver
from cluster.round_tap import RoundTap
from paceline.errors import PacelineError
from paceline.status import status_of
from paceline.v1 import trace_pb2, trace_pb2_grpc

SERVICE_NAME = trace_pb2.DESCRIPTOR.services_by_name["TraceService"].full_name
MAX_UNREAD = 2_000
"""Messages that a caller may leave unread before its stream is ended: some seconds' worth. A drafter
may make one of 40 KB, so that this is 80 MB at most; 1 KB is usual."""

_Context = grpc.aio.ServicerContext[Any, Any]


class TraceServicer(trace_pb2_grpc.TraceServiceServicer):
    """A tap on the driver for each stream, for as long as it is open."""

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
        now = self._driver.clock.now
        messages: asyncio.Queue[trace_pb2.TraceResponse] = asyncio.Queue()
        begun = trace_pb2.TraceBegun(now=now(), model=model)
        with self._driver.tapped(RoundTap(messages.put_nowait, now)):
            # Whoever has read this may ask for an answer: not a step of it must be missed.
            await context.write(trace_pb2.TraceResponse(begun=begun))
            async for message in _until_too_many(messages):
                await context.write(message)
        await context.abort(
            grpc.StatusCode.RESOURCE_EXHAUSTED, f"the caller left {MAX_UNREAD} messages unread"
        )


async def _until_too_many(
    messages: asyncio.Queue[trace_pb2.TraceResponse],
) -> AsyncIterator[trace_pb2.TraceResponse]:
    while messages.qsize() <= MAX_UNREAD:
        yield await messages.get()
