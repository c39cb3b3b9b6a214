"""Finds the cluster of a command: a named one, a running one, or a private one for the command.

Before Ray starts it checks whether workers can load their models; torch is imported only for that.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Console

from cluster.config.model import Config, WorkersConfig
from cluster.placement.plan import Host, Placement, plan_placement
from deploy.session import ray_head
from deploy.session.record import ClusterRecord, read_record
from deploy.session.signals import ending_on_signals, signals_held
from deploy.terminal.fetch_progress import show_fetch
from deploy.terminal.lines import plain
from paceline.access import Access
from paceline.address import EVERYWHERE
from paceline.client import Client
from paceline.errors import ConfigError, DeadlineError, UnavailableError, VocabularyMismatchError
from paceline.text import counted
from workers.drafting.kind import DRAFTERS, DrafterOptions
from workers.models.catalog import CATALOG, ModelFiles, is_present, resolve_model
from workers.models.hub import is_hub_name
from workers.process.logs import new_run

if TYPE_CHECKING:
    from cluster.placement.controller import WorkerStatus
    from cluster.placement.launch import ClusterHandle
    from paceline.generation import WorkerLife


Progress = Callable[[str], None]
FOUND_BY_RAY = Path("/tmp/ray/ray_current_cluster")
_LONGEST_ADDRESS = 256
"""Most characters to read of the file that has Ray's address."""


@contextmanager
def open_cluster(
    config: Config,
    *,
    home: Path,
    progress: Progress,
    server: str | None,
    console: Console | None = None,
    access: Access | None = None,
) -> Iterator[ClusterHandle]:
    """A cluster that serves `config` while the block runs.

    It is `server` ("host:port") if given, else the cluster of `paceline up` with the same
    deployment, else a private one. A private cluster runs on the running Ray cluster or on a head
    of ours, without keys and TLS. It ends with the block, on an error, and on SIGINT and SIGTERM.
    Fetches of models are shown on `console` (None: stderr). Raises the PacelineError that says why
    there is no cluster.
    """
    if server is None and config.is_pool:
        raise ConfigError(
            "target.groups is 0: a pool of drafters answers no requests; give the configuration "
            "of a deployment that uses it, or name one with --server"
        )
    address = server or running_address(config, home)
    if address is not None:
        check_listening(address, access)
        from cluster.placement.launch import ClusterHandle

        yield ClusterHandle(address)
        return
    _tell_of_another(config, home)
    check_models(config, home=home, console=console)
    own = {"host": "127.0.0.1", "grpc_port": 0, "http": False}
    own |= {"api_keys": None, "tls_cert": None, "tls_key": None}
    private = config.model_copy(
        update={"server": config.server.model_copy(update=own), "workers": WorkersConfig()}
    )
    with ending_on_signals(), join_ray(private, progress=progress) as own_head:
        from cluster.placement.launch import start_cluster

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


def check_listening(address: str, access: Access | None = None) -> None:
    """Raise UnavailableError with the cause if no server can be reached at "host:port"."""
    with Client(address, **(access or {})) as client:
        client.connect()


def running_address(config: Config, home: Path) -> str | None:
    """Address of the cluster of `paceline up`, if it runs and has the same deployment."""
    record = read_record(home)
    if record is None or record.deployment != config.deployment():
        return None
    return _where_it_listens(record)


def _where_it_listens(record: ClusterRecord) -> str | None:
    address = _of_today(record).address
    return address if address and ray_head.is_listening(address) else None


def _tell_of_another(config: Config, home: Path) -> None:
    """Say on stderr, even if quiet, that a running cluster is not used, and why.

    The cluster that is used instead may serve another model.
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
    """The keys in which two deployments differ, with both values."""
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
    """The record of `up`, with the present address, since a driver may have moved to another node.

    The controller is asked if nothing listens at the recorded address. A head of ours has one node,
    on which a driver returns at its old address.
    """
    record = read_record(home)
    return None if record is None else _of_today(record)


def _of_today(record: ClusterRecord) -> ClusterRecord:
    if record.address and record.head is None and not ray_head.is_listening(record.address):
        with deployment_of(record) as handle:
            if handle is not None:
                record = replace(record, address=handle.address or record.address)
    return replace(
        record, address=_from_here(record.address), http_address=_from_here(record.http_address)
    )


def _from_here(address: str | None) -> str | None:
    """Where a caller on this host finds it: no certificate is for "all interfaces"."""
    host, _, port = (address or "").rpartition(":")
    return f"localhost:{port}" if host in EVERYWHERE else address


def lives_of(record: ClusterRecord) -> list[WorkerLife]:
    """The history of the workers' processes, from the controller; empty if that is gone."""
    with deployment_of(record) as handle, suppress(UnavailableError):
        return [] if handle is None else handle.lives()
    return []


def workers_of(record: ClusterRecord) -> list[WorkerStatus]:
    """The workers, from the controller; empty if that is gone."""
    with deployment_of(record) as handle, suppress(DeadlineError, UnavailableError):
        return [] if handle is None else handle.workers()
    return []


@contextmanager
def deployment_of(record: ClusterRecord) -> Iterator[ClusterHandle | None]:
    """The deployment on its Ray cluster; None: the deployment or the Ray cluster is gone."""
    is_there = False
    with ExitStack() as stack:
        if record.head is None or ray_head.is_listening(record.ray_address):
            with suppress(UnavailableError):
                stack.enter_context(_joined(record.ray_address, record.head))
                is_there = True
        yield _found(record.name) if is_there else None


@contextmanager
def on_ray(address: str, name: str) -> Iterator[ClusterHandle | None]:
    """The deployment with this name on the Ray cluster at `address`; None: there is none.

    Raises UnavailableError if this process cannot join that cluster.
    """
    with _joined(address):
        yield _found(name)


def _found(name: str) -> ClusterHandle | None:
    from cluster.placement.launch import find_cluster  # It imports Ray: only where one was joined.

    return find_cluster(name)


@contextmanager
def _joined(address: str, head: ray_head.RayHead | None = None) -> Iterator[None]:
    leave = enter_ray(address, head)
    try:
        yield
    finally:
        if leave is not None:
            leave()


@contextmanager
def join_ray(config: Config, *, progress: Progress) -> Iterator[ray_head.RayHead | None]:
    """Join the running Ray cluster (yields None) or a head of ours, which ends with the block."""
    running = running_ray(os.environ, progress)
    stack = ExitStack()
    try:
        head = None
        if running is None:
            head = ray_head.plan_head()
            stack.enter_context(ray_head.guarded(head))
            head = start_own_head(head, config, progress)
            stack.callback(ray_head.stop_head, head)
        if leave := enter_ray(head.address if head else running or "", head):
            stack.callback(leave)
        if running is not None:
            progress(f"Ray: using the cluster at {running}")
        yield head
    finally:
        with signals_held():
            stack.close()


def start_own_head(head: ray_head.RayHead, config: Config, progress: Progress) -> ray_head.RayHead:
    """Start a planned head with all CPUs that this process may use, or more if workers need more.

    It gets this host's GPUs too, unless the configuration excludes them.
    """
    num_cores = len(own_cores())
    plan = check_devices(config)
    progress("Ray: starting a local cluster")
    if plan.reserved_cpus > num_cores:
        progress(f"Ray: the workers share {num_cores} cores, and ask for {plan.reserved_cpus}")

    def import_ray() -> None:
        ray_head.prepare_to_join(head)
        import cluster.placement.launch  # noqa: F401  (slow, so that it is done while Ray starts)

    return ray_head.start_head(
        head,
        num_cpus=max(num_cores, plan.reserved_cpus),
        gpus=config.target.resources != "cpu",
        meanwhile=import_ray,
    )


def check_devices(config: Config) -> Placement:
    """Plan the workers on this host.

    Raises UnavailableError if it has fewer GPUs than target or drafters ask for. Of which kind they
    are, only Ray knows.
    """
    target, gpus = config.target, 0
    for_drafters = sum(one.count for one in config.drafters if one.gpu is not None)
    # "auto" takes what the head finds.
    if target.resources == "gpu" or target.gpu is not None or for_drafters:
        import torch

        gpus = torch.cuda.device_count()
    if for_drafters > gpus:
        raise UnavailableError(
            f"{counted(for_drafters, 'drafter')} must have a GPU (drafters.gpu), but this host has "
            f"{counted(gpus, 'GPU')}: remove the key, lower drafters.count, or join a Ray cluster "
            "that has them (RAY_ADDRESS)"
        )
    host = Host("local", len(own_cores()), gpus, labels=target.selector if gpus else {})
    return plan_placement(config, [host], enforce=False)


def enter_ray(address: str, head: ray_head.RayHead | None = None) -> Callable[[], None] | None:
    """Join Ray at `address`. Returns a function that leaves it; None: it was joined already.

    `head`: the head there, if it is ours; None: it is another's.
    """
    if head is not None:
        ray_head.prepare_to_join(head)
    elif ":" in address and "//" not in address and not ray_head.is_listening(address):
        raise UnavailableError(f"no Ray cluster at {address} (RAY_ADDRESS); start it or unset it")
    from cluster.placement import launch

    return launch.disconnect if launch.connect(address) else None


def leave_ray() -> None:
    """Leave the Ray cluster that this process may have joined."""
    if "ray" in sys.modules:
        from cluster.placement.launch import disconnect

        disconnect()


def running_ray(environ: Mapping[str, str], progress: Progress | None = None) -> str | None:
    """RAY_ADDRESS, else the address of a Ray cluster that `ray start` left running on this host.

    Ray writes that address to a file in a folder that all users share. A process that joins a Ray
    cluster runs the code that the cluster sends. So the file is trusted only if this user or root
    owns it and no other user can write it.
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
            f"Ray: {FOUND_BY_RAY} names a cluster at {found}, but other users could have written "
            "it, so it is not used; set RAY_ADDRESS to use that cluster"
        )
    return None


def check_models(config: Config, *, home: Path, console: Console | None = None) -> None:
    """Fetch missing models and inspect checkpoints that are not ours, before anything starts.

    Nothing is fetched if this host lacks the GPUs. Fetches are shown on `console` (None: stderr).
    Raises CheckpointError, ConfigError, ModelFetchError, UnavailableError or
    VocabularyMismatchError.
    """
    names = [one.model for one in config.drafters if one.model]
    if not config.is_pool:
        names.insert(0, config.target.model)
    for name in names:
        if name not in CATALOG and not is_hub_name(name):
            resolve_model(name, home=home)  # Report a missing folder before fetching anything.
    ray_runs = running_ray(os.environ) is not None
    for name in dict.fromkeys(names):
        if is_hub_name(name) or (name in CATALOG and not is_present(CATALOG[name], home=home)):
            if not ray_runs:
                check_devices(config)
            with show_fetch(console or Console(stderr=True), name) as show:
                resolve_model(name, home=home, progress=show)
    files = {name: resolve_model(name, home=home) for name in names}
    if not config.is_pool:  # else each drafter checks its own
        check_workers(config, files, ray_runs=ray_runs)


def own_cores() -> tuple[int, ...]:
    """The cores that this process may use."""
    return tuple(sorted(os.sched_getaffinity(0)))


def check_workers(config: Config, files: Mapping[str, ModelFiles], *, ray_runs: bool) -> None:
    """Inspect the checkpoints. `files`: by the model names of `config`.

    `ray_runs`: workers will run on an existing Ray cluster, which may have GPUs; on a head of ours
    they compute on CPUs. Raises CheckpointError, ConfigError naming the model, or
    VocabularyMismatchError.
    """
    if not _may_be_refused(config, files):
        return
    from workers.engine.load.checkpoint import choose_length, inspect_checkpoint
    from workers.engine.load.vocabulary import digest_vocabulary, read_tokenizer

    target = config.target
    info = inspect_checkpoint(files[target.model].folder)
    longest = None if target.max_model_len == "auto" else target.max_model_len
    choose_length(longest, info.max_model_len)
    if target.emulated is None:  # else nothing is computed
        _check_engines(config, files, longest, ray_runs=ray_runs)
    for model, tokenizer in dict.fromkeys(
        (one.model, getattr(one.options_of_kind(), "tokenizer", None)) for one in config.drafters
    ):
        if model is None:
            continue
        digest = inspect_checkpoint(files[model].folder).vocabulary_digest
        if tokenizer is not None:
            digest = digest_vocabulary(read_tokenizer(tokenizer).get_vocab())
        if digest != info.vocabulary_digest:
            own = files[target.model].folder
            raise VocabularyMismatchError(
                f"drafter {model!r} does not have the vocabulary of target {target.model!r}; "
                f"choose a drafter with the target's tokenizer, or kind {_kinds_without_model()}, "
                f'or have kind "model" translate, with options = {{ tokenizer = "{own}" }}'
                if tokenizer is None
                else f"drafter {model!r}: options.tokenizer ({tokenizer}) does not have the "
                f"vocabulary of target {target.model!r}; expected a folder as {own}"
            )


def _may_be_refused(config: Config, files: Mapping[str, ModelFiles]) -> bool:
    """Whether inspection is needed. Our own models fit, unless the options are unusual."""
    target = config.target
    usual = (
        target.tensor_parallel == 1
        and target.max_model_len == target.kv_memory == "auto"
        and target.resources != "gpu"
        and target.kv_cache_dtype == "auto"
    )
    return not usual or any(name not in CATALOG for name in files)


def _check_engines(
    config: Config, files: Mapping[str, ModelFiles], longest: int | None, *, ray_runs: bool
) -> None:
    from workers.engine.open import check_ahead

    target = config.target
    kv_memory = None if target.kv_memory == "auto" else target.kv_memory
    device: Literal["cpu", "cuda"] = "cpu"
    if target.resources == "gpu":
        device = "cuda"
    elif target.resources == "auto" and ray_runs:
        # Only Ray knows whether the target gets GPUs. Its engine checks the rest.
        from workers.engine.load.model import part_config
        from workers.engine.parallel.weight_cuts import Place

        part_config(files[target.model].folder, Place(0, target.tensor_parallel))
        return
    check_ahead(
        files[target.model].folder,
        device=device,
        weights=files[target.model].weights,
        kv_memory_bytes=kv_memory,
        dtype=target.dtype,
        kv_dtype=target.kv_cache_dtype,
        max_model_len=longest,
        degree=target.tensor_parallel,
    )
    if device == "cuda":
        return  # A drafter may be left with a CPU.
    for one in config.drafters:
        if one.model is None:
            continue
        kind = DRAFTERS.get(one.kind, field="kind")
        options = DrafterOptions(
            kind.name,
            files[one.model].folder,
            files[one.model].weights,
            kv_memory_bytes=kv_memory,
            device=device,
            of_kind=one.options_of_kind(),
        )
        try:
            kind.check(options)
        except ConfigError as error:
            raise ConfigError(f"drafter {one.model!r}: {error}") from error


def _kinds_without_model() -> str:
    return " or ".join(name for name, kind in DRAFTERS.all().items() if kind.default_model is None)
