"""Decides which worker gets which threads, cores and devices. Pure: nodes in, a plan out.

The shards of each target group form a placement group, on one node if any node has room for all of
them. Model drafters form another group, spread over the nodes. The driver is placed with the first
shard. So is a drafter without a model, which takes almost no processor time and reserves no core.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from cluster.config.model import Config, DrafterConfig
from cluster.driver.meters import shard_name
from paceline.errors import UnavailableError
from paceline.text import counted

Bundle = dict[str, float]


@dataclass(frozen=True, slots=True)
class Host:
    """A node of the Ray cluster, with its free CPUs and GPUs."""

    name: str
    cpus: float
    gpus: float = 0.0


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """One worker.

    `kind`: "target", or the drafter's kind. `group`, `bundle`: its place. `cores`: those it is
    pinned to; None: it is not pinned. `rank`, `degree`: a shard's number, and how many shards its
    target group has. `drafter`: the configuration of a drafter.
    """

    name: str
    kind: str
    model: str | None
    threads: int
    cores: tuple[int, ...] | None
    group: int
    bundle: int
    reserved_cpus: int
    reserved_gpus: int
    rank: int = 0
    degree: int = 1
    drafter: DrafterConfig | None = None

    @property
    def is_model_drafter(self) -> bool:
        """Whether it drafts with a model, and so computes on cores or a GPU of its own."""
        return self.drafter is not None and self.model is not None


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """A Ray placement group."""

    bundles: tuple[Bundle, ...]
    strategy: Literal["STRICT_PACK", "PACK", "SPREAD"]


@dataclass(frozen=True, slots=True)
class Placement:
    """The whole plan. The first groups are the target's; bundle N of each holds its shard N.

    Bundle 0 of group 0 also holds the driver.
    """

    groups: tuple[GroupPlan, ...]
    workers: tuple[WorkerPlan, ...]

    @property
    def reserved_cpus(self) -> int:
        """CPUs that all workers reserve together."""
        return sum(worker.reserved_cpus for worker in self.workers)


def plan_placement(
    config: Config,
    nodes: Sequence[Host],
    *,
    cores: Sequence[int] | None = None,
    enforce: bool = True,
) -> Placement:
    """Divide the nodes among the workers.

    `cores`: the numbers of those cores of a single node that only this deployment uses. Workers are
    pinned to them if there are enough. `enforce=False` lets workers reserve more cores than there
    are. Raises UnavailableError, which says what is needed and what is free, also if shards
    outnumber devices.
    """
    drafters = _each_drafter(config)
    num_model_drafters = sum(drafter.model is not None for drafter in drafters)
    degree, num_targets = config.target.tensor_parallel, config.target.groups
    _check_devices(config, nodes)
    shard_gpus, drafter_gpus = _share_gpus(config, num_model_drafters, nodes)
    shard_threads, drafter_threads = _share_threads(config, drafters, nodes)
    workers = [
        WorkerPlan(
            name=shard_name(rank, group=group, num_groups=num_targets),
            kind="target",
            model=config.target.model,
            threads=shard_threads,
            cores=None,
            group=group,
            bundle=rank,
            reserved_cpus=shard_threads,
            reserved_gpus=shard_gpus,
            rank=rank,
            degree=degree,
        )
        for group in range(num_targets)
        for rank in range(degree)
    ]
    for number, (drafter, threads) in enumerate(zip(drafters, drafter_threads, strict=True)):
        is_model = drafter.model is not None
        if drafter.is_in_driver:
            continue
        workers.append(
            WorkerPlan(
                name=_drafter_name(number),
                kind=drafter.kind,
                model=drafter.model,
                threads=threads,
                cores=None,
                group=num_targets if is_model else 0,
                bundle=sum(worker.is_model_drafter for worker in workers) if is_model else 0,
                reserved_cpus=threads if is_model else 0,
                reserved_gpus=drafter_gpus if is_model else 0,
                drafter=drafter,
            )
        )
    shards = workers[:degree]  # Other groups need as much.
    strategy: Literal["STRICT_PACK", "PACK"] = "STRICT_PACK" if _fit_one(shards, nodes) else "PACK"
    groups = [GroupPlan(_bundles(shards), strategy) for _ in range(num_targets)]
    if num_model_drafters:
        models = [worker for worker in workers if worker.is_model_drafter]
        groups.append(GroupPlan(_bundles(models), "SPREAD"))
    if enforce:
        _check_room(workers, nodes)
    return Placement(tuple(groups), tuple(_pin(workers, cores)))


def own_drafters(config: Config) -> dict[str, DrafterConfig]:
    """The drafters that draft in the driver, by name."""
    return {
        _drafter_name(number): drafter
        for number, drafter in enumerate(_each_drafter(config))
        if drafter.is_in_driver
    }


def _each_drafter(config: Config) -> list[DrafterConfig]:
    return [one for drafter in config.drafters for one in [drafter] * drafter.count]


def _drafter_name(number: int) -> str:
    return f"drafter-{number}"


def _check_devices(config: Config, nodes: Sequence[Host]) -> None:
    """Raise UnavailableError if shards outnumber devices: they would take turns, without gain."""
    resources, degree = config.target.resources, _num_shards(config)
    gpus = int(sum(node.gpus for node in nodes))
    cpus = int(sum(node.cpus for node in nodes))
    wants_gpus = resources == "gpu" or (resources == "auto" and gpus > 0)
    if wants_gpus and gpus < degree:
        raise UnavailableError(
            f"{counted(degree, 'shard')} of the target must have {counted(degree, 'GPU')}, but "
            f"only {gpus} are free on {_nodes(nodes)} ({_shards_asked(config)}); lower "
            f'{_lower(config)}, free GPUs, or set target.resources = "cpu"'
        )
    if degree > 1 and cpus < degree:
        raise UnavailableError(
            f"{_shards_asked(config)}, a CPU core or more each, but {cpus} cores are "
            f"free on {_nodes(nodes)}: lower {_lower(config)}, or free some"
        )


def _num_shards(config: Config) -> int:
    """Number of shards of all target groups."""
    return config.target.groups * config.target.tensor_parallel


def _shards_asked(config: Config) -> str:
    degree, groups = config.target.tensor_parallel, config.target.groups
    if groups == 1:
        return f"target.tensor_parallel is {degree}"
    return (
        f"target.groups is {groups} and target.tensor_parallel {degree}: {groups * degree} shards"
    )


def _lower(config: Config) -> str:
    return "tensor_parallel" if config.target.groups == 1 else "groups or tensor_parallel"


def _share_gpus(config: Config, num_drafters: int, nodes: Sequence[Host]) -> tuple[int, int]:
    """GPUs of each shard and of each model drafter. The target's come first."""
    gpus = 0 if config.target.resources == "cpu" else int(sum(node.gpus for node in nodes))
    num_shards = _num_shards(config)
    return int(gpus >= num_shards), int(gpus >= num_shards + num_drafters)


def _nodes(nodes: Sequence[Host]) -> str:
    return f"{len(nodes)} node{'s' * (len(nodes) != 1)}"


def _fit_one(shards: Sequence[WorkerPlan], nodes: Sequence[Host]) -> bool:
    """Whether some node has room for all shards. A single shard is always placed on one."""
    cpus = sum(shard.reserved_cpus for shard in shards)
    gpus = sum(shard.reserved_gpus for shard in shards)
    fits = any(node.cpus >= cpus and node.gpus >= gpus for node in nodes)
    return fits or len(shards) == 1


def _share_threads(
    config: Config, drafters: Sequence[DrafterConfig], nodes: Sequence[Host]
) -> tuple[int, list[int]]:
    """Threads of each shard, and of each drafter."""
    num_shards = _num_shards(config)
    cpus = sorted((int(node.cpus) for node in nodes), reverse=True) or [1]
    models = [drafter for drafter in drafters if drafter.model is not None]
    if len(cpus) == 1:
        given = [one.threads for one in models if one.threads != "auto"]
        if config.target.threads != "auto":
            given += [config.target.threads] * num_shards
        even_share = max(1, (cpus[0] - sum(given)) // max(1, num_shards + len(models) - len(given)))
    else:
        per_node = -(-len(models) // (len(cpus) - 1))
        even_share = max(1, cpus[-1] // max(1, per_node))
    threads = [_chosen(drafter, even_share) for drafter in drafters]
    if config.target.threads != "auto":
        return config.target.threads, threads
    taken = sum(
        n for drafter, n in zip(drafters, threads, strict=True) if drafter.model is not None
    )
    left = cpus[0] - taken if len(cpus) == 1 else cpus[0]
    # With several nodes, some groups may share one.
    a_node = (
        num_shards
        if len(cpus) == 1
        else -(-config.target.groups // len(cpus)) * (config.target.tensor_parallel)
    )
    return max(1, left // a_node), threads


def _chosen(drafter: DrafterConfig, even_share: int) -> int:
    if drafter.threads != "auto":
        return drafter.threads
    return even_share if drafter.model is not None else 1


def _bundles(workers: Sequence[WorkerPlan]) -> tuple[Bundle, ...]:
    return tuple(bundle_of(worker) for worker in workers)


def bundle_of(worker: WorkerPlan) -> Bundle:
    """Resources that the worker reserves."""
    bundle: Bundle = {"CPU": float(worker.reserved_cpus)}
    if worker.reserved_gpus:
        bundle["GPU"] = float(worker.reserved_gpus)
    return bundle


def _check_room(workers: Sequence[WorkerPlan], nodes: Sequence[Host]) -> None:
    """Check by first fit that there is room: the target first, drafters where most is left."""
    left = [[node.cpus, node.gpus] for node in nodes]
    for worker in workers:
        left.sort(reverse=True)
        for room in left:
            if room[0] >= worker.reserved_cpus and room[1] >= worker.reserved_gpus:
                room[0] -= worker.reserved_cpus
                room[1] -= worker.reserved_gpus
                break
        else:
            needed = ", ".join(
                f"{one.name} {one.reserved_cpus} CPUs"
                + (f" and {one.reserved_gpus} GPU" if one.reserved_gpus else "")
                for one in workers
                if one.reserved_cpus
            )
            there = ", ".join(f"{n.name}: {n.cpus:g} CPUs, {n.gpus:g} GPUs" for n in nodes)
            raise UnavailableError(
                f"the cluster has no room for {worker.name}: needed are {needed}; free are "
                f"{there or 'no nodes'}; set fewer threads or drafters, or free some"
            )


def _pin(workers: Sequence[WorkerPlan], cores: Sequence[int] | None) -> list[WorkerPlan]:
    """Give each worker that reserves cores the next free ones, or pin none."""
    needed = sum(worker.reserved_cpus for worker in workers)
    if cores is None or needed > len(cores):
        return list(workers)
    free = iter(cores)
    return [
        worker
        if not worker.reserved_cpus
        else replace(worker, cores=tuple(next(free) for _ in range(worker.reserved_cpus)))
        for worker in workers
    ]
