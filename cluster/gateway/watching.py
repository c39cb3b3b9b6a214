"""Watches every HTTP request from its start to its end: counts, logs and traces it."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.gateway.http_spans import current_span, end_span
from cluster.gateway.metrics import GatewayMetrics, RequestWatch
from workers.process.logs import ACCESS
from workers.process.tracing import Tracing

if TYPE_CHECKING:
    from opentelemetry.trace import Span

LEFT = 499
"""The status, as nginx has it, of a request whose caller left before the answer's end."""

_KEY = "paceline.watch"
_access = logging.getLogger(ACCESS)


def watch_of(scope: Scope) -> RequestWatch:
    """The watch of this request."""
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
                with current_span(self._tracing, scope) as span:
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
            end_span(span, watch, method=method, path=path, status=status)
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
