"""What `auto` believes of times: of sizes that were seen and others, beside drafting or not."""

from __future__ import annotations

import random

import pytest

from cluster.decoding.auto.timings import DraftTimes, Mean, StepModel, TimesBySize
from cluster.decoding.events import StepDone
from cluster.decoding.instructions import RunStep, Slice


def test_a_mean_counts_its_first_values_in_full_and_forgets_old_ones() -> None:
    mean = Mean()
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
    assert steps.ms(0) == steps.ms(1) == steps.ms(64) == 18.0
    assert steps.ms(160) == pytest.approx(19.5)
    assert steps.ms(512) == pytest.approx(21 + 256 * 3 / 255), "as steep as from the first to here"
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


@pytest.mark.parametrize("toll", [0.0, 0.5])
def test_a_step_model_learns_what_drafting_adds(toll: float) -> None:
    """Steps of 20 ms, passes of 5 ms beside each other one in turn, on the same host."""
    model, now = StepModel(), 0.0
    for number in range(1, 60):
        drafts = number % 4 >= 2
        passes = 3 if drafts else 0
        model.sent(now, _step(number), drafts=drafts)
        ms = 20 + toll * 5 * passes
        for place in range(passes):
            model.heard(now + (place + 1) * 0.005, 1, 5.0)
        now += ms / 1000
        model.answered(StepDone(now, number, (), step_seconds=ms / 1000))
    assert model.ms(1) == pytest.approx(20, abs=0.5)
    assert model.ms(1, 15) == pytest.approx(20 + toll * 15, abs=0.5)
    assert model.ms(1, 1000) == pytest.approx(20 / (1 - toll), abs=0.5), "at most the step"
    assert model.estimates()["step_ms_per_drafting_ms"] == pytest.approx(toll, abs=0.02)


def test_a_step_model_tells_what_a_proposal_adds() -> None:
    """The device takes 20 ms, the host 2 ms more, and each proposal .5 ms."""
    model, now = StepModel(), 0.0
    for number in range(1, 40):
        proposals = number % 5
        model.sent(now, _step(number), drafts=False)
        model.heard(now, proposals, 0.0)
        now += 0.022 + 0.0005 * proposals
        model.answered(StepDone(now, number, (), step_seconds=0.020))
    assert model.estimates()["step_ms_per_proposal"] == pytest.approx(0.5, abs=0.05)


def test_one_slow_step_is_a_hiccup_and_three_are_how_it_is() -> None:
    model, now = StepModel(), 0.0

    def go(number: int, ms: float) -> None:
        nonlocal now
        model.sent(now, _step(number), drafts=False)
        now += ms / 1000
        model.answered(StepDone(now, number, (), step_seconds=ms / 1000))

    for number in range(30):
        go(number, 20.0)
    for number in range(30, 32):
        go(number, 60.0)
    assert model.ms(1) < 21
    for number in range(32, 36):
        go(number, 60.0)
    assert model.ms(1) == pytest.approx(60, abs=1.0)
    for number in range(36, 42):
        go(number, 20.0)
    assert model.ms(1) == pytest.approx(20, abs=1.0), "as soon as it is over"


def test_draft_times_by_batch_and_kind() -> None:
    times = DraftTimes()
    assert not times.known
    times.add_pass(1, 1, 2.5, False)
    times.add_restart(4.75, 1, waits=False)
    assert times.round_trip_ms.value == pytest.approx(1.0), (
        "without a pass, and half of one before it"
    )
    for _ in range(50):
        times.add_pass(64, 64, 3.6, False)
    assert times.pass_ms(64) == pytest.approx(3.6)
    assert 2.5 < times.pass_ms(32) < 3.6
    assert times.tokens_a_pass.value == pytest.approx(1.0)
    assert times.pass_ms(1, grows=True) == pytest.approx(2.5), "nothing better is known"
    times.add_pass(1, 1, 4.0, True)
    assert times.pass_ms(1, grows=True) == pytest.approx(4.0)
    assert times.pass_ms(1) == pytest.approx(2.5)
    for _ in range(4):
        times.add_pass(1, 1, 2.5, False)
    times.add_pass(1, 1, 100.0, False)
    assert times.pass_ms(1) == pytest.approx(2.5), "one slow pass is a hiccup"


def test_the_first_passes_of_a_process_are_soon_forgotten() -> None:
    times = DraftTimes()
    for ms in (90.0, 40.0, *[2.5] * 3):
        times.add_pass(1, 1, ms, False)
    assert times.pass_ms(1) == pytest.approx(2.5)
    for _ in range(9):
        times.add_pass(1, 1, 2.5, False)
    for _ in range(3):
        times.add_pass(1, 1, 0.1, False)
    assert times.pass_ms(1) == pytest.approx(2.5), "nor do a few that had hardly anything to do"


def _step(number: int) -> RunStep:
    return RunStep(number, (), (), (Slice(1, 2, (9,), 0, True, ()),))
