"""A gateway on a free port, and what tests of it share."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx2

from cluster.access.gate import Gate
from cluster.gateway.app import Gateway
from cluster.gateway.drivers import DriverPool
from cluster.gateway.openai_answers import Formats
from cluster.gateway.server import listen, serving
from tests.cluster.system import HOST
from workers.process.tracing import Tracing


@dataclass(frozen=True)
class Served:
    """A gateway that serves at `url`. `http` asks it."""

    gateway: Gateway
    port: int
    http: httpx2.AsyncClient

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    async def complete(self, **fields: Any) -> httpx2.Response:
        """The answer of /v1/completions."""
        return await self.http.post("/v1/completions", json=fields)


@asynccontextmanager
async def running_gateway(
    addresses: Sequence[str],
    *,
    send_buffer: int | None = None,
    gate: Gate | None = None,
    formats: Formats | None = None,
    tracing: Tracing | None = None,
    cors_origins: Sequence[str] = (),
    **options: Any,
) -> AsyncIterator[Served]:
    """`send_buffer`: bytes that a socket takes before its caller reads. `options`: of the pool."""
    gateway = Gateway(
        DriverPool(addresses, **options),
        gate,
        formats=formats,
        tracing=tracing,
        cors_origins=cors_origins,
    )
    listener = listen(HOST, 0)
    if send_buffer is not None:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
    port = listener.getsockname()[1]
    async with (
        serving(gateway, listener),
        httpx2.AsyncClient(base_url=f"http://{HOST}:{port}", timeout=120) as http,
    ):
        yield Served(gateway, port, http)


@asynccontextmanager
async def connection(
    served: Served,
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A bare connection, for callers that are not well-behaved."""
    reader, writer = await asyncio.open_connection(HOST, served.port)
    try:
        yield reader, writer
    finally:
        writer.close()
        await asyncio.gather(writer.wait_closed(), return_exceptions=True)


def head(length: int, path: str = "/v1/completions") -> bytes:
    """The headers of a request with a body of `length` bytes."""
    return f"POST {path} HTTP/1.1\r\nHost: gateway\r\nContent-Length: {length}\r\n\r\n".encode()
