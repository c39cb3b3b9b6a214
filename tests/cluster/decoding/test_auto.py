"""Policy `auto` under the simulator: never far from the best fixed policy, never below plain.

Times are virtual, so every ratio is exact and the same in every run. Fleet.same_text compares each
answer with plain decoding's.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from cluster.simulation.fleet import Fleet
from cluster.simulation.layout import Layout, Load
from workers.emulated.latency_profiles import DeviceProfile, LinkProfile, PassTimes, load_profile
from workers.emulated.replay_text import Guess

pytestmark = pytest.mark.long

TARGET = load_profile("70b-4xh100")
DRAFTER = load_profile("1b-h100")
FIXED = (
    ("lockstep", 4),
    ("lockstep", 8),
    ("pearl", 8),
    ("chain", 8),
    ("fanout", 8),
)
FIXED_IN_LARGE_BATCHES = (
    ("chain", 2),
    ("chain", 4),
    ("chain", 8),
    ("fanout", 2),
)


def compute_bound(profile: DeviceProfile) -> DeviceProfile:
    """A device on which each row of a step takes as long as the first one."""
    times = PassTimes(batch=(1, 64), tokens=(1, 64), table=((5.0, 320.0), (5.0, 320.0)))
    return profile.model_copy(update={"pass_ms": times})


def decode(
    policy: str,
    *,
    window: int = 16,
    acceptance: float = 0.75,
    hit_rate: float = 0.0,
    drafters: int = 1,
    groups: int = 1,
    rtt_ms: float = 0.1,
    batch: int = 1,
    tokens: int = 400,
    target: DeviceProfile = TARGET,
    drafter: DeviceProfile = DRAFTER,
    shared: float | None = None,
    requests: int | None = None,
) -> tuple[float, Fleet]:
    """Tokens per second from the first token of all to the last of all, and the simulated fleet.

    `shared`: how much longer a step takes beside drafting, if drafter and target share a host.
    """
    layout = Layout(
        target,
        policy,
        window,
        drafter=drafter,
        drafters=drafters,
        replicas=groups,
        link=LinkProfile(rtt_ms=rtt_ms),
        shared_host=shared,
    )
    guess = Guess(acceptance, hit_rate, seed=1)
    load = Load(requests or batch, 16, tokens, guess, concurrency=batch)
    fleet = Fleet(layout, load)
    fleet.run()
    assert fleet.same_text
    first = min(one.first_at for one in fleet.answered)
    last = max(one.last_at for one in fleet.answered)
    return sum(len(one.token_ids) for one in fleet.answered) / (last - first), fleet


def choices(fleet: Fleet) -> Counter[str]:
    """The number of verdicts by chosen policy."""
    return Counter(fleet.drivers[0].scheduler.speculation().choices)


@pytest.mark.parametrize(
    ("rtt_ms", "acceptance", "hit_rate"),
    [(0.1, 0.75, 0.0), (0.1, 0.85, 0.85), (2.0, 0.85, 0.5), (10.0, 0.75, 0.0)],
)
def test_within_a_twentieth_of_the_best_fixed_policy(
    rtt_ms: float, acceptance: float, hit_rate: float
) -> None:
    given: dict[str, Any] = {"rtt_ms": rtt_ms, "acceptance": acceptance, "hit_rate": hit_rate}
    fixed = [decode(policy, window=window, **given)[0] for policy, window in FIXED]
    auto, _ = decode("auto", **given)
    assert auto >= 0.95 * max(fixed)
    assert auto >= 1.05 * min(fixed), "negative control: the choice matters"


def test_with_several_drafters_it_is_as_fast_as_spread() -> None:
    given: dict[str, Any] = {"hit_rate": 0.5, "drafters": 3, "tokens": 300}
    spread, _ = decode("spread", window=8, **given)
    assert decode("auto", **given)[0] >= 0.95 * spread


@pytest.mark.parametrize(
    ("given", "fixed"),
    [
        ({"batch": 8, "tokens": 200, "acceptance": 0.85}, FIXED),
        ({"batch": 8, "tokens": 200, "acceptance": 0.75, "rtt_ms": 10.0}, FIXED),
        ({"batch": 3, "tokens": 200, "acceptance": 0.5, "rtt_ms": 2.0}, FIXED),
        ({"batch": 64, "tokens": 60, "acceptance": 0.85}, FIXED_IN_LARGE_BATCHES),
        ({"batch": 64, "tokens": 60, "acceptance": 0.5}, FIXED_IN_LARGE_BATCHES),
    ],
    ids=["8", "8 far away", "3 half right", "64", "64 half right"],
)
def test_a_whole_batch_within_a_twentieth_of_the_best_fixed_policy(
    given: dict[str, Any], fixed: tuple[tuple[str, int], ...]
) -> None:
    speeds = [decode(policy, window=window, **given)[0] for policy, window in fixed]
    assert decode("auto", **given)[0] >= 0.95 * max(speeds)


def test_branches_in_a_batch() -> None:
    """A few sequences try branches; all follow once branches are hit. Windows fit the driver's
    time.
    """
    given: dict[str, Any] = {"batch": 8, "tokens": 400, "acceptance": 0.85, "hit_rate": 0.85}
    chain, fanout = (decode(policy, window=8, **given)[0] for policy in ("chain", "fanout"))
    auto, fleet = decode("auto", **given)
    assert chain < 0.9 * fanout, "negative control: branches matter"
    assert auto >= 0.95 * fanout
    branched = choices(fleet)["fanout"] + choices(fleet)["fanout-tree"]
    assert branched > choices(fleet).total() / 2


def test_trees_are_verified_where_they_pay() -> None:
    """Second guesses that are often right are worth more in a step than after it."""
    given: dict[str, Any] = {"acceptance": 0.85, "hit_rate": 0.85, "tokens": 300}
    ahead = max(decode("fanout", window=window, **given)[0] for window in (8, 12))
    auto, fleet = decode("auto", window=32, **given)
    assert choices(fleet)["fanout-tree"] > choices(fleet).total() / 2
    assert auto >= 1.04 * ahead


def test_nothing_is_lost_where_no_second_guess_is_right() -> None:
    given: dict[str, Any] = {"acceptance": 0.85, "hit_rate": 0.0, "batch": 4, "tokens": 200}
    chain, _ = decode("chain", window=8, **given)
    auto, _ = decode("auto", window=32, **given)
    assert auto >= 0.95 * chain


def test_requests_that_come_and_go() -> None:
    """Thirty-two requests, eight at a time: what is learned outlasts each of them."""
    speeds = []
    for policy in ("chain", "auto"):
        layout = Layout(TARGET, policy, 8, drafter=DRAFTER, drafters=1)
        fleet = Fleet(layout, Load(32, 16, 60, Guess(0.85, 0.0, seed=1), concurrency=8))
        fleet.run()
        fleet.check_end()
        assert fleet.same_text
        speeds.append(fleet.committed / max(one.last_at for one in fleet.answered))
    assert speeds[1] >= 0.95 * speeds[0]


@pytest.mark.parametrize(
    "given",
    [
        {"acceptance": 0.0, "tokens": 300},
        {"drafter": DRAFTER.scaled(10), "tokens": 300},
        {"acceptance": 0.0, "batch": 64, "tokens": 40},
        {"acceptance": 0.3, "batch": 64, "tokens": 60},
        {"drafter": DRAFTER.scaled(10), "batch": 64, "tokens": 40},
        {"acceptance": 0.0, "batch": 8, "tokens": 100, "rtt_ms": 10.0},
        {"acceptance": 0.3, "batch": 64, "tokens": 60, "rtt_ms": 10.0, "window": 32},
    ],
    ids=[
        *("never right", "slow drafter", "64 never right", "64 seldom right", "64 slow drafter"),
        *("8 never right, far away", "64 seldom right, far away"),
    ],
)
def test_never_below_plain_decoding(given: dict[str, Any]) -> None:
    plain, _ = decode("off", **given)
    auto, _ = decode("auto", **given)
    assert auto >= 0.98 * plain


def test_speculation_shrinks_to_nothing_as_the_step_becomes_compute_bound() -> None:
    """`auto` loses only what it takes to learn the time of steps."""
    plain, _ = decode("off", target=compute_bound(TARGET), batch=8, tokens=300)
    auto, bound = decode("auto", target=compute_bound(TARGET), batch=8, tokens=300)
    _, free = decode("auto", batch=8, tokens=100)
    assert auto >= 0.9 * plain
    assert choices(bound)["off"] > 0.9 * choices(bound).total()
    drafted, usual = (
        counts.drafted / counts.verdicts
        for counts in (fleet.drivers[0].scheduler.totals.counts for fleet in (bound, free))
    )
    assert drafted < 0.25
    assert usual > 1.0


def test_an_instant_drafter_next_door_is_worth_waiting_for() -> None:
    """Waiting for its window costs less than the plain step of a chain after each rollback."""
    given: dict[str, Any] = {"drafter": DRAFTER.scaled(0.02), "acceptance": 0.75}
    fixed = [decode(policy, window=window, **given)[0] for policy, window in FIXED]
    auto, fleet = decode("auto", **given)
    assert choices(fleet)["lockstep"] > choices(fleet).total() / 2
    assert auto >= 0.95 * max(fixed)
