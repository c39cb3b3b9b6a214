"""Serves a gateway on a port with uvicorn: limits of a connection, and the end on a signal."""

from __future__ import annotations

import asyncio
import logging
import resource
import signal
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from contextvars import ContextVar
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.gateway.app import Gateway
from paceline.errors import InternalError, UnavailableError
from workers.process.certificate import LOOK_SECONDS, Certificate
from workers.process.server import RunningServer

_log = logging.getLogger(__name__)

MAX_CONNECTIONS = 2048
"""Most open connections; the next is closed."""

IDLE_SECONDS = 30.0
"""Longest time from the start of a connection, or the end of an answer, to the end of the next
request's headers. After that the connection is closed."""

UNREAD_SECONDS = 60.0
"""Longest time in which a caller reads nothing of an answer while more waits than its socket takes.
After that the connection is closed, which cancels the request."""

_LOOK_SECONDS = 0.05
"""Time between two looks whether draining is done."""

_LAST_WORD_SECONDS = 0.5
"""Time for the last messages to reach gRPC callers."""

_CUT_SECONDS = 1.0
"""Time for requests that are cut off to end. After that their connections are closed."""


class _Alarm:
    """Calls `ring` once, some seconds after `start`, unless `stop` comes first."""

    def __init__(self, seconds: float, ring: Callable[[], None]) -> None:
        self._seconds = seconds
        self._ring = ring
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._seconds, self._end)

    def stop(self) -> None:
        """Stop the alarm. No error if it does not run."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _end(self) -> None:
        self._timer = None
        self._ring()


class Connection(asyncio.Protocol):
    """A connection, with limits on how long a caller may send or read nothing.

    It hands asyncio's events to uvicorn's protocol, `inner`, and knows from `_watched` whether a
    request is open. `connections` are those that are open.
    """

    def __init__(self, inner: asyncio.Protocol, connections: set[Connection]) -> None:
        self._inner = inner
        self._connections = connections
        self._is_answering = False
        self._has_whole_request = False
        self._num_unsent = 0
        self._writing_is_paused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn
        # asyncio does this only if a socket names its protocol; `create_server` leaves it out. Else
        # an answer in two writes waits 40 ms until the caller's host confirms the first.
        connected = transport.get_extra_info("socket")
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.transport = transport
        self._connections.add(self)
        self._idle = _Alarm(IDLE_SECONDS, transport.abort)
        self._unread = _Alarm(UNREAD_SECONDS, self._check_unread)
        # Writing is paused exactly while bytes wait for the socket. With TLS, asyncio pauses at the
        # limit and not above it, and the socket's own buffer takes 64 KiB more.
        transport.set_write_buffer_limits(high=1 if transport.get_extra_info("sslcontext") else 0)
        self._idle.start()
        self._inner.connection_made(transport)
        if len(self._connections) > MAX_CONNECTIONS:
            transport.abort()

    def data_received(self, data: bytes) -> None:
        token = _connection.set(self)  # The task of a request inherits it.
        try:
            self._inner.data_received(data)
        except h11.LocalProtocolError:  # not HTTP, in the middle of an answer
            self.transport.abort()
        finally:
            _connection.reset(token)
        if self._has_whole_request and not self.transport.is_reading():
            # uvicorn reads no further until the answer ends, so it would not notice that the caller
            # leaves.
            self.transport.abort()

    def answer_begins(self) -> None:
        """A request's headers are there, and no answer yet."""
        self._is_answering = True
        self._watch_idle()

    def answer_ends(self) -> None:
        """The whole answer is written, or there will be no more of it."""
        self._is_answering = self._has_whole_request = False
        self._watch_idle()

    def request_ends(self) -> None:
        """The body of the request has been read."""
        self._has_whole_request = self._is_answering

    def pause_writing(self) -> None:
        self._inner.pause_writing()
        self._writing_is_paused = True
        self._num_unsent = self.transport.get_write_buffer_size()
        self._unread.start()
        self._watch_idle()

    def resume_writing(self) -> None:
        self._inner.resume_writing()
        self._writing_is_paused = False
        self._unread.stop()
        self._watch_idle()

    def eof_received(self) -> bool | None:
        return self._inner.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.discard(self)
        self._inner.connection_lost(exc)
        self._idle.stop()
        self._unread.stop()

    def _watch_idle(self) -> None:
        """Run the alarm while no request is open and nothing waits to be sent.

        Bytes of headers do not restart it.
        """
        if self._is_answering or self._writing_is_paused or self.transport.is_closing():
            self._idle.stop()
        else:
            self._idle.start()

    def _check_unread(self) -> None:
        """Close the connection unless its caller has read since the last check."""
        before, self._num_unsent = self._num_unsent, self.transport.get_write_buffer_size()
        if self._num_unsent < before:
            self._unread.start()
        else:
            self.transport.abort()


_connection: ContextVar[Connection] = ContextVar("_connection")
"""The connection whose bytes are read, in the task of a request: the one that it came by."""


def _watched(app: ASGIApp) -> ASGIApp:
    """`app`, which tells a request's connection when it begins, is read and has its answer."""

    async def watch(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        connection = _connection.get()
        is_answered = False

        def end() -> None:
            nonlocal is_answered
            if not is_answered:  # A next request may have begun since.
                is_answered = True
                connection.answer_ends()

        async def read() -> Message:
            message = await receive()
            if not is_answered and not message.get("more_body", False):
                connection.request_ends()
            return message

        async def write(message: Message) -> None:
            await send(message)
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                end()

        connection.answer_begins()
        try:
            await app(scope, read, write)
        finally:
            end()

    return watch


class _Server(uvicorn.Server):
    """uvicorn without signal handlers of its own, which would end requests that are open."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def listen(host: str, port: int, *, hint: str = "") -> socket.socket:
    """A listening socket. Port 0 is any free one. Raises UnavailableError, ending with `hint`."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=MAX_CONNECTIONS)
    except UnicodeError as error:
        raise UnavailableError(f"cannot listen at {host}:{port}: this is no host name") from error
    except OSError as error:
        why = (error.strerror or str(error)).partition(" (while ")[0]  # The address comes first.
        hint = f"; {hint}" if hint else ""
        raise UnavailableError(f"cannot listen at {host}:{port}: {why}{hint}") from error


class RunningGateway:
    """A gateway that serves at `address` until `stop`. `start_gateway` makes it."""

    def __init__(
        self, gateway: Gateway, listener: socket.socket, certificate: Certificate | None
    ) -> None:
        host, port = listener.getsockname()[:2]
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self.gateway = gateway
        self._connections: set[Connection] = set()
        config = _uvicorn_config(gateway, self._connections)
        self._renewing: asyncio.Task[None] | None = None
        if certificate is not None:
            config.ssl = certificate.for_http()
            self._renewing = asyncio.create_task(_renew(certificate, config.ssl))
        self._server = _Server(config)
        self.serving = asyncio.create_task(self._serve(listener))

    async def _serve(self, listener: socket.socket) -> None:
        with listener:  # uvicorn closes it only if nothing fails.
            await self._server.serve([listener])

    async def started(self) -> None:
        """Return when it serves. Raises what ended it before."""
        while not self._server.started and not self.serving.done():
            await asyncio.sleep(0.01)
        if self.serving.done():
            self.serving.result()

    async def wait(self) -> None:
        await asyncio.wait({self.serving})

    async def stop(self, grace: float | None = None) -> None:
        """Wait at most `grace` seconds for open requests, cut the others off, and end."""
        if grace:
            await self.gateway.drain(grace)
        if self._renewing is not None:
            self._renewing.cancel()
        await self.gateway.cut_off()
        self._server.should_exit = True
        await asyncio.wait({self.serving}, timeout=_CUT_SECONDS)
        for connection in tuple(self._connections):
            connection.transport.abort()
        await self.wait()


def _uvicorn_config(gateway: Gateway, connections: set[Connection]) -> uvicorn.Config:
    """`connections`: gets those that are open."""
    config = uvicorn.Config(
        _watched(gateway.app),
        http="h11",
        ws="none",
        lifespan="on",
        log_config=None,
        log_level="error",
        access_log=False,
        server_header=False,
        reset_contextvars=False,  # `_watched` finds the connection by one.
        timeout_keep_alive=int(2 * IDLE_SECONDS),  # `Connection` decides.
        timeout_graceful_shutdown=int(10 * _CUT_SECONDS),  # `stop` ends them earlier.
    )
    config.load()
    make_inner: Any = config.http_protocol_class

    def connect(**of_server: Any) -> Connection:
        return Connection(make_inner(**of_server), connections)

    config.http_protocol_class = connect  # type: ignore[assignment]
    return config


async def _renew(certificate: Certificate, context: ssl.SSLContext) -> None:
    while True:
        await asyncio.sleep(LOOK_SECONDS)
        try:
            certificate.renew(context)
        except Exception:  # Connections go on with the certificate from before.
            _log.exception("the certificate could not be renewed")


async def start_gateway(
    gateway: Gateway, listener: socket.socket, *, certificate: Certificate | None = None
) -> RunningGateway:
    """Serve in the background. Returns when it serves. `certificate`: for TLS; None: plain text."""
    running = RunningGateway(gateway, listener, certificate)
    try:
        await running.started()
    except BaseException:
        await running.stop()
        raise
    return running


@asynccontextmanager
async def serving(
    gateway: Gateway, listener: socket.socket, *, certificate: Certificate | None = None
) -> AsyncIterator[RunningGateway]:
    """Serve while the block runs. Open requests are cut off at its end. Raises what ended it."""
    running = await start_gateway(gateway, listener, certificate=certificate)
    try:
        yield running
    finally:
        await running.stop()
    running.serving.result()


def raise_file_limit() -> None:
    """Let this process open as many files, and so connections, as the system allows it."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


async def _drained(gateway: Gateway, server: RunningServer | None, seconds: float) -> None:
    stopping = () if server is None else (_stopped(gateway, server, seconds),)
    await asyncio.gather(gateway.drain(seconds), *stopping)


async def _stopped(gateway: Gateway, server: RunningServer, seconds: float) -> None:
    """Stop the gRPC server as soon as nothing is decoded. A GenerateMany stream may stay open."""
    stopping = asyncio.create_task(server.stop(seconds))
    try:
        while gateway.num_running and not stopping.done():
            await asyncio.wait({stopping}, timeout=_LOOK_SECONDS)
        await server.stop(_LAST_WORD_SECONDS)
    finally:
        stopping.cancel()


async def serve_until_signal(
    gateway: Gateway,
    listener: socket.socket,
    *,
    drain_seconds: float,
    on_ready: Callable[[RunningServer | None], None],
    start_grpc: Callable[[], Awaitable[RunningServer]] | None = None,
    certificate: Certificate | None = None,
) -> tuple[int, int]:
    """Serve until SIGTERM or Ctrl-C; then let open requests end, while new ones get 503.

    A second signal ends them at once. Returns the first signal and how many HTTP requests were cut
    off. `start_grpc` starts a gRPC server beside it, which `on_ready` gets.
    """
    signals: asyncio.Queue[int] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, signals.put_nowait, number)
    async with serving(gateway, listener, certificate=certificate) as http, AsyncExitStack() as end:
        grpc_server = None
        if start_grpc is not None:
            grpc_server = await start_grpc()
            end.push_async_callback(grpc_server.stop)
        on_ready(grpc_server)
        first = asyncio.create_task(signals.get())
        await asyncio.wait({first, http.serving}, return_when=asyncio.FIRST_COMPLETED)
        if http.serving.done():
            raise InternalError("the HTTP server ended") from http.serving.exception()
        draining = asyncio.create_task(_drained(gateway, grpc_server, drain_seconds))
        second = asyncio.create_task(signals.get())
        await asyncio.wait({draining, second}, return_when=asyncio.FIRST_COMPLETED)
        draining.cancel()
        second.cancel()
        return first.result(), gateway.num_open
