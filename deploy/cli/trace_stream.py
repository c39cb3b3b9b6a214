"""Reads the stream of TraceService and draws it as it arrives."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import grpc

from deploy.cli.trace_file import TraceFile
from paceline.channel import caller_options
from paceline.client import UNARY_SECONDS
from paceline.status import error_of
from paceline.v1 import inference_pb2, inference_pb2_grpc, trace_pb2, trace_pb2_grpc

_LAST_SECONDS = 0.2
"""How long to wait for messages that are on their way when the block ends."""


@asynccontextmanager
async def tracing(address: str) -> AsyncIterator[TraceFile]:
    """Trace the server at "host:port" while the block runs. Raises the server's PacelineError."""
    drawn = TraceFile()
    async with grpc.aio.insecure_channel(address, options=caller_options(address)) as channel:
        call = trace_pb2_grpc.TraceServiceStub(channel).Trace(trace_pb2.TraceRequest())
        try:
            messages = aiter(call)
            drawn.add(await anext(messages))  # From now on the server reports rounds.
            reader = asyncio.create_task(_read(messages, drawn))
            try:
                yield drawn
                await _all_is_told(channel)
                await asyncio.wait([reader], timeout=_LAST_SECONDS)
                if reader.done():
                    reader.result()
            finally:
                reader.cancel()
                await asyncio.gather(reader, return_exceptions=True)
        except grpc.RpcError as error:
            raise error_of(error, address) from error
        finally:
            call.cancel()


async def _all_is_told(channel: grpc.aio.Channel) -> None:
    """Wait until all earlier rounds were reported: a later call is answered after them."""
    stub = inference_pb2_grpc.InferenceServiceStub(channel)
    with suppress(grpc.RpcError):  # A server that is gone also ends the stream, with the reason.
        await stub.Stats(inference_pb2.StatsRequest(), timeout=UNARY_SECONDS)


async def _read(messages: AsyncIterator[trace_pb2.TraceResponse], drawn: TraceFile) -> None:
    async for message in messages:
        drawn.add(message)
