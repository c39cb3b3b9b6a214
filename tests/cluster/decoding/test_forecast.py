"""Forecasts against closed forms, and in simple limits."""

from __future__ import annotations

import dataclasses

import pytest

from cluster.decoding.forecast import Conditions, lockstep, off, run_ahead

STEP, PASS = 18.7, 2.6


def conditions(acceptance: float, *, rtt: float = 0.5, passes: float = PASS) -> Conditions:
    return Conditions(
        chances=(acceptance,) * 24,
        step_ms=lambda candidates, messages: STEP,
        pass_ms=passes,
        tokens_a_pass=1.0,
        restart_ms=1.5 * passes + rtt,
    )


def speedup(tokens_per_ms: float) -> float:
    return tokens_per_ms * STEP


@pytest.mark.parametrize("window", [1, 4, 8])
def test_lockstep_is_the_closed_form(window: int) -> None:
    forecast = lockstep(conditions(0.75, rtt=2.0), window)
    tokens = (1 - 0.75 ** (window + 1)) / 0.25
    assert forecast.tokens == pytest.approx(tokens)
    # The first draft comes after the round trip and its pass.
    assert forecast.ms == pytest.approx(STEP + window * PASS + 2.0)


@pytest.mark.parametrize(
    ("rtt", "acceptance", "measured"),
    [
        *((0.5, 0.75, 2.13), (0.5, 0.85, 2.94), (2.5, 0.75, 2.10)),
        *((2.5, 0.85, 2.89), (10.5, 0.75, 1.87), (10.5, 0.85, 2.51)),
    ],
)
def test_chain_is_near_what_a_prototype_measured(
    rtt: float, acceptance: float, measured: float
) -> None:
    """The measurement is over real gRPC."""
    forecast = run_ahead(conditions(acceptance, rtt=rtt), 16)
    assert speedup(forecast.tokens_per_ms) == pytest.approx(measured, rel=0.05)


def test_without_acceptance_nothing_is_faster_than_plain_decoding() -> None:
    given = conditions(0.0)
    assert off(given).tokens_per_ms == pytest.approx(1 / STEP)
    assert run_ahead(given, 8).tokens_per_ms == pytest.approx(1 / STEP)
    assert lockstep(given, 4).tokens_per_ms < 0.7 / STEP


def test_a_drafter_slower_than_the_target_brings_a_chain_next_to_nothing() -> None:
    forecast = run_ahead(conditions(0.75, passes=10 * PASS), 8)
    assert 1 - 1e-9 <= speedup(forecast.tokens_per_ms) < 1.03


def test_an_instant_drafter_with_every_token_right_fills_every_window() -> None:
    given = dataclasses.replace(conditions(1.0, rtt=0.0, passes=0.01), restart_ms=0.0)
    assert run_ahead(given, 8).tokens == pytest.approx(9, rel=0.02)


def test_branches_that_are_hit_raise_the_forecast() -> None:
    given = conditions(0.75)
    hit = dataclasses.replace(given, hit_rate=0.85, branch_length=3.0)
    assert run_ahead(hit, 8).tokens_per_ms > 1.2 * run_ahead(given, 8).tokens_per_ms


@pytest.mark.parametrize(
    ("acceptance", "hit_rate", "simulated"),
    [
        (0.5, 0.0, 1.10),
        (0.75, 0.0, 1.11),
        (0.85, 0.0, 1.09),
        (0.75, 0.85, 1.05),
        (0.85, 0.85, 1.07),
    ],
)
def test_a_second_group_brings_what_it_does_in_the_simulator(
    acceptance: float, hit_rate: float, simulated: float
) -> None:
    """The best of `replicas` over the best of `chain` and `fanout`, 70B, no round trip."""
    one = dataclasses.replace(conditions(acceptance), hit_rate=hit_rate, branch_length=3.5)
    two = dataclasses.replace(one, groups=2)
    gain = run_ahead(two, 8).tokens_per_ms / run_ahead(one, 8).tokens_per_ms
    assert gain == pytest.approx(simulated, abs=0.025)
    assert run_ahead(two, 8).waited_ms < 0, "steps overlap"


def test_a_second_group_brings_nothing_where_no_candidate_is_right() -> None:
    given = dataclasses.replace(conditions(0.0), groups=2)
    assert run_ahead(given, 8).tokens_per_ms == pytest.approx(1 / STEP)


def test_longer_steps_for_more_candidates_are_in_the_forecast() -> None:
    given = dataclasses.replace(
        conditions(0.75), step_ms=lambda candidates, messages: STEP + candidates
    )
    assert run_ahead(given, 8).ms > run_ahead(conditions(0.75), 8).ms


def test_a_driver_that_proposals_keep_busy_makes_steps_longer_and_more_proposals() -> None:
    """Reading takes 0.05 ms for each proposal, so those of 64 sequences take longer than a pass."""

    def step_ms(candidates: float, messages: float) -> float:
        return max(STEP, 64 * 0.05 * (1 + messages))

    given = dataclasses.replace(conditions(0.75), step_ms=step_ms)
    free, busy = run_ahead(conditions(0.75), 8), run_ahead(given, 8)
    assert busy.step_ms > 1.2 * free.step_ms
    assert busy.messages > free.messages
    assert busy.messages <= 17, "no more than is granted"
    branches = dataclasses.replace(given, messages_a_fork=0.5)
    assert run_ahead(branches, 8).step_ms > 2 * busy.step_ms
    assert run_ahead(branches, 2).step_ms < run_ahead(branches, 8).step_ms / 2


def test_of_a_tree_the_driver_reads_what_a_step_may_verify() -> None:
    """A chain is one proposal a pass, a tree one for each node: a large tree makes steps longer."""
    given = dataclasses.replace(
        conditions(0.5), step_ms=lambda candidates, messages: max(STEP, 1.6 * messages)
    )
    told = dataclasses.replace(given, messages_a_candidate=1.5)
    assert run_ahead(given, 32).step_ms == run_ahead(given, 32, is_tree=True).step_ms == STEP
    assert run_ahead(told, 32, is_tree=True).messages == 48
    assert run_ahead(told, 32, is_tree=True).step_ms == pytest.approx(1.6 * 48)
    assert run_ahead(told, 2, is_tree=True).messages == run_ahead(given, 2, is_tree=True).messages
