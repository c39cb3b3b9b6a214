"""How a client shows who it is, by an API key, and checks whom it talks to, by TLS."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypedDict, TypeVar

from paceline.address import Address, obstacle_at
from paceline.channel import Options, caller_options
from paceline.errors import InvalidRequestError
from paceline.quiet_grpc import grpc

if TYPE_CHECKING:
    import ssl

MAX_KEY_LENGTH = 512
"""Most characters of an API key."""

_Stub = TypeVar("_Stub")


class Access(TypedDict, total=False):
    """The keywords of a client that concern access.

    - `key`: an API key of the server.
    - `ca`: a file with the certificates, in PEM, of authorities that may sign the server's. It
      turns TLS on.
    - `tls`: True: TLS, by default with the authorities that gRPC brings.
    """

    key: str | None
    ca: str | os.PathLike[str] | None
    tls: bool


class Connector(Protocol):
    """How a process of a deployment reaches another one, in place of `ca` and `tls`."""

    def lasting_channel(self, address: str, options: Options) -> grpc.aio.Channel:
        """A channel to "host:port"."""

    def obstacle(self, address: Address, seconds: float) -> str | None:
        """As `paceline.address.obstacle_at`."""


@dataclass(frozen=True, slots=True)
class Credentials:
    """The checked values of `Access`. `roots`: the content of `ca`. None: no key, no file.

    `connector`: makes channels for asyncio; None: they are made as the other values say.
    """

    key: str | None = field(default=None, repr=False)
    ca: str | None = None
    tls: bool = False
    roots: bytes | None = field(default=None, repr=False)
    connector: Connector | None = None

    @classmethod
    def of(
        cls,
        key: str | None = None,
        ca: str | os.PathLike[str] | None = None,
        tls: bool = False,
        connector: Connector | None = None,
    ) -> Credentials:
        """Raises InvalidRequestError, which never quotes the key."""
        if key is not None and not _is_key(key):
            raise InvalidRequestError(
                "key",
                f"expected 1 to {MAX_KEY_LENGTH} printable characters of ASCII without spaces, as "
                "`paceline keys new` prints them",
            )
        if ca is None:
            return cls(key, None, tls, connector=connector)
        path = os.fspath(ca)
        try:
            with open(path, "rb") as stream:
                roots = stream.read()
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            raise InvalidRequestError("ca", f"{path!r} cannot be read: {why}") from None
        made = cls(key, path, True, roots, connector)
        made.context()  # Refuses a file that has no certificate.
        return made

    def context(self) -> ssl.SSLContext:
        """What gRPC checks, for a connection without gRPC. Raises InvalidRequestError."""
        import ssl  # Slow to import, and rarely needed.

        try:
            context = ssl.create_default_context(cafile=self.ca)
        except (ssl.SSLError, OSError):
            raise InvalidRequestError(
                "ca", f"{self.ca!r} has no certificate; expected a file in PEM"
            ) from None
        context.set_alpn_protocols(["h2"])
        return context

    def obstacle(self, address: Address, seconds: float) -> str | None:
        """Why no connection to `address` can be made, as `obstacle_at`."""
        if self.connector is not None:
            return self.connector.obstacle(address, seconds)
        return obstacle_at(address, seconds, self.context() if self.tls else None)

    def channel(self, address: str) -> grpc.Channel:
        """A channel to the server at "host:port", for blocking calls.

        A call waits in its own thread. With gRPC's shared thread, about one call in a thousand that
        began while its server ended waited for good.
        """
        options = [*caller_options(address), ("SingleThreadedUnaryStream", 1)]
        if not self.tls:
            return grpc.insecure_channel(address, options=options)
        return grpc.secure_channel(address, grpc.ssl_channel_credentials(self.roots), options)

    def async_channel(self, address: str, *, own_connection: bool = False) -> grpc.aio.Channel:
        """The same for asyncio. `own_connection`: no other channel shares its connection."""
        options = caller_options(address)
        if own_connection:
            options = [*options, ("grpc.use_local_subchannel_pool", 1)]
        if self.connector is not None:
            return self.connector.lasting_channel(address, options)
        if not self.tls:
            return grpc.aio.insecure_channel(address, options=options)
        return grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(self.roots), options)

    def stub(self, kind: Callable[[Any], _Stub], channel: Any) -> _Stub:
        """A stub of this kind whose calls all carry the key."""
        made = kind(channel)
        if self.key is not None:
            key = ("authorization", f"Bearer {self.key}")
            for name, call in vars(made).items():
                setattr(made, name, partial(_call_with, call, key))
        return made


def _call_with(
    call: Callable[..., Any],
    key: tuple[str, str],
    *arguments: Any,
    metadata: Sequence[tuple[str, str]] | None = None,
    **options: Any,
) -> Any:
    """Call with the key beside the metadata that the call has."""
    return call(*arguments, metadata=(key, *(metadata or ())), **options)


def _is_key(key: object) -> bool:
    return (
        isinstance(key, str)
        and 1 <= len(key) <= MAX_KEY_LENGTH
        and key.isascii()
        and key.isprintable()
        and " " not in key
    )
