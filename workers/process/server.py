"""A gRPC server on one port: a worker's services, the health service and reflection."""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import uuid
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from paceline.channel import MAX_CALLS_PER_SERVER, WORKERS, Keepalive, server_options
from paceline.errors import InternalError, PacelineError, UnavailableError, outward
from paceline.status import call_status_of
from workers.process.mutual_tls import PeerWatch, WorkerTls
from workers.process.threads import EXIT_BROKEN

AddServices = Callable[[grpc.aio.Server], Sequence[str]]
"""Adds services to a server and returns their full names (`paceline.v1.TargetService`)."""

LAST_WORD_SECONDS = 1.0
"""Seconds that a broken worker waits for its streams to end, so that peers learn the reason."""

MAX_WATCHERS = MAX_CALLS_PER_SERVER // 2
"""Most open Watch calls of the health service, which needs no key: others keep the rest."""

_Context = grpc.aio.ServicerContext[Any, Any]
_log = logging.getLogger(__name__)


class Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # it has no stubs
    """The standard health service: one status for "" and all of a server's services.

    It replaces the one of grpcio-health-checking, in which one watcher that does not read its
    stream can block all reports.
    """

    def __init__(self, services: Sequence[str]) -> None:
        self._services = frozenset(("", *services))
        self._serving = False
        self._changed = asyncio.Event()
        self._num_watchers = 0

    def report(self, *, serving: bool) -> None:
        """Answer this status from now on, and notify watchers."""
        if serving != self._serving:
            self._serving = serving
            self._changed.set()
            self._changed = asyncio.Event()

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: _Context
    ) -> health_pb2.HealthCheckResponse:
        if request.service not in self._services:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no service {request.service!r} here")
        return health_pb2.HealthCheckResponse(status=self._status_of(request.service))

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: _Context) -> None:
        """Writes the status at once, and again whenever it changes."""
        if self._num_watchers >= MAX_WATCHERS:
            why = f"{MAX_WATCHERS} callers watch already; use Check"
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, why)
        self._num_watchers += 1
        try:
            told = None
            while True:
                changed, status = self._changed, self._status_of(request.service)
                if status != told:
                    await context.write(health_pb2.HealthCheckResponse(status=status))
                    told = status
                await changed.wait()
        finally:
            self._num_watchers -= 1

    def _status_of(self, service: str) -> health_pb2.HealthCheckResponse.ServingStatus:
        if service not in self._services:
            return health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        if self._serving:
            return health_pb2.HealthCheckResponse.SERVING
        return health_pb2.HealthCheckResponse.NOT_SERVING


class RunningServer:
    """A server that listens. `address` is where clients reach it, "host:port".

    `inner_address`: where its own deployment reaches it besides; None: nowhere.
    """

    def __init__(
        self,
        server: grpc.aio.Server,
        *,
        address: str,
        health: Health,
        inner_address: str | None = None,
    ) -> None:
        self.address = address
        self.inner_address = inner_address
        self.life: int | None = None
        """The life of the worker that it serves (workers/process/handshake.py); None: no worker."""
        self.uses: Callable[[], Sequence[object]] | None = None
        """What each party uses of the drafter that it serves; None: it serves none."""
        self._server = server
        self._health = health
        self._ending: asyncio.Task[None] | None = None
        self._closers: list[Callable[[], Awaitable[None]]] = []
        self._broken: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def report(self, *, serving: bool) -> None:
        """Make the health service answer SERVING from now on, or NOT_SERVING."""
        self._health.report(serving=serving)

    async def serve_after(self, ready: Callable[[], Awaitable[None]]) -> None:
        """Report SERVING after `ready` has succeeded. If it raises, stop and raise the same."""
        try:
            await ready()
            self.report(serving=True)
        except BaseException:
            await self.stop()
            raise

    def on_stop(self, closer: Callable[[], Awaitable[None]]) -> None:
        self._closers.append(closer)

    def report_broken(self, reason: str) -> None:
        """Note that the process cannot serve any more: a new connection would not help either."""
        if not self._broken.done():
            self._broken.set_result(reason)

    async def exit_when_broken(self) -> None:
        """End the process with a nonzero status once `report_broken` was called.

        Streams get a moment to end with their reasons. Nothing is cleaned up, since a device that
        does not answer would keep the process from ending.
        """
        _log.critical("this process ends: %s", await self._broken)
        with suppress(Exception):
            await asyncio.wait_for(self.stop(LAST_WORD_SECONDS), 2 * LAST_WORD_SECONDS)
        logging.shutdown()
        os._exit(EXIT_BROKEN)

    async def stop(self, grace: float | None = None) -> None:
        """Refuse new calls, wait at most `grace` seconds for running ones, end them, then close.

        A repeated call does nothing.
        """
        self.report(serving=False)
        await self._server.stop(grace)
        while self._closers:
            await self._closers.pop()()

    def stop_soon(self, grace: float) -> None:
        """Run `stop` in the background; `wait` returns when the server has stopped."""
        if self._ending is None:
            self._ending = asyncio.create_task(self._stop_or_log(grace))

    async def _stop_or_log(self, grace: float) -> None:
        try:
            await self.stop(grace)
        except Exception:
            _log.exception("the server at %s did not stop properly", self.address)

    async def wait(self) -> None:
        await self._server.wait_for_termination()


async def start_server(
    add: AddServices,
    *,
    host: str,
    port: int = 0,
    serving: bool = True,
    keepalive: Keepalive = WORKERS,
    interceptors: Sequence[Any] = (),
    credentials: grpc.ServerCredentials | None = None,
    inner_host: str | None = None,
    tls: WorkerTls | None = None,
) -> RunningServer:
    """Listen on `host`:`port` (0: a free port) with the services that `add` adds.

    Health and reflection are added. With `serving=False` the health service answers NOT_SERVING
    until `report`. `interceptors` see each call first, and may raise a PacelineError to end it.
    `credentials`: for TLS; None: plain text. `inner_host`: where to listen besides, at any free
    port, for other processes of the deployment; None: nowhere. `tls`: how these show who they are,
    at `inner_host` if it is given, else at `host`; None: in no way, and in plain text. Raises
    UnavailableError, naming the address, if the port cannot be bound.
    """
    watch = check = inner_credentials = None
    if tls is not None:
        watch = PeerWatch()
        check = partial(watch.check, required=inner_host is None)
        inner_credentials = tls.for_server(watch)
        if inner_host is None:
            credentials = inner_credentials
    server = grpc.aio.server(
        options=server_options(keepalive),
        interceptors=[_UnexpectedErrors(check), *interceptors],
        maximum_concurrent_rpcs=MAX_CALLS_PER_SERVER,
    )
    services = add(server)
    own_health = Health(services)
    own_health.report(serving=serving)
    health_pb2_grpc.add_HealthServicer_to_server(own_health, server)
    reflection.enable_server_reflection(
        (*services, health.SERVICE_NAME, reflection.SERVICE_NAME), server
    )
    wanted = _join_address(host, port)
    try:
        bound_port = _listen(server, wanted, credentials)
        inner_port = 0
        if inner_host is not None:
            inner_port = _listen(server, _join_address(inner_host, 0), inner_credentials)
    except RuntimeError as error:
        raise UnavailableError(
            f"cannot listen on {wanted}: the port is in use or not allowed; "
            "choose another one, or end the process that holds it"
        ) from error
    if watch is not None:
        watch.port = inner_port or bound_port
    await server.start()
    return RunningServer(
        server,
        address=_join_address(host, bound_port),
        health=own_health,
        inner_address=_join_address(inner_host, inner_port) if inner_host else None,
    )


def _listen(
    server: grpc.aio.Server, address: str, credentials: grpc.ServerCredentials | None
) -> int:
    """Returns the port. Raises RuntimeError if it cannot be bound."""
    if credentials is None:
        return server.add_insecure_port(address)
    return server.add_secure_port(address, credentials)


def _join_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def status_code(error: PacelineError) -> grpc.StatusCode:
    code: grpc.StatusCode = grpc.StatusCode[outward(error).grpc_code]
    return code


def unexpected(request_id: str) -> InternalError:
    """The error that a caller gets for an unexpected exception. Call it in the exception's handler.

    The exception goes to the log, with the request's id, and not to the caller: it may quote data
    of other callers, or of ours.
    """
    _log.exception("request %s: an unexpected error", request_id)
    return InternalError(
        f"an unexpected error ended request {request_id!r}; the server's log has it under this id: "
        "please report it"
    )


class _UnexpectedErrors(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic only in stubs
    """Ends calls that raise with our own errors; gRPC would send the text of the exception.

    The id in the error is the request's id if it has one, else a new one. `check` sees each call
    first, and may raise; None: there is no check.
    """

    def __init__(self, check: Callable[[_Context], None] | None) -> None:
        self._check = check

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        handler = await continuation(details)
        if handler is None:
            return None
        for kind in ("unary_unary", "unary_stream", "stream_unary", "stream_stream"):
            behavior = getattr(handler, kind)
            if behavior is not None:
                return handler._replace(**{kind: _guarded(behavior, self._check)})
        return handler


def _guarded(behavior: Any, check: Callable[[_Context], None] | None) -> Any:
    if inspect.isasyncgenfunction(behavior):

        async def iterate(request: Any, context: Any) -> Any:
            try:
                if check is not None:
                    check(context)
                async for response in behavior(request, context):
                    yield response
            except Exception as error:
                await _end(error, request, context)

        return iterate

    async def answer(request: Any, context: Any) -> Any:
        try:
            if check is not None:
                check(context)
            return await behavior(request, context)
        except Exception as error:
            await _end(error, request, context)

    return answer


async def _end(error: Exception, request: Any, context: Any) -> None:
    if isinstance(error, grpc.aio.AbortError) or context.done():
        raise error
    if not isinstance(error, PacelineError):
        error = unexpected(getattr(request, "request_id", "") or uuid.uuid4().hex)
    code, text, metadata = call_status_of(error)
    await context.abort(code, text, metadata)
