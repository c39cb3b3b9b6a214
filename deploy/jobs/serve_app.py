"""Ray Serve applications, as for a RayService: `deploy.jobs.serve_app:app` and `:whole`.

    PACELINE_DRIVERS=10.0.0.5:8001,10.0.0.6:8001 serve run deploy.jobs.serve_app:app
    PACELINE_CONFIG=/etc/paceline/paceline.toml serve run deploy.jobs.serve_app:whole

`app` is the application of `paceline serve`, in front of the drivers that PACELINE_DRIVERS names.
`whole` also starts a deployment, on the Ray cluster that runs it. PACELINE_CONFIG is its
configuration; without it, that is the local demo. The deployment ends with the application.

PACELINE_SERVED_MODEL_NAME is the model's name to callers. PACELINE_API_KEYS is a file of API keys,
PACELINE_API_KEY the gateway's own key at the drivers, and PACELINE_CA the authority of their
certificates (docs/security.md). All may be left out. Replicas read them from their own environment
(`runtime_env.env_vars` of a RayService). The limits of connections in cluster/gateway/server.py do
not apply: Serve's proxy holds the connections.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from fastapi import FastAPI
from ray import serve

from cluster.access.gate import Gate
from cluster.config.load import load_config
from cluster.config.model import Config
from cluster.gateway.app import MAX_OPEN_REQUESTS, Gateway
from cluster.gateway.drivers import LOOK_SECONDS, DriverPool
from cluster.placement.launch import ClusterHandle, start_cluster
from deploy.session.cluster import check_models
from paceline.access import Access
from paceline.address import parse_address
from paceline.errors import ConfigError, WorkerLostError
from workers.models.catalog import default_home
from workers.process.logs import new_run
from workers.process.mutual_tls import WorkerTls

_log = logging.getLogger(__name__)

ADDRESSES = "PACELINE_DRIVERS"
CONFIG = "PACELINE_CONFIG"
SERVED_MODEL_NAME = "PACELINE_SERVED_MODEL_NAME"
API_KEYS, KEY, CA = "PACELINE_API_KEYS", "PACELINE_API_KEY", "PACELINE_CA"
DRAIN_SECONDS = 30.0
"""How long open requests of a replica that is removed may take to end."""


def build() -> FastAPI:
    """The application of a replica. Raises ConfigError and InvalidAddressError."""
    return gateway_of(os.environ).app


def gateway_of(environ: Mapping[str, str]) -> Gateway:
    """The gateway that the environment describes."""
    addresses = [one.strip() for one in environ.get(ADDRESSES, "").split(",") if one.strip()]
    if not addresses:
        raise ConfigError(
            f"{ADDRESSES}: expected the drivers, HOST:PORT[,HOST:PORT], got none; set it in the "
            "runtime environment of the application"
        )
    for address in addresses:
        parse_address(address, ADDRESSES)
    pool = DriverPool(addresses, served_model_name=_served_name(environ), access=_access(environ))
    return Gateway(pool, _gate(environ))


def _served_name(environ: Mapping[str, str]) -> str | None:
    return environ.get(SERVED_MODEL_NAME) or None


def _config(environ: Mapping[str, str]) -> Config:
    path = environ.get(CONFIG)
    return load_config(Path(path) if path else None, environ)


def _access(environ: Mapping[str, str]) -> Access:
    return {"key": environ.get(KEY) or None, "ca": environ.get(CA) or None}


def _gate(environ: Mapping[str, str]) -> Gate | None:
    keys = environ.get(API_KEYS)
    return Gate.of(Path(keys)) if keys else None


class Deployment:
    """A deployment of this Ray cluster, as a replica that owns it.

    It starts in a thread, so that gateways can say meanwhile that it does. If the replica's process
    ends, the workers end too, and Serve starts another replica.
    """

    def __init__(self) -> None:
        self._handle: ClusterHandle | None = None
        self._error: Exception | None = None
        self._said = "it starts"
        self._thread = threading.Thread(target=self._start, daemon=True)
        self._thread.start()

    async def where(self) -> tuple[str | None, str]:
        """The driver's address, None before it has one, and how far the start is."""
        address = None if self._handle is None else await asyncio.to_thread(self._address)
        return address, self._said

    async def check_health(self) -> None:
        """Raises what ended the deployment; Serve then replaces this replica."""
        if self._error is not None:
            raise self._error
        if self._handle is not None:
            await asyncio.to_thread(self._address)

    async def __del__(self) -> None:
        if self._handle is not None:
            await asyncio.to_thread(self._handle.stop, DRAIN_SECONDS)

    def _start(self) -> None:
        try:
            config = _config(os.environ)
            config = config.model_copy(
                update={"server": config.server.model_copy(update={"http": False})}
            )
            home = default_home(os.environ)
            check_models(config, home=home)
            self._handle = start_cluster(
                config,
                home=home,
                logs=new_run(home),
                progress=self._say,
                detached=False,
                name=None,
            )
        except Exception as error:
            _log.exception("the deployment did not start")
            self._error = error

    def _say(self, line: str) -> None:
        self._said = line
        _log.info("%s", line)

    def _address(self) -> str:
        assert self._handle is not None
        workers = self._handle.workers()
        if not workers:
            raise WorkerLostError("the controller no longer has workers")
        # The driver is on another node if its own was lost.
        driver = workers[-1]
        return driver.inner_address or driver.address or self._handle.address


class _Following(DriverPool):
    """The driver of `Deployment`, wherever it is."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        super().__init__(
            [],
            served_model_name=_served_name(environ),
            access=_access(environ),
            tls=WorkerTls.of(_config(environ).workers.tls),
        )
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
        context = serve.get_replica_context()
        deployment: Any = serve.get_deployment_handle(_DEPLOYMENT, app_name=context.app_name)
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
    return Gateway(_Following(os.environ), _gate(os.environ)).app


class _Whole:
    """Binds the gateway to the deployment, so that one application has both."""

    def __init__(self, deployment: object) -> None:
        del deployment  # `_Following` finds it by its name.


_DEPLOYMENT = "deployment"
_GATEWAY: dict[str, Any] = {
    "name": "gateway",
    # Serve's default, 5, would have callers wait here while drivers are idle.
    "max_ongoing_requests": MAX_OPEN_REQUESTS,
    "graceful_shutdown_timeout_s": DRAIN_SECONDS,
    "ray_actor_options": {"num_cpus": 0},
}
_as_deployment: Any = serve.deployment  # Its type has no `bind`.
app = _as_deployment(serve.ingress(build)(), **_GATEWAY).bind()
whole = _as_deployment(serve.ingress(build_whole)(_Whole), **_GATEWAY).bind(
    _as_deployment(
        Deployment,
        name=_DEPLOYMENT,
        num_replicas=1,
        graceful_shutdown_timeout_s=2 * DRAIN_SECONDS,
        ray_actor_options={"num_cpus": 0},
    ).bind()
)
