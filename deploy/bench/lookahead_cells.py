"""The cells of `bench lookahead`: which policies, links and acceptances are measured."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from cluster.decoding.policies import PolicyName
from cluster.simulation.closed_forms import best_lockstep_window
from workers.emulated.profiles import DeviceProfile

RTTS_MS = (0.1, 2.0, 10.0)
ACCEPTANCES = (0.75, 0.85, None)
"""None: as recorded."""
HIT_RATES = (0.85, 0.5, 0.0)
BATCHES = (8, 64)
"""Beside 1; without a link and at the higher acceptance."""
CHAIN_WINDOW = 8
NEEDS_BRANCHES = ("fanout", "spread")
NEEDS_DRAFTERS = {"spread": 4}
NOT_MEASURED = ("replicas",)
"""It needs several targets."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One policy under one condition. `acceptance`, `hit_rate` None: as recorded, or no use."""

    policy: PolicyName
    rtt_ms: float
    acceptance: float | None
    hit_rate: float | None
    batch: int
    window: int

    @property
    def num_drafters(self) -> int:
        """Drafters that the policy uses."""
        return NEEDS_DRAFTERS.get(self.policy.value, 1)

    @property
    def name(self) -> str:
        """For people, and unique among the cells."""
        if self.policy is PolicyName.OFF:
            return f"off, batch {self.batch}"
        acceptance = "recorded" if self.acceptance is None else f"{self.acceptance:g}"
        hits = "" if self.hit_rate is None else f", hits {self.hit_rate:g}"
        batch = "" if self.batch == 1 else f", batch {self.batch}"
        return f"{self.policy.value}, rtt {self.rtt_ms:g} ms, acceptance {acceptance}{hits}{batch}"


def cells(target: DeviceProfile, drafter: DeviceProfile, *, quick: bool) -> list[Cell]:
    """All cells but those of plain decoding; `quick`: one of each policy."""
    found = []
    for policy in PolicyName:
        if policy is PolicyName.OFF or policy.value in NOT_MEASURED:
            continue
        for rtt_ms, acceptance, batch in _conditions(quick=quick):
            hit_rates: tuple[float | None, ...] = (None,)
            if policy.value in NEEDS_BRANCHES and acceptance is not None:
                full = policy.value == "fanout" and not quick and batch == 1
                hit_rates = HIT_RATES if full else HIT_RATES[:1]
            for hit_rate in hit_rates:
                window = CHAIN_WINDOW
                if policy is PolicyName.LOCKSTEP:
                    window = best_lockstep_window(
                        acceptance or ACCEPTANCES[0] or 0.75,
                        step_ms=target.pass_ms.ms(batch, batch),
                        draft_ms=drafter.pass_ms.ms(batch, batch),
                        rtt_ms=rtt_ms,
                    )
                found.append(Cell(policy, rtt_ms, acceptance, hit_rate, batch, window))
    return found


def plain_cell(batch: int) -> Cell:
    """Plain decoding of so many sequences."""
    return Cell(PolicyName.OFF, RTTS_MS[0], ACCEPTANCES[0], None, batch, CHAIN_WINDOW)


def _conditions(*, quick: bool) -> Iterator[tuple[float, float | None, int]]:
    if quick:
        yield RTTS_MS[0], 0.85, 1
        return
    for rtt_ms in RTTS_MS:
        for acceptance in ACCEPTANCES:
            yield rtt_ms, acceptance, 1
    for batch in BATCHES:
        yield RTTS_MS[0], 0.85, batch
