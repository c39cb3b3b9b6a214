"""Starts a deployment on a Ray cluster, finds it again, ends it.

    connect(address)            this process joins a Ray cluster
    start_cluster(config, ...)  starts a deployment on it
    find_cluster(name)          finds one that another process started

Importing this module imports Ray, so do it only when a cluster is needed.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import ray
from ray._private.state import available_resources_per_node
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from cluster.access.keys import new_key
from cluster.config.model import Config
from cluster.placement.actor_calls import cause_of, first_line
from cluster.placement.actors import WorkerSetup
from cluster.placement.controller import Controller, WorkerStatus
from cluster.placement.plan import Host, Placement, plan_placement
from paceline.errors import DeadlineError, UnavailableError, WorkerLostError
from paceline.generation import WorkerLife

NAMESPACE = "paceline"
_LOOPBACK = "127.0.0.1"
_HEAD = "node:__internal_head__"
"""A resource that Ray gives to its head node only."""
_POLL_SECONDS = 0.1
_STOP_SECONDS = 10.0
_ROOM_PATIENCE = 5.0
"""Seconds to wait for room. What an earlier deployment freed shows in Ray's count after a while."""

Progress = Callable[[str], None]


class ClusterHandle:
    """A deployment that serves at `address` ("host:port" of InferenceService).

    `http_address`: "host:port" of its HTTP interface; None: it has none, or it is not known.
    """

    def __init__(
        self, address: str, controller: Any = None, *, http_address: str | None = None
    ) -> None:
        self.address = address
        self.http_address = http_address
        self._controller = controller

    def stop(self, drain_seconds: float = 0.0) -> int:
        """End all workers. No error if they have ended already.

        First take no more requests, and give running ones `drain_seconds` to end. Returns how many
        did not end in time.
        """
        if self._controller is None:
            return 0
        left = 0
        with contextlib.suppress(RayError):
            stopping = self._controller.stop.remote(drain_seconds)
            left = int(ray.get(stopping, timeout=_STOP_SECONDS + drain_seconds))
        with contextlib.suppress(RayError):
            ray.kill(self._controller)
        self._controller = None
        return left

    def workers(self) -> list[WorkerStatus]:
        """The workers as the controller sees them; empty if there is no controller.

        Raises DeadlineError if it does not answer in time, WorkerLostError if it is lost.
        """
        if self._controller is None:
            return []
        try:
            workers: list[WorkerStatus] = ray.get(self._controller.workers.remote(), timeout=5.0)
        except GetTimeoutError:
            raise DeadlineError("the controller did not answer within 5 s") from None
        except RayError as error:
            raise WorkerLostError(f"the controller does not answer: {first_line(error)}") from None
        return workers

    def lives(self) -> list[WorkerLife]:
        """The history of the workers' processes; empty if there is no controller."""
        if self._controller is None:
            return []
        try:
            lives: list[WorkerLife] = ray.get(self._controller.lives.remote(), timeout=5.0)
        except RayError as error:
            raise WorkerLostError(f"the controller does not answer: {first_line(error)}") from None
        return lives


def connect(address: str) -> bool:
    """Join the Ray cluster at `address` ("host:port", or any value of RAY_ADDRESS).

    Returns whether this call joined it. Raises UnavailableError.
    """
    if ray.is_initialized():
        return False
    on_sigterm = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(
            address=address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR
        )
    except (ConnectionError, RuntimeError, ValueError, RayError) as error:
        raise UnavailableError(
            f"cannot join the Ray cluster at {address}: {first_line(error)}"
        ) from error
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, on_sigterm)  # Ray installs a handler that prints a trace.
    return True


def disconnect() -> None:
    """Leave the Ray cluster. Everything that this process started and did not detach ends."""
    ray.shutdown()


def start_cluster(
    config: Config,
    *,
    home: Path,
    progress: Progress,
    logs: Path | None = None,
    detached: bool,
    name: str | None,
    cores: Sequence[int] | None = None,
) -> ClusterHandle:
    """Start a deployment on the Ray cluster that this process has joined.

    `detached`: it outlives this process and is found by its `name`; else it ends with this process.
    `cores`: see plan_placement. Given only on a Ray cluster of our own; there the stderr of workers
    goes to their logs, because users do not read Ray's log files.
    `logs`: the folder for logs on each host; None: no logs. Raises the PacelineError that says why
    it failed, after ending everything.
    """
    nodes, placement = _place(config, cores)
    setup = WorkerSetup(
        config=config,
        home=home,
        host=_LOOPBACK if len(nodes) == 1 else None,
        logs=logs,
        takes_stderr=cores is not None,
        gateway_key=None if config.server.api_keys is None else new_key(),
    )
    options: dict[str, Any] = {
        "num_cpus": 0,
        "max_concurrency": 100,
        # The controller belongs on the head node, without which Ray cannot go on either. Ray would
        # not keep a node affinity for an actor that needs no resource.
        "resources": {_HEAD: 0.001},
    }
    if detached:
        options |= {"lifetime": "detached", "name": name}
    try:
        controller = ray.remote(Controller).options(**options).remote(setup, placement)
    except ValueError as error:
        raise UnavailableError(
            f"a deployment named {name!r} is on this Ray cluster already; end it first: "
            "paceline down"
        ) from error
    handle = ClusterHandle("", controller)
    try:
        handle.address = _follow(controller, progress)
        told: Any = controller
        handle.http_address = cast("str | None", ray.get(told.http_address.remote()))
    except BaseException:
        handle.stop()
        raise
    return handle


def find_cluster(name: str) -> ClusterHandle | None:
    """The detached deployment with this name, on the Ray cluster that this process has joined."""
    try:
        controller = ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        return None
    address: str | None = None
    with contextlib.suppress(RayError):
        address = cast("str | None", ray.get(controller.address.remote(), timeout=5.0))
    return ClusterHandle(address or "", controller)


def _place(config: Config, cores: Sequence[int] | None) -> tuple[list[Host], Placement]:
    give_up = time.monotonic() + _ROOM_PATIENCE
    while True:
        nodes = _free_nodes()
        try:
            return nodes, plan_placement(config, nodes, cores=cores)
        except UnavailableError:
            if time.monotonic() > give_up:
                raise
        time.sleep(_POLL_SECONDS)


def _free_nodes() -> list[Host]:
    """The living nodes, with what is free on each."""
    free = available_resources_per_node()
    nodes = [node for node in ray.nodes() if node["Alive"]]
    # A node may have joined or left between the two calls.
    return [
        Host(
            name=node["NodeManagerAddress"],
            cpus=free[node["NodeID"]].get("CPU", 0.0),
            gpus=free[node["NodeID"]].get("GPU", 0.0),
            memory=free[node["NodeID"]].get("memory", 0.0),
            labels=node["Labels"],
            node_id=node["NodeID"],
        )
        for node in nodes
        if node["NodeID"] in free
    ]


def _follow(controller: Any, progress: Progress) -> str:
    """Report the controller's progress until it is up. Returns the address."""
    coming = controller.bring_up.remote()
    seen = 0
    try:
        while True:
            ready, _ = ray.wait([coming], timeout=_POLL_SECONDS)
            lines = ray.get(controller.progress.remote(seen))
            seen += len(lines)
            for line in lines:
                progress(line)
            if ready:
                address: str = ray.get(coming)
                return address
    except RayTaskError as error:
        raise cause_of(error) from None
    except (RayActorError, GetTimeoutError) as error:
        raise WorkerLostError(f"the controller's process ended: {first_line(error)}") from None
