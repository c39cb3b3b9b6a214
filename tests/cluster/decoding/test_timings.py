"""Estimates of how long things take: from what was seen, and for what was not."""

from __future__ import annotations

import random

import pytest

from cluster.decoding.events import (
    Admitted,
    DrafterJoined,
    SequenceVerdict,
    StepDone,
    TargetJoined,
)
from cluster.decoding.instructions import Grant, Instruction, RunStep
from cluster.decoding.scheduler import Scheduler
from cluster.decoding.timings import (
    MOST_READ,
    DraftTimes,
    DriverShare,
    Mean,
    StepCosts,
    TimesBySize,
)
from tests.cluster.decoding.scripts import PROMPT
from tests.cluster.decoding.true_text import request


def test_a_mean_counts_its_first_values_in_full_and_forgets_old_ones() -> None:
    mean = Mean()
    assert not mean.known
    mean.add(10)
    mean.add(20)
    assert mean.value == pytest.approx(15, rel=0.03)
    for _ in range(200):
        mean.add(7)
    assert mean.value == pytest.approx(7, abs=0.01)


def test_times_are_linear_between_what_was_seen() -> None:
    steps = TimesBySize()
    steps.add(1, 18.0)
    assert steps.ms(40) == 18.0, "nothing else is known"
    steps.add(64, 18.0)
    steps.add(256, 21.0)
    assert steps.ms(1) == steps.ms(64) == 18.0
    assert steps.ms(160) == pytest.approx(19.5)
    assert steps.ms(512) == pytest.approx(21 + 256 * 3 / 255), "as steep as from the first to here"
    assert steps.ms(0) == 18.0, "as level as between the two smallest"
    assert steps.ms_per_unit(64) == pytest.approx(3 / 192)


def test_noise_never_makes_a_larger_step_look_faster() -> None:
    steps = TimesBySize()
    luck = random.Random(3)
    for _ in range(300):
        rows = luck.randrange(1, 40)
        steps.add(rows, 20 + 0.1 * rows + luck.uniform(-3, 3))
    times = [steps.ms(rows) for rows in range(1, 60)]
    assert times == sorted(times)
    assert steps.ms(20) == pytest.approx(22, abs=1.0)


def test_draft_times_by_batch() -> None:
    times = DraftTimes()
    assert not times.known
    times.add_pass(batch=1, tokens=1, ms=2.5)
    assert times.restart_ms() == pytest.approx(3.75), "no round trip is known of"
    times.add_restart(4.75)
    assert times.round_trip_ms == pytest.approx(1.0)
    for _ in range(50):
        times.add_pass(batch=64, tokens=64, ms=3.6)
    assert times.pass_ms(64) == pytest.approx(3.6)
    assert 2.5 < times.pass_ms(32) < 3.6
    assert times.tokens_a_pass.value == pytest.approx(1.0)
    assert times.pass_ms(1) == pytest.approx(2.5)
    assert times.pass_ms(1, branches=True) == pytest.approx(2.5), "nothing better is known"
    times.add_pass(batch=1, tokens=1, ms=4.0, branches=True)
    times.add_restart(9.0, branches=True)
    assert times.pass_ms(1, branches=True) == pytest.approx(4.0)
    assert times.pass_ms(1) == pytest.approx(2.5)
    assert times.restart_ms(branches=True) == pytest.approx(9.0)
    assert times.restart_ms() == pytest.approx(4.75)
    times.add_pass(batch=1, tokens=1, ms=100.0)
    assert times.pass_ms(1) < 4.0, "it counts as twice the usual"


def test_what_a_candidate_adds_to_a_step_and_how_many_tokens_come() -> None:
    costs = StepCosts()
    for step in range(20):
        candidates = step % 4
        seconds = 0.010 + 0.002 * candidates
        costs.add(0.02 * step, candidates=candidates, step_seconds=seconds, tokens=3)
    assert costs.ms_per_candidate == pytest.approx(2.0)
    assert costs.tokens_per_ms == pytest.approx(3 / 20)
    # What the target did not work is no time of a step.
    costs.pause()
    costs.add(99.0, candidates=0, step_seconds=0.010, tokens=1)
    assert costs.tokens_per_ms == pytest.approx(3 / 20)


def test_the_work_of_chains_is_what_all_chains_share() -> None:
    share = DriverShare()
    for second in range(50):
        share.answered(second, driver_seconds=0.5, step_seconds=0.9, chains=40)
    assert share.most_chains == pytest.approx(40 * 0.85 / 0.5)
    for second in range(50, 100):
        share.answered(second, driver_seconds=1.0, step_seconds=0.9, chains=40)
    assert share.most_chains == pytest.approx(40 * 0.85, rel=1e-3)


def test_time_in_which_nothing_was_asked_is_no_time_for_chains() -> None:
    share = DriverShare()
    for minute in range(50):
        share.answered(60.0 * minute, driver_seconds=0.5, step_seconds=0.9, chains=40)
    assert share.most_chains == pytest.approx(40 * 0.85 * (0.9 + 0.5) / 0.5)
    assert share.most_chains < MOST_READ


def test_where_work_is_not_known_the_bound_stays() -> None:
    share = DriverShare()
    for second in range(50):
        share.answered(second, driver_seconds=0.0, step_seconds=0.9, chains=40)
    assert share.most_chains == MOST_READ


def _branches_granted(driver_share: float, *, steps: int = 80) -> list[int]:
    """By step: the branches that the last grant allowed, for four sequences at two drafters."""
    scheduler, granted, running = Scheduler(), dict.fromkeys(range(1, 5), 0), []

    def send(event: object) -> None:
        out: list[Instruction] = scheduler.handle(event)  # type: ignore[arg-type]
        running.extend(one for one in out if isinstance(one, RunStep))
        granted.update({one.sequence_id: one.fan_out for one in out if isinstance(one, Grant)})

    for name in "ab":
        send(DrafterJoined(0, name, 1000))
    for number in granted:
        asked = request(number, PROMPT, policy="fanout", window=8, max_tokens=200)
        send(Admitted(0, asked))
    send(TargetJoined(0, 50, 1000, 4, 1024))
    seen = []
    for number in range(1, steps + 1):
        step = running[-1]
        verdicts = tuple(SequenceVerdict(one.sequence_id, 0, 9) for one in step.slices)
        send(
            StepDone(
                0.02 * number,
                step.step,
                verdicts,
                step_seconds=0.018,
                driver_seconds=0.02 * driver_share,
            )
        )
        seen.append(max(granted.values()))
    scheduler.check_integrity()
    return seen


def test_a_driver_without_time_has_its_drafters_draft_less() -> None:
    assert set(_branches_granted(0.3)) == {17}, "as many as the grant has places for"
    busy = _branches_granted(1.0)
    assert busy[0] == 17
    assert busy[-1] == 0, "however few they are, it is busy: chains alone"


def test_a_driver_that_knows_not_what_it_works_grants_as_ever() -> None:
    assert set(_branches_granted(0.0)) == {17}
