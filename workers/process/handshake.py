"""The handshake of a driver and a worker: the versions and the lives of both (types.proto, Hello).

A life is one start of a server. `DriverIdentity` is the driver's side, `Reception` the worker's.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.metadata import version
from itertools import count
from typing import Protocol, TypeVar

from google.protobuf.message import DecodeError

from paceline.errors import PacelineError, ProtocolError, VersionMismatchError, WrongLifeError
from paceline.v1 import types_pb2
from workers.process.logs import SeldomLog

LIFE_KEY = "paceline-life"
"""The initial metadata of a stream that a worker has let in: its life, in hexadecimal."""

MAX_NAME = 128
"""Most characters of the name of a driver or of a worker."""

HELLO_SECONDS = 10.0
"""How long a stream may take to say hello."""

MAX_REMEMBERED = 1024
"""Most drivers, and most pairs of driver and worker's name, that a worker remembers."""

_MAX_VERSION = 40
_VERSION = re.compile(r"(0|[1-9][0-9]{0,5})\.(0|[1-9][0-9]{0,5})(?![0-9])")
_UPGRADE = (
    "versions may differ by one minor version; upgrade the older one, one minor version after the "
    "other (docs/operations.md, Upgrades)"
)
_log = logging.getLogger(__name__)
KeyT = TypeVar("KeyT")
ValueT = TypeVar("ValueT")


@cache
def own_version() -> str:
    return version("paceline")


def check_version(theirs: str, ours: str, *, they: str, we: str) -> None:
    """Raise VersionMismatchError unless the two versions work together.

    `they` and `we` are who runs them, in words.
    """
    shown = repr(theirs[:_MAX_VERSION])
    if not theirs:
        raise VersionMismatchError(
            f"{they} tells no version, as builds do that know no handshake; {we} runs Paceline "
            f"{ours}: {_UPGRADE}"
        )
    their, our = _VERSION.match(theirs), _VERSION.match(ours)
    if their is None or len(theirs) > _MAX_VERSION:
        raise VersionMismatchError(
            f"{they} tells the version {shown}, which is none such as 0.1.0; {we} runs Paceline "
            f"{ours}: {_UPGRADE}"
        )
    assert our is not None
    apart = abs(int(their[2]) - int(our[2]))
    if their[1] != our[1] or apart > 1:
        raise VersionMismatchError(
            f"{they} runs Paceline {shown[1:-1]}, and {we} runs {ours}: {_UPGRADE}"
        )


def with_life(address: str, life: int | None) -> str:
    """An address that also tells the life of the worker there, for `split_life`."""
    return address if life is None else f"{address}#{life:x}"


def split_life(told: str) -> tuple[str, int | None]:
    """The address "host:port", and the life of the worker there; None: it was not told."""
    address, _, life = told.partition("#")
    return address, int(life, 16) if life else None


class Description(Protocol):
    """What a worker's description tells for the handshake."""

    version: str
    life: int


class DriverIdentity:
    """Who a driver is to its workers.

    `name`: the same for all lives of the driver; None: a new one, for a driver that is not started
    again. `life`: above all earlier lives of the driver; None: the milliseconds since 1970.
    """

    def __init__(
        self, name: str | None = None, life: int | None = None, *, version: str | None = None
    ) -> None:
        self.name = name or f"driver-{uuid.uuid4().hex[:12]}"
        self.life = life or time.time_ns() // 1_000_000
        self.version = version or own_version()
        self._streams = count(1)

    def hello(
        self, worker: str, worker_life: int | None, *, stream: bool = True
    ) -> types_pb2.Hello:
        """A hello to a worker. `worker_life` None: it is not known yet. `stream`: opens one."""
        return types_pb2.Hello(
            driver=self.name,
            driver_life=self.life,
            stream=next(self._streams) if stream else 0,
            worker=worker,
            worker_life=worker_life or 0,
            version=self.version,
        )

    def check(self, description: Description, worker: str, expected_life: int | None) -> None:
        """Raise VersionMismatchError, ProtocolError or WrongLifeError unless `worker` is meant.

        `worker`: its name and address, in words. `expected_life` None: any life is meant.
        """
        check_version(
            description.version, self.version, they=worker, we=f"the driver {self.name!r}"
        )
        if not description.life:
            raise ProtocolError(f"{worker} tells no life: expected a number above 0")
        if expected_life not in (None, description.life):
            raise WrongLifeError(
                f"{worker} has the life {description.life:x}, but {expected_life:x} is meant: "
                "another worker, or a new process of this one, holds the address; the driver waits "
                "to be told where the worker is"
            )


class Reception:
    """Whom a worker lets in: checks each hello, and ends streams that a later one replaces.

    `role`: what the worker is, in words. `life`: its own.
    """

    def __init__(self, role: str, *, version: str | None = None) -> None:
        self.life = secrets.randbits(63) + 1
        self.version = version or own_version()
        self._role = role
        # By driver, and by driver and worker's name: the last life, and the last stream of a life.
        self._lives: dict[str, int] = {}
        self._last: dict[tuple[str, str], tuple[int, int]] = {}
        self._open: dict[tuple[str, str], tuple[int, Callable[[PacelineError], None]]] = {}
        self._refusals = SeldomLog(_log)

    @property
    def welcome(self) -> tuple[tuple[str, str]]:
        """The initial metadata of a stream that is let in."""
        return ((LIFE_KEY, f"{self.life:x}"),)

    def check(self, hello: types_pb2.Hello, peer: str) -> None:
        """Raise the reason to refuse a driver that asks for a description. `peer`: its address."""
        with self._logged(peer):
            self._check(hello)

    async def hear(
        self, first: Awaitable[tuple[str, types_pb2.Hello | None]], peer: str
    ) -> types_pb2.Hello:
        """The hello of a stream's first message, which is awaited for at most HELLO_SECONDS.

        `first` gives what the message is, in words, and its hello, if any. Raises ProtocolError.
        """
        with self._logged(peer):
            try:
                async with asyncio.timeout(HELLO_SECONDS):
                    kind, hello = await first
            except TimeoutError:
                raise ProtocolError(
                    f"hello: expected as the first message, and got none in {HELLO_SECONDS:g} s"
                ) from None
            except DecodeError:
                kind, hello = "bytes that are no message", None
            if hello is None:
                raise ProtocolError(
                    f"hello: expected as the first message of a stream to a {self._role}, got "
                    f"{kind}; a driver of a build that knows no handshake must be upgraded"
                )
            return hello

    @contextmanager
    def entered(
        self, hello: types_pb2.Hello, end: Callable[[PacelineError], None], peer: str
    ) -> Iterator[None]:
        """Let a stream in, which lasts as long as the block. Raises the reason to refuse it.

        `end` is called with the reason, at most once, if the stream must end because the driver has
        opened a later one, or has begun a later life.
        """
        with self._logged(peer):
            self._check(hello, of_stream=True)
        key, turn = (hello.driver, hello.worker), (hello.driver_life, hello.stream)
        self._end_earlier(hello)
        self._note(self._lives, hello.driver, hello.driver_life)
        self._note(self._last, key, turn)
        own = self._open[key] = (hello.driver_life, end)
        try:
            yield
        finally:
            if self._open.get(key) is own:
                del self._open[key]

    def _check(self, hello: types_pb2.Hello, *, of_stream: bool = False) -> None:
        for field, text in (("driver", hello.driver), ("worker", hello.worker)):
            if not 0 < len(text) <= MAX_NAME:
                raise ProtocolError(
                    f"hello.{field}: expected 1 to {MAX_NAME} characters, got {len(text)}"
                )
        driver = f"driver {hello.driver!r}"
        check_version(
            hello.version, self.version, they=driver, we=f"the {self._role} {hello.worker!r}"
        )
        needed = ("driver_life", "stream", "worker_life") if of_stream else ("driver_life",)
        for field in needed:
            if not getattr(hello, field):
                raise ProtocolError(f"hello.{field}: expected a number above 0")
        if hello.worker_life not in (0, self.life):
            raise WrongLifeError(
                f"{driver} means the life {hello.worker_life:x} of {hello.worker!r}, but this "
                f"{self._role} has the life {self.life:x}: ask for its description again"
            )
        last_life = self._lives.get(hello.driver, 0)
        if hello.driver_life < last_life:
            raise WrongLifeError(
                f"the life {hello.driver_life} of {driver} is over: its life {last_life} has "
                "replaced it; end the older process"
            )
        last = self._last.get((hello.driver, hello.worker))
        if of_stream and last is not None and (hello.driver_life, hello.stream) <= last:
            raise WrongLifeError(
                f"the stream {hello.stream} of {driver} comes late: its stream {last[1]} has "
                "replaced it"
            )

    def _end_earlier(self, hello: types_pb2.Hello) -> None:
        """End what the stream replaces: the driver's streams of earlier lives, and its own last."""
        for key, (life, end) in list(self._open.items()):
            if key[0] != hello.driver:
                continue
            if life < hello.driver_life:
                why = f"the life {hello.driver_life} of driver {key[0]!r} has replaced {life}"
            elif key[1] == hello.worker:
                why = f"the stream {hello.stream} of driver {key[0]!r} has replaced this one"
            else:
                continue
            del self._open[key]
            end(WrongLifeError(why))

    def _note(self, table: dict[KeyT, ValueT], key: KeyT, value: ValueT) -> None:
        """Remember the latest. Forget the oldest that has no open stream."""
        table.pop(key, None)
        table[key] = value
        if len(table) > MAX_REMEMBERED:
            held = {one for key in self._open for one in (key, key[0])}
            del table[next((one for one in table if one not in held), key)]

    @contextmanager
    def _logged(self, peer: str) -> Iterator[None]:
        try:
            yield
        except PacelineError as error:
            self._refusals.warning("refused %s: %s", peer, error)
            raise
