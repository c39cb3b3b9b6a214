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

from cluster.decoding.counts import CountedVerdict, Foresight
from cluster.decoding.estimates import Acceptance, DraftTimes, Mean, StepTimes
from cluster.decoding.events import Proposed, StepDone
from cluster.decoding.forecast import Conditions, Forecast, lockstep, off, run_ahead
from cluster.decoding.instructions import RunStep
from cluster.decoding.pilot import (
    FIRST_GUESS,
    FIRST_PROBE,
    LAST_PROBE,
    RESTING,
    Correction,
    Pilot,
)
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

FIRST_HIT_RATE = 0.5
"""Of branches of which nothing is known: worth a try."""
_DOUBT = 4.0


class Controller:
    """Observes everything, and chooses for sequences that have a Pilot. Times are seconds."""

    def __init__(self) -> None:
        self.choices: dict[str, int] = {}
        """Verdicts by the policy that was chosen, of all sequences together."""
        self._steps = StepTimes()
        self._drafters: dict[str, DraftTimes] = {}
        self._acceptances: dict[str, Acceptance] = {}
        self._corrections: dict[PolicyName, Correction] = {}
        # Of verdicts against the first candidate, the share that a branch had foreseen, and how
        # many candidates it then held.
        self._hits: dict[PolicyName, Mean] = {}
        self._branch_lengths: dict[PolicyName, Mean] = {}
        self._rows = 1
        self._sequences = 1
        self._sent_at: float | None = None
        self._step_ms = 0.0
        self._choices_left = CHOICES_A_STEP
        self._tokens_per_ms = 0.0
        self._has_prefill = False
        self._num_drafters = 0
        self._latest: tuple[PolicyName, int] | None = None

    def estimates(self) -> dict[str, float]:
        """What it believes of the target and of each drafter, by name."""
        found = {}
        if self._steps.known:
            found["step_ms"] = self._steps.ms(self._rows)
            found["step_ms_per_candidate"] = self._steps.ms_per_row(self._rows)
        for name, times in self._drafters.items():
            if times.known:
                found[f"{name}.pass_ms"] = times.pass_ms()
                found[f"{name}.round_trip_ms"] = times.round_trip_ms
        for name, acceptance in self._acceptances.items():
            found[f"{name}.acceptance"] = acceptance.mean
        for policy, hits in self._hits.items():
            found[f"{policy.value}.hit_rate"] = hits.value
        return found

    def admitted(self, pilot: Pilot) -> None:
        """A sequence begins, with what was last chosen for another."""
        if self._latest is not None:
            choice, window = self._latest
            if pilot.allows(choice) and not policy_named(choice).waits:
                pilot.choice, pilot.policy = choice, policy_named(choice)
            pilot.window = min(pilot.limit, max(window, pilot.branches))

    def sent(self, now: float, step: RunStep) -> None:
        """A step goes out; one that only closes sequences tells nothing."""
        if not step.slices:
            self._sent_at = None
            return
        self._sent_at = now
        self._has_prefill = any(len(part.token_ids) != 1 + part.window for part in step.slices)
        self._rows = sum(len(part.token_ids) for part in step.slices)
        self._sequences = len(step.slices)

    def answered(self, event: StepDone, *, tokens_per_ms: float, num_drafters: int) -> None:
        """The step is back, before its verdicts are handed in.

        `tokens_per_ms`: of the batch. `num_drafters`: that can be used.
        """
        self._num_drafters = num_drafters
        self._choices_left = CHOICES_A_STEP
        self._tokens_per_ms = tokens_per_ms
        if self._sent_at is not None:
            self._step_ms = (event.now - self._sent_at) * 1000
            if not self._has_prefill and self._step_ms > 0:
                self._steps.add(self._rows, self._step_ms)
        self._sent_at = None

    def drafted(self, event: Proposed) -> None:
        """A pass of a drafter."""
        batch = len(event.proposals)
        if batch and event.pass_seconds > 0:
            times = self._drafters.setdefault(event.drafter, DraftTimes())
            # Of a tree a pass adds a level.
            tokens = sum(1 if one.parents else len(one.token_ids) for one in event.proposals)
            branches = any(one.parents for one in event.proposals)
            ms = event.pass_seconds * 1000
            times.add_pass(batch=batch, tokens=tokens, ms=ms, branches=branches)

    def attached(self, pilot: Pilot, event: Proposed) -> None:
        """Candidates of the pass continue what is committed of this sequence."""
        if pilot.restarted_at is None:
            return
        times = self._drafters.get(event.drafter)
        if times is not None:
            times.restart.add((event.now - pilot.restarted_at) * 1000)
        pilot.restarted_at = None

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
        self._use_drafter(pilot, drafter)
        pilot.verdicts += 1
        pilot.last_window = verdict.window
        for choices in (pilot.choices, self.choices):
            choices[pilot.choice.value] = choices.get(pilot.choice.value, 0) + 1
        if verdict.tried:
            pilot.acceptance.add(tried=verdict.tried, accepted=verdict.accepted)
            if drafter is not None:
                self._acceptances[drafter].add(tried=verdict.tried, accepted=verdict.accepted)
        if tree.num_candidates or pilot.policy is RESTING or drafter is None:
            pilot.restarted_at = None
        elif pilot.restarted_at is None:
            pilot.restarted_at = now
        self._correct(pilot, verdict, now)
        if policy_named(pilot.choice).fans_out:
            self._count_hits(pilot, verdict, tree)
        if self._is_hopeless(pilot):
            self._rest(pilot)
        elif self._is_time(pilot) and self._choices_left > 0:
            self._choices_left -= 1
            self._choose(pilot, drafter)

    def _use_drafter(self, pilot: Pilot, drafter: str | None) -> None:
        if drafter is not None and drafter != pilot.drafter:
            pilot.drafter = drafter
            prior = self._acceptances.setdefault(drafter, Acceptance(FIRST_GUESS))
            pilot.acceptance = Acceptance(prior)

    def _correct(self, pilot: Pilot, verdict: CountedVerdict, now: float) -> None:
        """Compare what the policy brought since the verdict before with what it had promised.

        By the time of a step as it is now: that others' candidates make it longer is no fault.
        """
        before, pilot.last_verdict_at = pilot.last_verdict_at, now
        if before is None or self._has_prefill or not pilot.promised or pilot.probing:
            return
        if not self._step_ms:
            return
        forecast = pilot.promised * (now - before) * 1000 / self._step_ms
        # What its window was worth, so that luck with it does not count.
        reached, brought = 1.0, 1.0
        for chance in pilot.acceptance.chances(verdict.depth):
            reached *= chance
            brought += reached
        correction = self._corrections.setdefault(pilot.choice, Correction())
        correction.add(brought, forecast)
        for name, other in self._corrections.items():
            if name is not pilot.choice:
                other.forget()

    def _count_hits(self, pilot: Pilot, verdict: CountedVerdict, tree: TokenTree) -> None:
        if verdict.foresight in (Foresight.BRANCH, Foresight.OTHERS):
            hit = verdict.foresight is Foresight.BRANCH
            self._hits.setdefault(pilot.choice, Mean()).add(float(hit))
            if hit:
                held = tree.num_verifiable(pilot.window)
                self._branch_lengths.setdefault(pilot.choice, Mean()).add(held)

    def _is_hopeless(self, pilot: Pilot) -> bool:
        """Plainly not worth drafting for; seen at each verdict, so it must cost nothing."""
        if pilot.policy is RESTING or pilot.acceptance.candidates < PROBE_CANDIDATES:
            return False
        if pilot.probing and pilot.acceptance.candidates - pilot.probed_from < PROBE_CANDIDATES:
            return False
        hits = self._hits.get(pilot.choice)
        has_hits = hits is not None and hits.value > POOR
        return not has_hits and pilot.acceptance.mean < POOR

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
        times = self._drafters.get(drafter) if drafter is not None else None
        if not self._steps.known or times is None or not times.known:
            return  # What is in use will teach.
        pilot.verdicts = 0
        conditions = self._conditions(pilot, times)
        plain = off(conditions).tokens_per_ms * self._factor(PolicyName.OFF)
        best, window, forecast, worth = self._best(pilot, conditions)
        failed = worth < plain * GAIN_TO_DRAFT
        if failed and pilot.policy is RESTING:
            hopeful = replace(conditions, chances=(HOPE,) * len(conditions.chances))
            if self._best(pilot, hopeful)[-1] >= plain * GAIN_TO_DRAFT:
                self._probe(pilot)
            return
        if failed:
            self._rest(pilot)
            pilot.estimates = self._estimates(pilot, conditions, times, plain, plain)
            return
        pilot.probing = False
        pilot.choice, pilot.policy, pilot.window = best, policy_named(best), window
        step_ms = conditions.step_ms(round(forecast.candidates))
        pilot.promised = forecast.tokens_per_ms * step_ms
        pilot.patience = PATIENCE * _drafting_ms(conditions, window // pilot.branches) / 1000
        self._latest = best, window
        pilot.estimates = self._estimates(pilot, conditions, times, worth, plain)

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
            given = self._given(name, conditions, pilot)
            window, forecast = self._best_window(pilot, given, ahead)
            worth = self._worth(forecast, conditions) * self._factor(name)
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

    def _given(self, name: PolicyName, conditions: Conditions, pilot: Pilot) -> Conditions:
        """The conditions with what its branches bring and cost a policy that has some."""
        if not policy_named(name).fans_out or pilot.drafter is None:
            return conditions
        hits, lengths = self._hits.get(name), self._branch_lengths.get(name)
        ahead = conditions.step_ms(0) / conditions.pass_ms
        return replace(
            conditions,
            pass_ms=self._drafters[pilot.drafter].pass_ms(branches=True),
            hit_rate=_leaning(hits, FIRST_HIT_RATE),
            branch_length=_leaning(lengths, min(pilot.window, ahead / 2)),
        )

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
            found.append((self._worth(forecast, conditions), depth, forecast))
        best = max(worth for worth, _, _ in found)
        enough = best - abs(best) / 200
        _, depth, forecast = next(one for one in reversed(found) if one[0] >= enough)
        return min(pilot.limit, depth * pilot.branches), forecast

    def _worth(self, forecast: Forecast, conditions: Conditions) -> float:
        """Tokens/ms of this sequence, less what the others lose by its candidates."""
        longer_ms = conditions.step_ms(round(forecast.candidates)) - conditions.step_ms(0)
        # The batch could have what it has, or decode plainly.
        plain = self._sequences / self._steps.ms(self._sequences)
        share = (self._sequences - 1) / self._sequences
        lost = share * max(self._tokens_per_ms, plain) * longer_ms
        return (forecast.tokens - lost) / forecast.ms

    def _conditions(self, pilot: Pilot, times: DraftTimes) -> Conditions:
        depth = max(1, pilot.limit // pilot.branches)
        rows = self._rows - pilot.last_window
        return Conditions(
            chances=pilot.acceptance.chances(depth),
            step_ms=lambda count: self._steps.ms(rows + count * pilot.branches),
            pass_ms=times.pass_ms(),
            tokens_a_pass=times.tokens_a_pass.value,
            restart_ms=times.restart.value,
        )

    def _factor(self, name: PolicyName) -> float:
        correction = self._corrections.get(name)
        return 1.0 if correction is None else correction.factor

    def _estimates(
        self, pilot: Pilot, conditions: Conditions, times: DraftTimes, worth: float, plain: float
    ) -> dict[str, float]:
        return {
            "acceptance": pilot.acceptance.mean,
            "step_ms": conditions.step_ms(0),
            "step_ms_per_candidate": self._steps.ms_per_row(self._rows),
            "pass_ms": times.pass_ms(branches=pilot.policy.fans_out),
            "round_trip_ms": times.round_trip_ms,
            "window": float(pilot.window),
            "tokens_per_ms": worth,
            "plain_tokens_per_ms": plain,
        }


def _leaning(mean: Mean | None, prior: float) -> float:
    """The mean, near `prior` while it rests on little."""
    if mean is None:
        return prior
    return (mean.value * mean.weight + prior * _DOUBT) / (mean.weight + _DOUBT)


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
