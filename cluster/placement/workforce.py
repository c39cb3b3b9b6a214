"""The workers of a deployment as Ray actors: reserves room, creates actors, has them serve.

The actors are detached, so that they outlive the controller's process; the ledger says which they
are. cluster/placement/revival.py deals with lost workers.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import ray
from ray._private.state import available_resources_per_node
from ray.exceptions import RayError
from ray.util.placement_group import (
    PlacementGroup,
    get_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.placement.actor_calls import outcome_of
from cluster.placement.actors import (
    DrafterActor,
    DriverActor,
    GatewayActor,
    ShardActor,
)
from cluster.placement.ledger import (
    NAMESPACE,
    Ledger,
    Phase,
    WorkerEntry,
    WorkerSetup,
    actor_name,
    remove_groups,
    sweep,
    write_drafters,
    write_ledger,
)
from cluster.placement.lives import RecentEnds, longest_silence, room_needed, room_there
from cluster.placement.plan import (
    GroupPlan,
    Host,
    Placement,
    WorkerPlan,
    bundle_of,
    plan_more_groups,
)
from paceline.errors import UnavailableError
from paceline.generation import WorkerLife
from paceline.wire.fields import values_of
from workers.process.handshake import with_life

DRIVER = "driver"
GATEWAY = "gateway"
ROOM_SECONDS = 30.0
"""How long the cluster may take to reserve what the plan asks for."""
_PLACE_SECONDS = 5.0
"""How long Ray may take to find another place for a worker."""
_NODE_LABEL = "ray.io/node-id"
_ANSWERS_AT_ONCE = 100
_TELL_SECONDS = 5.0
_PATIENCE_OF_LOADS = 3.0
"""Requests wait for a lost target as long as this many loads of its slowest shard took, plus the
time to find a shard that hangs."""


@dataclass(slots=True, kw_only=True)
class Worker(WorkerEntry):
    """A worker, whichever actor it lives in now."""

    handle: Any = None
    ends: RecentEnds = field(default_factory=RecentEnds)
    next_try_at: float | None = None
    """When it is started again, by time.monotonic; None: it serves or is being started."""

    @property
    def kind(self) -> str:
        return self.name if self.plan is None else self.plan.kind

    @property
    def is_shard(self) -> bool:
        return self.kind == "target"

    @property
    def is_drafter(self) -> bool:
        return self.plan is not None and not self.is_shard

    @property
    def address(self) -> str | None:
        """Where it serves, or served last; None: it never did."""
        return None if self.serving is None else self.serving.address

    @property
    def told_address(self) -> str | None:
        """`address` as the driver is told it, with the life of a shard or drafter."""
        return None if self.serving is None else with_life(self.serving.address, self.serving.life)

    @property
    def port(self) -> int:
        """The port where it serves, or served last; 0: it never did."""
        return 0 if self.serving is None else int(self.serving.address.rpartition(":")[2])

    def entry(self) -> WorkerEntry:
        return WorkerEntry(**{one.name: getattr(self, one.name) for one in fields(WorkerEntry)})

    @classmethod
    def found(cls, entry: WorkerEntry, run: str) -> Worker:
        """The worker of an entry. It has no handle if Ray does not know its actor any more."""
        worker = cls(**values_of(entry))
        with contextlib.suppress(ValueError):
            name = actor_name(run, entry.name, entry.life)
            worker.handle = ray.get_actor(name, namespace=NAMESPACE)
        return worker

    def end_of_process(self, why: str) -> None:
        self.last_end = why
        self.ends.add(time.monotonic())


class Workforce:
    """All workers. `load_seconds`: time that the slowest shard took to serve at first."""

    def __init__(
        self,
        setup: WorkerSetup,
        placement: Placement,
        *,
        deployment: str,
        run: str,
        groups: Sequence[str] | None = None,
    ) -> None:
        """`deployment`: its name. `run`: see Ledger. `groups`: names of its placement groups, which
        its owner made; None: it has no owner, and makes them itself.
        """
        self.setup = setup
        self.phase: Phase = "starts"
        self.workers = [Worker(name=plan.name, plan=plan) for plan in placement.workers]
        # A pool of drafters has neither driver nor gateway.
        self.driver = None if setup.config.is_pool else Worker(name=DRIVER, plan=None)
        self.gateway = (
            Worker(name=GATEWAY, plan=None) if self.driver and setup.serves_http else None
        )
        self.states: dict[str, str] = {}
        """What each worker does that does not serve, in words that continue its name."""
        self.load_seconds = 0.0
        self._deployment = deployment
        self._run = run
        self._placement = placement
        self._is_owned = groups is not None
        self._group_names: tuple[str | None, ...] = tuple(groups or group_names(run, placement))
        self._groups: list[PlacementGroup | None] = []
        self._places: dict[str, PlacementGroup | None] = {}
        """Places that some worker has of its own, by name; None: it is being made."""
        self._driver_life = 0

    @classmethod
    def found(cls, ledger: Ledger, *, deployment: str, groups: Sequence[str] | None) -> Workforce:
        """The workers of a ledger, as Ray knows them now. Blocks.

        Raises ValueError if the room of the deployment is no longer reserved.
        """
        force = cls(
            ledger.setup,
            ledger.placement,
            deployment=deployment,
            run=ledger.run,
            groups=groups,
        )
        force.phase = ledger.phase
        force._driver_life = ledger.driver_life
        force.load_seconds = ledger.load_seconds
        by_name = {entry.name: Worker.found(entry, ledger.run) for entry in ledger.workers}
        force.driver = by_name.pop(DRIVER, None)
        force.gateway = by_name.pop(GATEWAY, None)
        force.workers = list(by_name.values())
        force._group_names = ledger.groups
        force._groups = [
            None if name is None else get_placement_group(name) for name in ledger.groups
        ]
        for name in ledger.places:
            with contextlib.suppress(ValueError):  # The controller ended before it made this one.
                force._places[name] = get_placement_group(name)
        return force

    async def restore_places(self) -> None:
        """After `found`: free places that nobody has, since the controller ended in a move.

        A drafter that has no other place gets a new one; without room it leaves.
        """
        for worker in list(self.workers):
            if worker.place not in self._places:
                worker.place = None
            if (
                (worker.place is None and worker.in_use)
                and worker.plan is not None
                and worker.plan.group < 0
            ):
                worker.place = await self._make_place([worker.plan])
                if worker.place is None:
                    self.workers.remove(worker)
                    self.end(worker)
        for name in self._places.keys() - {worker.place for worker in self.workers}:
            self._remove_place(name)

    def save(self) -> None:
        """Write the ledger, which takes about a millisecond."""
        ledger = Ledger(
            run=self._run,
            phase=self.phase,
            setup=self.setup,
            placement=self._placement,
            groups=self._group_names,
            places=tuple(self._places),
            workers=tuple(worker.entry() for worker in self.all),
            load_seconds=self.load_seconds,
            driver_life=self._driver_life,
        )
        write_ledger(self._deployment, ledger)
        if self.setup.host is None and self.phase == "runs":
            write_drafters(self._deployment, self.drafter_addresses())

    @property
    def all(self) -> list[Worker]:
        last = [one for one in (self.gateway, self.driver) if one is not None]
        return [*self.workers, *last]

    @property
    def shards(self) -> list[Worker]:
        """The shards in use of all target groups, group by group, each by rank."""
        return [worker for worker in self.workers if worker.is_shard and worker.in_use]

    def target_addresses(self) -> list[str]:
        """Addresses of the shards that have served, as the driver is told them."""
        told = [shard.told_address for shard in self.shards]
        return [address for address in told if address is not None]

    def drafter_addresses(self) -> dict[str, str]:
        """Addresses of the drafters that have served, by name, as the driver is told them."""
        return {
            worker.name: address
            for worker in self.workers
            if worker.is_drafter and worker.in_use and (address := worker.told_address) is not None
        }

    def driver_addresses(self) -> list[str]:
        """Address of the driver for the gateway, if it has served."""
        serving = None if self.driver is None else self.driver.serving
        return [] if serving is None else [serving.inner_address or serving.address]

    async def tell_gateway(self, *, drivers: bool = False) -> None:
        """Tell the gateway `states`, and where the driver is if `drivers`. A lost one is not told:
        it is told all when it is started again.
        """
        if self.gateway is None or self.gateway.serving is None:
            return
        handle = self.gateway.handle
        with contextlib.suppress(RayError, TimeoutError):
            async with asyncio.timeout(_TELL_SECONDS):
                await handle.note_workers.remote(dict(self.states))
                if drivers:
                    await handle.set_drivers.remote(self.driver_addresses())

    async def reserve(self) -> None:
        """Reserve what the plan asks for. Raises UnavailableError."""
        self.save()
        names = [name for name in self._group_names if name is not None]
        if not self._is_owned:
            make_groups(names, self._placement.groups, detached=True)
        groups = [get_placement_group(name) for name in names]
        self._groups = [*groups]
        for plan, group in zip(self._placement.groups, groups, strict=True):
            if not await asyncio.to_thread(group.wait, ROOM_SECONDS):
                raise UnavailableError(
                    f"the cluster did not reserve {room_needed(plan)} within "
                    f"{ROOM_SECONDS:g} s; {room_there()}"
                )

    def lives(self) -> list[WorkerLife]:
        now = time.monotonic()
        return [
            WorkerLife(
                name=worker.name,
                restarts=worker.restarts,
                last_end=worker.last_end,
                next_try_seconds=(
                    None if worker.next_try_at is None else max(0.0, worker.next_try_at - now)
                ),
                log=self._log_path(worker.name),
            )
            for worker in self.all
            if worker.in_use
        ]

    def room_of(self, worker: Worker) -> tuple[GroupPlan, PlacementGroup]:
        """The placement group that has the worker's place, and its plan."""
        if worker.place is not None:
            plans = [one.plan for one in self.workers if one.place == worker.place and one.plan]
            place = self._places[worker.place]
            assert place is not None
            return _group_of(plans), place
        number = worker.plan.group if worker.plan else 0
        group = self._groups[number]
        assert group is not None
        return self._placement.groups[number], group

    async def try_elsewhere(self, worker: Worker) -> bool:
        """Give a worker another place, if there is one. Returns whether it has moved.

        The other place is another node, else another GPU of the same node. The old place stays
        reserved, so that no other worker gets a device that fails. It is taken again if the new one
        fails too. A worker that joined later has no place in the plan, and gets another one. The
        driver stays because its address must; drafters without cores stay too.
        """
        plan = worker.plan
        if plan is None or not plan.reserved_cpus:
            return False
        used = worker.place
        if plan.group < 0:
            place = await self._make_place([plan])
        elif used is None:
            place = await self._another_place(plan)
        else:
            place = None  # The old one.
        if place is None and (used is None or plan.group < 0):
            return False
        worker.place = place
        if plan.group < 0:  # Its new place has no other bundle.
            worker.plan = replace(plan, bundle=0)
        if used is not None:
            self.end(worker)
            self.save()
            self._free_place(used)
        return True

    async def _another_place(self, plan: WorkerPlan) -> str | None:
        nodes = placement_group_table(self._groups[plan.group])["bundles_to_node_id"]
        node = nodes.get(plan.bundle)
        if not node:  # The node of its place is lost: Ray gives its group another one itself.
            return None
        elsewhere = {_NODE_LABEL: f"!{node}"}
        # Workers that listen on the loopback must all be on one node.
        tries = [elsewhere] if self.setup.host is None else []
        tries += [{}] if plan.reserved_gpus else []
        for labels in tries:
            if (place := await self._make_place([plan], labels)) is not None:
                return place
        return None

    async def enlist(self, plan: WorkerPlan) -> Worker | None:
        """A further drafter. It has a place that another one left, or gets a place of its own.

        Returns None if the cluster has no room for it.
        """
        worker = Worker(name=plan.name, plan=plan)
        if plan.reserved_cpus and (vacant := self._vacant_place(plan)) is not None:
            worker.plan = replace(plan, group=vacant[0], bundle=vacant[1])
        elif plan.reserved_cpus:
            worker.place = await self._make_place([plan])
            if worker.place is None:
                return None
        self.workers.append(worker)
        return worker

    async def enlist_groups(self, numbers: Sequence[int]) -> list[Worker]:
        """The shards of further target groups, each group on as few nodes as possible.

        They are not in use yet. Raises UnavailableError if the cluster has no room for all of them;
        then nothing has changed.
        """
        if not numbers:
            return []
        first = [one.plan for one in self.shards if one.plan and one.plan.target_group == 0]
        nodes = await asyncio.to_thread(free_nodes)
        if self.setup.host is not None:  # All workers listen on the loopback of one node.
            table = placement_group_table(self._groups[0])
            nodes = [one for one in nodes if one.node_id == table["bundles_to_node_id"].get(0)]
        shards: list[Worker] = []
        try:
            for part, node_id in plan_more_groups(first, numbers, nodes):
                place = await self._make_place(part, node_id=node_id)
                if place is None:
                    raise UnavailableError(
                        f"the cluster did not reserve {room_needed(_group_of(part))} for "
                        f"{', '.join(one.name for one in part)}; {room_there()}"
                    )
                joining = [
                    Worker(name=one.name, plan=one, place=place, in_use=False) for one in part
                ]
                self.workers += joining
                shards += joining
        except BaseException:
            for shard in shards:
                self.dismiss(shard)
            raise
        return shards

    def dismiss(self, worker: Worker) -> None:
        """End a drafter or shard for good. Its place is freed with the last worker there.

        Ray cannot free a part of a placement group. Another drafter may have the part (`enlist`).
        """
        self.end(worker)
        self.workers.remove(worker)
        if worker.place is not None:
            self._free_place(worker.place)
        if worker.plan is None or not worker.is_shard or worker.plan.group < 0:
            return
        number = worker.plan.group
        group = self._groups[number]
        if group is not None and number not in [one.plan.group for one in self.workers if one.plan]:
            self._groups[number] = None
            names = enumerate(self._group_names)
            self._group_names = tuple(None if one == number else name for one, name in names)
            remove_placement_group(group)

    def _vacant_place(self, plan: WorkerPlan) -> tuple[int, int] | None:
        """The numbers of a group and of a bundle that nobody has, and that the drafter can have."""
        taken = {
            (one.plan.group, one.plan.bundle)
            for one in self.workers
            if one.plan is not None and one.plan.reserved_cpus
        }
        for number, group in enumerate(self._placement.groups):
            if self._groups[number] is None:
                continue
            for bundle, needs in enumerate(zip(group.bundles, group.selectors, strict=True)):
                if (number, bundle) not in taken and needs == (bundle_of(plan), plan.selector):
                    return number, bundle
        return None

    async def _make_place(
        self,
        plans: Sequence[WorkerPlan],
        labels: Mapping[str, str] | None = None,
        node_id: str | None = None,
    ) -> str | None:
        """Reserve a place for workers on one node. Returns its name; None: there is none.

        `labels`: those of the node, besides what each worker asks for. `node_id`: the node to try
        first. If this raises, or is cancelled, nothing stays reserved.
        """
        name = f"{self._run}/place-{secrets.token_hex(4)}"
        self._places[name] = None
        self.save()
        selectors = tuple({**plan.selector, **(labels or {})} for plan in plans)
        wanted = replace(_group_of(plans), selectors=selectors, node_id=node_id)
        try:
            make_groups([name], [wanted], detached=True)
            self._places[name] = group = get_placement_group(name)
            is_there = await asyncio.to_thread(group.wait, _PLACE_SECONDS)
        except BaseException:
            self._remove_place(name)
            raise
        if not is_there:
            self._remove_place(name)
        return name if is_there else None

    def _free_place(self, name: str) -> None:
        """Remove a place that the last worker there has left."""
        if name not in [one.place for one in self.workers]:
            self._remove_place(name)

    def _remove_place(self, name: str) -> None:
        remove_groups([name])
        del self._places[name]  # Last: while it may be there, the ledger names it.

    def make(self, worker: Worker) -> None:
        """Give the worker a new actor in its place. An earlier actor is ended."""
        self.end(worker)
        worker.life += 1
        self.save()
        plan = worker.plan
        kind: type = GatewayActor if worker is self.gateway else DriverActor
        if plan is not None:
            kind = ShardActor if worker.is_shard else DrafterActor
        in_plan = plan is not None and (worker.place is None or plan.group < 0)
        worker.handle = (
            ray.remote(kind)
            .options(
                name=actor_name(self._run, worker.name, worker.life),
                namespace=NAMESPACE,
                lifetime="detached",
                num_cpus=plan.reserved_cpus if plan else 0,
                num_gpus=plan.reserved_gpus if plan else 0,
                max_concurrency=_ANSWERS_AT_ONCE,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    self.room_of(worker)[1],
                    placement_group_bundle_index=plan.bundle if plan and in_plan else 0,
                ),
            )
            .remote(self.setup.log_of(worker.name))
        )

    async def serve(self, worker: Worker, port: int) -> None:
        """Have the worker's actor serve. Raises its PacelineError, or WorkerLostError."""
        if worker.plan is not None:
            # Core numbers apply to the node that the plan chose.
            plan = worker.plan if worker.place is None else replace(worker.plan, cores=None)
            call = worker.handle.serve.remote(self.setup, plan, port)
        elif worker is self.gateway:
            call = worker.handle.serve.remote(self.setup, self.driver_addresses(), port)
        else:
            # Above the last one, also if another controller chose that or the clock went back.
            self._driver_life = max(self._driver_life + 1, time.time_ns() // 1_000_000)
            self.save()
            call = worker.handle.serve.remote(
                self.setup,
                self.target_addresses(),
                self.drafter_addresses(),
                port,
                life=self._driver_life,
                patience=_PATIENCE_OF_LOADS * self.load_seconds
                + longest_silence(self.setup.config.target.hung_after),
            )
        worker.serving = await outcome_of(call, worker.name, log=self._log_path(worker.name))

    def end(self, worker: Worker) -> None:
        if worker.handle is not None:
            ray.kill(worker.handle)

    def is_disowned(self) -> bool:
        """Whether Ray has freed what the owner of the deployment reserved. Blocks."""
        return self._is_owned and any(
            placement_group_table(group).get("state", "REMOVED") == "REMOVED"
            and group in self._groups  # Else it was freed meanwhile (`dismiss`).
            for group in list(self._groups)
            if group is not None
        )

    def release(self) -> None:
        """End all processes, free what they reserved, and remove the ledger."""
        sweep(self._deployment)

    def _log_path(self, name: str) -> str:
        log = self.setup.log_of(name)
        return "" if log is None else str(log.path)


def make_groups(names: Sequence[str], plans: Sequence[GroupPlan], *, detached: bool) -> None:
    """Ask Ray for placement groups with these names.

    `detached`: they stay until they are removed; else they end with this process, and with them all
    actors in them.
    """
    for name, plan in zip(names, plans, strict=True):
        placement_group(
            list(plan.bundles),
            strategy=plan.strategy,
            name=name,
            lifetime="detached" if detached else None,
            # Ray calls this private. It is the only way to prefer a node and yet let Ray find
            # another one when that is lost.
            _soft_target_node_id=plan.node_id,
            bundle_label_selector=_selectors(plan.selectors),
        )


def group_names(run: str, placement: Placement) -> list[str]:
    return [f"{run}/group-{number}" for number in range(len(placement.groups))]


def _group_of(plans: Sequence[WorkerPlan]) -> GroupPlan:
    """A placement group that has these workers on one node."""
    bundles, selectors = map(bundle_of, plans), (plan.selector for plan in plans)
    return GroupPlan(tuple(bundles), "STRICT_PACK", tuple(selectors))


def free_nodes() -> list[Host]:
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


def _selectors(selectors: Sequence[Mapping[str, str]]) -> list[dict[str, str]] | None:
    """Label selectors of a group's bundles, as Ray takes them; None: no bundle has one."""
    return list(map(dict, selectors)) if any(selectors) else None
