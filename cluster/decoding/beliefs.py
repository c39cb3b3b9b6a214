"""What the controller of `auto` (auto.py) believes: all estimates, and what a forecast is worth.

A step takes what the device takes for the rows that it feeds, and besides what messages and the
driver take. The latter grows with what the driver must read meanwhile: a verdict for each
sequence, and each proposal. So a candidate has a price as a row of a step, and drafting has one
whether candidates are verified or not.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from cluster.decoding.cohorts import Cohort
from cluster.decoding.counts import CountedVerdict, Foresight
from cluster.decoding.estimates import Acceptance, DraftTimes, Mean, TimesBySize
from cluster.decoding.events import Proposed, StepDone
from cluster.decoding.forecast import Conditions, Forecast
from cluster.decoding.instructions import RunStep
from cluster.decoding.pilot import FIRST_GUESS, Correction, Pilot
from cluster.decoding.policies import PolicyName, policy_named
from cluster.decoding.token_tree import TokenTree

FIRST_HIT_RATE = 0.5
"""Of branches of which nothing is known: worth a try."""
FIRST_BRANCHES = 0.5
"""Proposals of a pass for each candidate of the window, before any branches were seen."""
PROOF = 6.0
"""Verdicts against the first candidate by which a policy with branches is known."""
UNSETTLED = 2
"""So many verdicts after a change tell nothing of the new policy."""
_DOUBT = 4.0
_SHORTEST_MS, _LONGEST_MS = 1e-3, 6e5
"""What a step, a pass or a restart may take."""

_FULL = 0.9
"""A driver that works so much of the time is as good as busy."""

_UNLIKE_MS, _UNLIKE = 1.0, 1.3
"""A step that takes so much longer than was believed is a surprise."""


@dataclass(slots=True)
class _Step:
    """A step of the batch: its sequences that decode, the rows that it feeds for them and in all.

    `messages`: proposals that arrived while it was computed. `ms`: from sending to answer.
    """

    sent_at: float = 0.0
    sequences: int = 1
    decoding_rows: int = 1
    rows: int = 1
    messages: int = 0
    ms: float = 0.0

    @property
    def has_prefill(self) -> bool:
        return self.rows > self.decoding_rows


class Beliefs:
    """Observes every step and pass. Times of events are seconds, estimates milliseconds."""

    def __init__(self) -> None:
        self._device = TimesBySize()  # by rows
        self._host = TimesBySize()  # by messages, verdicts included: what a step takes besides
        self._work = TimesBySize()  # by the same: what the driver works
        self._heard = 0  # proposals since the last answer
        self._drafters: dict[str, DraftTimes] = {}
        self._acceptances: dict[str, Acceptance] = {}
        self._corrections: dict[PolicyName, Correction] = {}
        # Of verdicts against the first candidate, the share that a branch had foreseen, and how
        # many candidates it then held.
        self._hits: dict[PolicyName, Mean] = {}
        self._branch_lengths: dict[PolicyName, Mean] = {}
        self._branch_windows = Mean()  # of verdicts on sequences that have branches
        self._tokens = Mean()  # of a verdict
        self._sent: dict[tuple[int, int], _Step] = {}  # by target group and number
        self._last = _Step()

    @property
    def sequences(self) -> int:
        """That decoded in the last step."""
        return self._last.sequences

    def estimates(self) -> dict[str, float]:
        """What it believes of the target and of each drafter, by name."""
        found = {}
        if self._device.known:
            found["step_ms"] = self._step_ms(self._last.rows, _num_messages(self._last))
            found["step_ms_per_candidate"] = self._device.ms_per_unit(self._last.rows)
            found["step_ms_per_proposal"] = self._host.ms_per_unit(_num_messages(self._last))
        for name, times in self._drafters.items():
            if times.known:
                found[f"{name}.pass_ms"] = times.pass_ms(self.sequences)
                found[f"{name}.round_trip_ms"] = times.round_trip_ms
        for name, acceptance in self._acceptances.items():
            found[f"{name}.acceptance"] = acceptance.mean
        for policy, hits in self._hits.items():
            found[f"{policy.value}.hit_rate"] = hits.value
        return found

    def sent(self, now: float, step: RunStep) -> None:
        """A step goes out; one that only closes sequences tells nothing."""
        decoding = [part for part in step.slices if len(part.token_ids) == 1 + part.window]
        # Of a step that was lost with its target nothing more comes.
        self._sent = {key: one for key, one in self._sent.items() if key[0] != step.group}
        if not step.slices:
            return
        self._sent[step.group, step.step] = _Step(
            sent_at=now,
            sequences=max(1, len(decoding)),
            decoding_rows=sum(len(part.token_ids) for part in decoding),
            rows=sum(len(part.token_ids) for part in step.slices),
        )

    def answered(self, event: StepDone) -> bool:
        """The step is back; whether it took far longer than was believed."""
        step = self._sent.pop((event.group, event.step), None)
        if step is None:
            return False
        step.ms = (event.now - step.sent_at) * 1000
        self._last = step
        if event.driver_seconds > 0:
            self._work.add(step.sequences + self._heard, event.driver_seconds * 1000)
        self._heard = 0
        device_ms = event.step_seconds * 1000
        if not (_is_plausible(step.ms) and 0 <= device_ms < _LONGEST_MS):
            return False
        believed_ms = (
            self._step_ms(step.rows, _num_messages(step)) if self._device.known else step.ms
        )
        self._device.add(step.rows, min(device_ms, step.ms))
        self._host.add(_num_messages(step), max(0.0, step.ms - device_ms))
        return step.ms > max(_UNLIKE * believed_ms, believed_ms + _UNLIKE_MS)

    def _step_ms(self, rows: float, messages: float) -> float:
        """No step ends before the driver has read what was sent to it meanwhile."""
        ms = self._device.ms(rows) + self._host.ms(messages)
        return max(ms, self._work.ms(messages) / _FULL) if self._work.known else ms

    def drafted(self, event: Proposed) -> None:
        """A pass of a drafter."""
        self._heard += len(event.proposals)
        for step in self._sent.values():
            step.messages += len(event.proposals)
        told = Counter(one.sequence_id for one in event.proposals)
        batch = len(told)
        if batch and event.believable_seconds > 0:
            times = self._drafters.setdefault(event.drafter, DraftTimes())
            # A pass adds a level to a tree, which may be told in several proposals.
            grown = {
                one.sequence_id
                for one in event.proposals
                if one.parents or told[one.sequence_id] > 1
            }
            tokens = len(grown) + sum(
                len(one.token_ids) for one in event.proposals if one.sequence_id not in grown
            )
            ms = event.believable_seconds * 1000
            times.add_pass(batch=batch, tokens=tokens, ms=ms, branches=bool(grown))
            if grown:
                times.branch_messages.add(sum(told[one] - 1 for one in grown) / len(grown))

    def attached(self, pilot: Pilot, event: Proposed) -> None:
        """Candidates of the pass continue what is committed of this sequence."""
        if pilot.restarted_at is None:
            return
        times = self._drafters.get(event.drafter)
        restart_ms = (event.now - pilot.restarted_at) * 1000
        if times is not None and _is_plausible(restart_ms):
            times.add_restart(restart_ms, branches=pilot.policy.fans_out)
        pilot.restarted_at = None

    def acceptance(self, drafter: str) -> Acceptance:
        """Of all that it drafted."""
        return self._acceptances.setdefault(drafter, Acceptance(FIRST_GUESS))

    def learn(
        self, pilot: Pilot, cohort: Cohort, verdict: CountedVerdict, now: float, tree: TokenTree
    ) -> None:
        """From a verdict on a sequence of this cohort; `tree`: what it left."""
        tried, accepted = verdict.tried, verdict.accepted
        if accepted == verdict.depth and verdict.foresight is not Foresight.NOTHING:
            # What was held for the place of the verdict's own token was judged as well.
            tried, accepted = tried + 1, accepted + (verdict.foresight is Foresight.FIRST)
        if tried:
            pilot.acceptance.add(tried=tried, accepted=accepted)
            cohort.acceptance.add(tried=tried, accepted=accepted, sequences=max(1, cohort.members))
            known = self.acceptance(cohort.like.drafter)
            known.add(tried=tried, accepted=accepted, sequences=self.sequences)
        self._tokens.add(verdict.committed, of=self.sequences)
        self._correct(pilot, cohort, verdict, now)
        if policy_named(pilot.choice).fans_out:
            self._branch_windows.add(pilot.window, of=self.sequences)
            self._count_hits(pilot, verdict, tree)

    def _correct(self, pilot: Pilot, cohort: Cohort, verdict: CountedVerdict, now: float) -> None:
        """Compare what the policy brought since the verdict before with what it had promised.

        By the time of a step as it is now, which has estimates of its own.
        """
        before, pilot.last_verdict_at = pilot.last_verdict_at, now
        if before is None or self._last.has_prefill or not pilot.promised or pilot.trying:
            return
        if pilot.verdicts <= UNSETTLED:
            return  # What it held and drafted is still that of the policy before.
        elapsed_ms = (now - before) * 1000
        if not (_is_plausible(self._last.ms) and _is_plausible(elapsed_ms)):
            return
        forecast = pilot.promised * elapsed_ms / self._last.ms
        # What its window was worth, so that luck with it does not count.
        reached, brought = 1.0, 1.0
        for chance in cohort.acceptance.chances(verdict.depth) if verdict.depth else ():
            reached *= chance
            brought += reached
        correction = self._corrections.setdefault(pilot.choice, Correction())
        correction.add(brought, forecast, of=self.sequences)
        for name, other in self._corrections.items():
            if name is not pilot.choice:
                other.forget(of=self.sequences)

    def _count_hits(self, pilot: Pilot, verdict: CountedVerdict, tree: TokenTree) -> None:
        if verdict.foresight in (Foresight.BRANCH, Foresight.OTHERS):
            hit = verdict.foresight is Foresight.BRANCH
            self._hits.setdefault(pilot.choice, Mean()).add(float(hit), of=self.sequences)
            if hit:
                held = tree.num_verifiable(pilot.window)
                lengths = self._branch_lengths.setdefault(pilot.choice, Mean())
                lengths.add(held, of=self.sequences)

    def conditions(self, cohort: Cohort) -> Conditions | None:
        """What a forecast for all of a cohort rests on; None: too little was seen yet."""
        like = cohort.like
        times = self._drafters.get(like.drafter)
        if not self._device.known or times is None or not times.known:
            return None
        members, others = self._shares(cohort)
        other_rows = float(others)
        other_messages = 0.0
        if others:
            own_rows = members + cohort.candidates
            other_rows = max(other_rows, self._last.decoding_rows - own_rows)
            own_messages = members * (cohort.plan.messages if cohort.plan else 0.0)
            other_messages = max(0.0, self._last.messages - own_messages)

        def step_ms(candidates: float, messages: float) -> float:
            rows = other_rows + members * (1 + candidates * like.branches)
            heard = others + other_messages + members * (1 + messages)
            return self._step_ms(rows, heard)

        return Conditions(
            chances=cohort.acceptance.chances(max(1, like.limit // like.branches)),
            step_ms=step_ms,
            pass_ms=times.pass_ms(members),
            tokens_a_pass=times.tokens_a_pass.value,
            restart_ms=times.restart_ms(),
        )

    def _shares(self, cohort: Cohort) -> tuple[int, int]:
        """Sequences of the batch that are of the cohort, and the others."""
        members = max(1, cohort.members)
        return members, max(0, self.sequences - members)

    def given(self, name: PolicyName, conditions: Conditions, cohort: Cohort) -> Conditions:
        """The conditions with what its branches bring and cost a policy that has some."""
        if not policy_named(name).fans_out:
            return conditions
        times = self._drafters[cohort.like.drafter]
        members, _ = self._shares(cohort)
        pass_ms = times.pass_ms(members, branches=True)
        ahead = conditions.step_ms(0, 0) / pass_ms
        window = cohort.plan.window if cohort.plan else cohort.like.limit
        return replace(
            conditions,
            pass_ms=pass_ms,
            messages_a_candidate=self._messages_a_candidate(times),
            restart_ms=times.restart_ms(branches=True),
            hit_rate=_leaning(self._hits.get(name), FIRST_HIT_RATE),
            branch_length=_leaning(self._branch_lengths.get(name), min(window, ahead / 2)),
        )

    def _messages_a_candidate(self, times: DraftTimes) -> float:
        """Of a pass that grows branches: they are the more, the longer they may grow."""
        if not (times.branch_messages.known and self._branch_windows.known):
            return FIRST_BRANCHES
        return times.branch_messages.value / max(1.0, self._branch_windows.value)

    def worth(self, forecast: Forecast, conditions: Conditions, cohort: Cohort) -> float:
        """Tokens/ms that each of the cohort adds to the batch, less what the others then lose."""
        members, others = self._shares(cohort)
        others_lose = 1 / conditions.step_ms(0, 0) - 1 / forecast.step_ms
        lost = others * max(1.0, self._tokens.value) * others_lose / members
        return forecast.tokens_per_ms - lost

    def is_bearable(self, candidates: int, chance: float) -> bool:
        """Whether a sequence may draft that is not known yet: if most are right, nobody loses."""
        if not self._device.known:
            return True
        step, tokens, reached = self._last, float(self.sequences), 1.0
        for _ in range(candidates):
            reached *= chance
            tokens += reached
        plain_ms = self._step_ms(step.rows, _num_messages(step))
        more_ms = self._device.ms(step.rows + candidates) - self._device.ms(step.rows)
        return tokens / (plain_ms + more_ms) >= self.sequences / plain_ms

    def proven(self, name: PolicyName) -> bool:
        """Whether enough is known of it for all to follow."""
        hits = self._hits.get(name)
        return not policy_named(name).fans_out or (hits is not None and hits.weight >= PROOF)

    def factor(self, name: PolicyName) -> float:
        """What the policy brought over what was forecast, of late."""
        correction = self._corrections.get(name)
        return 1.0 if correction is None else correction.factor

    def told(self, cohort: Cohort, conditions: Conditions, *, branches: bool) -> dict[str, float]:
        """What is told of a choice for a cohort (inference.proto, SpeculationStats.estimates)."""
        times = self._drafters[cohort.like.drafter]
        members, _ = self._shares(cohort)
        return {
            "sequences_alike": float(members),
            "step_ms": conditions.step_ms(0, 0),
            "step_ms_per_candidate": self._device.ms_per_unit(self._last.rows),
            "step_ms_per_proposal": self._host.ms_per_unit(_num_messages(self._last)),
            "pass_ms": times.pass_ms(members, branches=branches),
            "round_trip_ms": times.round_trip_ms,
        }


def _num_messages(step: _Step) -> int:
    return step.sequences + step.messages


def _is_plausible(ms: float) -> bool:
    """Clocks may jump, and a drafter may say anything: that teaches nothing."""
    return _SHORTEST_MS < ms < _LONGEST_MS


def _leaning(mean: Mean | None, prior: float) -> float:
    """The mean, near `prior` while it rests on little."""
    if mean is None:
        return prior
    return (mean.value * mean.weight + prior * _DOUBT) / (mean.weight + _DOUBT)
