"""A simulated fleet: the same text, nothing lost, the same events every time."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from cluster.decoding.instructions import RunStep
from cluster.decoding.policy import POLICIES, policy_named
from cluster.simulation import fleet as fleet_module
from cluster.simulation.clock import SimulatedLink, VirtualClock
from cluster.simulation.fleet import Fleet
from cluster.simulation.layout import HostCosts, Load
from cluster.simulation.target import SimulatedTarget
from cluster.simulation.trial import course_of, figures_of
from tests.cluster.simulation.devices import layout, load, simulated
from workers.emulated.latency_profiles import LinkProfile
from workers.emulated.replay_text import Guess

CASES = [
    (policy, branches)
    for policy in POLICIES
    for branches in (1, 3)
    if branches == 1 or not policy_named(policy).needs.chains_only
]


@pytest.mark.parametrize(("policy", "branches"), CASES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_policy_gives_the_text_of_plain_decoding(
    policy: str, branches: int, temperature: float
) -> None:
    needs = policy_named(policy).needs
    drafters = max(1, needs.drafters)
    fleet = simulated(
        layout(policy, window=6, drafters=drafters, rtt_ms=3.0),
        load(temperature=temperature),
        branches=branches,
        costs=HostCosts(),
        replicas=needs.groups,
    )
    assert fleet.same_text
    plain = simulated(layout("off"), load(temperature=temperature))
    assert _texts(fleet) == _texts(plain)


def _texts(fleet: Fleet) -> dict[int, list[int]]:
    return {one.request.sequence_id: one.token_ids for one in fleet.answered}


class _Forgetful(SimulatedTarget):
    """Broken: forgets to move the KV of accepted paths."""

    def step(self, step: RunStep) -> None:
        slices = tuple(replace(part, kv_moves=()) for part in step.slices)
        super().step(replace(step, slices=slices))


def test_a_forgotten_move_is_another_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_module, "SimulatedTarget", _Forgetful)
    fleet = simulated(layout("lockstep", window=6), load(hit_rate=1.0), branches=2)
    assert not fleet.same_text


def test_a_simulation_takes_the_same_course_every_time() -> None:
    def course(seed: int) -> list[tuple[int, float, float]]:
        fleet = simulated(layout("chain"), load(seed=seed), cells=2, costs=HostCosts())
        return [(one.request.sequence_id, one.first_at, one.last_at) for one in fleet.answered]

    assert course(1) == course(1)
    assert course(1) != course(2)


def test_few_blocks_are_given_back_and_nothing_is_lost() -> None:
    fleet = simulated(
        layout("chain", window=6), load(requests=20, concurrency=8, tokens=100), kv_blocks=24
    )
    assert fleet.drivers[0].scheduler.num_preemptions > 0
    assert fleet.same_text


def test_the_router_spreads_requests_and_drafters_are_shared() -> None:
    fleet = simulated(layout("chain"), load(requests=24, concurrency=8), targets=2, cells=2)
    assert len(fleet.drafters) == 2
    counts = [sum(one.group == group for one in fleet.answered) for group in range(4)]
    assert min(counts) >= 4
    assert fleet.same_text


def test_two_groups_verify_one_sequence_in_turns() -> None:
    """They give more tokens than one group in the same time, with fewer tokens in each step."""
    alone = load(requests=3, concurrency=1, tokens=200, acceptance=0.85)
    one = simulated(layout("fanout", window=8), alone)
    two = simulated(layout("replicas", window=8), alone, replicas=2)
    assert two.same_text
    assert _texts(one) == _texts(two)
    ends = [max(answer.last_at for answer in fleet.answered) for fleet in (one, two)]
    assert ends[1] < 0.97 * ends[0]
    steps = [sum(answer.steps for answer in fleet.answered) for fleet in (one, two)]
    assert steps[1] > 1.3 * steps[0]
    passes = [target.meter.passes for target in two.targets]
    assert min(passes) > 0.4 * sum(passes)


def test_many_sequences_are_shared_by_the_groups_of_a_driver() -> None:
    many = load(requests=24, concurrency=8)
    fleet = simulated(layout("replicas"), many, replicas=2)
    plain = simulated(layout("fanout"), many, targets=2)
    assert fleet.same_text
    ends = [max(answer.last_at for answer in one.answered) for one in (fleet, plain)]
    assert ends[0] == pytest.approx(ends[1], rel=0.15)


def test_requests_that_come_at_random_are_answered_late_where_there_are_too_many() -> None:
    asked = Load(200, 40, 20, Guess(0.8, 0.0, 3), per_second=2.0)
    at_ease = figures_of([course_of(simulated(layout("off"), asked, max_num_seqs=2))])
    many = replace(asked, per_second=20.0)
    crowded = figures_of([course_of(simulated(layout("off"), many, max_num_seqs=2))])
    # Two at a time, 20 tokens of 20 ms each: just under 5 requests a second, because of prefill.
    assert at_ease.completed_per_second == pytest.approx(2.0, rel=0.3)
    assert 4.0 * 0.95 < crowded.completed_per_second < 5.0
    assert crowded.ttft_ms.p99 > 10 * at_ease.ttft_ms.p50
    assert at_ease.target.idle > 0.2 > crowded.target.idle


def test_shares_of_time_make_a_whole() -> None:
    alone = load(concurrency=1)
    fleet = simulated(layout("lockstep"), alone, costs=HostCosts())
    shares = figures_of([course_of(fleet)]).target
    assert shares.busy + shares.waiting + shares.idle == pytest.approx(1.0)
    assert shares.waiting > 0.2, "lockstep waits for its drafter"
    assert 0 < shares.prefill < shares.busy


def test_what_is_due_together_comes_in_the_order_of_asking() -> None:
    clock = VirtualClock()
    seen: list[str] = []
    for name in ("a", "b"):
        clock.at(1.0, seen.append, name)
    clock.at(0.5, seen.append, "first")
    clock.run()
    assert seen == ["first", "a", "b"]
    with pytest.raises(AssertionError, match="go back"):
        clock.at(0.5, seen.append, "late")


def test_messages_keep_their_order_and_share_the_bandwidth() -> None:
    clock = VirtualClock()
    arrivals: list[float] = []
    link = SimulatedLink(clock, LinkProfile(rtt_ms=10, mbit_per_second=8), hop_seconds=0.001)
    for num_bytes in (1000, 1000, 1):
        link.send(0.0, num_bytes, lambda: arrivals.append(clock.now))
    clock.run()
    assert arrivals[0] == pytest.approx(0.001 + 0.005 + 0.001)
    assert arrivals[1] - arrivals[0] == pytest.approx(0.001)
    assert all(before <= after for before, after in pairwise(arrivals))


def test_what_is_measured_is_more_than_one_burst() -> None:
    """Callers that begin together end together, so between two ends almost nothing runs."""
    for requests in (10, 14, 18, 40):
        asked = load(requests=requests, concurrency=8, tokens=20)
        shares = figures_of([course_of(simulated(layout("lockstep"), asked))]).target
        assert 0.5 < shares.busy <= 1.001
        assert shares.busy + shares.waiting < 1.001


def test_callers_out_of_step_ask_one_after_another() -> None:
    asked = replace(load(requests=32, concurrency=8, tokens=40), out_of_step=True)
    fleet = simulated(layout("off"), asked)
    assert fleet.same_text
    later = sorted(one.arrived for one in fleet.answered)[8:]
    assert len(set(later)) > 20
    assert [one.request.max_tokens for one in fleet.answered].count(40) == 25
