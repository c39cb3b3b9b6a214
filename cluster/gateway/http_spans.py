"""A span of OpenTelemetry for each HTTP request, with the `gen_ai` attributes of its answer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from starlette.datastructures import Headers
from starlette.types import Scope

from cluster.gateway.metrics import RequestWatch
from paceline.trace_context import TRACEPARENT
from workers.process.tracing import Tracing

if TYPE_CHECKING:
    from opentelemetry.trace import Span

_OPERATIONS = {"/v1/chat/completions": "chat", "/v1/completions": "text_completion"}


@contextmanager
def current_span(tracing: Tracing, scope: Scope) -> Iterator[Span]:
    """The span of an HTTP request, current while the block runs, so that calls to drivers name it.

    It is a child of the span that the header `traceparent` names. Whoever uses it must end it.
    """
    from opentelemetry.trace import SpanKind, use_span

    parent = Headers(scope=scope).get(TRACEPARENT, "")
    span = tracing.span(scope["method"], SpanKind.SERVER, parent=parent)
    with use_span(span, end_on_exit=False, record_exception=False):
        yield span


def end_span(span: Span, watch: RequestWatch, *, method: str, path: str, status: int) -> None:
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
