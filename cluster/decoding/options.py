"""The options of a cohort: each policy with its best window, and what it is worth."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from cluster.decoding.beliefs import Beliefs
from cluster.decoding.choices import CHAIN, FANOUT, Choice, drafting_choices
from cluster.decoding.cohorts import Cohort
from cluster.decoding.forecast import Conditions, Forecast, lockstep, run_ahead
from cluster.decoding.lookahead import forks_within

GAIN_TO_CHANGE = 1.03
"""Factor by which a policy's forecast must exceed the one in use to replace it."""

AS_GOOD = 1 / 200
"""Windows of a policy whose forecasts differ by at most this share are equally good."""

GAIN_TO_WAIT = 1.03
CANDIDATES_TO_WAIT = 12
"""A policy that waits for its drafter can be slower than plain decoding. So its forecast must
exceed others by this factor, and this many candidates of the cohort must have been tried."""


@dataclass(frozen=True, slots=True)
class Option:
    """A choice with its best window.

    `worth`: tokens/ms. `preferred`: the figure by which options are compared. `proven`: enough is
    known for all members to follow.
    """

    choice: Choice
    window: int
    forecast: Forecast
    worth: float
    preferred: float
    proven: bool = True


def options_of(
    cohort: Cohort,
    conditions: Conditions,
    beliefs: Beliefs,
    *,
    num_drafters: int,
    num_groups: int,
) -> list[Option]:
    """All options that draft, each choice with its best window; the best comes first.

    The choice in use is preferred, and so are choices that do not wait.
    """
    pilot = cohort.member
    in_use = {plan.choice for plan in (cohort.plan, cohort.trial) if plan is not None}
    before = cohort.plan.window if cohort.plan else pilot.window
    # In a large crowd no branches are granted: `fanout` is `chain`, whose drafter may as well grow
    # trees. With branches, fanout's own trees serve better.
    crowd = max(1, cohort.members, beliefs.sequences // max(1, num_drafters))
    forks = forks_within(1, pace=0.0, crowd=crowd) > 0
    found = []
    for choice in drafting_choices():
        policy, ahead = choice.policy, _forecast_of(choice)
        if not pilot.allows(choice) or policy.needs.drafters > num_drafters:
            continue
        if policy.needs.groups > num_groups:
            continue
        if forks != policy.fans_out and (policy.fans_out or choice.is_tree):
            continue
        proven = beliefs.proven(choice)
        if choice is CHAIN and not forks and pilot.allows(FANOUT):
            # `fanout` without branches is the same, and gets them once there are fewer sequences.
            choice = FANOUT if beliefs.hopes_for_branches() else choice
        is_followed = cohort.plan is not None and cohort.plan.choice is choice
        preference = GAIN_TO_CHANGE if choice in in_use else 1.0
        if policy.waits:
            alone = beliefs.sequences == 1
            if not alone or cohort.acceptance.candidates < CANDIDATES_TO_WAIT:
                continue  # Waiting in a batch misses a step of the other sequences.
            preference /= GAIN_TO_WAIT
        given = (
            beliefs.given(choice, conditions, cohort, crowd)
            if forks or choice.is_tree
            else conditions
        )
        if policy.replicates:
            given = replace(given, groups=num_groups)
        factor = beliefs.factor(choice)
        tried = []
        for depth in _depths(before // cohort.like.branches, len(given.chances)):
            forecast = ahead(given, depth)
            worth = beliefs.worth(forecast, given, cohort) * factor
            window = min(cohort.like.limit, depth * cohort.like.branches)
            preferred = worth * preference
            tried.append(Option(choice, window, forecast, worth, preferred, proven or is_followed))
        # A larger window leaves room for luck, but makes branches longer, which costs something.
        # With several groups a small window's grant runs out, which the forecast does not show.
        is_small = policy.fans_out and not policy.replicates
        within = GAIN_TO_CHANGE - 1 if policy.replicates else AS_GOOD
        found.append(_first_of_the_best(tried if is_small else tried[::-1], within))
    return sorted(found, key=lambda one: one.preferred, reverse=True)


def _depths(before: int, deepest: int) -> list[int]:
    """Powers of two up to twice the depth before, since larger steps must be measured first."""
    deepest = max(1, min(deepest, 2 * before))
    return sorted({1 << power for power in range(deepest.bit_length())} | {deepest})


def _first_of_the_best(options: list[Option], within: float) -> Option:
    """The first option whose worth is within the share `within` of the best."""
    best = max(one.worth for one in options)
    enough = best - abs(best) * within
    return next(one for one in options if one.worth >= enough)


def _forecast_of(choice: Choice) -> Callable[[Conditions, int], Forecast]:
    """How the choice is forecast, as a function of the conditions and the window."""
    if not choice.policy.drafting_is_free:
        return lockstep
    if choice.policy.waits:
        return _in_step
    return _tree if choice.is_tree else run_ahead


def _in_step(conditions: Conditions, window: int) -> Forecast:
    """Target and drafter wait for each other: a window is no longer than is drafted in a step."""
    pace = round(conditions.step_ms(0, 0) / conditions.pass_ms)
    return run_ahead(conditions, max(1, min(window, pace - 1)), waits=True)


def _tree(conditions: Conditions, window: int) -> Forecast:
    return run_ahead(conditions, window, is_tree=True)
