"""Devices with round numbers, and simulations with them."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from cluster.simulation.fleet import Fleet
from cluster.simulation.layout import HostCosts, Layout, Load
from workers.emulated.latency_profiles import DeviceProfile, LinkProfile, PassTimes
from workers.emulated.replay_text import Guess

STEP_MS = 20.0
DRAFT_MS = 2.5
FREE = HostCosts(**{one.name: 0.0 for one in fields(HostCosts)})
"""Costs of a driver and messages that take no time."""


def device(role: str, ms: float, *, gpus: int = 1) -> DeviceProfile:
    """A device whose pass takes the same time whatever it computes."""
    return DeviceProfile.model_validate(
        {
            "name": f"{role} of the test",
            "role": role,
            "about": "",
            "gpus": gpus,
            "hosts": 1,
            "source": "round numbers",
            "pass_ms": PassTimes(batch=(1, 2), tokens=(1, 2), table=((ms, ms), (ms, ms))),
        }
    )


def layout(policy: str, *, window: int = 4, drafters: int = 1, rtt_ms: float = 0.0) -> Layout:
    """One target group, with a drafter unless the policy is off. Only devices take time."""
    return Layout(
        target=device("target", STEP_MS, gpus=4),
        policy=policy,
        window=window,
        drafter=None if policy == "off" else device("drafter", DRAFT_MS),
        drafters=0 if policy == "off" else drafters,
        link=LinkProfile(rtt_ms=rtt_ms),
        costs=FREE,
    )


def load(
    *,
    requests: int = 12,
    concurrency: int = 4,
    acceptance: float = 0.75,
    hit_rate: float = 0.5,
    seed: int = 1,
    tokens: int = 60,
    temperature: float = 0.0,
) -> Load:
    """A load of callers that ask for `tokens` tokens each."""
    return Load(
        requests=requests,
        prompt_tokens=40,
        output_tokens=tokens,
        guess=Guess(acceptance, hit_rate, seed),
        concurrency=concurrency,
        temperature=temperature,
    )


def simulated(layout: Layout, load: Load, **changes: Any) -> Fleet:
    """Run a simulation. `changes`: of the layout."""
    fleet = Fleet(replace(layout, **changes), load)
    fleet.run()
    fleet.check_end()
    return fleet
