"""The controller of policy `auto`: which policy and window each sequence has now.

It believes its estimates (estimates.py), asks a forecast (forecast.py) what each policy would
bring under them, and corrects the forecast by what the policy brought when it was last in use. It
takes what raises the whole batch's tokens/s most: a sequence's own tokens, less those that the
others lose while a step takes longer for its candidates. It changes its mind only for a gain that
is worth the change.

A sequence whose drafts are not worth their price decodes plainly, and is probed now and then: a few
steps with candidates, at intervals that double while they fail.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from cluster.decoding.beliefs import Beliefs
from cluster.decoding.counts import CountedVerdict
from cluster.decoding.events import StepDone
from cluster.decoding.forecast import Conditions, Forecast, lockstep, off, run_ahead
from cluster.decoding.pilot import FIRST_PROBE, LAST_PROBE, RESTING, Pilot
from cluster.decoding.policies import PolicyName, policy_named
from cluster.decoding.token_tree import TokenTree

GAIN_TO_CHANGE = 1.03
"""A policy takes another's place when it promises so much more."""

GAIN_TO_DRAFT = 1.01
"""Drafting must promise so much more than plain decoding."""

GAIN_TO_WAIT = 1.03
CANDIDATES_TO_WAIT = 12
"""A policy that waits for its drafter must promise so much more than one that does not, and so many
candidates must have been tried: it is what can be slower than plain decoding."""

PATIENCE = 3.0
"""So many times what a window should take to draft may be waited, not for a drafter that hangs."""

FIRST_VERDICTS, VERDICTS_BETWEEN = 3, 8
"""The first choice is made after so many verdicts; a choice stands for so many."""

CHOICES_A_STEP = 4
"""So many sequences are chosen for at most when a step is answered: a choice takes time."""

POOR = 0.05
"""Less acceptance than this is not worth a forecast."""

HOPE = 0.9
"""A probe must be worth it if so many candidates turn out right; under a load that makes each too
dear there is nothing to find out."""

PROBE_CANDIDATES, PROBE_VERDICTS, PROBE_WINDOW = 6, 16, 2
"""A probe lasts until so many candidates were tried, or so many verdicts; its window is small."""


class Controller:
    """Chooses for sequences that have a Pilot. Times are seconds."""

    def __init__(self) -> None:
        self.choices: dict[str, int] = {}
        """Verdicts by the policy that was chosen, of all sequences together."""
        self.beliefs = Beliefs()
        self._choices_left = CHOICES_A_STEP
        self._num_drafters = 0
        self._latest: tuple[PolicyName, int] | None = None

    def admitted(self, pilot: Pilot) -> None:
        """A sequence begins, with what was last chosen for another."""
        if self._latest is not None:
            choice, window = self._latest
            if pilot.allows(choice) and not policy_named(choice).waits:
                pilot.choice, pilot.policy = choice, policy_named(choice)
            pilot.window = min(pilot.limit, max(window, pilot.branches))

    def answered(self, event: StepDone, *, tokens_per_ms: float, num_drafters: int) -> None:
        """A step is back, before its verdicts are handed in.

        `tokens_per_ms`: of the batch. `num_drafters`: that can be used.
        """
        self._num_drafters = num_drafters
        self._choices_left = CHOICES_A_STEP
        self.beliefs.answered(event, tokens_per_ms=tokens_per_ms)

    def judged(
        self,
        pilot: Pilot,
        verdict: CountedVerdict,
        now: float,
        drafter: str | None,
        tree: TokenTree,
    ) -> None:
        """A verdict on a sequence, which goes on; chooses anew when it is time.

        `drafter`: that of the sequence. `tree`: what the verdict left.
        """
        pilot.verdicts += 1
        pilot.last_window = verdict.window
        for choices in (pilot.choices, self.choices):
            choices[pilot.choice.value] = choices.get(pilot.choice.value, 0) + 1
        self.beliefs.learn(pilot, verdict, now, drafter, tree)
        if tree.num_candidates or pilot.policy is RESTING or drafter is None:
            pilot.restarted_at = None
        elif pilot.restarted_at is None:
            pilot.restarted_at = now
        if self._is_hopeless(pilot):
            self._rest(pilot)
        elif self._is_time(pilot) and self._choices_left > 0:
            self._choices_left -= 1
            self._choose(pilot, drafter)

    def _is_hopeless(self, pilot: Pilot) -> bool:
        """Plainly not worth drafting for; seen at each verdict, so it must cost nothing."""
        if pilot.policy is RESTING or pilot.acceptance.candidates < PROBE_CANDIDATES:
            return False
        if pilot.probing and pilot.acceptance.candidates - pilot.probed_from < PROBE_CANDIDATES:
            return False
        return pilot.acceptance.mean < POOR and self.beliefs.hit_rate(pilot.choice) < POOR

    def _rest(self, pilot: Pilot) -> None:
        """Decode plainly until the next probe."""
        pilot.verdicts = 0
        failed_again = pilot.probing
        pilot.probe_after = min(2 * pilot.probe_after, LAST_PROBE) if failed_again else FIRST_PROBE
        pilot.probing = False
        pilot.choice, pilot.policy = PolicyName.OFF, RESTING
        pilot.promised = 1.0

    def _is_time(self, pilot: Pilot) -> bool:
        if pilot.probing:
            tried = pilot.acceptance.candidates - pilot.probed_from
            return tried >= PROBE_CANDIDATES or pilot.verdicts >= PROBE_VERDICTS
        if pilot.policy is RESTING:
            return pilot.verdicts >= pilot.probe_after
        return pilot.verdicts >= (VERDICTS_BETWEEN if pilot.promised else FIRST_VERDICTS)

    def _choose(self, pilot: Pilot, drafter: str | None) -> None:
        conditions = self.beliefs.conditions(pilot, drafter)
        if conditions is None:
            return  # What is in use will teach.
        pilot.verdicts = 0
        plain = off(conditions).tokens_per_ms * self.beliefs.factor(PolicyName.OFF)
        best, window, forecast, worth = self._best(pilot, conditions)
        failed = worth < plain * GAIN_TO_DRAFT
        if failed and pilot.policy is RESTING:
            hopeful = replace(conditions, chances=(HOPE,) * len(conditions.chances))
            if self._best(pilot, hopeful)[-1] >= plain * GAIN_TO_DRAFT:
                self._probe(pilot)
            return
        if failed:
            self._rest(pilot)
            pilot.estimates = self.beliefs.told(pilot, conditions, plain, plain)
            return
        pilot.probing = False
        pilot.choice, pilot.policy, pilot.window = best, policy_named(best), window
        step_ms = conditions.step_ms(round(forecast.candidates))
        pilot.promised = forecast.tokens_per_ms * step_ms
        pilot.patience = PATIENCE * _drafting_ms(conditions, window // pilot.branches) / 1000
        self._latest = best, window
        pilot.estimates = self.beliefs.told(pilot, conditions, worth, plain)

    def _probe(self, pilot: Pilot) -> None:
        pilot.probing = True
        pilot.probed_from = pilot.acceptance.candidates
        pilot.choice, pilot.policy = PolicyName.CHAIN, policy_named(PolicyName.CHAIN)
        pilot.window = min(pilot.limit, PROBE_WINDOW * pilot.branches)

    def _best(
        self, pilot: Pilot, conditions: Conditions
    ) -> tuple[PolicyName, int, Forecast, float]:
        """The policy that drafts and its window that are worth most, what is in use preferred."""
        found = []
        for name, ahead in _FORECASTS.items():
            if not pilot.allows(name) or policy_named(name).needs.drafters > self._num_drafters:
                continue
            given = self.beliefs.given(name, conditions, pilot)
            window, forecast = self._best_window(pilot, given, ahead)
            worth = self.beliefs.worth(forecast, conditions) * self.beliefs.factor(name)
            if policy_named(name).waits:
                if pilot.acceptance.candidates < CANDIDATES_TO_WAIT:
                    continue
                worth /= GAIN_TO_WAIT
            if name is pilot.choice:
                worth *= GAIN_TO_CHANGE
            found.append((worth, name, window, forecast))
        worth, name, window, forecast = max(found, key=lambda one: one[0])
        if name is pilot.choice:
            worth /= GAIN_TO_CHANGE
        if policy_named(name).waits:
            worth *= GAIN_TO_WAIT
        return name, window, forecast, worth

    def _best_window(
        self,
        pilot: Pilot,
        conditions: Conditions,
        ahead: Callable[[Conditions, int], Forecast],
    ) -> tuple[int, Forecast]:
        """The largest window that is as good as any to within a two-hundredth.

        Of the one before, half of it and twice: what larger steps take must be seen first.
        """
        before = max(1, pilot.window // pilot.branches)
        deepest = min(len(conditions.chances), 2 * before)
        found = []
        for depth in sorted({1, max(1, before // 2), before, deepest}):
            forecast = ahead(conditions, depth)
            found.append((self.beliefs.worth(forecast, conditions), depth, forecast))
        best = max(worth for worth, _, _ in found)
        enough = best - abs(best) / 200
        _, depth, forecast = next(one for one in reversed(found) if one[0] >= enough)
        return min(pilot.limit, depth * pilot.branches), forecast


def _drafting_ms(conditions: Conditions, depth: int) -> float:
    """From a verdict to so many candidates after it."""
    passes = depth / max(0.1, conditions.tokens_a_pass)
    return conditions.restart_ms + passes * conditions.pass_ms


def _pearl(conditions: Conditions, window: int) -> Forecast:
    """As the policy has it, a window is no longer than what is drafted in a step."""
    pace = round(conditions.step_ms(0) / conditions.pass_ms)
    return run_ahead(conditions, max(1, min(window, pace - 1)), waits=True)


_FORECASTS: dict[PolicyName, Callable[[Conditions, int], Forecast]] = {
    PolicyName.LOCKSTEP: lockstep,
    PolicyName.PEARL: _pearl,
    PolicyName.CHAIN: run_ahead,
    PolicyName.FANOUT: run_ahead,
    PolicyName.SPREAD: run_ahead,
}
