"""`paceline up`, `serve`, `apply` and `down`: the life of a cluster."""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from cluster.config.load import load_config
from cluster.config.model import Config
from deploy.cli.reach import teller
from deploy.session import ray_head
from deploy.session.cluster import (
    Progress,
    check_models,
    deployment_of,
    enter_ray,
    leave_ray,
    on_ray,
    own_cores,
    running_ray,
    start_own_head,
    workers_of,
)
from deploy.session.ray_head import Guard
from deploy.session.record import ClusterRecord, alone, read_record, remove_record, write_record
from deploy.session.signals import ending_on_signals, ignore_signals, signals_held
from deploy.terminal.lines import plain
from deploy.terminal.options import DeploymentFlags, drain_option
from paceline.errors import InvalidRequestError, UnavailableError
from paceline.text import counted
from workers.models.catalog import default_home
from workers.process.logs import new_run
from workers.process.mutual_tls import WorkerTls

if TYPE_CHECKING:
    from cluster.placement.launch import ClusterHandle


CONTROLLER_NAME = "paceline"


def up(
    environ: Mapping[str, str],
    flags: DeploymentFlags,
) -> None:
    """Start a cluster and its server; `paceline down` ends it. The last line is its address.

    A pool of drafters (target.groups = 0) has no server: its last lines are the drafters'
    addresses.
    """
    settings = flags.load(environ)
    console = Console(stderr=True)
    began = time.monotonic()
    record, _ = start_checked(settings, environ, console, stays=True)
    if settings.is_pool:
        plain(
            console,
            f"up after {time.monotonic() - began:.1f} s: the pool {record.name!r}, Ray at "
            f"{record.ray_address}, logs in {record.logs}",
        )
        for worker in workers_of(record):
            typer.echo(worker.address)
        return
    tell_where(console, settings, record, time.monotonic() - began)
    typer.echo(record.address)


def tell_where(console: Console, config: Config, record: ClusterRecord, seconds: float) -> None:
    """Say where a server is reached, and by whom."""
    if config.server.api_keys is None:
        plain(console, "open: no API keys (server.api_keys), whoever reaches it can use it")
    scheme = "https" if config.server.tls_cert else "http"
    http = f"HTTP at {scheme}://{record.http_address}/v1, " if record.http_address else ""
    plain(
        console,
        f"up after {seconds:.1f} s: {http}gRPC at {record.address}, "
        f"Ray at {record.ray_address}, logs in {record.logs}",
    )


def start_checked(
    config: Config, environ: Mapping[str, str], console: Console, *, stays: bool
) -> tuple[ClusterRecord, Guard | None]:
    """Start a cluster after all checks that need none. See `start`."""
    home = default_home(environ)
    with alone(home, "up"):
        refuse_second(home)
        if not config.is_pool:
            refuse_taken_ports(config)
        if running_ray(environ) is None:  # All workers are on this host.
            WorkerTls.of(config.workers.tls)
        check_models(config, home=home)
        with teller(console) as tell:
            return start(config, environ, home=home, progress=tell, stays=stays)


def start(
    config: Config, environ: Mapping[str, str], *, home: Path, progress: Progress, stays: bool
) -> tuple[ClusterRecord, Guard | None]:
    """Start a cluster and record it. On a failure or a signal, end what was started.

    `stays`: whether it outlives this process, which then ignores signals once the cluster is up.
    Otherwise the guard of a Ray head of our own, which is returned, ends it with this process.
    """
    running = running_ray(environ, progress)
    head = ray_head.plan_head() if running is None else None  # Nothing is started yet.
    record = ClusterRecord(
        name=config.server.name or CONTROLLER_NAME,
        address=None,
        deployment=config.deployment(),
        ray_address=head.address if head else running or "",
        head=head,
        logs=str(new_run(home)),
    )
    guard: Guard | None = None
    is_up = False
    try:
        # Written before anything starts, so `down` can end it even if this process is killed.
        write_record(home, record)
        if head is not None:
            guard = Guard(head)
            head = start_own_head(head, config, progress)
            record = replace(record, head=head)
            write_record(home, record)
        enter_ray(record.ray_address, head)
        if running is not None:
            progress(f"Ray: using the cluster at {running}")
        from cluster.placement.launch import start_cluster

        handle = start_cluster(
            config,
            home=home,
            logs=Path(record.logs),
            progress=progress,
            detached=True,
            name=record.name,
            cores=own_cores() if head else None,
        )
        try:
            if stays:
                ignore_signals()
            record = replace(record, address=handle.address, http_address=handle.http_address)
            write_record(home, record)
        except BaseException:
            handle.stop()
            raise
        if stays and guard is not None:
            guard.keep()
        is_up = True
    finally:
        with signals_held():
            leave_ray()
            if not is_up:
                if head is not None:
                    ray_head.stop_head(head)
                remove_record(home)
            if guard is not None and (stays or not is_up):
                guard.close()
    return record, guard


def refuse_second(home: Path) -> None:
    """Raise UnavailableError if a cluster of `up` runs. Clean up after one that is dead."""
    record = read_record(home)
    if record is None:
        return
    head = record.head
    runs = ray_head.is_listening(record.ray_address) and (
        head is None or not head.processes or ray_head.is_running(head)
    )
    if runs:
        where = f" at {record.address}" if record.address else ", a pool"
        where = " half-way" if record.address is None else where
        raise UnavailableError(
            f"a cluster is up already{where}: end it with `paceline down`, "
            "change it with `paceline apply`, or look at it with `paceline status`"
        )
    if head is not None:
        ray_head.stop_head(head)
    remove_record(home)


def refuse_taken_ports(config: Config) -> None:
    """Raise UnavailableError if the server's host is not usable or a port is taken."""
    server = config.server
    try:
        family = socket.getaddrinfo(server.host, None, type=socket.SOCK_STREAM)[0][0]
    except (OSError, UnicodeError) as error:
        raise _refused_host(server.host, error) from None
    ports = {"grpc_port": server.grpc_port} | (
        {"http_port": server.http_port} if server.http else {}
    )
    for key, port in ports.items():
        if port == 0:
            continue
        try:
            socket.create_server((server.host, port), family=family).close()
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                raise _refused_host(server.host, error) from None
            raise UnavailableError(
                f"cannot listen on {server.host}:{port} ({error.strerror}): set server.{key} to "
                "another port (0: any free one), or end what holds it"
            ) from None


def _refused_host(host: str, error: Exception) -> UnavailableError:
    said = error.strerror if isinstance(error, OSError) else str(error)
    return UnavailableError(
        f"cannot listen on {host!r} ({said}): set server.host to an address of this host, to "
        '"127.0.0.1" (only callers on this host), or to "0.0.0.0" (callers from anywhere)'
    )


_LOOK_SECONDS = 2.0


def serve(
    environ: Mapping[str, str],
    *,
    flags: DeploymentFlags,
    drain: Annotated[
        float, drain_option("On SIGTERM or Ctrl-C, give running requests this long to end.")
    ] = 0.0,
    address: Annotated[str | None, typer.Option(hidden=True)] = None,
) -> None:
    """Serve a model over HTTP and gRPC until a signal.

    It is `paceline up` in the foreground; `paceline gateway` is the HTTP interface alone.
    """
    if address is not None:
        raise InvalidRequestError(
            "address", "the HTTP interface of servers that run is `paceline gateway --address`"
        )
    config = flags.load(environ)
    if config.is_pool:
        raise InvalidRequestError("config", "is a pool of drafters: start it with `paceline up`")
    home, console = default_home(environ), Console(stderr=True)
    began = time.monotonic()
    with ending_on_signals(drain):
        record, guard = start_checked(config, environ, console, stays=False)
        try:
            tell_where(console, config, record, time.monotonic() - began)
            typer.echo(record.address)
            _wait_while_it_serves(record, home)
        finally:
            with signals_held():
                _end(record, home, drain)
                if guard is not None:
                    guard.close()


def _wait_while_it_serves(record: ClusterRecord, home: Path) -> None:
    """Return if it was ended by `paceline down`. Raise UnavailableError if its Ray cluster ends."""
    while ray_head.is_listening(record.ray_address):
        time.sleep(_LOOK_SECONDS)
    if read_record(home) == record:
        raise UnavailableError(
            f"the Ray cluster at {record.ray_address} has ended; logs: {record.logs}"
        )


def _end(record: ClusterRecord, home: Path, drain: float) -> None:
    """End it, unless `paceline down` has done so or is doing so."""
    try:
        with alone(home, "down"):
            present = read_record(home)
            if present is not None and present.ray_address == record.ray_address:
                end(present, home, drain=drain)
    except UnavailableError:
        if read_record(home) is not None:
            raise


def down(
    environ: Mapping[str, str],
    drain: Annotated[float, drain_option("Give running requests this long to end.")] = 0.0,
) -> None:
    """End the cluster of `paceline up`. No error if there is none or parts of it are dead."""
    home = default_home(environ)
    with alone(home, "down"):
        record = read_record(home)
        if record is None:
            typer.echo("nothing is up")
            return
        end(record, home, drain=drain)
    typer.echo("down")


def end(record: ClusterRecord, home: Path, *, drain: float) -> None:
    """End what the record names, and remove it. `drain`: seconds for running requests."""
    if record.head is None or (drain and ray_head.is_listening(record.ray_address)):
        _end_on(record, drain=drain)
    if record.head is not None:
        ray_head.stop_head(record.head)
    remove_record(home)


def _end_on(record: ClusterRecord, *, drain: float) -> None:
    """End the deployment on a Ray cluster, our own or another, if both still exist."""
    try:
        leave = enter_ray(record.ray_address, record.head)
    except UnavailableError:
        typer.echo(f"the Ray cluster at {record.ray_address} is gone, with everything on it")
        return
    from cluster.placement.launch import find_cluster

    handle = find_cluster(record.name)
    left = 0 if handle is None else handle.stop(drain)
    if left:
        were = "was" if left == 1 else "were"
        typer.echo(f"{counted(left, 'request')} did not end within {drain:g} s and {were} cut off")
    if leave is not None:
        leave()


def apply(
    environ: Mapping[str, str],
    config: Annotated[Path, typer.Argument(help="TOML file.")],
) -> None:
    """Change drafters, target groups and defaults of a deployment that serves.

    Requests continue.

    It is the cluster of `paceline up`, or, with server.name, the deployment of this name on the
    Ray cluster at RAY_ADDRESS, such as a job.
    """
    settings = load_config(config, environ)
    home = default_home(environ)
    name = settings.server.name
    with alone(home, "apply"):
        record = read_record(home)
        if record is not None and name in (None, record.name):
            check_models(settings, home=home)
            with deployment_of(record) as handle:
                done = _applied(handle, settings, gone=f"the deployment at {record.address}")
            write_record(home, replace(record, deployment=settings.deployment()))
        elif name is None:
            raise UnavailableError(
                "nothing is up: start a cluster with `paceline up`, or give the deployment's "
                "name in server.name"
            )
        else:
            done = _apply_to_named(name, settings, home, environ)
    for line in done or ["nothing has changed"]:
        typer.echo(line)


def _apply_to_named(
    name: str, settings: Config, home: Path, environ: Mapping[str, str]
) -> list[str]:
    address = running_ray(environ)
    if address is None:
        raise UnavailableError(
            f"no Ray cluster is running that could have {name!r}: set RAY_ADDRESS to its address"
        )
    check_models(settings, home=home)
    with on_ray(address, name) as handle:
        gone = f"{name!r} is not on the Ray cluster at {address}, or it"
        return _applied(handle, settings, gone=gone)


def _applied(handle: ClusterHandle | None, settings: Config, *, gone: str) -> list[str]:
    if handle is None:
        raise UnavailableError(f"{gone} is gone; `paceline down` cleans up after `paceline up`")
    return handle.apply(settings)
