"""Ray Serve applications, as for a RayService: `deploy.jobs.serve_app:app` and `:whole`.

    PACELINE_DRIVERS=10.0.0.5:8001,10.0.0.6:8001 serve run deploy.jobs.serve_app:app
    PACELINE_CONFIG=/etc/paceline/paceline.toml serve run deploy.jobs.serve_app:whole

`app` is the application of `paceline gateway`, in front of the drivers that PACELINE_DRIVERS names.
`whole` also starts a deployment, on the Ray cluster that runs it. PACELINE_CONFIG is its
configuration; without it, that is the local demo. The deployment ends with the application, which
Serve calls running once the deployment serves. Any number of replicas of `gateway` may share the
requests: each answers `/metrics` for all of them.

PACELINE_SERVED_MODEL_NAME is the model's name to callers. PACELINE_API_KEYS is a file of API keys,
PACELINE_API_KEY the gateway's own key at the drivers, and PACELINE_CA the authority of their
certificates (docs/security.md). PACELINE_TOOL_FORMAT, PACELINE_REASONING_FORMAT,
PACELINE_LOG_FORMAT and PACELINE_OTLP_ENDPOINT are what flags of the same names are for `paceline
gateway` (docs/cli.md); PACELINE_CORS_ORIGINS is a list with commas. All may be left out. Replicas
read them from their own environment (`runtime_env.env_vars` of a RayService). The limits of
connections in cluster/gateway/server.py do not apply: Serve's proxy holds the connections.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Self

from fastapi import FastAPI
from ray import serve

from cluster.access.gate import Gate
from cluster.config.load import load_config
from cluster.config.model import Config, check_origins
from cluster.gateway.app import MAX_OPEN_REQUESTS, Gateway
from cluster.gateway.counts import Counted, CountsHolder, Exchange
from cluster.gateway.drivers import LOOK_SECONDS, DriverPool
from cluster.gateway.openai_answers import Formats
from cluster.placement.launch import ClusterHandle, start_cluster
from deploy.session.cluster import check_models
from paceline.access import Access
from paceline.address import parse_address
from paceline.errors import ConfigError, DeadlineError
from workers.models.catalog import default_home
from workers.process.logs import json_lines, new_run
from workers.process.mutual_tls import WorkerTls
from workers.process.tracing import start_tracing

_log = logging.getLogger(__name__)

ADDRESSES = "PACELINE_DRIVERS"
CONFIG = "PACELINE_CONFIG"
SERVED_MODEL_NAME = "PACELINE_SERVED_MODEL_NAME"
API_KEYS, KEY, CA = "PACELINE_API_KEYS", "PACELINE_API_KEY", "PACELINE_CA"
OTLP_ENDPOINT = "PACELINE_OTLP_ENDPOINT"
CORS_ORIGINS = "PACELINE_CORS_ORIGINS"
_CHOICES = {
    "PACELINE_TOOL_FORMAT": ("auto", "hermes", "llama", "none"),
    "PACELINE_REASONING_FORMAT": ("auto", "think", "none"),
    "PACELINE_LOG_FORMAT": ("text", "json"),
}
"""Variables and their values; the first is the default."""
DRAIN_SECONDS = 30.0
"""How long open requests of a replica that is removed may take to end."""


def build() -> FastAPI:
    """The application of a replica. Raises ConfigError and InvalidAddressError."""
    return gateway_of(os.environ, partial(_exchange, _COUNTS)).app


def gateway_of(environ: Mapping[str, str], exchange: Exchange | None = None) -> Gateway:
    """The gateway that the environment describes."""
    addresses = _listed(environ, ADDRESSES)
    if not addresses:
        raise ConfigError(
            f"{ADDRESSES}: expected the drivers, HOST:PORT[,HOST:PORT], got none; set it in the "
            "runtime environment of the application"
        )
    for address in addresses:
        parse_address(address, ADDRESSES)
    return _gateway(DriverPool(addresses, **_of_pool(environ)), environ, exchange)


def _gateway(pool: DriverPool, environ: Mapping[str, str], exchange: Exchange | None) -> Gateway:
    """A gateway with the formats, the tracing and the log that the environment describes."""
    tool, reasoning, log_format = (_chosen(name, environ) for name in _CHOICES)
    if log_format == "json":
        handler = logging.StreamHandler()
        handler.setFormatter(json_lines("gateway"))
        logging.getLogger().addHandler(handler)
    endpoint = environ.get(OTLP_ENDPOINT) or None
    return Gateway(
        pool,
        Gate.of(Path(keys)) if (keys := environ.get(API_KEYS)) else None,
        formats=Formats.named(tool, reasoning),
        tracing=start_tracing("paceline-gateway", environ, endpoint=endpoint),
        cors_origins=check_origins(_listed(environ, CORS_ORIGINS)),
        exchange=exchange,
    )


def _listed(environ: Mapping[str, str], name: str) -> list[str]:
    return [one.strip() for one in environ.get(name, "").split(",") if one.strip()]


def _chosen(name: str, environ: Mapping[str, str]) -> str:
    expected = _CHOICES[name]
    given = environ.get(name) or expected[0]
    if given not in expected:
        raise ConfigError(f"{name}: expected one of {', '.join(expected)}, got {given!r:.100}")
    return given


def _config(environ: Mapping[str, str]) -> Config:
    path = environ.get(CONFIG)
    return load_config(Path(path) if path else None, environ)


def _of_pool(environ: Mapping[str, str]) -> dict[str, Any]:
    """What a DriverPool is told besides its addresses."""
    access: Access = {"key": environ.get(KEY) or None, "ca": environ.get(CA) or None}
    return {"served_model_name": environ.get(SERVED_MODEL_NAME) or None, "access": access}


class Counts:
    """Holds what all gateways of an application have counted."""

    def __init__(self) -> None:
        self._holder = CountsHolder()

    async def exchange(self, told: Mapping[str, Counted]) -> tuple[str, Mapping[str, Counted]]:
        return self._holder.name, self._holder.exchange(told, time.monotonic())


async def _exchange(holder: str, told: Mapping[str, Counted]) -> tuple[str, Mapping[str, Counted]]:
    """What `Counts` answers, which is in the deployment `holder` of this application."""
    answer: tuple[str, Mapping[str, Counted]] = await _beside(holder).exchange.remote(told)
    return answer


def _beside(deployment: str) -> Any:
    """A handle of another deployment of this replica's application."""
    return serve.get_deployment_handle(deployment, app_name=serve.get_replica_context().app_name)


class Deployment(Counts):
    """A deployment of this Ray cluster, as a replica that owns it.

    It starts in a thread, so that gateways can say meanwhile that it does. If the replica's process
    ends, the workers end too, and Serve starts another replica.
    """

    def __init__(self) -> None:
        super().__init__()
        self._handle: ClusterHandle | None = None
        self._address: str | None = None
        self._error: Exception | None = None
        self._said = "it starts"
        self._thread = threading.Thread(target=self._start, daemon=True)
        self._thread.start()

    async def where(self) -> tuple[str | None, str]:
        """The driver's address, None before it has one, and how far the start is."""
        if self._handle is not None:
            with contextlib.suppress(DeadlineError):
                self._address = await asyncio.to_thread(
                    self._handle.present_address, for_gateways=True
                )
        return self._address, self._said

    async def check_health(self) -> None:
        """Raises what ended the deployment; Serve then replaces this replica."""
        if self._error is not None:
            raise self._error
        if self._handle is not None:
            with contextlib.suppress(DeadlineError):  # Requests do not need the controller.
                await asyncio.to_thread(self._handle.present_address)

    async def __del__(self) -> None:
        if self._handle is not None:
            await asyncio.to_thread(self._handle.stop, DRAIN_SECONDS)

    def _start(self) -> None:
        try:
            config = _config(os.environ)
            home = default_home(os.environ)
            check_models(config, home=home)
            self._handle = start_cluster(
                config,
                home=home,
                logs=new_run(home),
                progress=self._say,
                detached=False,
                name=None,
                http=False,
            )
        except Exception as error:
            _log.exception("the deployment did not start")
            self._error = error

    def _say(self, line: str) -> None:
        self._said = line
        _log.info("%s", line)


class _Following(DriverPool):
    """The driver of `Deployment`, wherever it is."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        tls = WorkerTls.of(_config(environ).workers.tls)
        super().__init__([], tls=tls, **_of_pool(environ))
        self.workers = {"the deployment": "starts"}
        self._following: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        self._following = asyncio.create_task(self._follow())
        return self

    async def close(self) -> None:
        if self._following is not None:
            self._following.cancel()
            await asyncio.gather(self._following, return_exceptions=True)
        await super().close()

    async def _follow(self) -> None:
        deployment = _beside(_DEPLOYMENT)
        while True:
            try:
                address, said = await deployment.where.remote()
                self.workers = {"the deployment": said} if address is None else {}
                await self.set_addresses([] if address is None else [address])
            except Exception as error:  # Its replica is replaced meanwhile.
                _log.warning("the deployment does not answer: %s", error)
            await asyncio.sleep(LOOK_SECONDS)


def build_whole() -> FastAPI:
    """The application of a replica in front of `Deployment`."""
    exchange = partial(_exchange, _DEPLOYMENT)
    return _gateway(_Following(os.environ), os.environ, exchange).app


class Loaded:
    """A replica that has begun once the deployment serves.

    So Serve calls the application running then, and not before, and KubeRay keeps the cluster of
    an earlier version until then. Gateways begin at once, and say how far the start is.
    """

    async def __init__(self) -> None:  # type: ignore[misc]  # Serve awaits it.
        while True:
            with contextlib.suppress(Exception):  # The deployment's replica is replaced meanwhile.
                if (await _beside(_DEPLOYMENT).where.remote())[0] is not None:
                    return
            await asyncio.sleep(LOOK_SECONDS)


class _Bound:
    """Binds a gateway to other deployments, so that one application has all of them."""

    def __init__(self, *others: object) -> None:
        del others  # They are found by their names.


_DEPLOYMENT, _COUNTS = "deployment", "counts"
_GATEWAY: dict[str, Any] = {
    "name": "gateway",
    # Serve's default, 5, would have callers wait here while drivers are idle.
    "max_ongoing_requests": MAX_OPEN_REQUESTS,
    "graceful_shutdown_timeout_s": DRAIN_SECONDS,
    "ray_actor_options": {"num_cpus": 0},
}
_as_deployment: Any = serve.deployment  # Its type has no `bind`.
_ONE: dict[str, Any] = {
    "num_replicas": 1,
    "max_ongoing_requests": MAX_OPEN_REQUESTS,
    "ray_actor_options": {"num_cpus": 0},
}
app = _as_deployment(serve.ingress(build)(_Bound), **_GATEWAY).bind(
    _as_deployment(Counts, name=_COUNTS, **_ONE).bind()
)
whole = _as_deployment(serve.ingress(build_whole)(_Bound), **_GATEWAY).bind(
    _as_deployment(
        Deployment, name=_DEPLOYMENT, graceful_shutdown_timeout_s=2 * DRAIN_SECONDS, **_ONE
    ).bind(),
    _as_deployment(Loaded, name="loaded", **_ONE).bind(),
)
