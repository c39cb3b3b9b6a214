"""A certificate with its key: read from PEM files, and again when they change."""

from __future__ import annotations

import logging
import os
import ssl
import threading
import time
from collections.abc import Callable
from pathlib import Path

import grpc

from paceline.errors import ConfigError

LOOK_SECONDS = 2.0
"""Time between two looks at the files of a server that new connections reach."""

MAX_FILE_BYTES = 1024 * 1024
"""Most bytes of a certificate's or a key's file."""

_HANDSHAKE_TURNS = 5
"""More turns than a handshake takes: client, server, client, server."""

_log = logging.getLogger(__name__)


class Certificate:
    """A certificate chain and its private key. New connections get what the files have now.

    Files that do not fit together, as in the middle of a change, are tried again at the next look;
    until then what was read before stays in use. With `ca`, the authorities that may sign the other
    side's certificate, both sides of a connection show one; `name` is what it must be for. Then
    files fit together if a peer with the same files would accept the certificate now.
    """

    def __init__(
        self,
        chain: Path,
        key: Path,
        *,
        ca: Path | None = None,
        name: str = "",
        source: str = "TLS",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`source`: begins errors, such as the key of the configuration that names the files.

        Raises ConfigError if the files cannot be used.
        """
        self._chain = chain
        self._key = key
        self._ca = ca
        self._name = name
        self._source = source
        self._clock = clock
        self._looking = threading.Lock()  # gRPC asks from threads of its own.
        self._looked_at = clock()
        self._mark = self._present_mark()
        self.pair, self.roots = self._read()
        self._version = 0
        self._version_for_http = 0
        self._told_trouble = ""

    @classmethod
    def of(cls, chain: Path | None, key: Path | None) -> Certificate | None:
        """The certificate of a configuration; None: plain text. Raises ConfigError."""
        return None if chain is None or key is None else cls(chain, key)

    @property
    def version(self) -> int:
        """Grows when `pair` or `roots` change. It looks at the files, not too often."""
        with self._looking:
            self._look()
        return self._version

    def check(self) -> None:
        """Raises ConfigError if the present files cannot be used, or cannot be used any more."""
        self._read()

    def for_http(self) -> ssl.SSLContext:
        """A context for asyncio's servers. Call `renew` now and then to keep it up to date."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        context.load_cert_chain(self._chain, self._key, password=_no_password)
        return context

    def renew(self, context: ssl.SSLContext) -> None:
        """Have new connections of `context` get a changed certificate. Open ones go on."""
        if (version := self.version) != self._version_for_http:
            self._version_for_http = version
            context.load_cert_chain(self._chain, self._key, password=_no_password)

    def for_grpc(self, on_connection: Callable[[], None] = lambda: None) -> grpc.ServerCredentials:
        """Credentials of a gRPC server, which asks for a changed certificate at new connections.

        `on_connection` is called at each new connection, before its handshake, in any thread.
        """
        given = self._version

        def changed() -> grpc.ServerCertificateConfiguration | None:
            nonlocal given
            on_connection()
            if (version := self.version) == given:
                return None
            given = version
            return self._configuration()

        # None is a documented answer: nothing has changed. The stubs do not have it.
        return grpc.dynamic_ssl_server_credentials(
            self._configuration(),
            changed,  # type: ignore[arg-type]
            require_client_authentication=self._ca is not None,
        )

    def _configuration(self) -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration([self.pair], self.roots)

    def _look(self) -> None:
        now = self._clock()
        if now - self._looked_at < LOOK_SECONDS:
            return
        self._looked_at = now
        mark = self._present_mark()
        if mark == self._mark:
            return
        try:
            self.pair, self.roots = self._read()
        except ConfigError as error:
            if str(error) != self._told_trouble:
                self._told_trouble = str(error)
                _log.error("%s; the certificate from before is still in use", error)
            return
        self._mark, self._told_trouble = mark, ""
        self._version += 1
        _log.warning("%s: %s was read again", self._source, self._chain)

    def _files(self) -> list[Path]:
        return [self._chain, self._key, *([] if self._ca is None else [self._ca])]

    def _read(self) -> tuple[tuple[bytes, bytes], bytes | None]:
        """Key and chain, and `ca`, as PEM, after a check that they fit together.

        Raises ConfigError.
        """
        source = self._source
        for path in self._files():
            try:
                size = path.stat().st_size
            except OSError as error:
                raise ConfigError(f"{source}: {path} cannot be read: {error.strerror}") from None
            if size > MAX_FILE_BYTES:
                raise ConfigError(f"{source}: {path} has more than {MAX_FILE_BYTES:,} bytes")
        scratch = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            scratch.load_cert_chain(self._chain, self._key, password=_no_password)
            if self._ca is not None:
                self._check_peers()
            roots = None if self._ca is None else self._ca.read_bytes()
            return (self._key.read_bytes(), self._chain.read_bytes()), roots
        except _PasswordWantedError:
            raise ConfigError(
                f"{source}: {self._key} is encrypted; expected a private key without a password"
            ) from None
        except ssl.SSLCertVerificationError as error:
            raise ConfigError(
                f"{source}: {self._chain} would be refused by a peer that has {self._ca}: "
                f"{error.verify_message.rstrip('.')}"
            ) from None
        except ssl.SSLError as error:
            raise ConfigError(
                f"{source}: {self._chain} and {self._key} are no certificate with its private key, "
                f"both in PEM ({error.reason or error})"
            ) from None
        except OSError as error:
            raise ConfigError(
                f"{source}: {error.filename} cannot be read: {error.strerror}"
            ) from None

    def for_peer(self) -> ssl.SSLContext:
        """A context that shows the certificate to a server, and checks the server's.

        It reads the files as they are now. Raises OSError, of which ssl.SSLError is one.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_cert_chain(self._chain, self._key, password=_no_password)
        self._load_roots(context)
        return context

    def _load_roots(self, context: ssl.SSLContext) -> None:
        try:
            context.load_verify_locations(self._ca)
        except ssl.SSLError:
            raise ConfigError(
                f"{self._source}: {self._ca} has no certificate; expected a file in PEM"
            ) from None

    def _check_peers(self) -> None:
        """Have two peers with these files shake hands. Raises ssl.SSLError."""
        server_context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        server_context.verify_mode = ssl.CERT_REQUIRED
        server_context.load_cert_chain(self._chain, self._key, password=_no_password)
        self._load_roots(server_context)
        to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
        sides = [
            self.for_peer().wrap_bio(to_client, to_server, server_hostname=self._name),
            server_context.wrap_bio(to_server, to_client, server_side=True),
        ]
        for _ in range(_HANDSHAKE_TURNS):
            for side in tuple(sides):
                try:
                    side.do_handshake()
                    sides.remove(side)
                except ssl.SSLWantReadError:
                    pass
        assert not sides, "the handshake did not end"

    def _present_mark(self) -> tuple[tuple[int, int, int], ...] | None:
        try:
            found = [os.stat(path) for path in self._files()]
        except OSError:
            return None
        return tuple((one.st_mtime_ns, one.st_ino, one.st_size) for one in found)


class _PasswordWantedError(Exception):
    pass


def _no_password() -> str:
    """Called for an encrypted key. Without it, OpenSSL would ask on the terminal."""
    raise _PasswordWantedError
