"""What every HTTP request passes before its endpoint: it is counted, logged and traced, its headers
are looked at, and its API key is checked before anything of its body is read.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.access.gate import Gate, Ticket, check_operator
from cluster.access.keys import KeyEntry
from cluster.gateway.errors import http_error
from cluster.gateway.metrics import GatewayMetrics, RequestWatch
from paceline.channel import TRACEPARENT
from paceline.errors import InvalidRequestError, PacelineError
from workers.process.logs import ACCESS
from workers.process.tracing import Tracing

if TYPE_CHECKING:
    from opentelemetry.trace import Span

LEFT = 499
"""The status, as nginx has it, of a request whose caller left before the answer's end."""

_KEY = "paceline.watch"
_OPERATIONS = {"/v1/chat/completions": "chat", "/v1/completions": "text_completion"}

_OPEN = ("/", "/docs", "/openapi.json", "/health", "/ready", "/version")
"""Paths that need no key."""

_OPERATORS = ("/metrics", "/console/state", "/console/rounds")
"""Paths that need an operator's key. All others need any key, whether or not they exist."""

_access = logging.getLogger(ACCESS)


# Counts, log and trace


def watch_of(scope: Scope) -> RequestWatch:
    watch: RequestWatch = scope[_KEY]
    return watch


class Watching:
    """Middleware: has a RequestWatch for each request. `routes`: all that the application has."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        metrics: GatewayMetrics,
        routes: list[BaseRoute],
        tracing: Tracing | None,
    ) -> None:
        self._app = app
        self._metrics = metrics
        self._tracing = tracing
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        watch = scope[_KEY] = RequestWatch(self._metrics)
        is_whole = False

        async def send_and_see(message: Message) -> None:
            nonlocal is_whole
            if message["type"] == "http.response.start":
                watch.status = message["status"]
            else:
                is_whole = not message.get("more_body", False)
            await send(message)

        self._metrics.http_open.inc()
        span = None
        try:
            if self._tracing is None:
                await self._app(scope, receive, send_and_see)
            else:
                with _current_span(self._tracing, scope) as span:
                    await self._app(scope, receive, send_and_see)
            if not is_whole:
                watch.status = LEFT
        except Exception:
            watch.status = 500
            raise
        finally:
            self._metrics.http_open.dec()
            self._end(scope, watch, span)

    def _end(self, scope: Scope, watch: RequestWatch, span: Span | None) -> None:
        method, path = _names(self._routes, scope)
        status = watch.status or LEFT
        self._metrics.http_requests.labels(method, path, str(status)).inc()
        if span is not None:
            _end_span(span, watch, method=method, path=path, status=status)
        if _access.isEnabledFor(logging.INFO):
            fields = _told(watch) | {"method": method, "path": path, "status": status}
            _access.info("%s %s %d", method, path, status, extra={"fields": fields})


def _names(routes: list[BaseRoute], scope: Scope) -> tuple[str, str]:
    """Method and path of a request as labels: of few values, whatever callers send."""
    for route in routes:
        match, _ = route.matches(scope)
        if match is not Match.NONE:
            path = str(getattr(route, "path", "")).replace(":path}", "}")
            return (scope["method"] if match is Match.FULL else "other"), path
    return "other", "other"


def _told(watch: RequestWatch) -> dict[str, Any]:
    """What the log says of a request. Nothing of prompts and answers is in it."""
    fields: dict[str, Any] = {
        "request_id": watch.request_id,
        "model": watch.model,
        "seconds": round(time.perf_counter() - watch.began, 6),
    }
    if watch.model is not None:
        fields |= {
            "prompt_tokens": watch.num_prompt_tokens,
            "tokens": watch.num_tokens,
            "ttft_seconds": _rounded(watch.seconds_to_first),
            "acceptance_length": _rounded(watch.acceptance_length),
            "finish_reasons": watch.finished,
        }
    return {name: value for name, value in fields.items() if value is not None}


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 6)


@contextmanager
def _current_span(tracing: Tracing, scope: Scope) -> Iterator[Span]:
    """The span of an HTTP request, current while the block runs, so that calls to drivers name it.

    It is a child of the span that the header `traceparent` names. Whoever uses it must end it.
    """
    from opentelemetry.trace import SpanKind, use_span

    parent = Headers(scope=scope).get(TRACEPARENT, "")
    span = tracing.span(scope["method"], SpanKind.SERVER, parent=parent)
    with use_span(span, end_on_exit=False, record_exception=False):
        yield span


def _end_span(span: Span, watch: RequestWatch, *, method: str, path: str, status: int) -> None:
    """End the span of a request, whose method and path are told as labels of metrics are."""
    from opentelemetry.trace import StatusCode

    attributes: dict[str, str | int | float | list[str]] = {
        "http.request.method": method,
        "http.route": path,
        "http.response.status_code": status,
    }
    span.update_name(f"{method} {path}")
    if watch.model is not None and (operation := _OPERATIONS.get(path)) is not None:
        span.update_name(f"{operation} {watch.model}")
        attributes |= {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "paceline",
            "gen_ai.request.model": watch.model,
            "gen_ai.response.model": watch.model,
            "gen_ai.response.id": watch.request_id or "",
            "gen_ai.response.finish_reasons": list(watch.finished),
            "gen_ai.usage.input_tokens": watch.num_prompt_tokens,
            "gen_ai.usage.output_tokens": watch.num_tokens,
        }
        if watch.seconds_to_first is not None:
            attributes["paceline.ttft_seconds"] = watch.seconds_to_first
        if watch.acceptance_length is not None:
            attributes["paceline.acceptance_length"] = watch.acceptance_length
    span.set_attributes(attributes)
    if status >= 500:
        span.set_status(StatusCode.ERROR)
        span.set_attribute("error.type", str(status))
    span.end()


# Headers and keys


class OneLength:
    """Refuses a request that tells the length of its body in two ways.

    A proxy in front may take the other one, and then take what follows the body for an answer.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        names = {name for name, _ in scope.get("headers", ())}
        if {b"content-length", b"transfer-encoding"} <= names:
            why = "expected Content-Length or Transfer-Encoding, got both"
            error = http_error(InvalidRequestError("headers", why))
            response = error.response(path_of(scope))
            response.headers["connection"] = "close"
            await response(scope, receive, send)
        else:
            await self._app(scope, receive, send)


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
