"""Closed forms against figures that were published or computed by hand."""

from __future__ import annotations

import random

import pytest

from cluster.simulation.closed_forms import (
    best_lockstep_window,
    expected_tokens,
    ideal_overlap,
    lockstep,
)

TIMES = {"step_ms": 18.3, "draft_ms": 2.5}


@pytest.mark.parametrize(("alpha", "speedup"), [(0.75, 1.97), (0.85, 2.49)])
def test_lockstep_of_the_emulated_pair(alpha: float, speedup: float) -> None:
    window = best_lockstep_window(alpha, **TIMES, rtt_ms=0)
    assert lockstep(alpha, window, **TIMES, rtt_ms=0) == pytest.approx(speedup, abs=0.005)
    for other in (window - 1, window + 1):
        assert lockstep(alpha, other, **TIMES, rtt_ms=0) <= speedup + 0.005


def test_a_parallel_drafter_fills_a_window_in_one_pass() -> None:
    window = best_lockstep_window(0.85, **TIMES, rtt_ms=0, tokens_a_pass=8)
    assert window % 8 == 0, "what a pass gives is all verified"
    one = lockstep(0.85, 8, **TIMES, rtt_ms=0, tokens_a_pass=8)
    assert one == pytest.approx(expected_tokens(0.85, 8) * 18.3 / (18.3 + 2.5))


def test_expected_tokens_is_the_mean_of_a_truncated_run() -> None:
    rng = random.Random(1)
    total = 0
    for _ in range(20_000):
        run = 0
        while run < 6 and rng.random() < 0.8:
            run += 1
        total += run + 1
    # The standard deviation of a round is below 2.5, of the mean below 0.018.
    assert total / 20_000 == pytest.approx(expected_tokens(0.8, 6), abs=0.09)
    assert expected_tokens(1.0, 6) == 7


def test_the_ideal_is_bounded_by_acceptance_and_by_the_drafters_pace() -> None:
    assert ideal_overlap(0.75, **TIMES) == pytest.approx(4.0)
    assert ideal_overlap(0.99, **TIMES) == pytest.approx(18.3 / 2.5 + 1)
    assert ideal_overlap(1.0, **TIMES) == pytest.approx(18.3 / 2.5 + 1)
