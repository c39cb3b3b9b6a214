"""Forecasts against closed forms, and in simple limits."""

from __future__ import annotations

import dataclasses
from itertools import product

import pytest

from cluster.decoding.auto.forecast import (
    Conditions,
    lockstep,
    outlook_of,
    run_ahead,
)
from cluster.decoding.counts import firsts_along
from cluster.decoding.token_tree import RANK_CHANCES, Node, likeliest

STEP, PASS = 18.7, 2.6


def conditions(acceptance: float, *, rtt: float = 0.5, passes: float = PASS) -> Conditions:
    return Conditions(
        acceptance=acceptance,
        step_ms=lambda candidates, drafting: STEP,
        pass_ms=passes,
        tokens_a_pass=1.0,
        restart_ms=1.5 * passes + rtt,
    )


def speedup(tokens_per_ms: float) -> float:
    return tokens_per_ms * STEP


@pytest.mark.parametrize("window", [1, 4, 8])
def test_lockstep_is_the_closed_form(window: int) -> None:
    given = dataclasses.replace(conditions(0.75), restart_ms=PASS + 2.0)
    forecast = lockstep(given, window)
    tokens = (1 - 0.75 ** (window + 1)) / 0.25
    assert forecast.tokens == pytest.approx(tokens)
    # The first draft comes after the round trip and its pass.
    assert forecast.ms == pytest.approx(STEP + window * PASS + 2.0)


def test_a_parallel_drafter_fills_its_window_in_one_pass() -> None:
    given = dataclasses.replace(conditions(0.75), restart_ms=PASS + 2.0, tokens_a_pass=8.0)
    assert lockstep(given, 8).ms == pytest.approx(STEP + PASS + 2.0)
    assert lockstep(given, 16).ms == pytest.approx(STEP + 2 * PASS + 2.0)
    # After a wrong guess the next step has a window, where one token a pass gives a few.
    one, many = (run_ahead(dataclasses.replace(given, tokens_a_pass=k), 8) for k in (1.0, 8.0))
    assert many.candidates > 1.4 * one.candidates
    assert many.tokens_per_ms > 1.04 * one.tokens_per_ms


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
    # With .025 for all but the first: 0 tokens ahead would pass otherwise.
    assert gain == pytest.approx(simulated, abs=0.05 if acceptance == 0.5 else 0.025)


def test_a_second_group_brings_nothing_where_no_candidate_is_right() -> None:
    given = dataclasses.replace(conditions(0.0), groups=2)
    assert run_ahead(given, 8).tokens_per_ms == pytest.approx(1 / STEP)


def test_longer_steps_for_more_candidates_are_in_the_forecast() -> None:
    given = dataclasses.replace(
        conditions(0.75), step_ms=lambda candidates, drafting: STEP + candidates
    )
    assert run_ahead(given, 8).ms > run_ahead(conditions(0.75), 8).ms


def test_drafting_beside_a_step_makes_it_longer_only_while_it_goes_on() -> None:
    """A drafter on the target's host: each millisecond of drafting adds half of one."""

    def step_ms(candidates: float, drafting_ms: float) -> float:
        return STEP + 0.5 * min(drafting_ms, 2 * STEP)

    apart = conditions(0.75)
    beside = dataclasses.replace(apart, step_ms=step_ms)
    assert lockstep(beside, 4) == lockstep(apart, 4), "it drafts between steps"
    assert 1.2 * STEP < run_ahead(beside, 8).ms <= 2 * STEP
    small, large = run_ahead(beside, 1), run_ahead(beside, 8)
    assert small.ms < large.ms, "a small grant ends sooner"


def test_a_batch_in_lockstep_takes_turns() -> None:
    """The windows of one half are drafted while the target verifies those of the other."""
    alone, batch = conditions(0.75), dataclasses.replace(conditions(0.75), crowd=6)
    assert lockstep(batch, 1).ms == pytest.approx(2 * STEP)
    assert lockstep(batch, 16).ms == pytest.approx(lockstep(alone, 16).ms)


def test_a_chain_is_the_closed_form() -> None:
    outlook = outlook_of(3, 0.8)
    assert outlook.tokens == pytest.approx((1 - 0.8**4) / 0.2)
    assert outlook.goes_on == pytest.approx(0.8**4)
    assert outlook.is_open == pytest.approx(1 - 0.8**4)
    assert outlook.candidates == 3


@pytest.mark.parametrize(("depth", "nodes", "level"), [(3, 9, 3), (3, 6, 2), (2, 2, 0), (1, 2, 1)])
def test_a_tree_is_the_sum_over_all_that_may_come(depth: int, nodes: int, level: int) -> None:
    """At each place the first guess is right, or the second, or neither.

    Beside the chain to `depth`, each place below `level` has a second guess with a chain to there.
    """
    acceptance, hit_rate = 0.7, 0.4
    tokens = goes_on = is_open = 0.0
    for outcome in product(("first", "second", "neither"), repeat=depth + 1):
        weight = 1.0
        for right in outcome:
            weight *= {
                "first": acceptance,
                "second": (1 - acceptance) * hit_rate,
                "neither": (1 - acceptance) * (1 - hit_rate),
            }[right]
        accepted, end = 0, depth
        while True:
            has_fork = end == depth and accepted < level
            if accepted < end and outcome[accepted] == "first":
                accepted += 1
            elif has_fork and outcome[accepted] == "second":
                accepted, end = accepted + 1, -level
            elif end < 0 and accepted < -end and outcome[accepted] == "first":
                accepted += 1
            else:
                break
        tokens += weight * (accepted + 1)
        if accepted == abs(end) and outcome[accepted] == "first":
            goes_on += weight
        elif not has_fork:
            is_open += weight
    outlook = outlook_of(depth, acceptance, nodes=nodes, second_chance=hit_rate)
    assert outlook.tokens == pytest.approx(tokens)
    assert outlook.goes_on == pytest.approx(goes_on)
    assert outlook.is_open == pytest.approx(is_open)


@pytest.mark.parametrize(("depth", "nodes"), [(1, 1), (4, 3), (4, 7), (8, 24), (12, 12), (0, 8)])
def test_a_tree_has_about_as_many_candidates_as_a_step_picks(depth: int, nodes: int) -> None:
    root = Node(0, 0, 0)
    chain = root
    for place in range(depth):
        first, branch = _child(chain), _child(chain)
        for _ in range(depth - place - 1):
            branch = _child(branch)
        chain = first
    picked = likeliest(root, nodes, width=2, rank_chances=RANK_CHANCES)
    outlook = outlook_of(min(depth, nodes), 0.7, nodes=nodes, second_chance=0.5)
    assert len(picked) - depth <= outlook.candidates <= len(picked)


def test_along_a_path_it_is_told_whether_first_candidates_were_right() -> None:
    parents = (0, 0, 1, 1, 2, 4)  # two candidates, under the first two more, and so on
    assert firsts_along(parents, (0, 3, 5)) == (True, False, True)
    assert firsts_along(parents, (1,)) == (False, False), "one beneath it was refused"
    assert firsts_along(parents, ()) == (False,)
    assert firsts_along(parents, (0, 2)) == (True, True), "nothing beneath it"


def _child(parent: Node) -> Node:
    child = Node(1, parent.length + 1, 0, parent)
    parent.children.append(child)
    return child
