"""Decides which worker gets which threads, cores and devices. Pure: nodes in, a plan out.

The shards of a target group lie on as few nodes as possible, and those of one node have consecutive
ranks: they talk most, and GPUs of a node are the closest (NVLink). Each such part of a target group
is a placement group that Ray keeps on one node, also when it moves. Model drafters form another
group, spread over the nodes. The driver is placed with the first shard. So is a drafter without a
model, which takes almost no processor time and reserves no core.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, compress
from typing import Literal

from cluster.config.fields import GPU_LABEL
from cluster.config.model import Config, DrafterConfig
from cluster.driver.meters import shard_name
from paceline.errors import UnavailableError
from paceline.text import counted

Bundle = dict[str, float]


_NAMED_HOSTS = 8
"""Most hosts of which a refusal says what they lack."""


@dataclass(frozen=True, slots=True)
class Host:
    """A node of the Ray cluster, with its free CPUs, GPUs and bytes of memory, and its labels.

    `node_id`: Ray's, in hexadecimal digits; None: it is no node of Ray yet.
    """

    name: str
    cpus: float
    gpus: float = 0.0
    memory: float = math.inf
    labels: Mapping[str, str] = field(default_factory=dict)
    node_id: str | None = None


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """One worker.

    `kind`: "target", or the drafter's kind. `group`, `bundle`: its place, by the number of the
    placement group and of the bundle in it; a negative `group`: it has a place of its own.
    `selector`: labels that its node must have. `cores`: those it is pinned to; None: it is not
    pinned. `rank`, `degree`: a shard's number, and how many shards its target group has.
    `target_group`: the number of that group.
    `drafter`: the configuration of a drafter.
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
    reserved_memory: int = 0
    selector: Mapping[str, str] = field(default_factory=dict)
    rank: int = 0
    degree: int = 1
    drafter: DrafterConfig | None = None
    target_group: int = 0

    @property
    def is_model_drafter(self) -> bool:
        """Whether it drafts with a model, and so computes on cores or a GPU of its own."""
        return self.drafter is not None and self.model is not None


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """A Ray placement group.

    `selectors`: labels that the node of each bundle must have. `node_id`: the node that the plan
    chose for a STRICT_PACK group. Ray takes another one if it must.
    """

    bundles: tuple[Bundle, ...]
    strategy: Literal["STRICT_PACK", "SPREAD"]
    selectors: tuple[Mapping[str, str], ...]
    node_id: str | None = None


@dataclass(frozen=True, slots=True)
class Placement:
    """The whole plan. Bundle 0 of group 0 also holds the driver."""

    groups: tuple[GroupPlan, ...]
    workers: tuple[WorkerPlan, ...]

    @property
    def reserved_cpus(self) -> int:
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
    pinned to them if there are enough; workers whose threads are "auto" share theirs.
    `enforce=False` lets workers reserve more cores than there are. Raises UnavailableError, which
    says what is needed and what is free, also if shards outnumber devices.
    """
    drafters = _each_drafter(config)
    _check_devices(config, nodes)
    shard_gpus, drafter_gpus = _share_gpus(config, drafters, nodes)
    shard_threads, drafter_threads = _share_threads(
        config, drafters, nodes, by_gpu=bool(shard_gpus) and all(drafter_gpus)
    )
    target, num_targets = config.target, config.target.groups
    shards = [
        WorkerPlan(
            name=shard_name(rank, group=group),
            kind="target",
            model=target.model,
            threads=shard_threads,
            cores=None,
            group=group,
            bundle=rank,
            reserved_cpus=shard_threads,
            reserved_gpus=shard_gpus,
            reserved_memory=target.memory or 0,
            selector=target.selector,
            rank=rank,
            degree=target.tensor_parallel,
            target_group=group,
        )
        for group in range(num_targets)
        for rank in range(target.tensor_parallel)
    ]
    models = [
        plan_drafter(number, drafter, threads, gpus)
        for number, (drafter, threads, gpus) in enumerate(
            zip(drafters, drafter_threads, drafter_gpus, strict=True)
        )
        if not drafter.is_in_driver
    ]
    rooms = _Rooms(nodes, [*shards, *models], enforce=enforce)
    groups: list[GroupPlan] = []
    workers: list[WorkerPlan] = []
    for number in range(num_targets):
        for part, node_id in rooms.place_group([one for one in shards if one.group == number]):
            workers += [
                replace(one, group=len(groups), bundle=bundle) for bundle, one in enumerate(part)
            ]
            groups.append(_group_of(part, "STRICT_PACK", node_id))
    reserving = [one for one in models if one.is_model_drafter]
    for one in reserving:
        rooms.place(one)
    workers += [
        replace(one, group=len(groups), bundle=reserving.index(one))
        if one.is_model_drafter
        else one
        for one in models
    ]
    if reserving:
        groups.append(_group_of(reserving, "SPREAD"))
    return Placement(tuple(groups), tuple(_pin(workers, cores, config)))


def plan_drafter(number: int, drafter: DrafterConfig, threads: int, gpus: int) -> WorkerPlan:
    """A drafter in a process, which has no place yet."""
    return WorkerPlan(
        name=_drafter_name(number),
        kind=drafter.kind,
        model=drafter.model,
        threads=threads,
        cores=None,
        group=0,
        bundle=0,
        reserved_cpus=threads if drafter.model is not None else 0,
        reserved_gpus=gpus,
        reserved_memory=drafter.memory or 0,
        selector=drafter.selector,
        drafter=drafter,
    )


def plan_more_groups(
    first: Sequence[WorkerPlan], numbers: Sequence[int], nodes: Sequence[Host]
) -> list[tuple[Sequence[WorkerPlan], str | None]]:
    """Places for target groups with these numbers, like the group that has the shards `first`.

    Returns their parts that share a node, each with the id of its node. A shard's bundle is its
    number in its part. Raises UnavailableError, which says what is needed and what is free.
    """
    wanted = [
        [
            replace(
                shard,
                name=shard_name(shard.rank, group=number),
                target_group=number,
                group=-1,
                cores=None,
            )
            for shard in first
        ]
        for number in numbers
    ]
    rooms = _Rooms(nodes, [shard for group in wanted for shard in group], enforce=True)
    return [
        ([replace(one, bundle=bundle) for bundle, one in enumerate(part)], node_id)
        for group in wanted
        for part, node_id in rooms.place_group(group)
    ]


def own_drafters(config: Config) -> dict[str, DrafterConfig]:
    return {
        _drafter_name(number): drafter
        for number, drafter in enumerate(_each_drafter(config))
        if drafter.is_in_driver
    }


def _each_drafter(config: Config) -> list[DrafterConfig]:
    return [one for drafter in config.drafters for one in [drafter] * drafter.count]


def _drafter_name(number: int) -> str:
    return f"drafter-{number}"


def _group_of(
    workers: Sequence[WorkerPlan],
    strategy: Literal["STRICT_PACK", "SPREAD"],
    node_id: str | None = None,
) -> GroupPlan:
    return GroupPlan(
        tuple(bundle_of(worker) for worker in workers),
        strategy,
        tuple(worker.selector for worker in workers),
        node_id,
    )


def _check_devices(config: Config, nodes: Sequence[Host]) -> None:
    """Raise UnavailableError if shards outnumber devices: they would take turns, without gain."""
    target, degree = config.target, _num_shards(config)
    fitting = _fitting(target.selector, nodes)
    gpus = int(sum(node.gpus for node in fitting))
    cpus = int(sum(node.cpus for node in fitting))
    wants_gpus = (
        target.resources == "gpu"
        or target.gpu is not None
        or (target.resources == "auto" and gpus > 0)
    )
    if wants_gpus and gpus < degree:
        cure = (
            'set target.resources = "cpu"'
            if target.gpu is None
            else "name another kind in target.gpu"
        )
        raise UnavailableError(
            f"{counted(degree, 'shard')} of the target must have {counted(degree, 'GPU')}"
            f"{_of_selector(target.selector)}, but only {gpus} are free on {_nodes(fitting)} "
            f"({_shards_asked(config)}); lower {_lower(config)}, free GPUs, or {cure}"
            f"{_cluster(nodes)}"
        )
    if degree > 1 and cpus < degree:
        raise UnavailableError(
            f"{_shards_asked(config)}, a CPU core or more each, but {cpus} cores are "
            f"free on {_nodes(fitting)}{_of_selector(target.selector)}: lower {_lower(config)}, "
            f"or free some{_cluster(nodes)}"
        )


def _fitting(selector: Mapping[str, str], nodes: Sequence[Host]) -> list[Host]:
    return [node for node in nodes if selector.items() <= node.labels.items()]


def _of_selector(selector: Mapping[str, str]) -> str:
    """The words after what a worker needs: the kind of its GPU, and labels of its node."""
    labels = dict(selector)
    kind = labels.pop(GPU_LABEL, None)
    words = "" if kind is None else f" of kind {kind}"
    if labels:
        words += " on a node with " + ", ".join(f'{key} = "{of}"' for key, of in labels.items())
    return words


def _cluster(nodes: Sequence[Host]) -> str:
    """What the cluster has free, for the end of a message."""
    named = "; ".join(map(_there, nodes[:_NAMED_HOSTS])) or "no nodes"
    more = len(nodes) - _NAMED_HOSTS
    return f"; free are {named}" + (f"; and {counted(more, 'node')} more" if more > 0 else "")


def _there(node: Host) -> str:
    words = f"{node.name}: {node.cpus:g} CPUs, {node.gpus:g} GPUs"
    if (kind := node.labels.get(GPU_LABEL)) is not None:
        words += f" ({kind})"
    if node.memory < math.inf:
        words += f", {node.memory / 2**30:.1f} GiB"
    own = {key: of for key, of in node.labels.items() if not key.startswith("ray.io/")}
    return words + "".join(f", {key}={of}" for key, of in own.items())


def _num_shards(config: Config) -> int:
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


def _share_gpus(
    config: Config, drafters: Sequence[DrafterConfig], nodes: Sequence[Host]
) -> tuple[int, list[int]]:
    """GPUs of each shard and of each drafter.

    The target's come first. A drafter that names a kind must have a GPU. The others have one each
    if enough are left, else they compute on CPUs.
    """
    if config.target.resources == "cpu":
        return 0, [0] * len(drafters)
    num_shards = _num_shards(config)
    fitting = _fitting(config.target.selector, nodes)
    shards_have = sum(int(node.gpus) for node in fitting) >= num_shards
    free = sum(int(node.gpus) for node in nodes) - num_shards * shards_have
    enough = shards_have and free >= sum(one.model is not None for one in drafters)

    def gpus_of(one: DrafterConfig) -> int:
        may = enough and any(node.gpus >= 1 for node in _fitting(one.selector, nodes))
        return int(one.model is not None and (one.gpu is not None or may))

    return int(shards_have), [gpus_of(one) for one in drafters]


def _nodes(nodes: Sequence[Host]) -> str:
    return f"{len(nodes)} node{'s' * (len(nodes) != 1)}"


def _share_threads(
    config: Config, drafters: Sequence[DrafterConfig], nodes: Sequence[Host], *, by_gpu: bool
) -> tuple[int, list[int]]:
    """Threads of each shard, and of each drafter.

    `by_gpu`: each of them has a GPU. On several nodes it then gets that GPU's share of the cores.
    """
    num_shards = _num_shards(config)
    # A head without CPUs has no workers.
    cpus = sorted((int(node.cpus) for node in nodes if node.cpus >= 1), reverse=True) or [1]
    models = [drafter for drafter in drafters if drafter.model is not None]
    if by_gpu and len(nodes) > 1:
        shares = [_cores_of_gpu(one.selector, nodes) for one in drafters]
        threads = [_chosen(one, share) for one, share in zip(drafters, shares, strict=True)]
        own = _cores_of_gpu(config.target.selector, nodes)
        return own if config.target.threads == "auto" else config.target.threads, threads
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
    return max(1, left // max(1, a_node)), threads


def _cores_of_gpu(selector: Mapping[str, str], nodes: Sequence[Host]) -> int:
    """Cores for each GPU, on the fitting node that has the fewest."""
    fitting = [node for node in _fitting(selector, nodes) if node.gpus >= 1]
    return max(1, min((int(node.cpus / node.gpus) for node in fitting), default=1))


def _chosen(drafter: DrafterConfig, even_share: int) -> int:
    if drafter.threads != "auto":
        return drafter.threads
    return even_share if drafter.model is not None else 1


def bundle_of(worker: WorkerPlan) -> Bundle:
    bundle: Bundle = {"CPU": float(worker.reserved_cpus)}
    if worker.reserved_gpus:
        bundle["GPU"] = float(worker.reserved_gpus)
    if worker.reserved_memory:
        bundle["memory"] = float(worker.reserved_memory)
    return bundle


class _Rooms:
    """What is left on each node while workers are placed.

    Without `enforce` a group that has no room is one part without a node.
    """

    def __init__(
        self, nodes: Sequence[Host], workers: Sequence[WorkerPlan], *, enforce: bool
    ) -> None:
        self._nodes = nodes
        self._left = list(nodes)
        self._workers = workers
        self._enforce = enforce

    def place_group(
        self, shards: Sequence[WorkerPlan]
    ) -> list[tuple[Sequence[WorkerPlan], str | None]]:
        """Divide a target group among nodes, in the order of the ranks. Raises UnavailableError.

        One node if any has room, else the fewest, with equal parts if possible. Of several nodes
        with room, the one with the least: larger ones are left whole.
        """
        first, degree = shards[0], len(shards)
        rooms = {number: _capacity(node, first) for number, node in enumerate(self._left)}
        rooms = {number: room for number, room in rooms.items() if room > 0}
        sizes = _parts(degree, sorted(rooms.values(), reverse=True))
        if sizes is None:
            if not self._enforce:
                return [(shards, None)]
            for number, room in rooms.items():
                self._take(number, shards[:room])
            raise self._no_room(shards[sum(rooms.values())])
        parts: list[tuple[Sequence[WorkerPlan], str | None]] = []
        begin = 0
        for size in sizes:
            number = min((one for one in rooms if rooms[one] >= size), key=lambda one: rooms[one])
            del rooms[number]
            part = shards[begin : begin + size]
            begin += size
            self._take(number, part)
            parts.append((part, self._left[number].node_id))
        return parts

    def place(self, worker: WorkerPlan) -> None:
        """Take a worker's room where most is left. Raises UnavailableError if there is none."""
        fitting = [number for number, node in enumerate(self._left) if _capacity(node, worker) > 0]
        if fitting:
            number = max(fitting, key=lambda one: self._left[one].cpus)
            self._take(number, [worker])
        elif self._enforce:
            raise self._no_room(worker)

    def _take(self, number: int, workers: Sequence[WorkerPlan]) -> None:
        left = self._left[number]
        self._left[number] = replace(
            left,
            cpus=left.cpus - sum(one.reserved_cpus for one in workers),
            gpus=left.gpus - sum(one.reserved_gpus for one in workers),
            memory=left.memory - sum(one.reserved_memory for one in workers),
        )

    def _no_room(self, worker: WorkerPlan) -> UnavailableError:
        lacking = [f"{one.name} {_lacks(one, worker)}" for one in self._left[:_NAMED_HOSTS]]
        needed = ", ".join(
            f"{one.name} {_needs(one)}" for one in self._workers if one.reserved_cpus
        )
        whole = "; ".join(lacking)
        return UnavailableError(
            f"the cluster has no room for {worker.name}"
            f"{f' beside the workers before it: {whole}' if whole else ''}; needed are {needed}"
            f"{_cluster(self._nodes)}; set fewer threads, drafters or target groups, or free some"
        )


def _parts(degree: int, rooms: Sequence[int]) -> list[int] | None:
    """How many shards go to each node; None: there is no room. `rooms`: largest first."""
    count = next((n for n in range(1, len(rooms) + 1) if sum(rooms[:n]) >= degree), None)
    if count is None:
        return None
    if degree % count == 0 and rooms[count - 1] >= degree // count:
        return [degree // count] * count
    parts: list[int] = []
    for room in rooms[:count]:
        parts.append(min(room, degree - sum(parts)))
    return parts


def _capacity(node: Host, worker: WorkerPlan) -> int:
    """How many workers like this one have room on the node."""
    if not worker.selector.items() <= node.labels.items():
        return 0
    needs = [
        (node.cpus, worker.reserved_cpus),
        (node.gpus, worker.reserved_gpus),
        (node.memory, worker.reserved_memory),
    ]
    return int(min((there // one for there, one in needs if one), default=math.inf))


def _lacks(node: Host, worker: WorkerPlan) -> str:
    """What a node lacks for a worker, in words after the node's name."""
    wrong = [
        f"has {f'{key}={node.labels[key]}' if key in node.labels else f'no label {key}'}"
        for key, value in worker.selector.items()
        if node.labels.get(key) != value
    ]
    missing = [
        f"lacks {needed - there:g} {unit}"
        for needed, there, unit in (
            (worker.reserved_cpus, node.cpus, "CPUs"),
            (worker.reserved_gpus, node.gpus, "GPUs"),
        )
        if there < needed
    ]
    if node.memory < worker.reserved_memory:
        missing.append(f"lacks {(worker.reserved_memory - node.memory) / 2**30:.1f} GiB")
    return " and ".join([*wrong, *missing])


def _needs(worker: WorkerPlan) -> str:
    words = f"{worker.reserved_cpus} CPUs"
    if worker.reserved_gpus:
        words += f" and {worker.reserved_gpus} GPU"
    if worker.reserved_memory:
        words += f" and {worker.reserved_memory / 2**30:.1f} GiB"
    return words + _of_selector(worker.selector)


def _pin(
    workers: Sequence[WorkerPlan], cores: Sequence[int] | None, config: Config
) -> list[WorkerPlan]:
    """Give each worker that reserves cores the next free ones, or pin none.

    Workers on CPUs whose threads are "auto" are pinned to the cores of all of them: while one
    waits for another, that one can compute on them (CpuEngine, `most_threads`).
    """
    needed = sum(worker.reserved_cpus for worker in workers)
    if cores is None or needed > len(cores):
        return list(workers)
    free = iter(cores)
    own = [tuple(next(free) for _ in range(worker.reserved_cpus)) for worker in workers]
    shares = [_shares_cores(worker, config) for worker in workers]
    shared = tuple(chain.from_iterable(compress(own, shares)))
    return [
        replace(worker, cores=shared if does else some or None)
        for worker, some, does in zip(workers, own, shares, strict=True)
    ]


def _shares_cores(worker: WorkerPlan, config: Config) -> bool:
    threads = config.target.threads if worker.drafter is None else worker.drafter.threads
    # Ranks wait for each other at every sum, so each keeps its cores.
    alone = worker.degree == 1 and not worker.reserved_gpus
    return threads == "auto" and alone and worker.reserved_cpus > 0
