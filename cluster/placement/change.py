"""Compares the configuration of a running deployment with a new one. Pure: no I/O.

Drafters, the number of target groups and the defaults of requests may change while a deployment
serves. Everything else is fixed until its end, and a change of it is refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from cluster.config.model import Config, DrafterConfig
from cluster.placement.plan import WorkerPlan, own_drafters, plan_drafter
from paceline.errors import ConfigError

_DEFAULTS = ("policy", "verification", "window", "branches", "stopping", "drafter", "merge")
"""The keys of [speculation] that may change. Further ones: `_changing`."""


@dataclass(frozen=True, slots=True)
class Change:
    """What a new configuration changes.

    `joining`: drafters. `joining_groups`: numbers of target groups. `leaving`: names of drafters,
    and of the shards of groups.
    """

    joining: tuple[WorkerPlan, ...]
    joining_groups: tuple[int, ...]
    leaving: tuple[str, ...]
    keys: tuple[str, ...]
    """The keys that change besides the drafters, in words."""


def plan_change(old: Config, new: Config, workers: Sequence[WorkerPlan]) -> Change:
    """What must happen to `workers`, which run, so that they are those of `new`.

    Workers are compared with those that run, and not with `old`: a change that was interrupted is
    finished by the next. Raises ConfigError, which names the first key that may not change.
    """
    if old.is_pool != new.is_pool:
        raise ConfigError(
            f"target.groups: {old.target.groups} -> {new.target.groups}: a pool of drafters "
            "(groups = 0) stays one, and a deployment with a target keeps at least one group; end "
            "the deployment and start it anew"
        )
    if fixed := _changed(_fixed(old), _fixed(new)):
        raise ConfigError(
            f"{fixed[0]}: a deployment that serves keeps this; leave it as it is, or end the "
            "deployment and start it anew"
        )
    in_driver = own_drafters(old)
    if [*map(_single, in_driver.values())] != [*map(_single, own_drafters(new).values())]:
        raise ConfigError(
            "drafters: those that draft in the driver stay while it serves; leave them as they "
            "are, or give the new ones own_process = true"
        )
    running = [worker for worker in workers if worker.drafter is not None]
    wanted = [
        one
        for drafter in new.drafters
        for one in [_single(drafter)] * drafter.count
        if not drafter.is_in_driver
    ]
    leaving = []
    for worker in running:
        assert worker.drafter is not None
        if (single := _single(worker.drafter)) in wanted:
            wanted.remove(single)
        else:
            leaving.append(worker.name)
    groups = {one.target_group for one in workers if one.drafter is None}
    shards = [
        one.name for one in workers if one.drafter is None and one.target_group >= new.target.groups
    ]
    return Change(
        joining=tuple(_plans(wanted, running, leaving, [*in_driver])),
        joining_groups=tuple(one for one in range(new.target.groups) if one not in groups),
        leaving=(*leaving, *shards),
        keys=tuple(_changed(_changing(old), _changing(new))),
    )


def _single(drafter: DrafterConfig) -> DrafterConfig:
    return drafter.model_copy(update={"count": 1})


def _plans(
    wanted: Sequence[DrafterConfig],
    running: Sequence[WorkerPlan],
    leaving: Sequence[str],
    taken: Sequence[str],
) -> list[WorkerPlan]:
    """Plans of further drafters, with new names. Workforce.enlist chooses their places.

    `taken`: the names of drafters in the driver.

    With threads "auto" a drafter with a model gets as many as others of the deployment, else one;
    it gets a GPU if they have one. It is pinned to the cores of one that leaves.
    """
    spare = {one.name: one for one in running if one.name in leaving and one.cores is not None}
    models = [worker for worker in running if worker.is_model_drafter]
    threads = models[0].threads if models else 1
    gpus = models[0].reserved_gpus if models else 0
    names = [*(worker.name for worker in running), *taken]
    first = 1 + max((int(re.sub(r"\D", "", name)) for name in names), default=-1)
    plans = []
    for number, drafter in enumerate(wanted, first):
        is_model = drafter.model is not None
        own = drafter.threads if drafter.threads != "auto" else threads if is_model else 1
        left = next((one for one in spare.values() if is_model and one.threads == own), None)
        if left is not None:
            del spare[left.name]
        plan = plan_drafter(
            number, drafter, own, max(gpus, int(drafter.gpu is not None)) if is_model else 0
        )
        cores = None if left is None else left.cores
        plans.append(replace(plan, cores=cores, group=-1 if is_model else 0))
    return plans


def _fixed(config: Config) -> dict[str, object]:
    tables = config.model_dump(mode="json", exclude={"drafters", "plan"})
    return {
        f"{table}.{key}": value
        for table, keys in tables.items()
        for key, value in keys.items()
        if f"{table}.{key}" not in _changing(config)
    }


def _changing(config: Config) -> dict[str, object]:
    """The keys that may change besides the drafters, with their values."""
    found: dict[str, object] = {
        f"speculation.{key}": getattr(config.speculation, key) for key in _DEFAULTS
    }
    return found | {
        "server.max_waiting": config.server.max_waiting,
        "target.groups": config.target.groups,
    }


def _changed(old: dict[str, object], new: dict[str, object]) -> list[str]:
    return [f"{key}: {old[key]!r} -> {new[key]!r}" for key in old if old[key] != new[key]]
