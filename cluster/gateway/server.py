"""Serves a gateway on a port with uvicorn: limits of a connection, and the end on a signal."""

from __future__ import annotations

import asyncio
import resource
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from cluster.gateway.app import Gateway
from paceline.errors import InternalError, UnavailableError

MAX_CONNECTIONS = 2048
"""Most open connections; the next is closed."""

IDLE_SECONDS = 30.0
"""Longest time from the start of a connection, or the end of an answer, to the end of the next
request's headers. After that the connection is closed."""

UNREAD_SECONDS = 60.0
"""Longest time in which a caller reads nothing of an answer while more waits than its socket takes.
After that the connection is closed, which cancels the request."""

_CUT_SECONDS = 1.0
"""Time for requests that are cut off to end. After that their connections are closed."""


class _Alarm:
    """Calls `ring` once, some seconds after `start`, unless `stop` comes first."""

    def __init__(self, seconds: float, ring: Callable[[], None]) -> None:
        self._seconds = seconds
        self._ring = ring
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Start the alarm. No effect if it runs already."""
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


class Connection(H11Protocol):
    """A connection of uvicorn, with limits on how long a caller may send or read nothing."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # Writing is paused exactly while bytes wait for the socket.
        transport.set_write_buffer_limits(high=0)
        self.num_unsent = 0
        self.idle = _Alarm(IDLE_SECONDS, transport.abort)
        self.unread = _Alarm(UNREAD_SECONDS, self.check_unread)
        self.idle.start()
        if len(self.connections) > MAX_CONNECTIONS:
            transport.abort()

    def is_answering(self) -> bool:
        """Whether a request has no whole answer yet."""
        return self.cycle is not None and not self.cycle.response_complete

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.is_answering() and not self.cycle.more_body and self.conn.trailing_data[0]:
            # uvicorn reads no further until the answer ends, so it would not notice that the caller
            # leaves.
            self.transport.abort()
        self.watch_idle()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self.watch_idle()

    def watch_idle(self) -> None:
        """Run the alarm while no request is open and nothing waits to be sent.

        Bytes of headers do not restart it.
        """
        if self.is_answering() or self.flow.write_paused:
            self.idle.stop()
        else:
            self.idle.start()

    def pause_writing(self) -> None:
        super().pause_writing()
        self.num_unsent = self.transport.get_write_buffer_size()
        self.unread.start()
        self.watch_idle()

    def resume_writing(self) -> None:
        super().resume_writing()
        self.unread.stop()
        self.watch_idle()

    def check_unread(self) -> None:
        """Close the connection unless its caller has read since the last check."""
        before, self.num_unsent = self.num_unsent, self.transport.get_write_buffer_size()
        if self.num_unsent < before:
            self.unread.start()
        else:
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.idle.stop()
        self.unread.stop()

    def send_400_response(self, msg: str) -> None:
        """Answer bytes that are not HTTP; in the middle of another answer, end the connection."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.transport.abort()


class _Server(uvicorn.Server):
    """uvicorn without signal handlers of its own, which would end requests that are open."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Port 0 is any free one. Raises UnavailableError."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=MAX_CONNECTIONS)
    except UnicodeError as error:
        raise UnavailableError(f"cannot listen at {host}:{port}: this is no host name") from error
    except OSError as error:
        why = (error.strerror or str(error)).partition(" (while ")[0]  # The address comes first.
        raise UnavailableError(f"cannot listen at {host}:{port}: {why}") from error


def raise_file_limit() -> None:
    """Let this process open as many files, and so connections, as the system allows it."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


@asynccontextmanager
async def serving(gateway: Gateway, listener: socket.socket) -> AsyncIterator[asyncio.Task[None]]:
    """Serve while the block runs. Yields the serving task. Open requests are cut off at the end."""
    config = uvicorn.Config(
        gateway.app,
        http=Connection,
        ws="none",
        lifespan="on",
        log_config=None,
        log_level="error",
        access_log=False,
        server_header=False,
        timeout_keep_alive=int(2 * IDLE_SECONDS),  # `Connection` decides.
        timeout_graceful_shutdown=int(10 * _CUT_SECONDS),  # `serving` ends them earlier.
    )
    server = _Server(config)
    running = asyncio.create_task(server.serve([listener]))
    try:
        while not server.started and not running.done():
            await asyncio.sleep(0.01)
        if running.done():
            running.result()
        yield running
    finally:
        await gateway.cut_off()
        server.should_exit = True
        await asyncio.wait({running}, timeout=_CUT_SECONDS)
        for connection in tuple(server.server_state.connections):
            connection.transport.abort()
        await running


async def serve_until_signal(
    gateway: Gateway, listener: socket.socket, *, drain_seconds: float, on_ready: Callable[[], None]
) -> tuple[int, int]:
    """Serve until SIGTERM or Ctrl-C; then let open requests end, while new ones get 503.

    A second signal ends them at once. Returns the first signal and how many requests were cut off.
    """
    signals: asyncio.Queue[int] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, signals.put_nowait, number)
    async with serving(gateway, listener) as server:
        on_ready()
        first = asyncio.create_task(signals.get())
        await asyncio.wait({first, server}, return_when=asyncio.FIRST_COMPLETED)
        if server.done():
            raise InternalError("the HTTP server ended") from server.exception()
        draining = asyncio.create_task(gateway.drain(drain_seconds))
        second = asyncio.create_task(signals.get())
        await asyncio.wait({draining, second}, return_when=asyncio.FIRST_COMPLETED)
        draining.cancel()
        second.cancel()
        return first.result(), gateway.num_open
