"""The caller's trace, as W3C's `traceparent` tells it to the server.

It is sent if the program uses OpenTelemetry. This package does not import it.
"""

from __future__ import annotations

import sys
from typing import Any

TRACEPARENT = "traceparent"
"""Name of the metadata of a call, and of the HTTP header."""


def traceparent() -> str:
    """The current span of this task or thread; "": there is none."""
    trace: Any = sys.modules.get("opentelemetry.trace")
    if trace is None:
        return ""
    context = trace.get_current_span().get_span_context()
    if not context.is_valid:
        return ""
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


def trace_metadata() -> tuple[tuple[str, str], ...]:
    """The same as metadata of a call."""
    told = traceparent()
    return ((TRACEPARENT, told),) if told else ()
