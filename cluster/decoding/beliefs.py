"""What the controller of `auto` (auto.py) believes: all estimates, and what a forecast is worth."""

from __future__ import annotations

from dataclasses import replace

from cluster.decoding.counts import CountedVerdict, Foresight
from cluster.decoding.estimates import Acceptance, DraftTimes, Mean, StepTimes
from cluster.decoding.events import Proposed, StepDone
from cluster.decoding.forecast import Conditions, Forecast
from cluster.decoding.instructions import RunStep
from cluster.decoding.pilot import FIRST_GUESS, Correction, Pilot
from cluster.decoding.policies import PolicyName, policy_named
from cluster.decoding.token_tree import TokenTree

FIRST_HIT_RATE = 0.5
"""Of branches of which nothing is known: worth a try."""
_DOUBT = 4.0
_SHORTEST_MS, _LONGEST_MS = 1e-3, 6e5
"""What a step, a pass or a restart may take."""


class Beliefs:
    """Observes every step and pass. Times of events are seconds, estimates milliseconds."""

    def __init__(self) -> None:
        self._steps = StepTimes()
        self._drafters: dict[str, DraftTimes] = {}
        self._acceptances: dict[str, Acceptance] = {}
        self._corrections: dict[PolicyName, Correction] = {}
        # Of verdicts against the first candidate, the share that a branch had foreseen, and how
        # many candidates it then held.
        self._hits: dict[PolicyName, Mean] = {}
        self._branch_lengths: dict[PolicyName, Mean] = {}
        # The last step: what it fed, when it left, what it took.
        self._rows = 1
        self._sequences = 1
        self._has_prefill = False
        self._sent_at: float | None = None
        self._step_ms = 0.0
        self._tokens_per_ms = 0.0

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

    def sent(self, now: float, step: RunStep) -> None:
        """A step goes out; one that only closes sequences tells nothing."""
        if not step.slices:
            self._sent_at = None
            return
        self._sent_at = now
        self._has_prefill = any(len(part.token_ids) != 1 + part.window for part in step.slices)
        self._rows = sum(len(part.token_ids) for part in step.slices)
        self._sequences = len(step.slices)

    def answered(self, event: StepDone, *, tokens_per_ms: float) -> None:
        """The step is back; `tokens_per_ms`: of the batch."""
        self._tokens_per_ms = tokens_per_ms
        if self._sent_at is not None:
            self._step_ms = (event.now - self._sent_at) * 1000
            if not self._has_prefill and _is_plausible(self._step_ms):
                self._steps.add(self._rows, self._step_ms)
        self._sent_at = None

    def drafted(self, event: Proposed) -> None:
        """A pass of a drafter."""
        batch = len(event.proposals)
        if batch and event.believable_seconds > 0:
            times = self._drafters.setdefault(event.drafter, DraftTimes())
            # Of a tree a pass adds a level.
            tokens = sum(1 if one.parents else len(one.token_ids) for one in event.proposals)
            branches = any(one.parents for one in event.proposals)
            ms = event.believable_seconds * 1000
            times.add_pass(batch=batch, tokens=tokens, ms=ms, branches=branches)

    def attached(self, pilot: Pilot, event: Proposed) -> None:
        """Candidates of the pass continue what is committed of this sequence."""
        if pilot.restarted_at is None:
            return
        times = self._drafters.get(event.drafter)
        restart_ms = (event.now - pilot.restarted_at) * 1000
        if times is not None and _is_plausible(restart_ms):
            times.restart.add(restart_ms)
        pilot.restarted_at = None

    def learn(
        self,
        pilot: Pilot,
        verdict: CountedVerdict,
        now: float,
        drafter: str | None,
        tree: TokenTree,
    ) -> None:
        """From a verdict on a sequence with this drafter; `tree`: what it left."""
        self._use_drafter(pilot, drafter)
        if verdict.tried:
            pilot.acceptance.add(tried=verdict.tried, accepted=verdict.accepted)
            if drafter is not None:
                self._acceptances[drafter].add(tried=verdict.tried, accepted=verdict.accepted)
        self._correct(pilot, verdict, now)
        if policy_named(pilot.choice).fans_out:
            self._count_hits(pilot, verdict, tree)

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
        elapsed_ms = (now - before) * 1000
        if not (_is_plausible(self._step_ms) and _is_plausible(elapsed_ms)):
            return
        forecast = pilot.promised * elapsed_ms / self._step_ms
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

    def given(self, name: PolicyName, conditions: Conditions, pilot: Pilot) -> Conditions:
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

    def worth(self, forecast: Forecast, conditions: Conditions) -> float:
        """Tokens/ms of this sequence, less what the others lose by its candidates."""
        longer_ms = conditions.step_ms(round(forecast.candidates)) - conditions.step_ms(0)
        # The batch could have what it has, or decode plainly.
        plain = self._sequences / self._steps.ms(self._sequences)
        share = (self._sequences - 1) / self._sequences
        lost = share * max(self._tokens_per_ms, plain) * longer_ms
        return (forecast.tokens - lost) / forecast.ms

    def conditions(self, pilot: Pilot, drafter: str | None) -> Conditions | None:
        """What a forecast for the sequence rests on; None: too little was seen yet."""
        times = self._drafters.get(drafter) if drafter is not None else None
        if not self._steps.known or times is None or not times.known:
            return None
        depth = max(1, pilot.limit // pilot.branches)
        rows = self._rows - pilot.last_window
        return Conditions(
            chances=pilot.acceptance.chances(depth),
            step_ms=lambda count: self._steps.ms(rows + count * pilot.branches),
            pass_ms=times.pass_ms(),
            tokens_a_pass=times.tokens_a_pass.value,
            restart_ms=times.restart.value,
        )

    def factor(self, name: PolicyName) -> float:
        """What the policy brought over what was forecast, of late."""
        correction = self._corrections.get(name)
        return 1.0 if correction is None else correction.factor

    def hit_rate(self, name: PolicyName) -> float:
        """Of the policy's branches; 0: nothing is known of them."""
        hits = self._hits.get(name)
        return 0.0 if hits is None else hits.value

    def told(
        self, pilot: Pilot, conditions: Conditions, worth: float, plain: float
    ) -> dict[str, float]:
        """What is told of a choice (inference.proto, SpeculationStats.estimates)."""
        assert pilot.drafter is not None
        times = self._drafters[pilot.drafter]
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


def _is_plausible(ms: float) -> bool:
    """Clocks may jump, and a drafter may say anything: that teaches nothing."""
    return _SHORTEST_MS < ms < _LONGEST_MS


def _leaning(mean: Mean | None, prior: float) -> float:
    """The mean, near `prior` while it rests on little."""
    if mean is None:
        return prior
    return (mean.value * mean.weight + prior * _DOUBT) / (mean.weight + _DOUBT)
