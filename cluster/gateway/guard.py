"""Checks API keys of HTTP requests before anything of them is read, and counts what a key uses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from starlette.types import ASGIApp, Receive, Scope, Send

from cluster.access.gate import Gate, Ticket, check_operator
from cluster.access.keys import KeyEntry
from cluster.gateway.errors import http_error
from paceline.errors import PacelineError

_OPEN = ("/", "/docs", "/openapi.json", "/health", "/ready", "/version")
"""Paths that need no key."""

_OPERATORS = ("/metrics", "/console/state", "/console/rounds")
"""Paths that need an operator's key. All others need any key, whether or not they exist."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Whose request it is. `key`: as it came, for the drivers, which check it again."""

    entry: KeyEntry
    key: str = field(repr=False)
    gate: Gate = field(repr=False)


CALLER: ContextVar[Caller | None] = ContextVar("caller", default=None)
"""Whose request runs; None: the gateway has no keys."""


class Guard:
    """Middleware: lets in requests with a known key, and sets CALLER."""

    def __init__(self, app: ASGIApp, *, gate: Gate) -> None:
        self._app = app
        self._gate = gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and path_of(scope) not in _OPEN:
            try:
                CALLER.set(self._caller(scope))
            except PacelineError as error:
                await http_error(error).response(path_of(scope))(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _caller(self, scope: Scope) -> Caller:
        given = _given_keys(scope)
        client = scope.get("client")
        entry = self._gate.caller(given, peer=client[0] if client else "an unknown address")
        path = path_of(scope)
        if path in _OPERATORS:
            check_operator(entry, path)
        return Caller(entry, given[0].strip().partition(" ")[2].strip(), self._gate)


def _given_keys(scope: Scope) -> list[str]:
    """The values of `authorization`; that of `x-api-key`, which Anthropic's clients send, as such.

    A key that comes both ways is one value.
    """
    headers = [(name, value.decode("latin-1").strip()) for name, value in scope["headers"]]
    given = [value for name, value in headers if name == b"authorization"]
    keys = [f"Bearer {value}" for name, value in headers if name == b"x-api-key"]
    return given + [key for key in keys if key not in given]


def path_of(scope: Scope) -> str:
    """The path as the application knows it, without the prefix under which it is mounted."""
    return str(scope["path"]).removeprefix(str(scope.get("root_path", "")))


@contextmanager
def place_of_caller() -> Iterator[Ticket | None]:
    """A place of the present request's caller while the block runs; None: there are no keys.

    Raises RateLimitedError.
    """
    caller = CALLER.get()
    if caller is None:
        yield None
        return
    with caller.gate.quotas.place(caller.entry) as ticket:
        yield ticket
