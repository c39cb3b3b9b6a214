"""The Ray actors. Each is one worker and hosts its gRPC server in its own event loop.

Ray starts, places and ends them. No traffic of single tokens goes through Ray. Slow imports, such
as the code of models, happen in `serve`, so that the process is there at once and workers load in
parallel.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from cluster.config.fields import INTERFACE
from cluster.config.model import Config
from cluster.placement.ledger import Serving, WorkerSetup, read_drafters
from cluster.placement.plan import WorkerPlan, own_drafters
from paceline.address import EVERYWHERE
from workers.emulated.latency_profiles import load_profile
from workers.models.catalog import kept_models
from workers.process.logs import WorkerLog

if TYPE_CHECKING:
    from cluster.access.gate import Gate
    from cluster.driver.driver import Driver
    from cluster.driver.meters import WorkerMeter
    from cluster.gateway.drivers import DriverPool
    from cluster.gateway.server import RunningGateway
    from paceline.generation import WorkerLife
    from workers.drafting.kind import DrafterOptions
    from workers.models.catalog import ModelFiles
    from workers.process.certificate import Certificate
    from workers.process.mutual_tls import WorkerTls
    from workers.process.server import RunningServer
    from workers.process.tracing import Tracing
    from workers.target.shard import TargetShardOptions

_PATIENCE_SECONDS = 60.0
"""The least time that requests wait for a lost target. A new process may take that long
(revival.py)."""
_CONNECT_SECONDS = 30.0
"""How long the driver looks for workers that serve. Shards of a group need time to meet besides."""
HTTP_PORT_HINT = (
    "set server.http_port to another port (0: any free one), end what holds it, or set "
    "server.http = false"
)
_log = logging.getLogger(__name__)
_log.setLevel(logging.INFO)


class _Actor:
    """Base of the actors. `log`: where this process logs; None: nowhere."""

    def __init__(self, log: WorkerLog | None = None) -> None:
        self._server: RunningServer | RunningGateway | None = None
        self._watch: asyncio.Task[None] | None = None
        self._end: asyncio.Task[None] | None = None
        self._uses: Callable[[], Sequence[object]] | None = None
        if log is not None:
            log.open()
        _log.info("started, pid %d", os.getpid())

    async def wait(self, seconds: float) -> bool:
        """Wait at most `seconds` until the server has stopped. Returns whether it has.

        A lost actor fails this call at once. A caller that dies leaves no call that never ends.
        """
        if self._end is None:
            self._end = asyncio.create_task(self._until_end())
        return bool((await asyncio.wait({self._end}, timeout=seconds))[0])

    async def ping(self) -> None:
        """Answer as soon as the event loop is free. A step keeps it busy."""

    async def stop(self, grace: float | None = None) -> None:
        """End the server. It waits at most `grace` seconds for calls that run."""
        if self._server is not None:
            await self._server.stop(grace)

    async def _until_end(self) -> None:
        while self._server is None:
            await asyncio.sleep(0.1)
        await self._server.wait()

    def hold(self, server: RunningServer) -> Serving:
        """Keep a server that has started, and end this process if it breaks."""
        self._server, self._uses = server, server.uses
        # When the actor dies, the controller notices.
        self._watch = asyncio.create_task(server.exit_when_broken())
        _log.info("serving at %s", server.address)
        return Serving(server.address, os.getpid(), server.inner_address, server.life)


class ShardActor(_Actor):
    """A shard of the target."""

    def __init__(self, log: WorkerLog | None = None) -> None:
        super().__init__(log)
        self._loaded = (0, 0)

    async def progress(self) -> tuple[int, int]:
        """Loaded bytes and total bytes of this shard's weights; (0, 0) before it begins."""
        return self._loaded

    async def serve(self, setup: WorkerSetup, plan: WorkerPlan, port: int) -> Serving:
        """Load and serve. Raises what serve_target_shard and resolve_model raise."""
        assert plan.model is not None
        tls = _tls_of(setup)
        files = await files_of(setup.home, plan.model)
        target, host = setup.config.target, _worker_host(setup)
        os.environ.update(target.environment)  # NCCL reads it when the shards meet.
        if target.emulated is None:
            from workers.target.shard import serve_target_shard

            options = shard_options(setup.config, plan, files)
            options = replace(options, cache=kept_models(setup.home))
            server = await serve_target_shard(
                options, host=host, port=port, progress=self._note, tls=tls
            )
            return self.hold(server)
        profile = load_profile(target.emulated, role="target")
        from workers.emulated.target import serve_replay_target

        server = await serve_replay_target(files.folder, profile, host=host, port=port, tls=tls)
        return self.hold(server)

    def _note(self, done: int, total: int) -> None:
        self._loaded = done, total


class DrafterActor(_Actor):
    """A drafter of any kind."""

    async def serve(self, setup: WorkerSetup, plan: WorkerPlan, port: int) -> Serving:
        """Load and serve. Raises what serve_drafter and resolve_model raise."""
        tls = _tls_of(setup)
        files = None if plan.model is None else await files_of(setup.home, plan.model)
        host = _worker_host(setup)
        if plan.drafter is None or plan.drafter.emulated is None:
            from workers.drafting.drafter import serve_drafter

            options = drafter_options(setup.config, plan, files)
            cache = kept_models(setup.home)
            options = replace(options, labels=_node_labels(), cache=cache)
            return self.hold(await serve_drafter(options, host=host, port=port, tls=tls))
        from workers.emulated.drafter import serve_replay_drafter
        from workers.emulated.replay_text import Guess

        assert files is not None
        (server,) = await serve_replay_drafter(
            files.folder,
            load_profile(plan.drafter.emulated, role="drafter"),
            [Guess(plan.drafter.acceptance, plan.drafter.hit_rate, seed=plan.bundle)],
            max_sequences=setup.config.target.max_num_seqs,
            host=host,
            tls=tls,
        )
        return self.hold(server)

    async def uses(self) -> Sequence[object]:
        """What each party uses, as ShareUse."""
        return () if self._uses is None else self._uses()


class DriverActor(_Actor):
    """The driver. It serves InferenceService."""

    def __init__(self, log: WorkerLog | None = None) -> None:
        super().__init__(log)
        self._driver: Driver | None = None
        self._lives: Sequence[WorkerLife] = ()

    async def prepare(self, setup: WorkerSetup) -> None:
        """Do checks and slow imports while workers load. Raises ConfigError, CheckpointError."""
        _access_of(setup)
        _tls_of(setup)
        import cluster.driver.service  # noqa: F401  (slow, so that the driver need not wait for it)
        from workers.engine.load.checkpoint import describe_checkpoint

        files = await files_of(setup.home, setup.config.target.model)
        await asyncio.to_thread(describe_checkpoint, files.folder)

    async def serve(
        self,
        setup: WorkerSetup,
        target_addresses: Sequence[str],
        drafters: Mapping[str, str],
        port: int,
        *,
        life: int,
        patience: float,
    ) -> Serving:
        """Connect to the workers and serve. Raises what serve_driver raises.

        `life`: above those of the drivers that this one replaces.
        `patience`: seconds that requests wait for a lost target, if above _PATIENCE_SECONDS.
        """
        from cluster.driver.driver import DriverOptions
        from cluster.driver.pool_lookup import Nearness
        from cluster.driver.service import serve_driver
        from cluster.driver.target_links import MEET_SECONDS, StepTimeout
        from workers.drafting.kind import DrafterOptions
        from workers.process.handshake import DriverIdentity
        from workers.process.settings import freeze_present_objects

        config = setup.config
        files = await files_of(setup.home, config.target.model)
        options = DriverOptions(
            folder=files.folder,
            served_model_name=config.served_model_name,
            target_addresses=tuple(target_addresses),
            target_groups=config.target.groups,
            drafter_addresses=drafters,
            own_drafters={
                name: DrafterOptions(
                    drafter.kind,
                    max_sequences=config.target.groups * config.target.max_num_seqs,
                    of_kind=drafter.options_of_kind(),
                )
                for name, drafter in own_drafters(config).items()
            },
            shared_drafters=config.pool.addresses,
            find_shared=None if config.pool.name is None else _finder(config.pool.name),
            party=config.pool.party or "",
            nearness=Nearness(config.pool.near, {**_node_labels(), **config.pool.labels}),
            speculation=config.speculation.defaults(),
            wait_ms=config.speculation.wait_ms,
            max_num_seqs=config.target.max_num_seqs,
            prefix_cache=config.target.prefix_cache,
            max_waiting=config.server.max_waiting,
            step_timeout=StepTimeout(seconds=config.target.hung_after),
            target_patience=max(_PATIENCE_SECONDS, patience),
            connect_seconds=_CONNECT_SECONDS
            + (MEET_SECONDS if config.target.tensor_parallel > 1 else 0),
            tls=_tls_of(setup),
            tracing=_tracing(config, "paceline-driver"),
            identity=DriverIdentity(f"driver of {setup.deployment}", life),
        )
        gate, certificate = _access_of(setup)
        with_gateway = certificate is not None and setup.serves_http
        if gate is None:
            _log.warning("there are no API keys (server.api_keys): everybody may call the driver")
        _, server = await serve_driver(
            options,
            host=config.server.host,
            port=port,
            on_made=self._made,
            gate=gate,
            certificate=certificate,
            inner_host=_worker_host(setup) if options.tls or with_gateway else None,
        )
        freeze_present_objects()
        serving = self.hold(server)
        host, _, bound_port = serving.address.rpartition(":")
        if setup.host is None and host in EVERYWHERE:  # Name the node of the cluster instead.
            return replace(serving, address=f"{_worker_host(setup)}:{bound_port}")
        return serving

    async def connected(self) -> set[str]:
        return {one.name for one in self._meters() if one.connected}

    async def failing(self, seconds: float) -> dict[str, str]:
        """Workers that answer but have failed all requests for `seconds`: reasons by name."""
        return {one.name: one.trouble for one in self._meters() if one.is_failing(seconds)}

    async def drain(self, seconds: float) -> int:
        return 0 if self._driver is None else await self._driver.drain(seconds)

    async def set_target(self, addresses: Sequence[str]) -> None:
        """Set the addresses of the shards, group by group, each by rank.

        A driver that is still starting uses them as well.
        """
        if self._driver is not None:
            self._driver.set_target(addresses)

    async def until_scaled(self, groups: Collection[int], seconds: float) -> str | None:
        return None if self._driver is None else await self._driver.until_scaled(groups, seconds)

    async def note_target(self, trouble: str) -> None:
        if self._driver is not None:
            self._driver.note_target(trouble)

    async def set_drafters(self, drafters: Mapping[str, str]) -> None:
        if self._driver is not None:
            await self._driver.set_drafters(drafters)

    async def set_defaults(self, setup: WorkerSetup) -> None:
        if self._driver is not None:
            config = setup.config
            self._driver.set_defaults(
                config.speculation.defaults(), max_waiting=config.server.max_waiting
            )

    async def note_lives(self, lives: Sequence[WorkerLife]) -> None:
        """Note the history of all workers' processes, this one's included, for `status`."""
        self._lives = lives
        if self._driver is not None:
            self._driver.note_lives(lives)

    def _made(self, driver: Driver) -> None:
        self._driver = driver
        driver.note_lives(self._lives)

    def _meters(self) -> Sequence[WorkerMeter]:
        return () if self._driver is None else self._driver.meters


class GatewayActor(_Actor):
    """The gateway: OpenAI's HTTP interface in front of the driver.

    It is a process of its own, so that callers who keep it busy do not delay the driver's steps.
    """

    def __init__(self, log: WorkerLog | None = None) -> None:
        super().__init__(log)
        self._pool: DriverPool | None = None
        self._running: RunningGateway | None = None

    async def serve(self, setup: WorkerSetup, drivers: Sequence[str], port: int) -> Serving:
        """Serve, also while there are no drivers. Raises UnavailableError if it cannot listen."""
        from cluster.gateway.app import Gateway
        from cluster.gateway.drivers import DriverPool
        from cluster.gateway.server import listen, raise_file_limit, start_gateway

        raise_file_limit()
        gate, certificate = _access_of(setup)
        host = setup.config.server.host
        listener = listen(host, port, hint=HTTP_PORT_HINT)
        self._pool = DriverPool(drivers, access={"key": setup.gateway_key}, tls=_tls_of(setup))
        tracing = _tracing(setup.config, "paceline-gateway")
        self._server = self._running = await start_gateway(
            Gateway(
                self._pool,
                gate,
                tracing=tracing,
                cors_origins=setup.config.server.cors_origins,
            ),
            listener,
            certificate=certificate,
        )
        address = self._running.address
        if setup.host is None and host in EVERYWHERE:
            address = f"{_worker_host(setup)}:{listener.getsockname()[1]}"
        _log.info("serving at %s", address)
        return Serving(address, os.getpid())

    async def set_drivers(self, addresses: Sequence[str]) -> None:
        """Set the addresses of the drivers. Returns when new ones were asked what they serve."""
        if self._pool is not None:
            await self._pool.set_addresses(addresses)

    async def note_workers(self, states: Mapping[str, str]) -> None:
        if self._pool is not None:
            self._pool.workers = states

    async def drain(self, seconds: float) -> None:
        if self._running is not None:
            await self._running.gateway.drain(seconds)


def _tracing(config: Config, service: str) -> Tracing | None:
    """Raises ConfigError if traces are wanted and a package is missing."""
    from workers.process.tracing import start_tracing

    return start_tracing(service, os.environ, endpoint=config.server.otlp_endpoint)


def _access_of(setup: WorkerSetup) -> tuple[Gate | None, Certificate | None]:
    """Who may call the server, and its certificate. Raises ConfigError."""
    from cluster.access.gate import Gate
    from workers.process.certificate import Certificate

    server = setup.config.server
    path = None if server.api_keys is None else Path(server.api_keys)
    gate = Gate.of(path, gateway_key=setup.gateway_key)
    if server.tls_cert is None or server.tls_key is None:
        return gate, None
    return gate, Certificate(Path(server.tls_cert), Path(server.tls_key))


def _tls_of(setup: WorkerSetup) -> WorkerTls | None:
    """How this process shows others of the deployment who it is. Raises ConfigError."""
    from workers.process.mutual_tls import WorkerTls

    return WorkerTls.of(setup.config.workers.tls)


def _node_labels() -> dict[str, str]:
    """The labels of this process's Ray node; none outside Ray."""
    import ray

    if not ray.is_initialized():
        return {}
    labels = ray.get_runtime_context().get_node_labels()
    return {key: str(value) for key, value in labels.items()}


def _finder(pool: str) -> Callable[[], dict[str, str]]:
    """What looks up the drafters of the deployment `pool` on this Ray cluster. It blocks."""
    return lambda: {f"{pool}/{name}": at for name, at in read_drafters(pool).items()}


def _worker_host(setup: WorkerSetup) -> str:
    if setup.host is not None:
        return setup.host
    import ray

    address: str = ray.util.get_node_ip_address()
    return address


def shard_options(config: Config, plan: WorkerPlan, files: ModelFiles) -> TargetShardOptions:
    from workers.engine.parallel.group import Deadlines
    from workers.engine.parallel.weight_cuts import Place
    from workers.target.shard import TargetShardOptions

    target = config.target
    return TargetShardOptions(
        folder=files.folder,
        weights=files.weights,
        threads=plan.threads,
        kv_memory_bytes=_kv_bytes(config),
        max_model_len=None if target.max_model_len == "auto" else target.max_model_len,
        cores=plan.cores,
        device="cuda" if plan.reserved_gpus else "cpu",
        dtype=target.dtype,
        kv_dtype=target.kv_cache_dtype,
        batch_invariant=target.batch_invariant,
        kernels=target.kernels,
        place=Place(plan.rank, plan.degree),
        # A rank that waits for a hung one must give up before it seems to hang itself.
        deadlines=Deadlines(collective=target.hung_after / 2),
        interface=target.environment.get(INTERFACE),
    )


def drafter_options(config: Config, plan: WorkerPlan, files: ModelFiles | None) -> DrafterOptions:
    from workers.drafting.kind import DrafterOptions

    assert plan.drafter is not None
    options = DrafterOptions(
        kind=plan.kind,
        threads=plan.threads,
        max_sequences=config.target.max_num_seqs,
        cores=plan.cores,
        of_kind=plan.drafter.options_of_kind(),
    )
    if files is None:
        return options
    return replace(
        options,
        folder=files.folder,
        weights=files.weights,
        kv_memory_bytes=_kv_bytes(config),
        device="cuda" if plan.reserved_gpus else "cpu",
        kernels=config.target.kernels,
        prefix_cache=plan.drafter.prefix_cache,
    )


def _kv_bytes(config: Config) -> int | None:
    """Bytes for KV; None: the worker chooses by the memory of its device."""
    return None if config.target.kv_memory == "auto" else config.target.kv_memory


async def files_of(home: Path, model: str) -> ModelFiles:
    """A model's files on this host. Raises what resolve_model raises."""
    from workers.models.catalog import resolve_model

    return await asyncio.to_thread(resolve_model, model, home=home)
