"""The certificate of a server: read from two PEM files, and again when they change."""

from __future__ import annotations

import logging
import os
import ssl
import time
from collections.abc import Callable
from pathlib import Path

import grpc

from paceline.errors import ConfigError

LOOK_SECONDS = 2.0
"""Time between two looks at the files of a server that new connections reach."""

MAX_FILE_BYTES = 1024 * 1024
"""Most bytes of a certificate's or a key's file."""

_log = logging.getLogger(__name__)


class Certificate:
    """A certificate chain and its private key. New connections get what the files have now.

    Files that do not fit together, as in the middle of a change, are tried again at the next look;
    until then the old pair stays in use.
    """

    def __init__(
        self, chain: Path, key: Path, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Raises ConfigError if the files cannot be used."""
        self._chain = chain
        self._key = key
        self._clock = clock
        self._looked_at = clock()
        self._mark = self._present_mark()
        self._pair = self._read()
        self._told_trouble = ""

    @classmethod
    def of(cls, chain: Path | None, key: Path | None) -> Certificate | None:
        """The certificate of a configuration; None: plain text. Raises ConfigError."""
        return None if chain is None or key is None else cls(chain, key)

    def for_http(self) -> ssl.SSLContext:
        """A context for asyncio's servers. Call `renew` now and then to keep it up to date."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        context.load_cert_chain(self._chain, self._key, password=_no_password)
        return context

    def renew(self, context: ssl.SSLContext) -> None:
        """Have new connections of `context` get a changed certificate. Open ones go on."""
        if self._has_changed():
            context.load_cert_chain(self._chain, self._key, password=_no_password)

    def for_grpc(self) -> grpc.ServerCredentials:
        """Credentials of a gRPC server, which asks for a changed certificate at new connections."""

        def changed() -> grpc.ServerCertificateConfiguration | None:
            return self._configuration() if self._has_changed() else None

        # None is a documented answer: nothing has changed. The stubs do not have it.
        return grpc.dynamic_ssl_server_credentials(self._configuration(), changed)  # type: ignore[arg-type]

    def _configuration(self) -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration([self._pair])

    def _has_changed(self) -> bool:
        """Whether there is a new pair, which is in `_pair` then."""
        now = self._clock()
        if now - self._looked_at < LOOK_SECONDS:
            return False
        self._looked_at = now
        mark = self._present_mark()
        if mark == self._mark:
            return False
        try:
            self._pair = self._read()
        except ConfigError as error:
            if str(error) != self._told_trouble:
                self._told_trouble = str(error)
                _log.error("%s; the certificate from before is still in use", error)
            return False
        self._mark, self._told_trouble = mark, ""
        _log.warning("TLS: %s was read again", self._chain)
        return True

    def _read(self) -> tuple[bytes, bytes]:
        """Key and chain as PEM, after a check that they fit together. Raises ConfigError."""
        for path in (self._chain, self._key):
            try:
                size = path.stat().st_size
            except OSError as error:
                raise ConfigError(f"TLS: {path} cannot be read: {error.strerror}") from None
            if size > MAX_FILE_BYTES:
                raise ConfigError(f"TLS: {path} has more than {MAX_FILE_BYTES:,} bytes")
        scratch = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            scratch.load_cert_chain(self._chain, self._key, password=_no_password)
            return self._key.read_bytes(), self._chain.read_bytes()
        except _PasswordWantedError:
            raise ConfigError(
                f"TLS: {self._key} is encrypted; expected a private key without a password"
            ) from None
        except ssl.SSLError as error:
            raise ConfigError(
                f"TLS: {self._chain} and {self._key} are no certificate with its private key, both "
                f"in PEM ({error.reason or error})"
            ) from None
        except OSError as error:
            raise ConfigError(f"TLS: {error.filename} cannot be read: {error.strerror}") from None

    def _present_mark(self) -> tuple[tuple[int, int, int], ...] | None:
        try:
            found = [os.stat(path) for path in (self._chain, self._key)]
        except OSError:
            return None
        return tuple((one.st_mtime_ns, one.st_ino, one.st_size) for one in found)


class _PasswordWantedError(Exception):
    pass


def _no_password() -> str:
    """Called for an encrypted key. Without it, OpenSSL would ask on the terminal."""
    raise _PasswordWantedError
