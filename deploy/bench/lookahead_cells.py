"""The cells of `bench lookahead`: which policies, links and acceptances are measured."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from cluster.decoding.policies import PolicyName
from cluster.simulation.closed_forms import best_lockstep_window
from workers.emulated.profiles import DeviceProfile

Load = Literal["set", "recorded", "natural", "dilated"]
"""What is decoded: replayed with a set acceptance, replayed as recorded, or by the demo pair; that
as fast as it can, or dilated (workers/emulated/dilated.py).
"""
NATURAL: Load = "natural"
DILATED: Load = "dilated"
COMPUTED: tuple[Load, ...] = (NATURAL, DILATED)
"""Those whose models compute."""

RTTS_MS = (0.1, 2.0, 10.0)
ACCEPTANCES = (0.75, 0.85)
HIT_RATES = (0.85, 0.5, 0.0)
BATCHES = (8, 64)
"""Beside 1; without a link and at the higher acceptance."""
CHAIN_WINDOW = 8
FANOUT_WINDOW = 12
"""Of policies with branches, for one sequence of a set acceptance: what is foreseen is longer."""
TREE_WINDOW, TREE_BRANCHES, TREE_BATCH = 32, 4, 8
"""Of the cell by whose trees the time between steps is measured."""
FANOUT_TREE_WINDOW, FANOUT_TREE_BRANCHES = 32, 2
"""Of the cells of fanout and spread whose branches are verified as well as sent ahead."""
AUTO_WINDOW = 32
"""Of `auto`, of which it is the bound alone, where what is drafted is replayed."""
HITS_BRANCHES = ("fanout", "spread", "replicas", "auto")
"""Policies to which the second of a drafter's guesses matters."""
DILATION = 16.0
"""How many times slower the dilated pair is than the devices that it emulates.

So that a pass of the demo drafter with a dozen branches is hidden, on a core.
"""
DILATED_RTTS_MS = (0.1, 10.0)
DEMO_ACCEPTANCE = 0.95
"""About that of the demo pair: what lockstep's window is chosen by where it is dilated."""
NUM_SPREAD = 2
"""Drafters of spread where chains are verified."""
NUM_SPREAD_TREE = 4 if len(os.sched_getaffinity(0)) >= 4 else 2
"""The same where trees are: the layout of the best that there is. With four, drafters and driver
want 1.6 cores together, and on two they wait for each other (docs/performance/lookahead.md).
"""
NUM_REPLICAS = 2
"""Target groups of replicas, which needs as many times the GPUs."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One policy under one condition. `num_drafters`: that the layout has.

    `acceptance` and `hit_rate` are those that were set; None: as recorded or natural, or of no use.
    """

    policy: PolicyName
    load: Load
    rtt_ms: float
    acceptance: float | None
    hit_rate: float | None
    batch: int
    window: int
    branches: int = 1
    num_drafters: int = 1

    @property
    def num_targets(self) -> int:
        """Target groups that the policy uses."""
        return NUM_REPLICAS if self.policy is PolicyName.REPLICAS else 1

    @property
    def name(self) -> str:
        """For people, and unique among the cells."""
        batch = "" if self.batch == 1 else f", batch {self.batch}"
        load = "" if self.load == "set" else f", {self.load}"
        if self.policy is PolicyName.OFF:
            return f"off{load}{batch}"
        if self.load == "set":
            load = f", acceptance {self.acceptance:g}"
        hits = "" if self.hit_rate is None else f", hits {self.hit_rate:g}"
        tree = f", trees of {self.window}" if self.branches > 1 else ""
        tree += f", {self.num_drafters} drafters" if self.num_drafters > 1 else ""
        return f"{self.policy.value}, rtt {self.rtt_ms:g} ms{load}{hits}{tree}{batch}"


def part_names() -> tuple[str, ...]:
    """What can be measured apart: a policy on the replaying pair, or all on the demo pair."""
    return (*(one.value for one in _policies()), *COMPUTED)


def cells(
    target: DeviceProfile, drafter: DeviceProfile, *, quick: bool, parts: Sequence[str] = ()
) -> list[Cell]:
    """All cells but those of plain decoding; `quick`: one of each policy. `parts`: of these."""
    found = []
    for policy in _policies():
        if not parts or policy.value in parts:
            for condition in _conditions(quick=quick):
                found += _cells_of(policy, condition, target, drafter, quick=quick)
            if not quick:
                found += _trees_of(policy)
        if policy not in (PolicyName.SPREAD, PolicyName.REPLICAS):
            if NATURAL in parts or not (parts or quick):
                window = 3 if policy is PolicyName.LOCKSTEP else CHAIN_WINDOW
                found.append(Cell(policy, NATURAL, RTTS_MS[0], None, None, 1, window))
            if DILATED in parts or not (parts or quick):
                found += _dilated_of(policy, target, drafter)
    order: Sequence[Load] = ("set", "recorded", *COMPUTED)
    return sorted(found, key=lambda cell: max(1, order.index(cell.load)))


def plain_cell(batch: int, load: Load) -> Cell:
    """Plain decoding of so many sequences."""
    return Cell(PolicyName.OFF, load, RTTS_MS[0], None, None, batch, 0)


@dataclass(frozen=True, slots=True)
class _Condition:
    rtt_ms: float
    acceptance: float | None
    batch: int


def _policies() -> list[PolicyName]:
    return [policy for policy in PolicyName if policy is not PolicyName.OFF]


def _conditions(*, quick: bool) -> Iterator[_Condition]:
    if quick:
        yield _Condition(RTTS_MS[0], ACCEPTANCES[1], 1)
        return
    for rtt_ms in RTTS_MS:
        for acceptance in (*ACCEPTANCES, None):
            yield _Condition(rtt_ms, acceptance, 1)
    for batch in BATCHES:
        yield _Condition(RTTS_MS[0], ACCEPTANCES[1], batch)


def _cells_of(
    policy: PolicyName,
    condition: _Condition,
    target: DeviceProfile,
    drafter: DeviceProfile,
    *,
    quick: bool,
) -> list[Cell]:
    acceptance, batch, rtt_ms = condition.acceptance, condition.batch, condition.rtt_ms
    hit_rates: Sequence[float | None] = (None,)
    if policy.value in HITS_BRANCHES and acceptance is not None:
        every = policy is PolicyName.FANOUT and not quick and batch == 1
        hit_rates = HIT_RATES if every else HIT_RATES[:1]
    window = CHAIN_WINDOW
    if policy.value in HITS_BRANCHES and acceptance is not None and batch == 1:
        window = FANOUT_WINDOW
    if policy is PolicyName.LOCKSTEP:
        window = best_lockstep_window(
            acceptance or ACCEPTANCES[0],
            step_ms=target.pass_ms.ms(batch, batch),
            draft_ms=drafter.pass_ms.ms(batch, batch),
            rtt_ms=rtt_ms,
        )
    if policy is PolicyName.AUTO:
        window = AUTO_WINDOW
    load: Load = "recorded" if acceptance is None else "set"
    drafters = NUM_SPREAD if policy is PolicyName.SPREAD else 1
    return [
        Cell(policy, load, rtt_ms, acceptance, hit_rate, batch, window, num_drafters=drafters)
        for hit_rate in hit_rates
    ]


def _dilated_of(
    policy: PolicyName, target: DeviceProfile, drafter: DeviceProfile
) -> Iterator[Cell]:
    """The cells of the demo pair in slow motion."""
    for rtt_ms in DILATED_RTTS_MS:
        window = CHAIN_WINDOW
        if policy is PolicyName.LOCKSTEP:
            window = best_lockstep_window(
                DEMO_ACCEPTANCE,
                step_ms=target.pass_ms.ms(1, 1),
                draft_ms=drafter.pass_ms.ms(1, 1),
                rtt_ms=rtt_ms,
            )
        yield Cell(policy, DILATED, rtt_ms, None, None, 1, window)


def _trees_of(policy: PolicyName) -> Iterator[Cell]:
    """The cells whose steps verify trees."""
    if policy is PolicyName.CHAIN:
        acceptance, hit_rate = ACCEPTANCES[1], HIT_RATES[0]
        tree = (TREE_BATCH, TREE_WINDOW, TREE_BRANCHES)
        yield Cell(policy, "set", RTTS_MS[0], acceptance, hit_rate, *tree)
    if policy in (PolicyName.FANOUT, PolicyName.SPREAD):
        drafters = NUM_SPREAD_TREE if policy is PolicyName.SPREAD else 1
        shape = (1, FANOUT_TREE_WINDOW, FANOUT_TREE_BRANCHES, drafters)
        for rtt_ms in RTTS_MS:
            for acceptance in ACCEPTANCES:
                yield Cell(policy, "set", rtt_ms, acceptance, HIT_RATES[0], *shape)
