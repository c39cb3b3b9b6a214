"""OpenTelemetry traces of a process, if they are wanted: spans go to a collector by OTLP.

A trace is wanted if an endpoint is given, or the environment names one (OTEL_EXPORTER_OTLP_ENDPOINT
or OTEL_EXPORTER_OTLP_TRACES_ENDPOINT). The SDK reads all other variables OTEL_* itself, such as
OTEL_TRACES_SAMPLER. Nothing of OpenTelemetry is imported otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from paceline.channel import TRACEPARENT
from paceline.errors import ConfigError
from paceline.text import install_hint

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span, SpanKind

CALLER: ContextVar[str] = ContextVar("paceline_caller", default="")
"""The `traceparent` of the call that this task serves; "": the caller sent none."""

Attributes = Mapping[str, "str | int | float | bool | list[str]"]

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")


def note_caller(metadata: Iterable[tuple[str, Any]] | None) -> None:
    """Note the `traceparent` of the call that this task serves, from its metadata."""
    for name, value in metadata or ():
        if name == TRACEPARENT:
            CALLER.set(str(value))


class Tracing:
    """Makes spans with a provider of the SDK, which sends the last ones when this process ends."""

    def __init__(self, provider: TracerProvider) -> None:
        self.provider = provider
        self._tracer = provider.get_tracer("paceline")

    def span(
        self, name: str, kind: SpanKind, *, parent: str, attributes: Attributes | None = None
    ) -> Span:
        """Begin a span. `parent`: a `traceparent`; anything else begins a new trace."""
        return self._tracer.start_span(
            name, context=_context_of(parent), kind=kind, attributes=dict(attributes or {})
        )


def _context_of(parent: str) -> Context:
    from opentelemetry.context import Context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier = {TRACEPARENT: parent}
    return TraceContextTextMapPropagator().extract(carrier, context=Context())


def check_endpoint(url: str) -> str:
    """The URL of an OTLP receiver. Raises ConfigError if it is none."""
    try:
        parts = urlsplit(url)
        is_url = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        is_url = False
    if not is_url:
        raise ConfigError(
            f'otlp_endpoint: expected a URL such as http://127.0.0.1:4317, got "{url:.200}"'
        )
    return url


def start_tracing(
    service: str, environ: Mapping[str, str], *, endpoint: str | None = None
) -> Tracing | None:
    """Traces of this process under the service name `service`; None: they are not wanted.

    `endpoint`: URL of an OTLP receiver. Raises ConfigError if it is none, or a package is missing.
    """
    if endpoint is not None:
        check_endpoint(endpoint)
    wanted = endpoint is not None or any(environ.get(name) for name in _ENDPOINTS)
    is_off = environ.get("OTEL_SDK_DISABLED", "").lower() == "true"
    if not wanted or is_off or environ.get("OTEL_TRACES_EXPORTER", "otlp") == "none":
        return None
    try:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        exporter = _exporter(environ, endpoint)
    except ImportError as error:
        raise ConfigError(
            f"traces need further packages; {install_hint('otlp')}: {error}"
        ) from error
    name = environ.get("OTEL_SERVICE_NAME") or service
    provider = TracerProvider(resource=Resource.create({"service.name": name}))
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return Tracing(provider)


def _exporter(environ: Mapping[str, str], endpoint: str | None) -> Any:
    protocol = (
        environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL")
        or environ.get("OTEL_EXPORTER_OTLP_PROTOCOL")
        or "grpc"
    )
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

        return OTLPSpanExporter(endpoint=endpoint)
    if protocol == "http/protobuf":
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import (
            OTLPSpanExporter as HttpExporter,
        )

        url = None if endpoint is None else f"{endpoint.rstrip('/')}/v1/traces"
        return HttpExporter(endpoint=url)
    raise ConfigError(
        f'OTEL_EXPORTER_OTLP_PROTOCOL: expected "grpc" or "http/protobuf", got "{protocol}"'
    )
