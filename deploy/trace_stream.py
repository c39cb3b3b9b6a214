"""The stream of TraceService, drawn as it comes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import grpc

from deploy.trace_file import TraceFile
from paceline.channel import caller_options
from paceline.client import UNARY_SECONDS
from paceline.status import error_of
from paceline.v1 import inference_pb2, inference_pb2_grpc, trace_pb2, trace_pb2_grpc

_LAST_SECONDS = 0.2
"""How long messages that are on their way when the block ends are waited for."""


@asynccontextmanager
async def tracing(address: str) -> AsyncIterator[TraceFile]:
    """Trace the server at "host:port" while the block runs. Raises the PacelineError it gave."""
    drawn = TraceFile()
    async with grpc.aio.insecure_channel(address, options=caller_options(address)) as channel:
        call = trace_pb2_grpc.TraceServiceStub(channel).Trace(trace_pb2.TraceRequest())
        try:
            messages = aiter(call)
            drawn.add(await anext(messages))  # the server listens from now on
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
    """By the time that a later call is answered, all before it was told, however busy the host."""
    stub = inference_pb2_grpc.InferenceServiceStub(channel)
    with suppress(grpc.RpcError):  # a server that is gone ends the stream, which says so
        await stub.Stats(inference_pb2.StatsRequest(), timeout=UNARY_SECONDS)


async def _read(messages: AsyncIterator[trace_pb2.TraceResponse], drawn: TraceFile) -> None:
    async for message in messages:
        drawn.add(message)
