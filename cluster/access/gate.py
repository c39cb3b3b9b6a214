"""The gate of a server: which caller a key belongs to, and what that caller may do and have.

`CallGuard` has each gRPC call checked: which methods need a key, and whose call a handler serves.
"""

from __future__ import annotations

import inspect
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from cluster.access.keys import MAX_KEY_LENGTH, KeyEntry, KeyFile, gateway_entry
from paceline.errors import (
    OverloadedError,
    PacelineError,
    PermissionDeniedError,
    RateLimitedError,
    UnauthenticatedError,
    UnavailableError,
)
from paceline.status import call_status_of
from paceline.text import counted

RETRY_SECONDS = 1.0
"""What a caller with too many requests at once is told to wait."""

LOG_SECONDS = 10.0
"""Shortest time between two lines about calls without a key that is known."""

CALLER: ContextVar[KeyEntry | None] = ContextVar("caller", default=None)
"""Whose call runs; None: the server has no keys."""

_OPEN = ("/grpc.health.v1.Health/",)
"""Beginnings of methods that need no key."""

_OPERATORS = (
    "/paceline.v1.InferenceService/Stats",
    "/paceline.v1.InferenceService/DescribeTopology",
    "/paceline.v1.TraceService/",
    "/grpc.reflection.",
)
"""Beginnings of methods that need an operator's key. All others need any key."""

MORE_CALLS = 8
"""Open calls that a key may have beyond its concurrency: a GenerateMany stream without requests is
a call, too."""

_MINUTE = 60.0
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Usage:
    """What a key uses. `left`: requests that it may still begin, as counted at `at`."""

    running: int
    left: float
    at: float


class Ticket:
    """Places of a key that requests take. Release it when they have ended."""

    def __init__(self, quotas: Quotas, entry: KeyEntry) -> None:
        self.num_places = 0
        self.entry = entry
        self._quotas = quotas

    def add(self, count: int) -> None:
        """Take more places. Raises RateLimitedError or PermissionDeniedError, and takes none."""
        self._quotas.take(self, count)

    def release(self, *, unused: bool = False) -> None:
        """Give all places back. Releasing twice is no error.

        `unused`: they do not count in the requests of a minute either.
        """
        self._quotas.give_back(self, unused=unused)


class Quotas:
    """Counts what each key uses. Keys that use nothing and are unknown have no count."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._usage: dict[str, _Usage] = {}

    def __len__(self) -> int:
        return len(self._usage)

    def ticket(self, entry: KeyEntry, count: int = 1) -> Ticket:
        """Places for a request of `count` choices. Raises as `take` does."""
        ticket = Ticket(self, entry)
        ticket.add(count)
        return ticket

    def take(self, ticket: Ticket, count: int) -> None:
        """Take `count` places more for a ticket. Raises RateLimitedError, PermissionDeniedError."""
        entry, per_minute = ticket.entry, ticket.entry.requests_per_minute
        most = min(entry.concurrency, per_minute or entry.concurrency)
        if ticket.num_places + count > most:
            raise PermissionDeniedError(
                f"this counts as {ticket.num_places + count} requests (a choice each), and the API "
                f"key {entry.name!r} may have {most} at once; ask for fewer choices"
            )
        now = self._clock()
        usage = self._usage.get(entry.name)
        if usage is None:
            usage = self._usage[entry.name] = _Usage(0, float(per_minute or 0), now)
        if usage.running + count > entry.concurrency:
            raise RateLimitedError(
                f"the API key {entry.name!r} has {counted(usage.running, 'request')} running, and "
                f"may have {entry.concurrency}; try again when one has ended",
                RETRY_SECONDS,
            )
        if per_minute is not None:
            passed = (now - usage.at) * per_minute / _MINUTE
            usage.left, usage.at = min(float(per_minute), usage.left + passed), now
            if usage.left < count:
                raise RateLimitedError(
                    f"the API key {entry.name!r} may begin {counted(per_minute, 'request')} a "
                    "minute; try again later",
                    (count - usage.left) * _MINUTE / per_minute,
                )
            usage.left -= count
        usage.running += count
        ticket.num_places += count

    def give_back(self, ticket: Ticket, *, unused: bool = False) -> None:
        usage = self._usage.get(ticket.entry.name)
        if usage is not None:
            usage.running -= ticket.num_places
            if unused:
                usage.left += ticket.num_places
        ticket.num_places = 0

    @contextmanager
    def place(self, entry: KeyEntry, count: int = 1) -> Iterator[Ticket]:
        """A ticket while the block runs. Raises as `take` does.

        A request that the server cannot take now does not count in the requests of a minute; one
        that is refused for what it asks does.
        """
        ticket = self.ticket(entry, count)
        try:
            yield ticket
        except (OverloadedError, UnavailableError):
            ticket.release(unused=True)
            raise
        finally:
            ticket.release()

    def keep(self, names: Callable[[str], bool]) -> None:
        """Forget keys without requests for which `names` is false."""
        self._usage = {
            name: usage for name, usage in self._usage.items() if usage.running or names(name)
        }


class Gate:
    """Lets callers in by the keys of a file. `clock` counts seconds."""

    def __init__(
        self,
        keys: KeyFile,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._keys = keys
        self._clock = clock
        self._num_refused = 0
        self._told_at = clock() - LOG_SECONDS
        self.quotas = Quotas(clock)
        keys.on_change = lambda: self.quotas.keep(lambda name: keys.named(name) is not None)

    @classmethod
    def of(cls, path: Path | None, *, gateway_key: str | None = None) -> Gate | None:
        """The gate of a file of keys; None: there is no file, and everybody may do everything.

        `gateway_key`: of the deployment's own gateway. Raises ConfigError.
        """
        if path is None:
            return None
        return cls(KeyFile(path, own=() if gateway_key is None else (gateway_entry(gateway_key),)))

    def caller(self, authorization: Sequence[str], *, peer: str) -> KeyEntry:
        """Who calls. `authorization`: all values of that header. `peer`: where from, for the log.

        Raises UnauthenticatedError, which never quotes what the caller sent.
        """
        if not authorization:
            raise self._refusal("expected an API key (authorization: Bearer KEY), got none", peer)
        scheme, _, key = authorization[0].strip().partition(" ")
        key = key.strip()
        if len(authorization) > 1 or scheme.lower() != "bearer" or not key:
            raise self._refusal("expected one header, authorization: Bearer KEY", peer)
        if len(key) > MAX_KEY_LENGTH:
            raise self._refusal(f"the API key has more than {MAX_KEY_LENGTH} characters", peer)
        entry = self._keys.find(key)
        if entry is None:
            raise self._refusal("this server does not know the API key; ask its operator", peer)
        return entry

    def present(self, entry: KeyEntry) -> KeyEntry:
        """The entry that the same key has now. Raises UnauthenticatedError if it was removed."""
        now = self._keys.named(entry.name)
        if now is None or now.sha256 != entry.sha256:
            raise UnauthenticatedError(f"the API key {entry.name!r} is no longer valid")
        return now

    def _refusal(self, message: str, peer: str) -> UnauthenticatedError:
        self._num_refused += 1
        now = self._clock()
        if now - self._told_at >= LOG_SECONDS:
            _log.warning(
                "%s without a known API key; the last came from %s",
                counted(self._num_refused, "call"),
                peer,
            )
            self._told_at, self._num_refused = now, 0
        return UnauthenticatedError(message)


def check_operator(entry: KeyEntry, what: str) -> None:
    """Raise PermissionDeniedError unless the key is an operator's. `what` needs it."""
    if entry.role != "operator":
        raise PermissionDeniedError(
            f"{what} needs an operator's API key; {entry.name!r} is a user's"
        )


def tenant_of(entry: KeyEntry, claimed: str | None) -> str:
    """The tenant of a request. Raises PermissionDeniedError if the caller claims another."""
    if claimed and claimed != entry.tenant:
        raise PermissionDeniedError(
            f"tenant: the API key {entry.name!r} is of another tenant; leave the field out"
        )
    return entry.tenant


class CallGuard(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic only in stubs
    """Has each call checked before its handler sees it, and sets CALLER."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._open: Counter[str] = Counter()

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        handler = await continuation(details)
        if handler is None or details.method.startswith(_OPEN):
            return handler
        try:
            entry = self._entry(details)
        except PacelineError as error:
            return _refusal(error)
        for kind in ("unary_unary", "unary_stream", "stream_unary", "stream_stream"):
            behavior = getattr(handler, kind)
            if behavior is not None:
                return handler._replace(**{kind: self._checked(behavior, entry)})
        return handler

    def _entry(self, details: Any) -> KeyEntry:
        """Whose call it is. Raises UnauthenticatedError or PermissionDeniedError.

        It is checked before a message is read: else calls that never send one would stay open.
        """
        given = [
            value if isinstance(value, str) else value.decode("latin-1")
            for key, value in details.invocation_metadata or ()
            if key == "authorization"
        ]
        entry = self._gate.caller(given, peer="gRPC")
        if details.method.startswith(_OPERATORS):
            check_operator(entry, details.method.lstrip("/"))
        return entry

    def _checked(self, behavior: Any, entry: KeyEntry) -> Any:
        if inspect.isasyncgenfunction(behavior):

            async def iterate(request: Any, context: Any) -> Any:
                with self._call(entry):
                    async for response in behavior(request, context):
                        yield response

            return iterate

        async def answer(request: Any, context: Any) -> Any:
            with self._call(entry):
                return await behavior(request, context)

        return answer

    @contextmanager
    def _call(self, entry: KeyEntry) -> Iterator[None]:
        """Counts a call while the block runs, and sets CALLER. Raises RateLimitedError."""
        most = entry.concurrency + MORE_CALLS
        if self._open[entry.name] >= most:
            raise RateLimitedError(
                f"the API key {entry.name!r} has {most} open calls, and may have no more; "
                "end one first",
                RETRY_SECONDS,
            )
        self._open[entry.name] += 1
        CALLER.set(entry)
        try:
            yield
        finally:
            self._open[entry.name] -= 1
            if not self._open[entry.name]:
                del self._open[entry.name]


def _refusal(error: PacelineError) -> Any:
    """A handler that ends a call before anything of it is read."""

    async def refuse(requests: Any, context: Any) -> None:
        await context.abort(*call_status_of(error))

    handle: Any = refuse
    return grpc.stream_stream_rpc_method_handler(handle)
