"""If driver and messages take no time, the simulation equals the closed forms."""

from __future__ import annotations

import math

import pytest

from cluster.simulation.closed_forms import expected_tokens
from cluster.simulation.fleet import Fleet
from tests.cluster.simulation.devices import DRAFT_MS, STEP_MS, layout, load, simulated

TOKENS = 3000


def _ms_per_token(fleet: Fleet) -> float:
    [one] = fleet.answered
    return 1000 * (one.last_at - one.first_at) / (len(one.token_ids) - 1)


def test_plain_decoding_takes_a_step_a_token() -> None:
    fleet = simulated(layout("off"), load(requests=1, concurrency=1, tokens=200))
    assert _ms_per_token(fleet) == pytest.approx(STEP_MS)


def _standard_error(alpha: float, window: int, rounds: float) -> float:
    """Standard error of the mean number of tokens in a round: 1 and the run of right drafts."""
    runs = [alpha**run * (1 - alpha) for run in range(window)] + [alpha**window]
    mean = sum(run * chance for run, chance in enumerate(runs))
    variance = sum((run - mean) ** 2 * chance for run, chance in enumerate(runs))
    return math.sqrt(variance / rounds)


@pytest.mark.parametrize(("alpha", "rtt_ms"), [(0.75, 0.0), (0.85, 10.0)])
def test_lockstep_is_its_formula(alpha: float, rtt_ms: float) -> None:
    """Rounds have the formula's length, except the last ones, whose windows are cut.

    Tokens in a round are within 4 standard errors, which fails wrongly once in 16,000.
    """
    window = 5
    fleet = simulated(
        layout("lockstep", window=window, rtt_ms=rtt_ms),
        load(requests=1, concurrency=1, acceptance=alpha, tokens=TOKENS, seed=2),
    )
    [one] = fleet.answered
    rounds = one.steps - 1  # the first token is prefill's
    round_ms = 1000 * (one.last_at - one.first_at) / rounds
    assert round_ms == pytest.approx(window * DRAFT_MS + STEP_MS + rtt_ms, rel=3 / rounds)
    tokens = (TOKENS - 1) / rounds
    bound = 4 * _standard_error(alpha, window, rounds) + window / rounds
    assert abs(tokens - expected_tokens(alpha, window)) < bound
    # The bound excludes the formulas with two drafts fewer, and with an acceptance lower by .1.
    assert abs(tokens - expected_tokens(alpha, window - 2)) > bound
    assert abs(tokens - expected_tokens(alpha - 0.1, window)) > bound


def test_a_drafter_that_is_never_wrong_is_bound_by_its_pace() -> None:
    fleet = simulated(
        layout("chain", window=16),
        load(requests=1, concurrency=1, acceptance=1.0, tokens=TOKENS),
    )
    # Each step adds a token of the target, which the drafter must draft too.
    assert _ms_per_token(fleet) == pytest.approx(DRAFT_MS, rel=0.02)


def test_a_drafter_that_is_never_right_changes_nothing() -> None:
    fleet = simulated(
        layout("chain"), load(requests=1, concurrency=1, acceptance=0.0, hit_rate=0.0)
    )
    assert _ms_per_token(fleet) == pytest.approx(STEP_MS)
