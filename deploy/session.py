"""Where a command finds its cluster: given, running already, or a private one that ends with it."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from cluster.config_model import Config
from cluster.placement import Node, plan_placement
from deploy import ray_head
from deploy.fetch_progress import show_fetch
from deploy.head_guard import guarded
from deploy.lines import plain
from deploy.record import ClusterRecord, read_record
from deploy.signals import ending_on_signals, signals_held
from deploy.worker_checks import check_workers
from paceline.client import Client
from paceline.errors import UnavailableError
from workers.logs import new_run
from workers.models import CATALOGUE, is_present, resolve_model

if TYPE_CHECKING:
    from cluster.launch import ClusterHandle
    from paceline.generation import WorkerLife

Progress = Callable[[str], None]
FOUND_BY_RAY = Path("/tmp/ray/ray_current_cluster")
_LONGEST_ADDRESS = 256
"""Characters of that file which are read."""


@contextmanager
def open_cluster(
    config: Config,
    *,
    home: Path,
    progress: Progress,
    server: str | None,
    console: Console | None = None,
) -> Iterator[ClusterHandle]:
    """A cluster that serves `config`, for as long as the block runs.

    `server` ("host:port") if given; else the one of `paceline up` with the same deployment; else a
    private one, on the Ray cluster that runs or on a head of ours, ended with the block, with an
    error, and on SIGINT and SIGTERM. A fetch of models is shown on `console`, without one on
    stderr. Raises the PacelineError that says why there is none.
    """
    address = server or running_address(config, home)
    if address is not None:
        check_listening(address)
        from cluster.launch import ClusterHandle

        yield ClusterHandle(address)
        return
    _tell_of_another(config, home)
    check_models(config, home=home, console=console)
    private = config.model_copy(
        update={"server": config.server.model_copy(update={"host": "127.0.0.1", "grpc_port": 0})}
    )
    with ending_on_signals(), join_ray(private, progress=progress) as own_head:
        from cluster.launch import start_cluster

        handle = start_cluster(
            private,
            home=home,
            logs=new_run(home),
            progress=progress,
            detached=False,
            name=None,
            cores=own_cores() if own_head else None,
        )
        try:
            yield handle
        finally:
            if own_head is None:
                handle.stop()


def check_listening(address: str) -> None:
    """Raise UnavailableError with the cause where no server can be reached at "host:port"."""
    with Client(address) as client:
        client.connect()


def running_address(config: Config, home: Path) -> str | None:
    """Where the cluster of `paceline up` serves, if it runs and has the same deployment."""
    record = read_record(home)
    if record is None or record.deployment != config.deployment():
        return None
    return _where_it_listens(record)


def _where_it_listens(record: ClusterRecord) -> str | None:
    address = _of_today(record).address
    return address if address is not None and ray_head.is_listening(address) else None


def _tell_of_another(config: Config, home: Path) -> None:
    """Say on stderr, quiet or not, that the running cluster is left alone, and why.

    What answers in its place may be another model.
    """
    record = read_record(home)
    address = None if record is None else _where_it_listens(record)
    if record is None or address is None:
        return
    differing = ", ".join(_differences(record.deployment, config.deployment()))
    plain(
        Console(stderr=True),
        f"note: the cluster of `paceline up` at {address} is not used: its configuration differs "
        f"({differing}). A private cluster is started; to use the running one add --server "
        f"{address}, or give the configuration that it was started with (--config)",
    )


def _differences(running: Mapping[str, Any], asked: Mapping[str, Any]) -> list[str]:
    """Keys of two deployments, with both values."""
    pairs = [("target", running["target"], asked["target"])]
    there, here = running["drafters"], asked["drafters"]
    if len(there) == len(here):
        pairs += [
            (f"drafters[{number}]", *both)
            for number, both in enumerate(zip(there, here, strict=True))
        ]
    found = [
        f"{table}.{key}: {one.get(key)!r} there, {other.get(key)!r} here"
        for table, one, other in pairs
        for key in {**one, **other}
        if one.get(key) != other.get(key)
    ]
    if len(there) != len(here):
        found.append(f"drafters: {len(there)} there, {len(here)} here")
    return found


def present_record(home: Path) -> ClusterRecord | None:
    """What `up` recorded, with the address of today: a driver may be on another node by now.

    The controller is asked where nothing listens at the one recorded. A head of ours has one node,
    on which a driver comes back at the address that it had.
    """
    record = read_record(home)
    return None if record is None else _of_today(record)


def _of_today(record: ClusterRecord) -> ClusterRecord:
    if record.address is None or record.head is not None or ray_head.is_listening(record.address):
        return record
    return replace(record, address=_told_by_controller(record) or record.address)


def lives_of(record: ClusterRecord) -> list[WorkerLife]:
    """What became of the workers' processes, as the controller knows; none where it is gone."""
    with _controller_of(record) as handle:
        try:
            return [] if handle is None else handle.lives()
        except UnavailableError:
            return []


def _told_by_controller(record: ClusterRecord) -> str | None:
    with _controller_of(record) as handle:
        return None if handle is None else handle.address or None


@contextmanager
def _controller_of(record: ClusterRecord) -> Iterator[ClusterHandle | None]:
    """The deployment as Ray has it; None where it, or Ray, is gone."""
    if record.head is not None and not ray_head.is_listening(record.ray_address):
        yield None
        return
    try:
        leave = enter_ray(record.ray_address, own=record.head is not None)
    except UnavailableError:
        yield None
        return
    from cluster.launch import find_cluster

    try:
        yield find_cluster(record.name)
    finally:
        if leave is not None:
            leave()


@contextmanager
def join_ray(config: Config, *, progress: Progress) -> Iterator[ray_head.RayHead | None]:
    """Join the Ray that runs (yields None), or a head of ours that ends with the block."""
    running = running_ray(os.environ, progress)
    stack = ExitStack()
    try:
        head = None
        if running is None:
            head = ray_head.plan_head()
            stack.enter_context(guarded(head))
            head = start_own_head(head, config, progress)
            stack.callback(ray_head.stop_head, head)
        if leave := enter_ray(head.address if head else running or "", own=head is not None):
            stack.callback(leave)
        if running is not None:
            progress(f"Ray: using the cluster at {running}")
        yield head
    finally:
        with signals_held():
            stack.close()


def start_own_head(head: ray_head.RayHead, config: Config, progress: Progress) -> ray_head.RayHead:
    """Start a planned head, with as many CPUs as this process may use, and as the workers reserve.

    And with this host's GPUs, where the configuration does not keep them out.
    """
    num_cores = len(own_cores())
    gpus = 0
    if config.target.resources == "gpu":  # "auto" takes what the head finds.
        import torch  # check_models has imported it, which looked at what these GPUs are to load

        gpus = torch.cuda.device_count()
    plan = plan_placement(config, [Node("local", num_cores, gpus)], enforce=False)
    progress("Ray: starting a local cluster")
    if plan.reserved_cpus > num_cores:
        progress(f"Ray: the workers share {num_cores} cores, and ask for {plan.reserved_cpus}")
    return ray_head.start_head(
        head, num_cpus=max(num_cores, plan.reserved_cpus), gpus=config.target.resources != "cpu"
    )


def enter_ray(address: str, *, own: bool) -> Callable[[], None] | None:
    """Join the Ray at `address`; returns how to leave it, None where this process was in it."""
    if own:
        ray_head.prepare_to_join()
    elif ":" in address and "//" not in address and not ray_head.is_listening(address):
        raise UnavailableError(f"no Ray cluster at {address} (RAY_ADDRESS); start it or unset it")
    from cluster import launch

    return launch.disconnect if launch.connect(address) else None


def leave_ray() -> None:
    """Leave the Ray that this process may have joined."""
    if "ray" in sys.modules:
        from cluster.launch import disconnect

        disconnect()


def running_ray(environ: Mapping[str, str], progress: Progress | None = None) -> str | None:
    """RAY_ADDRESS, else a Ray cluster that `ray start` left running on this host.

    Ray notes the latter in a folder that all users share. Whoever joins a Ray cluster runs what it
    sends, so the note is believed only where this user or root wrote it and nobody else can.
    """
    if environ.get("RAY_ADDRESS"):
        return environ["RAY_ADDRESS"]
    try:
        number = os.open(FOUND_BY_RAY, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(number, errors="replace") as stream:
            about = os.fstat(number)
            found = stream.read(_LONGEST_ADDRESS).strip()
    except OSError:
        return None
    if not ray_head.is_listening(found):
        return None
    is_ours = stat.S_ISREG(about.st_mode) and about.st_uid in (0, os.getuid())
    if is_ours and not about.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return found
    if progress is not None:
        progress(
            f"Ray: {FOUND_BY_RAY} names a cluster at {found}, but others than this user could have "
            "written it: it is not used; set RAY_ADDRESS to use that cluster"
        )
    return None


def check_models(config: Config, *, home: Path, console: Console | None = None) -> None:
    """Fetch what is absent, and look into checkpoints that are not ours, before anything starts.

    A fetch is shown on `console`, without one on stderr. Raises CheckpointError, ConfigError,
    ModelFetchError or VocabularyMismatchError.
    """
    names = [config.target.model, *(one.model for one in config.drafters if one.model)]
    for name in names:
        if name not in CATALOGUE:
            resolve_model(name, home=home)  # An absent folder is said before anything is fetched.
    for name in dict.fromkeys(names):
        if name in CATALOGUE and not is_present(CATALOGUE[name], home=home):
            with show_fetch(console or Console(stderr=True), name) as show:
                resolve_model(name, home=home, progress=show)
    files = {name: resolve_model(name, home=home) for name in names}
    check_workers(config, files, ray_runs=running_ray(os.environ) is not None)


def own_cores() -> tuple[int, ...]:
    """The cores that this process may use."""
    return tuple(sorted(os.sched_getaffinity(0)))
