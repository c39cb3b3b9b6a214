"""The ledger of a deployment: what it has on its Ray cluster, so that it can be found again.

It is kept in the key-value store of Ray's GCS, under the deployment's name. So it outlives the
controller's process, needs no process of its own, and is as durable as Ray's record of the actors
themselves. The controller writes it before it makes anything, so that whatever exists is in it.
"""

from __future__ import annotations

import contextlib
import json
import pickle
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import ray

# Ray Serve keeps its own state there. Ray has no other interface to this store.
from ray.experimental.internal_kv import _internal_kv_del as delete
from ray.experimental.internal_kv import _internal_kv_get as get
from ray.experimental.internal_kv import _internal_kv_put as put
from ray.util.placement_group import get_placement_group, remove_placement_group

from cluster.config.model import Config
from cluster.placement.plan import Placement, WorkerPlan
from workers.process.logs import WorkerLog

NAMESPACE = "paceline"
"""Ray's namespace of our actors."""


Phase = Literal["starts", "runs", "ends"]
"""What the controller does: until all workers have served; then; from the call that ends it."""


@dataclass(frozen=True, slots=True)
class WorkerSetup:
    """The settings that every actor gets.

    `host`: where workers listen; None: at their node's address. `logs`: the folder for their logs;
    None: no logs. `takes_stderr`: see WorkerLog. `gateway_key`: the API key with which the gateway
    looks at the driver; None: there are no keys. `deployment`: a name that no other one has.
    `serves_http`: whether it has a gateway of its own.
    """

    config: Config
    home: Path
    host: str | None
    logs: Path | None = None
    takes_stderr: bool = False
    gateway_key: str | None = field(default=None, repr=False)
    deployment: str = field(default_factory=lambda: uuid.uuid4().hex[:12])
    serves_http: bool = True

    def log_of(self, worker: str) -> WorkerLog | None:
        if self.logs is None:
            return None
        is_json = self.config.server.log_format == "json"
        return WorkerLog(self.logs, worker, self.takes_stderr, is_json)


@dataclass(frozen=True, slots=True)
class Serving:
    """A worker that serves, with its address "host:port" and its process id.

    `inner_address`: where a driver with TLS speaks with the gateway; None: nowhere else.
    `life`: that of a shard or drafter (workers/process/handshake.py); None: it is neither.
    """

    address: str
    pid: int
    inner_address: str | None = None
    life: int | None = None


@dataclass(slots=True, kw_only=True)
class WorkerEntry:
    """What the ledger keeps of a worker. It outlives the controller's process."""

    name: str
    plan: WorkerPlan | None
    """None: driver or gateway."""
    life: int = 0
    """Number of its present actor, from 1; 0: it has had none."""
    serving: Serving | None = None
    """Where it serves, or served last."""
    restarts: int = 0
    restarting: bool = False
    last_end: str = ""
    place: str | None = None
    """Name of a place of its own (Ledger.places); None: it has the plan's."""
    in_use: bool = True
    """Whether the driver is to use it. One that joins the target, or leaves, is not in use; a
    controller that takes over half-way ends it."""


@dataclass(frozen=True, slots=True)
class Ledger:
    """What a deployment has. `run`: tells it from others, also from earlier ones with its name.

    `groups`: the names of the placement groups of `placement`, in its order; None: it was freed.
    `places`: those of further ones. `load_seconds`: see Workforce. `driver_life`: the last life
    that the driver was given.
    """

    run: str
    phase: Phase
    setup: WorkerSetup
    placement: Placement
    groups: tuple[str | None, ...]
    places: tuple[str, ...]
    workers: tuple[WorkerEntry, ...]
    load_seconds: float
    driver_life: int = 0


def actor_name(run: str, worker: str, life: int) -> str:
    return f"{run}/{worker}/{life}"


def read_ledger(deployment: str) -> Ledger | None:
    found = get(_key(deployment))
    ledger: Ledger | None = None if found is None else pickle.loads(found)
    return ledger


def write_ledger(deployment: str, ledger: Ledger) -> None:
    put(_key(deployment), pickle.dumps(ledger), overwrite=True)


def sweep(deployment: str) -> bool:
    """End all that the ledger names, and remove it. Returns whether there was a ledger.

    Call this only when the deployment's controller is gone, or is the caller.
    """
    ledger = read_ledger(deployment)
    if ledger is None:
        return False
    for entry in reversed(ledger.workers):
        with contextlib.suppress(ValueError):  # It has ended.
            name = actor_name(ledger.run, entry.name, entry.life)
            ray.kill(ray.get_actor(name, namespace=NAMESPACE))
    remove_groups((*filter(None, ledger.groups), *ledger.places))
    delete(_drafters_key(deployment))
    delete(_key(deployment))
    return True


def read_drafters(deployment: str) -> dict[str, str]:
    """Where the drafters of a deployment serve, by name; none if there is no such deployment.

    It is apart from the ledger, and JSON, so that deployments of other versions can read it.
    """
    found = get(_drafters_key(deployment))
    return {} if found is None else {str(name): str(at) for name, at in json.loads(found).items()}


def write_drafters(deployment: str, addresses: Mapping[str, str]) -> None:
    """Tell other deployments where the drafters are, each with its life (workforce.py)."""
    put(_drafters_key(deployment), json.dumps(dict(addresses)).encode(), overwrite=True)


def remove_groups(names: Iterable[str]) -> None:
    """Remove placement groups, and end what is in them. No error if some are gone."""
    for name in names:
        with contextlib.suppress(ValueError):
            remove_placement_group(get_placement_group(name))


def _key(deployment: str) -> bytes:
    return f"paceline/{deployment}".encode()


def _drafters_key(deployment: str) -> bytes:
    return f"paceline-drafters/{deployment}".encode()
