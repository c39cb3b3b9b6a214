"""A TCP relay that emulates a slow network path: it delays every byte and limits the rate.

    python -m workers.emulated.relay 127.0.0.1:9001 127.0.0.1:9002 --rtt-ms 10

It opens one listening port per address and prints the addresses of these ports. It is a process of
its own, so that other work in the same process cannot delay it, and needs no torch. It uses threads
and precise sleeps, since asyncio wakes up too late. Each chunk leaves at its own deadline, so that
lateness does not add up.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
import time
from collections import deque
from typing import Annotated

import typer

from workers.emulated.device_wait import fine_timer_slack, wait_until
from workers.emulated.latency_profiles import LinkProfile

_CHUNK = 65536


class Relay:
    """Passes connections on to `address` ("host:port"). `link`: the delay and rate each way."""

    def __init__(self, address: str, link: LinkProfile, *, host: str = "127.0.0.1") -> None:
        self._to = _split(address)
        self._link = link
        self._listener = socket.create_server((host, 0))
        self._sockets: list[socket.socket] = [self._listener]
        self._lock = threading.Lock()
        self._closed = False
        self.address = f"{host}:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Stop listening and break every connection."""
        with self._lock:
            self._closed = True
            for one in self._sockets:
                _shut(one)

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return  # closed
            try:
                far = socket.create_connection(self._to)
            except OSError:
                near.close()
                continue
            with self._lock:
                self._sockets += [near, far]
                if self._closed:
                    _shut(near)
                    _shut(far)
                    return
            for one in (near, far):
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for pair in ((near, far), (far, near)):
                _Direction(*pair, self._link).start()


class _Direction:
    """One direction of a connection: one thread reads and sets deadlines, another one sends."""

    def __init__(self, source: socket.socket, sink: socket.socket, link: LinkProfile) -> None:
        self._source = source
        self._sink = sink
        self._link = link
        self._chunks: deque[tuple[float, bytes]] = deque()
        self._ready = threading.Semaphore(0)

    def start(self) -> None:
        threading.Thread(target=self._read, daemon=True).start()
        threading.Thread(target=self._send, daemon=True).start()

    def _read(self) -> None:
        free_at = 0.0  # the time at which the link has sent all data read before
        delay = self._link.one_way_seconds(0)
        while True:
            try:
                data = self._source.recv(_CHUNK)
            except OSError:
                data = b""
            now = time.perf_counter()
            sending = self._link.one_way_seconds(len(data)) - delay
            free_at = max(free_at, now) + sending
            self._chunks.append((free_at + delay, data))
            self._ready.release()
            if not data:
                return

    def _send(self) -> None:
        fine_timer_slack()
        while True:
            self._ready.acquire()
            due, data = self._chunks.popleft()
            wait_until(due)
            if not data:
                _shut(self._sink)
                return
            try:
                self._sink.sendall(data)
            except OSError:
                _shut(self._source)
                return


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def _shut(one: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it was shut already
        one.shutdown(socket.SHUT_RDWR)
    one.close()


def main(
    addresses: list[str],
    rtt_ms: Annotated[float, typer.Option(help="Round-trip time.")] = 0.0,
    mbit_per_second: Annotated[float, typer.Option(help="Each way; 0: no bound.")] = 0.0,
) -> None:
    """Relay to each of ADDRESSES. Prints one address per line, and ends on SIGTERM or SIGINT."""
    link = LinkProfile(rtt_ms=rtt_ms, mbit_per_second=mbit_per_second)
    ended = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, ended)
    relays = [Relay(address, link) for address in addresses]
    for relay in relays:
        typer.echo(relay.address)
    signal.sigwait(ended)
    for relay in relays:
        relay.close()


if __name__ == "__main__":
    typer.run(main)
