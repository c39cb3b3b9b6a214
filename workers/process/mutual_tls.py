"""Mutual TLS within a deployment: each process shows a certificate, and checks that of the other.

A worker's certificate is one of the deployment's own authority, for NAME and for both uses, server
and client. Its files have the names of a secret of cert-manager. Addresses are not in it, because
workers move.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import grpc

from paceline.address import Address, obstacle_at, parse_address
from paceline.errors import ConfigError, PermissionDeniedError
from paceline.text import counted
from workers.process.certificate import Certificate

NAME = "worker.paceline"
"""What a worker's certificate is for: a DNS name among its subject alternative names."""

CHAIN_FILE, KEY_FILE, CA_FILE = "tls.crt", "tls.key", "ca.crt"
SOURCE = "workers.tls"
"""The key of the configuration that names the folder."""

LOG_SECONDS = 10.0
"""Shortest time between two lines about refused connections."""

SETTLE_SECONDS = 3.0
"""A connection without a call for this long counts as refused."""

_PROBE_SECONDS = 1.0
_MAX_PEERS = 512
_MAX_NAMED = 5
_MAX_SAMPLES = 8
_HTTP2_BEGIN = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
_log = logging.getLogger(__name__)


class WorkerTls:
    """The certificate of this process, for connections to and from others of its deployment."""

    def __init__(self, folder: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        """`folder`: it has CHAIN_FILE, KEY_FILE and CA_FILE. Raises ConfigError."""
        self._certificate = Certificate(
            folder / CHAIN_FILE,
            folder / KEY_FILE,
            ca=folder / CA_FILE,
            name=NAME,
            source=SOURCE,
            clock=clock,
        )

    @classmethod
    def of(cls, folder: str | Path | None) -> WorkerTls | None:
        """That of a configuration; None: plain text. Raises ConfigError."""
        return None if folder is None else cls(Path(folder))

    def for_server(self, watch: PeerWatch) -> grpc.ServerCredentials:
        """Credentials of a server whose connections `watch` counts."""
        return self._certificate.for_grpc(watch.on_connection)

    def channel(self, address: str, options: Sequence[tuple[str, Any]]) -> grpc.aio.Channel:
        """A channel with the files as they are now."""
        _ = self._certificate.version
        (key, chain), roots = self._certificate.pair, self._certificate.roots
        credentials = grpc.ssl_channel_credentials(roots, key, chain)
        named = [*options, ("grpc.ssl_target_name_override", NAME)]
        return grpc.aio.secure_channel(address, credentials, options=named)

    def lasting_channel(self, address: str, options: Sequence[tuple[str, Any]]) -> grpc.aio.Channel:
        """A channel that is used for long: calls begun after a change use the new files."""
        return _RenewedChannel(
            partial(self.channel, address, options), lambda: self._certificate.version
        )

    def obstacle(self, address: Address, seconds: float) -> str | None:
        """Why a connection to `address` fails; None: it may succeed. Takes about `seconds`.

        gRPC's server sends no reason when it refuses a certificate. Then our own is looked at.
        """
        try:
            return self._obstacle(address, seconds)
        except ssl.SSLCertVerificationError as error:
            return (
                f"its certificate is not accepted: {error.verify_message.rstrip('.')}; expected "
                f"one for {NAME} by an authority in {CA_FILE} of {SOURCE}; check the clocks too"
            )
        except ssl.SSLError as error:
            if obstacle_at(address, seconds) is None:
                return f"the worker there speaks plain text; set {SOURCE} for it too"
            return f"the TLS handshake failed: {error.reason or error}"
        except TimeoutError:
            return None
        except ConnectionRefusedError:
            return "nothing listens there (connection refused)"
        except OSError as error:
            return f"the connection failed: {error.strerror or error}"

    def _obstacle(self, address: Address, seconds: float) -> str | None:
        try:
            context = self._certificate.for_peer()
        except ConfigError as error:
            return str(error)
        except OSError as error:
            return f"{SOURCE}: its files cannot be read: {error.strerror or error}"
        context.set_alpn_protocols(["h2"])
        answer = b""
        with (
            socket.create_connection((address.host, address.port), seconds) as connection,
            context.wrap_socket(connection, server_hostname=NAME) as secured,
            suppress(ConnectionError, ssl.SSLEOFError),
        ):
            secured.sendall(_HTTP2_BEGIN)
            answer = secured.recv(512)
        if answer:
            return None
        try:
            self._certificate.check()
        except ConfigError as error:
            return f"the worker there refuses this one's certificate: {error}"
        return (
            "the worker there refuses this one's certificate, which is in order by the files of "
            f"{SOURCE} here: it has another {CA_FILE} or another clock"
        )


async def why_refused(
    error: grpc.aio.AioRpcError, address: str, tls: WorkerTls | None
) -> str | None:
    """Why no connection to a worker could be made, if `error` may be about TLS; None: it is not.

    `tls`: with what the connection was tried; None: plain text.
    """
    told = error.details() or ""
    # A connection that was once made ends with the same words, but without the first ones.
    if not told.startswith("failed to connect") or not any(
        sign in told for sign in ("handshake", "Secure read", "erification", "Socket closed")
    ):
        return None
    where = parse_address(address)
    if tls is not None:
        obstacle = await asyncio.to_thread(tls.obstacle, where, _PROBE_SECONDS)
    else:
        obstacle = await asyncio.to_thread(obstacle_at, where, _PROBE_SECONDS)
        if obstacle is not None and "speaks TLS" in obstacle:
            obstacle = f"the worker there speaks TLS, and this process plain text; set {SOURCE}"
    return None if obstacle is None else f"no connection to {address}: {obstacle}"


class PeerWatch:
    """Checks who calls a server with mutual TLS, and logs connections that were refused.

    gRPC refuses a connection in its handshake without telling us. It asks for the certificate
    before each handshake, so there are counts of connections that begin and of those with a call;
    the difference was refused. Addresses are those that the system lists at that moment, for the
    first connections after a line, so that a flood costs nothing. The reason is known to the other
    side only, but for a certificate for another name, which we check ourselves.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.port = 0
        """Where the server listens, once it does."""
        self._loop = asyncio.get_running_loop()
        self._clock = clock
        self._lock = threading.Lock()
        self._num_begun = 0
        self._num_called = 0
        self._num_told = 0
        self._num_samples = 0
        # Peers that have called, the last one last; and connections, not known to call yet.
        self._callers: OrderedDict[str, None] = OrderedDict()
        self._others: OrderedDict[str, None] = OrderedDict()
        self._settling: asyncio.TimerHandle | None = None
        self._told_names_at = -LOG_SECONDS
        self._num_untold_names = 0

    def on_connection(self) -> None:
        """A handshake begins. Called in gRPC's threads."""
        with self._lock:
            self._num_begun += 1
            self._num_samples += 1
            sample = self._num_samples <= _MAX_SAMPLES
        if sample:
            self._note_others()
        with suppress(RuntimeError):  # The loop has ended.
            self._loop.call_soon_threadsafe(self._settle_later)

    def check(self, context: Any, *, required: bool) -> None:
        """Raise PermissionDeniedError unless the peer of a call is a worker.

        `required`: False: the server has another port too, where no peer shows a certificate.
        """
        shown = context.auth_context()
        names = shown.get("x509_subject_alternative_name", ())
        if not shown.get("x509_pem_cert") and not required:
            return
        self._note_call(context.peer())
        if NAME.encode() in names:
            return
        has = ", ".join(one.decode("ascii", "replace")[:100] for one in names[:_MAX_NAMED])
        message = f"the certificate is for {has or 'no name'}; a worker's is for {NAME}"
        self._num_untold_names += 1
        if self._clock() - self._told_names_at >= LOG_SECONDS:
            self._told_names_at = self._clock()
            _log.warning(
                "refused a call from %s: %s (%s since the last such line)",
                context.peer(),
                message,
                counted(self._num_untold_names, "call"),
            )
            self._num_untold_names = 0
        raise PermissionDeniedError(message)

    def _note_call(self, peer: str) -> None:
        if peer in self._callers:
            self._callers.move_to_end(peer)
            return
        self._callers[peer] = None
        self._num_called += 1
        if len(self._callers) > _MAX_PEERS:
            self._callers.popitem(last=False)

    def _note_others(self) -> None:
        import psutil  # Rarely needed.

        with suppress(psutil.Error, OSError):
            for one in psutil.Process().net_connections("tcp"):
                if one.raddr and one.laddr.port == self.port:
                    self._others[_peer_of(one.raddr.ip, one.raddr.port)] = None
        while len(self._others) > _MAX_PEERS:
            self._others.popitem(last=False)

    def _settle_later(self) -> None:
        if self._settling is None:
            self._settling = self._loop.call_later(SETTLE_SECONDS, self._settle, self._num_begun)

    def _settle(self, num_begun: int) -> None:
        """Log how many of the first `num_begun` connections were refused, and look again later."""
        refused = num_begun - self._num_called - self._num_told
        pause = SETTLE_SECONDS
        if refused > 0:
            pause = LOG_SECONDS
            self._num_told += refused
            hosts = dict.fromkeys(
                peer.partition(":")[2].rpartition(":")[0]
                for peer in tuple(self._others)
                if peer not in self._callers
            )
            named = ", ".join(tuple(hosts)[:_MAX_NAMED]) or "an address that is not known"
            _log.warning(
                "%s from %s%s ended without a call: no TLS, no certificate, or one that is not "
                "accepted here (expired, or another authority's). gRPC does not tell which; the "
                "log of the other side does",
                counted(refused, "connection"),
                named,
                ", and others" if len(hosts) > _MAX_NAMED else "",
            )
        self._settling = None
        if self._num_begun > num_begun or refused > 0:
            self._settling = self._loop.call_later(pause, self._settle, self._num_begun)
        if self._num_begun == num_begun:
            self._others.clear()
            self._num_samples = 0


def _peer_of(host: str, port: int) -> str:
    """An address as gRPC writes it."""
    host = host.removeprefix("::ffff:")
    return f"ipv6:%5B{host}%5D:{port}" if ":" in host else f"ipv4:{host}:{port}"


class _RenewedChannel(grpc.aio.Channel):
    """A channel that is made anew when the certificate changes. Calls that run keep the old one."""

    def __init__(self, make: Callable[[], grpc.aio.Channel], version: Callable[[], int]) -> None:
        self._make = make
        self._now_version = version
        self._version = version()
        self._channel = make()
        self._num_calls: dict[grpc.aio.Channel, int] = {self._channel: 0}
        self._closing: set[asyncio.Task[None]] = set()

    def _current(self) -> grpc.aio.Channel:
        if (version := self._now_version()) != self._version:
            old, self._channel, self._version = self._channel, self._make(), version
            self._num_calls[self._channel] = 0
            self._close_idle(old)
        return self._channel

    def _close_idle(self, channel: grpc.aio.Channel) -> None:
        if channel is not self._channel and not self._num_calls.get(channel, 1):
            del self._num_calls[channel]
            task = asyncio.ensure_future(channel.close(None))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    def _method(self, kind: str, *about: Any, **more: Any) -> Any:
        def begin(*arguments: Any, **options: Any) -> Any:
            channel = self._current()
            call = getattr(channel, kind)(*about, **more)(*arguments, **options)
            self._num_calls[channel] += 1
            call.add_done_callback(partial(self._ended, channel))
            return call

        return begin

    def _ended(self, channel: grpc.aio.Channel, _: Any) -> None:
        if channel in self._num_calls:
            self._num_calls[channel] -= 1
            self._close_idle(channel)

    def unary_unary(self, *about: Any, **more: Any) -> Any:
        return self._method("unary_unary", *about, **more)

    def unary_stream(self, *about: Any, **more: Any) -> Any:
        return self._method("unary_stream", *about, **more)

    def stream_unary(self, *about: Any, **more: Any) -> Any:
        return self._method("stream_unary", *about, **more)

    def stream_stream(self, *about: Any, **more: Any) -> Any:
        return self._method("stream_stream", *about, **more)

    async def close(self, grace: float | None = None) -> None:
        """Close all channels. Running calls end after `grace` seconds."""
        channels, self._num_calls = list(self._num_calls), {}
        await asyncio.gather(*(one.close(grace) for one in channels), *self._closing)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._current().get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._current().wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._current().channel_ready()

    async def __aenter__(self) -> grpc.aio.Channel:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
