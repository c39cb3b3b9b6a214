"""Running estimates: what they say of what was seen, and of what was not."""

from __future__ import annotations

import random

import pytest

from cluster.decoding.estimates import Acceptance, DraftTimes, Mean, TimesBySize


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


def test_acceptance_leans_on_its_prior_until_there_is_evidence() -> None:
    drafter = Acceptance(0.7)
    sequence = Acceptance(drafter)
    assert sequence.chances(3) == pytest.approx((0.7,) * 3)
    for _ in range(60):
        drafter.add((True, True, False))  # 1, 1, 0
    assert drafter.chance(1) > 0.95
    assert drafter.chance(3) < 0.1
    assert sequence.chance(1) == pytest.approx(drafter.mean), "of the sequence nothing is known yet"
    for _ in range(60):
        sequence.add((False,))
    assert sequence.chance(1) < 0.1
    assert sequence.candidates == 60


def test_acceptance_follows_a_change() -> None:
    acceptance = Acceptance(0.7)
    for _ in range(200):
        acceptance.add((True,))
    for _ in range(100):
        acceptance.add((False,))
    assert acceptance.chance(1) < 0.15


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


def test_what_many_sequences_tell_at_a_time_lasts_as_long_as_what_one_tells() -> None:
    """Ten steps of rejections: of one sequence, and of each of 32."""
    one, many = Acceptance(0.9), Acceptance(0.9)
    for _ in range(10):
        one.add((False,))
        for _ in range(32):
            many.add((False,), sequences=32)
    steps = 0
    while many.chance(1) < 0.5:
        for _ in range(32):
            many.add((True,), sequences=32)
        steps += 1
    assert 4 < steps < 20, "not at the first step, and not much later than the ten"
