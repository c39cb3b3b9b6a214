"""A gRPC server of ours: services, health, reflection, one port."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from paceline.channel import WORKERS, Keepalive, server_options
from paceline.errors import PacelineError, UnavailableError, outward

AddServices = Callable[[grpc.aio.Server], Sequence[str]]
"""Adds services to a server and returns their full names (`paceline.v1.TargetService`)."""

SetHealth = Callable[[str, health_pb2.HealthCheckResponse.ServingStatus], Awaitable[None]]


class RunningServer:
    """A server that listens. `address` is where clients reach it, "host:port"."""

    def __init__(
        self,
        server: grpc.aio.Server,
        *,
        address: str,
        set_health: SetHealth,
        services: Sequence[str],
    ) -> None:
        self.address = address
        self._server = server
        self._set_health = set_health
        self._services = services
        self._closers: list[Callable[[], Awaitable[None]]] = []
        self._failure: PacelineError | None = None
        self._failed = asyncio.Event()
        self._ending: asyncio.Task[None] | None = None

    async def report_serving(self) -> None:
        """Let the health service answer SERVING from now on."""
        await self._report(health_pb2.HealthCheckResponse.SERVING)

    async def serve_once(self, ready: Callable[[], Awaitable[None]]) -> None:
        """Report SERVING after `ready`. Stops, and raises what that raised, where it fails."""
        try:
            await ready()
            await self.report_serving()
        except BaseException:
            await self.stop()
            raise

    def on_stop(self, closer: Callable[[], Awaitable[None]]) -> None:
        """Have `closer` awaited once the server has stopped."""
        self._closers.append(closer)

    async def stop(self, grace: float | None = None) -> None:
        """Take no new calls, wait at most `grace` seconds for running ones, end them, close.

        Stopping twice is no error.
        """
        await self._report(health_pb2.HealthCheckResponse.NOT_SERVING)
        await self._server.stop(grace)
        while self._closers:
            await self._closers.pop()()

    def fail(self, reason: PacelineError) -> None:
        """Stop for a reason, which `wait` and `until_failed` raise: the process is to end."""
        if self._failure is None:
            self._failure = reason
            self._failed.set()
            self._ending = asyncio.create_task(self.stop())

    async def until_failed(self) -> None:
        """Raise what the server was made to `fail` by, once it is."""
        await self._failed.wait()
        assert self._failure is not None
        raise self._failure

    async def wait(self) -> None:
        """Return when the server has stopped. Raises what it was made to `fail` by."""
        await self._server.wait_for_termination()
        if self._failure is not None:
            raise self._failure

    async def _report(self, status: health_pb2.HealthCheckResponse.ServingStatus) -> None:
        for service in ("", *self._services):
            await self._set_health(service, status)


async def start_server(
    add: AddServices,
    *,
    host: str,
    port: int = 0,
    serving: bool = True,
    keepalive: Keepalive = WORKERS,
) -> RunningServer:
    """Listen on `host`:`port` (0: a free port) with the services that `add` adds.

    Health and reflection are added. `serving=False` begins NOT_SERVING until `report_serving`.
    Raises UnavailableError, naming the port, when it cannot be bound.
    """
    server = grpc.aio.server(options=server_options(keepalive))
    services = add(server)
    health_servicer = health.aio.HealthServicer()  # type: ignore[attr-defined]
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    reflection.enable_server_reflection(
        (*services, health.SERVICE_NAME, reflection.SERVICE_NAME), server
    )
    wanted = _join_address(host, port)
    try:
        bound_port = server.add_insecure_port(wanted)
    except RuntimeError as error:
        raise UnavailableError(
            f"cannot listen on {wanted}: the port is in use or not allowed; "
            "choose another one, or end the process that holds it"
        ) from error
    running = RunningServer(
        server,
        address=_join_address(host, bound_port),
        set_health=health_servicer.set,
        services=services,
    )
    await running._report(
        health_pb2.HealthCheckResponse.SERVING
        if serving
        else health_pb2.HealthCheckResponse.NOT_SERVING
    )
    await server.start()
    return running


def _join_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def status_code(error: PacelineError) -> grpc.StatusCode:
    """The gRPC status by which an error of ours is told on the wire."""
    code: grpc.StatusCode = grpc.StatusCode[outward(error).grpc_code]
    return code
