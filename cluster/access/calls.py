"""Checks API keys of gRPC calls: which methods need one, and whose call a handler serves."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import grpc

from cluster.access.gate import RETRY_SECONDS, Gate, check_operator
from cluster.access.keys import KeyEntry
from paceline.errors import PacelineError, RateLimitedError
from paceline.status import call_status_of

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
