"""Starts a deployment on a Ray cluster, finds it again, ends it.

Importing this module imports Ray, so do it only when a cluster is needed.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import ray
from ray.exceptions import (
    ActorUnavailableError,
    GetTimeoutError,
    RayActorError,
    RayError,
    RayTaskError,
)

from cluster.access.keys import new_key
from cluster.config.model import Config
from cluster.placement.actor_calls import cause_of, first_line
from cluster.placement.controller import Controller, WorkerStatus
from cluster.placement.ledger import NAMESPACE, WorkerSetup, remove_groups, sweep
from cluster.placement.plan import Host, Placement, plan_placement
from cluster.placement.workforce import free_nodes, group_names, make_groups
from paceline.errors import DeadlineError, UnavailableError, WorkerLostError
from paceline.generation import WorkerLife

_LOOPBACK = "127.0.0.1"
_HEAD = "node:__internal_head__"
"""A resource that Ray gives to its head node only."""
_POLL_SECONDS = 0.1
_STOP_SECONDS = 10.0
_CHANGE_SECONDS = 1800.0
"""How long new workers may take to load."""
_ANSWER_SECONDS = 5.0
_AGAIN_SECONDS = 0.2
_PATIENCE_SECONDS = 20.0
"""How long the controller may be away: its process starts again in some seconds."""
_ROOM_PATIENCE = 5.0
"""Seconds to wait for room. What an earlier deployment freed shows in Ray's count after a while."""
_NAME_PATIENCE = 10.0
"""Seconds to wait for the name of a deployment that has ended, or whose start was killed."""
_SILENT_SECONDS = 5.0
"""A starter that has not asked for this long is gone or stopped."""

Progress = Callable[[str], None]


class ClusterHandle:
    """A deployment that serves at `address` ("host:port" of InferenceService).

    `http_address`: "host:port" of its HTTP interface; None: it has none, or it is not known.
    """

    def __init__(self, address: str, controller: Any = None, *, name: str = "") -> None:
        """`controller`: its actor; None: there is none. `name`: of the deployment there."""
        self.address = address
        self.http_address: str | None = None
        self._controller = controller
        self.name = name

    def stop(self, drain_seconds: float = 0.0) -> int:
        """End all workers. No error if they have ended already.

        First take no more requests, and give running ones `drain_seconds` to end. Returns how many
        did not end in time.
        """
        if self._controller is None:
            return 0
        left = 0
        for _ in range(2):
            try:
                left = self._ask("stop", drain_seconds, seconds=_STOP_SECONDS + drain_seconds)
                break
            except DeadlineError:
                self.restart_controller()  # It hangs. Its next process can drain.
            except (WorkerLostError, UnavailableError):
                break
        with contextlib.suppress(RayError):
            ray.kill(self._controller)
        with contextlib.suppress(RayError):
            sweep(self.name)  # A controller that did not answer has left all.
        self._controller = None
        return left

    def workers(self) -> list[WorkerStatus]:
        """The workers as the controller sees them; empty if there is no controller.

        Raises DeadlineError if it does not answer in time, WorkerLostError if it is lost for good.
        """
        workers: list[WorkerStatus] = self._ask("workers", without=[])
        return workers

    def lives(self) -> list[WorkerLife]:
        """The history of the workers' processes; empty without a controller. Raises as above."""
        lives: list[WorkerLife] = self._ask("lives", without=[])
        return lives

    def present_address(self, *, for_gateways: bool = False) -> str:
        """Where it serves: its driver is elsewhere if its node was lost. Raises as above.

        `for_gateways`: see Controller.address.
        """
        address: str = self._ask("address", for_gateways, without=None) or self.address
        if not for_gateways:
            self.address = address
        return address

    def controller_pid(self) -> int | None:
        """The controller's process on the head's host; None: there is none. Raises as above."""
        pid: int | None = self._ask("pid", without=None)
        return pid

    def starter_silent_for(self) -> float | None:
        """Seconds since its starter asked last; None: it is up. Raises as above."""
        silent: float | None = self._ask("starter_silent_for", without=None)
        return silent

    def apply(self, config: Config) -> list[str]:
        """Change the deployment while it serves (Controller.apply). Returns what was done.

        Raises ConfigError if a key may not change, what a worker that joins raises, and as above.
        """
        done: list[str] = self._ask("apply", config, seconds=_CHANGE_SECONDS, without=[])
        return done

    def restart_controller(self) -> None:
        """End the controller's process, so that Ray starts another. All workers continue."""
        if self._controller is not None:
            with contextlib.suppress(RayError):
                ray.kill(self._controller, no_restart=False)

    def _ask(
        self, method: str, *arguments: Any, seconds: float = _ANSWER_SECONDS, without: Any = 0
    ) -> Any:
        """The controller's answer; `without` if there is none. Waits while Ray starts it again.

        `seconds`: how long the answer may take. Raises as `workers` does.
        """
        if self._controller is None:
            return without
        give_up = time.monotonic() + max(seconds, _PATIENCE_SECONDS)
        while True:
            left = give_up - time.monotonic()
            try:
                call = getattr(self._controller, method).remote(*arguments)
                return ray.get(call, timeout=max(0.0, min(seconds, left)))
            except GetTimeoutError:
                raise DeadlineError(f"the controller did not answer within {seconds:g} s") from None
            except ActorUnavailableError as error:
                if left <= 0:
                    raise DeadlineError(f"the controller is away: {first_line(error)}") from None
                time.sleep(_AGAIN_SECONDS)
            except RayTaskError as error:
                raise cause_of(error) from None
            except RayError as error:
                raise WorkerLostError(
                    f"the controller does not answer: {first_line(error)}"
                ) from None


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
    http: bool = True,
) -> ClusterHandle:
    """Start a deployment on the Ray cluster that this process has joined.

    `detached`: it outlives this process; else Ray ends it with this process, whose own it is.
    `name`: by which it is found, if the configuration has none; None: any.
    `http`: whether it may have a gateway of its own.
    `cores`: see plan_placement. Given only on a Ray cluster of our own; there the stderr of workers
    goes to their logs, because users do not read Ray's log files.
    `logs`: the folder for logs on each host; None: no logs. Raises the PacelineError that says why
    it failed, after ending everything.
    """
    nodes, placement = _place(config, cores)
    setup = WorkerSetup(
        config=config,
        home=home,
        # Others reach the drafters of a pool.
        host=_LOOPBACK if len(nodes) == 1 and not config.is_pool else None,
        logs=logs,
        takes_stderr=cores is not None,
        gateway_key=None if config.server.api_keys is None else new_key(),
        serves_http=config.server.http and http,
    )
    run = f"paceline-{secrets.token_hex(6)}"
    deployment = config.server.name or name or run
    options: dict[str, Any] = {
        "name": deployment,
        "namespace": NAMESPACE,
        "lifetime": "detached",
        "max_restarts": -1,
        "num_cpus": 0,
        "max_concurrency": 100,
        # The controller belongs on the head node, without which Ray cannot go on either. Ray would
        # not keep a node affinity for an actor that needs no resource.
        "resources": {_HEAD: 0.001},
    }
    _free_name(deployment)
    # Ray ends what is in the groups of this process with this process, however it ends.
    groups = None if detached else group_names(run, placement)
    try:
        if groups is not None:
            make_groups(groups, placement.groups, detached=False)
        arguments = deployment, run, setup, placement, groups
        controller = ray.remote(Controller).options(**options).remote(*arguments)
    except BaseException as error:
        remove_groups(groups or ())
        if isinstance(error, ValueError):  # Another one got the name meanwhile.
            raise _taken(deployment, None) from None
        raise
    handle = ClusterHandle("", controller, name=deployment)
    try:
        handle.address = _follow(controller, progress)
        told: Any = controller
        handle.http_address = cast("str | None", ray.get(told.http_address.remote()))
    except BaseException:
        try:
            handle.stop()
        finally:
            remove_groups(groups or ())
        raise
    return handle


def find_cluster(name: str) -> ClusterHandle | None:
    """The deployment with this name, on the Ray cluster that this process has joined.

    Without its controller, what is left of it is ended, and there is none.
    """
    try:
        controller = ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        sweep(name)
        return None
    handle = ClusterHandle("", controller, name=name)
    with contextlib.suppress(DeadlineError, WorkerLostError):
        handle.present_address()
    return handle


def _free_name(deployment: str) -> None:
    """Clean up after an earlier deployment with this name if nobody has it any more.

    Its controller or its starter is gone, or it has just been ended. Raises UnavailableError if it
    runs, or is being started, which takes some seconds to see.
    """
    give_up = time.monotonic() + _NAME_PATIENCE
    while (found := find_cluster(deployment)) is not None:
        try:
            silent = found.starter_silent_for()
        except (WorkerLostError, DeadlineError):
            if time.monotonic() > give_up:
                raise _taken(deployment, found) from None
            time.sleep(_POLL_SECONDS)
            continue
        if silent is None or (silent < _SILENT_SECONDS and time.monotonic() > give_up):
            raise _taken(deployment, found)
        if silent >= _SILENT_SECONDS:
            found.stop()
        else:
            time.sleep(_POLL_SECONDS)


def _taken(deployment: str, first: ClusterHandle | None) -> UnavailableError:
    does = f"serves at {first.address}" if first and first.address else "runs or is being started"
    return UnavailableError(
        f"a deployment named {deployment!r} is on this Ray cluster already, and {does}; end it "
        "first: paceline down"
    )


def _place(config: Config, cores: Sequence[int] | None) -> tuple[list[Host], Placement]:
    give_up = time.monotonic() + _ROOM_PATIENCE
    while True:
        nodes = free_nodes()
        try:
            return nodes, plan_placement(config, nodes, cores=cores)
        except UnavailableError:
            if time.monotonic() > give_up:
                raise
        time.sleep(_POLL_SECONDS)


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
