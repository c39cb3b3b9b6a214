"""The chooser of policy `auto`: it chooses each sequence's policy and window.

It maximizes the tokens/s of the whole batch. Sequences with the same drafter whose drafts are
accepted about as often form a cohort (cohorts.py). The chooser chooses for a cohort as if all
members changed with the next step. It compares expected tokens over expected time of a step, both
of the whole batch. The time depends on the rows that a step feeds, on its sequences, and on the
proposals that the driver reads meanwhile (timings.py). The tokens are forecast for each policy
(forecast.py) and corrected by the tokens that the policy committed when it was last in use.

In each step the chooser makes a choice for one cohort, while the target computes if anything is
drafted. The members follow over a few steps, so an error shows before all have followed. After a
step that takes far longer than expected, all choices are made again.

A policy in use is left only for a gain that is worth the change. Where drafting does not pay, the
cohort rests: its sequences decode plainly. A sequence without observations, or whose drafts fail,
is probed: it gets candidates for a few steps. The intervals between probes double while they fail,
and only a few sequences of a batch are probed at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from cluster.decoding.auto.beliefs import Beliefs
from cluster.decoding.auto.cohorts import (
    CHAIN,
    FANOUT,
    FIRST_WINDOW,
    OFF,
    Choice,
    Cohort,
    Cohorts,
    Pilot,
    Plan,
    drafting_choices,
)
from cluster.decoding.auto.forecast import Conditions, Forecast, lockstep, off, run_ahead
from cluster.decoding.counts import CountedVerdict
from cluster.decoding.events import Proposed, StepDone
from cluster.decoding.instructions import RunStep
from cluster.decoding.policy import forks_within
from cluster.decoding.token_tree import TokenTree

GAIN_TO_CHANGE = 1.03
"""Factor by which a policy's forecast must exceed the one in use to replace it."""

AS_GOOD = 1 / 200
"""Windows of a policy whose forecasts differ by at most this share are equally good."""

GAIN_TO_WAIT = 1.03
CANDIDATES_TO_WAIT = 12
"""A policy that waits for its drafter can be slower than plain decoding. So its forecast must
exceed others by this factor, and this many candidates of the cohort must have been tried."""

GAIN_TO_DRAFT = 1.01
"""Draft only if the forecast gain over plain decoding exceeds this factor."""

PATIENCE = 3.0
"""Upper bound on a wait, as a multiple of a window's expected drafting time. It limits what a
drafter that hangs can cost."""

FIRST_REST, LAST_REST = 16, 128
"""Steps until a choice to rest is made again. They double whenever drafting is worse again."""

EVIDENCE = 8
"""Judged candidates of a drafter before the chooser chooses for its sequences."""

HOPE = 0.9
"""Probe only if drafting pays when this share of the candidates is right. Under a load that makes
every candidate too expensive, a probe could change nothing."""

PROBE_CANDIDATES, PROBE_VERDICTS, PROBE_WINDOW = 6, 16, 2
"""A probe ends after this many judged candidates or verdicts. Its window is small."""

FIRST_TRIED, SHARE_TRIED, SHARE_THAT_FOLLOWS = 8, 16, 2
"""How many sequences may be tried at a time while nothing is known; later, one in SHARE_TRIED of
the batch. One in SHARE_THAT_FOLLOWS may change its policy in a step."""


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
        # A larger window gains more from luck, but its branches are longer and cost more.
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
    """The forecast if each waits for the other: a window is no longer than is drafted in a step."""
    pace = round(conditions.step_ms(0, 0) / conditions.pass_ms)
    return run_ahead(conditions, max(1, min(window, pace - 1)), waits=True)


def _tree(conditions: Conditions, window: int) -> Forecast:
    return run_ahead(conditions, window, is_tree=True)


class Chooser:
    """Chooses for each sequence that has a Pilot. Times are seconds."""

    def __init__(self, *, observes: bool = True) -> None:
        """`observes`: False if no request will ever have the policy `auto`."""
        self._observes = observes
        self.choices: dict[str, int] = {}
        """Verdicts by the chosen policy, over all sequences."""
        self.beliefs = Beliefs()
        self._cohorts = Cohorts()
        self._step = 0
        self._num_drafters, self._num_groups = 0, 1
        # The cohort to choose for in this step; None: only a new one. `_is_late`: its turn was in
        # the last step already.
        self._turn: Cohort | None = None
        self._is_late = False
        self._may_decide = False
        self._changes_left = 0
        # How many sequences were tried in the last step, and in this step until now.
        self._tried = self._tried_now = 0
        self._latest: Plan | None = None
        self._is_first = False  # `_latest` is the first plan; `chose_first` has not returned True.
        self._num_begun = 0  # Sequences that began before anything was chosen.

    def admitted(self, pilot: Pilot) -> None:
        """Begin a sequence with the latest plan, or try it if it is one of the first."""
        assert self._observes, "it was told that it would have nothing to choose"
        latest = self._latest
        if latest is None and self._num_begun < FIRST_TRIED:
            self._num_begun += 1
            pilot.try_out(FIRST_WINDOW)
            return
        if latest is None or latest.choice.rests:
            pilot.rest()
            pilot.probe_after = 0
            return
        choice = latest.choice
        if choice.policy.replicates:
            choice = FANOUT  # Only a running sequence shows whether a group is to spare.
        if pilot.allows(choice) and not choice.policy.waits:
            pilot.follow(choice)
        pilot.window = min(pilot.limit, max(latest.window, pilot.branches))

    def sent(self, now: float, step: RunStep) -> None:
        """A step goes out to the target."""
        if self._observes:
            self.beliefs.steps.sent(now, step)

    def chose_first(self) -> bool:
        """Whether the first plan for new sequences was just made. True once."""
        is_first, self._is_first = self._is_first, False
        return is_first

    def answered(self, event: StepDone, *, num_drafters: int, num_groups: int = 1) -> None:
        """A step came back. Call before its verdicts are handed in.

        `num_drafters`: drafters that can be used. `num_groups`: target groups that can verify each
        sequence.
        """
        if not self._observes:
            return
        self._step += 1
        self._cohorts.end_of_step(self._step)
        if self.beliefs.steps.answered(event):
            self._cohorts.doubt()
        self._num_drafters, self._num_groups = num_drafters, num_groups
        missed = self._turn is not None and self._may_decide
        if missed and self._is_late and self._turn is not None:
            self._turn.decided_at = self._step  # No choice is possible: let other cohorts go first.
        self._is_late = missed and not self._is_late
        if not self._is_late:
            self._turn = self._cohorts.most_overdue(self._step)
        self._may_decide = True
        self._changes_left = max(4, self.beliefs.sequences // SHARE_THAT_FOLLOWS)
        self._tried, self._tried_now = self._tried_now, 0

    def drafted(self, event: Proposed) -> None:
        """A pass of a drafter arrived. The target is computing, so there is time to choose."""
        if not self._observes:
            return
        self.beliefs.drafted(event)
        turn = self._turn
        if turn is not None and turn.plan is not None and self._may_decide:
            self._choose_for(turn)

    def judged(
        self,
        pilot: Pilot,
        verdict: CountedVerdict,
        now: float,
        drafter: str | None,
        tree: TokenTree,
    ) -> None:
        """Learn from a verdict on a sequence that goes on, and steer the sequence.

        `drafter`: the sequence's own; None: it has none. `tree`: what the verdict left of it.
        """
        pilot.verdicts += 1
        for choices in (pilot.choices, self.choices):
            choices[pilot.choice.name] = choices.get(pilot.choice.name, 0) + 1
        if tree.num_candidates or pilot.rests or drafter is None:
            pilot.restarted_at = None
        elif pilot.restarted_at is None:
            pilot.restarted_at = now
        if drafter is None:
            return
        usual = self.beliefs.acceptance(drafter)
        if drafter != pilot.drafter:
            pilot.meets(drafter, usual)
        cohort = self._cohorts.of(pilot, drafter, usual)
        self.beliefs.learn(pilot, cohort, verdict, now, tree)
        cohort.judged(verdict.window)
        if pilot.trying:
            self._tried_now += 1
            tried = pilot.acceptance.candidates - pilot.tried_from
            if tried < PROBE_CANDIDATES and pilot.verdicts < PROBE_VERDICTS:
                return
        self._steer(pilot, self._cohorts.of(pilot, drafter, usual))

    def _steer(self, pilot: Pilot, cohort: Cohort) -> None:
        """Have a sequence follow its cohort's plan or trial."""
        plan = self._plan(cohort)
        if plan is None:
            # Nothing is chosen yet, so learn from verdicts on what is in use.
            if pilot.rests:
                self._try_out(pilot, FIRST_WINDOW, at_most=FIRST_TRIED)
            return
        if cohort.trial is not None and cohort.tries(pilot):
            plan = cohort.trial
        if plan.choice.rests:
            if not pilot.rests:
                pilot.rest()
            elif pilot.verdicts >= pilot.probe_after and plan.hopeful:
                self._try_out(pilot, PROBE_WINDOW, at_most=1)
        elif plan.choice is pilot.choice or self._changes_left > 0:
            self._changes_left -= plan.choice is not pilot.choice
            if plan.choice is not pilot.choice or pilot.trying:
                pilot.trying, pilot.probe_after, pilot.verdicts = False, 0, 0
            pilot.follow(plan.choice)
            pilot.window, pilot.promised = plan.window, plan.promised
            pilot.patience = plan.patience
        else:
            cohort.lags()
        pilot.told = plan.told

    def _try_out(self, pilot: Pilot, window: int, *, at_most: int) -> None:
        """Try a sequence, unless `at_most` or a share of the batch is being tried already."""
        at_most = max(at_most, self.beliefs.sequences // SHARE_TRIED)
        window = window if self.beliefs.is_bearable(window, HOPE) else 1
        if max(self._tried, self._tried_now) < at_most and self.beliefs.is_bearable(window, HOPE):
            self._tried_now += 1
            pilot.try_out(window)

    def _plan(self, cohort: Cohort) -> Plan | None:
        """The cohort's plan. It is made here if there is none, or if no pass arrived in time."""
        is_new = cohort.plan is None and self._turn in (None, cohort)
        if self._may_decide and (is_new or (self._is_late and cohort is self._turn)):
            self._choose_for(cohort)
        return cohort.plan

    def _choose_for(self, cohort: Cohort) -> None:
        conditions = self.beliefs.conditions(cohort)
        known = self.beliefs.acceptance(cohort.like.drafter).candidates
        if conditions is not None and known >= EVIDENCE:
            self._may_decide = False
            self._decide(cohort, conditions)

    def _decide(self, cohort: Cohort, conditions: Conditions) -> None:
        before = cohort.plan
        rested = before is not None and before.choice.rests
        plain = off(conditions).tokens_per_ms * self.beliefs.factor(OFF)
        options = self._options(cohort, conditions)
        best = next(one for one in options if one.proven)
        needed = plain * GAIN_TO_DRAFT
        if best.worth >= needed:
            cohort.plan = self._planned(cohort, conditions, best, plain)
        else:
            if not rested:
                again = cohort.rest_for > 0
                cohort.rest_for = min(2 * cohort.rest_for, LAST_REST) if again else FIRST_REST
            hopeful = replace(conditions, chances=(HOPE,) * len(conditions.chances))
            hopes = self._options(cohort, hopeful)[0].worth >= plain * GAIN_TO_DRAFT
            resting = Option(OFF, best.window, off(conditions), plain, plain)
            cohort.plan = self._planned(cohort, conditions, resting, plain, hopeful=hopes)
        cohort.trial = None
        if options[0] is not best and options[0].worth >= needed:
            cohort.trial = self._planned(cohort, conditions, options[0], plain)
        sequences = self.beliefs.sequences
        if self._latest is None or 2 * cohort.members >= sequences:
            self._is_first = self._latest is None
            alone = sequences == 1 and self._num_begun <= 1
            self._latest = (alone and cohort.trial) or cohort.plan
        cohort.decided_at, cohort.doubted = self._step, False
        cohort.decided_for = cohort.members
        cohort.decisions += 1

    def _planned(
        self,
        cohort: Cohort,
        conditions: Conditions,
        option: Option,
        plain: float,
        *,
        hopeful: bool = True,
    ) -> Plan:
        told = self.beliefs.told(cohort, conditions, branches=option.choice.policy.fans_out)
        told["window"] = float(option.window)
        told["tokens_per_ms"], told["plain_tokens_per_ms"] = option.worth, plain
        drafting_ms = _drafting_ms(conditions, option.window // cohort.like.branches)
        return Plan(
            choice=option.choice,
            window=option.window,
            promised=option.forecast.tokens_per_ms * option.forecast.step_ms,
            patience=PATIENCE * drafting_ms / 1000,
            messages=option.forecast.messages,
            hopeful=hopeful,
            told=told,
        )

    def _options(self, cohort: Cohort, conditions: Conditions) -> list[Option]:
        return options_of(
            cohort,
            conditions,
            self.beliefs,
            num_drafters=self._num_drafters,
            num_groups=self._num_groups,
        )


def _drafting_ms(conditions: Conditions, depth: int) -> float:
    """Milliseconds from a verdict to the `depth`-th candidate after it."""
    passes = depth / max(0.1, conditions.tokens_a_pass)
    return conditions.restart_ms + passes * conditions.pass_ms
