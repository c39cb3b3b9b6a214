"""What the controller of `auto` (auto.py) believes: all estimates, and what a forecast is worth."""

from __future__ import annotations

from dataclasses import replace

from cluster.decoding.choices import Choice
from cluster.decoding.cohorts import Cohort
from cluster.decoding.counts import CountedVerdict
from cluster.decoding.events import Proposed, is_believable
from cluster.decoding.forecast import Conditions, Forecast, StepMs, granted_ahead
from cluster.decoding.hits import FIRST_HIT_RATE, Hits
from cluster.decoding.outlook import chain_outlook, shape_of
from cluster.decoding.pilot import FIRST_GUESS, UNSETTLED, Acceptance, Correction, Pilot
from cluster.decoding.policies import forks_within
from cluster.decoding.timings import DraftTimes, Mean, StepModel
from cluster.decoding.token_tree import TokenTree
from cluster.decoding.windows import lead_length

FIRST_FORKS = 0.5
"""Proposals of a pass for each position that may fork, before any did."""
TOLD_A_CANDIDATE = 1.5
"""Proposals of a tree without branches sent ahead: each node is told once, and after a verdict
against them new ones are. One for each that a step may verify where most are right, 1.5 where few.
"""
PROOF = 5.0
"""So many verdicts against the first candidate, decayed, by which a policy with branches is known:
six."""
_LEAST_MS = 1e-3


class Beliefs:
    """Observes every step and pass. Times of events are seconds, estimates milliseconds."""

    def __init__(self) -> None:
        self.steps = StepModel()
        self._drafters: dict[str, DraftTimes] = {}
        self._acceptances: dict[str, Acceptance] = {}
        self._corrections: dict[Choice, Correction] = {}
        self._hits = Hits()
        self._forks = Mean()  # of sequences that have branches: positions that may fork
        self._tokens = Mean()  # of a verdict

    @property
    def sequences(self) -> int:
        """That decoded in the last step."""
        return self.steps.last.sequences

    def estimates(self) -> dict[str, float]:
        """What it believes of the target and of each drafter, by name."""
        found = self.steps.estimates()
        for name, times in self._drafters.items():
            if times.known:
                found[f"{name}.pass_ms"] = times.pass_ms(self.sequences)
                found[f"{name}.round_trip_ms"] = times.round_trip_ms
        for name, acceptance in self._acceptances.items():
            found[f"{name}.acceptance"] = acceptance.mean
        for policy, rate in self._hits.rates().items():
            found[f"{policy.value}.hit_rate"] = rate
        return found

    def drafted(self, event: Proposed) -> None:
        """A pass of a drafter."""
        self.steps.heard(len(event.proposals))
        if not event.proposals or event.believable_seconds <= 0:
            return
        # A pass adds a level to a tree, which may be told in several proposals.
        told: dict[int, int] = {}
        grown: set[int] = set()
        for one in event.proposals:
            before = told.get(one.sequence_id, 0)
            told[one.sequence_id] = before + 1
            if before or one.parents:
                grown.add(one.sequence_id)
        tokens = len(grown) + sum(
            [len(one.token_ids) for one in event.proposals if one.sequence_id not in grown]
        )
        times = self._drafters.get(event.drafter)
        if times is None:
            times = self._drafters[event.drafter] = DraftTimes()
        ms = event.believable_seconds * 1000
        times.heard(event.now, ms)
        times.add_pass(batch=len(told), tokens=tokens, ms=ms, branches=bool(grown))
        if grown:
            times.branch_messages.add(sum(told[one] - 1 for one in grown) / len(grown))

    def attached(self, pilot: Pilot, event: Proposed) -> None:
        """Candidates of the pass continue what is committed of this sequence."""
        if pilot.restarted_at is None:
            return
        times = self._drafters.get(event.drafter)
        seconds = event.now - pilot.restarted_at
        if times is not None and is_believable(seconds):
            times.add_restart(seconds * 1000, branches=pilot.policy.fans_out)
        pilot.restarted_at = None

    def acceptance(self, drafter: str) -> Acceptance:
        """Of all that it drafted."""
        return self._acceptances.setdefault(drafter, Acceptance(FIRST_GUESS))

    def learn(
        self, pilot: Pilot, cohort: Cohort, verdict: CountedVerdict, now: float, tree: TokenTree
    ) -> None:
        """From a verdict on a sequence of this cohort; `tree`: what it left."""
        rights = pilot.rights(verdict)
        if rights:
            pilot.acceptance.add(rights)
            cohort.acceptance.add(rights, sequences=max(1, cohort.members))
            self.acceptance(cohort.like.drafter).add(rights, sequences=self.sequences)
        self._tokens.add(verdict.committed, of=self.sequences)
        self._correct(pilot, cohort, verdict, now)
        policy = pilot.choice.policy
        if policy.fans_out:
            forks = self._forks_of(pilot, cohort)
            self._forks.add(forks, of=self.sequences)
            if not forks:
                pilot.until_branches = UNSETTLED
            elif pilot.until_branches <= 0:
                self._hits.count(pilot, verdict, rights, tree, of=self.sequences)
            else:  # Until some come, or should have, a miss tells nothing of branches.
                beside = tree.num_candidates - lead_length(tree.root, tree.num_candidates)
                passed = 1 / (1 + self._restart_steps(cohort))
                pilot.until_branches = 0.0 if beside else pilot.until_branches - passed
        elif pilot.choice.is_tree:
            self._hits.count(pilot, verdict, rights, tree, of=self.sequences)

    def _forks_of(self, pilot: Pilot, cohort: Cohort) -> int:
        """Positions of its chain that may fork."""
        times = self._drafters.get(cohort.like.drafter)
        pass_ms = times.pass_ms(self.sequences, branches=True) if times else 0.0
        bounded = pass_ms and not pilot.choice.is_tree
        pace = self.steps.last.ms / pass_ms if bounded else 0.0
        crowd = max(1, cohort.members)
        return forks_within(granted_ahead(pilot.window), pace=pace, crowd=crowd)

    def _correct(self, pilot: Pilot, cohort: Cohort, verdict: CountedVerdict, now: float) -> None:
        """Compare what the policy brought since the verdict before with what it had promised.

        By the time of a step as it is now, which has estimates of its own.
        """
        before, pilot.last_verdict_at = pilot.last_verdict_at, now
        if before is None or self.steps.last.has_prefill or not pilot.promised or pilot.trying:
            return
        last_seconds = self.steps.last.ms / 1000
        if not (is_believable(last_seconds) and is_believable(now - before)):
            return
        if not self._is_settled(pilot, cohort):
            return
        forecast = pilot.promised * (now - before) / last_seconds
        # What its window was worth, so that luck with it does not count.
        chances = cohort.acceptance.chances(max(1, verdict.depth))
        if pilot.choice.is_tree:
            shape = shape_of(verdict.depth, verdict.window)
            brought = shape.outlook(chances, self._hits.rate(pilot.choice)).tokens
        else:
            brought = chain_outlook(verdict.depth, chances).tokens
        correction = self._corrections.setdefault(pilot.choice, Correction())
        correction.add(brought, forecast, of=self.sequences)
        for choice, other in self._corrections.items():
            if choice is not pilot.choice:
                other.forget(of=self.sequences)

    def _is_settled(self, pilot: Pilot, cohort: Cohort) -> bool:
        """Whether what it holds and drafts is no longer that of the policy before."""
        return pilot.verdicts > UNSETTLED + self._restart_steps(cohort)

    def _restart_steps(self, cohort: Cohort) -> float:
        """Steps that pass until its drafter answers a verdict."""
        times = self._drafters.get(cohort.like.drafter)
        restart_ms = times.restart_ms() if times is not None and times.known else 0.0
        return restart_ms / max(self.steps.last.ms, _LEAST_MS)

    def conditions(self, cohort: Cohort) -> Conditions | None:
        """What a forecast for all of a cohort rests on; None: too little was seen yet."""
        like = cohort.like
        times = self._drafters.get(like.drafter)
        if not self.steps.known or times is None or not times.known:
            return None
        members, _ = self._shares(cohort)
        return Conditions(
            chances=cohort.acceptance.chances(max(1, like.limit // like.branches)),
            step_ms=self._step_ms(cohort, hopeful=False),
            pass_ms=times.pass_ms(members) + times.pause_ms,
            tokens_a_pass=times.tokens_a_pass.value,
            restart_ms=times.restart_ms(),
        )

    def _step_ms(self, cohort: Cohort, *, hopeful: bool) -> StepMs:
        """Of a step of which each of the cohort has so many candidates and so many proposals."""
        members, others = self._shares(cohort)
        other_rows = float(others)
        other_messages = 0.0
        if others:
            own_rows = members + cohort.candidates
            other_rows = max(other_rows, self.steps.last.decoding_rows - own_rows)
            own_messages = members * (cohort.plan.messages if cohort.plan else 0.0)
            other_messages = max(0.0, self.steps.last.proposals - own_messages)

        def step_ms(candidates: float, messages: float) -> float:
            rows = other_rows + members * (1 + candidates * cohort.like.branches)
            messages = other_messages + members * messages
            return self.steps.ms(rows, others + members, messages, hopeful=hopeful)

        return step_ms

    def _shares(self, cohort: Cohort) -> tuple[int, int]:
        """Sequences of the batch that are of the cohort, and the others."""
        members = max(1, cohort.members)
        return members, max(0, self.sequences - members)

    def given(
        self, choice: Choice, conditions: Conditions, cohort: Cohort, crowd: int
    ) -> Conditions:
        """The conditions with what its branches bring and cost a choice that has some.

        `crowd`: sequences of its drafter. Of one that is not proven, and so is only tried, what it
        costs to read more proposals than ever came at a time is hoped to be no more.
        """
        if not self.proven(choice):
            conditions = replace(conditions, step_ms=self._step_ms(cohort, hopeful=True))
        if choice.is_tree:
            conditions = replace(conditions, second_chance=self._hits.rate(choice))
        if not choice.policy.fans_out:
            told = TOLD_A_CANDIDATE * cohort.like.branches if choice.is_tree else 0.0
            return replace(conditions, messages_a_candidate=told)
        times = self._drafters[cohort.like.drafter]
        members, _ = self._shares(cohort)
        pass_ms = times.pass_ms(members, branches=True) + times.pause_ms
        ahead = conditions.step_ms(0, 0) / pass_ms
        window = cohort.plan.window if cohort.plan else cohort.like.limit
        return replace(
            conditions,
            pass_ms=pass_ms,
            messages_a_fork=self._messages_a_fork(times),
            crowd=crowd,
            restart_ms=times.restart_ms(branches=True),
            hit_rate=self._hits.rate(choice),
            branch_length=self._hits.branch_length(choice, likely=min(window, ahead / 2)),
        )

    def _messages_a_fork(self, times: DraftTimes) -> float:
        """Proposals of a pass for a sequence, for each position that may fork."""
        if not (times.branch_messages.known and self._forks.known):
            return FIRST_FORKS
        return times.branch_messages.value / max(1.0, self._forks.value)

    def worth(self, forecast: Forecast, conditions: Conditions, cohort: Cohort) -> float:
        """Tokens/ms that each of the cohort adds to the batch, less what the others then lose."""
        members, others = self._shares(cohort)
        others_lose = 1 / conditions.step_ms(0, 0) - 1 / forecast.step_ms
        lost = others * max(1.0, self._tokens.value) * others_lose / members
        return forecast.tokens_per_ms - lost

    def is_bearable(self, candidates: int, chance: float) -> bool:
        """Whether a sequence may draft that is not known yet: if most are right, nobody loses."""
        if not self.steps.known:
            return True
        tokens, reached = float(self.sequences), 1.0
        for _ in range(candidates):
            reached *= chance
            tokens += reached
        last = self.steps.last
        plain_ms = self.steps.ms(last.rows, last.sequences, last.proposals)
        ms = self.steps.ms(last.rows + candidates, last.sequences, last.proposals)
        return tokens / ms >= self.sequences / plain_ms

    def hopes_for_branches(self) -> bool:
        """Whether branches sent ahead may be worth it, for all that is known."""
        return self._hits.rate(Choice.FANOUT) >= FIRST_HIT_RATE / 2

    def proven(self, choice: Choice) -> bool:
        """Whether enough is known of it for all to follow."""
        is_plain = not (choice.is_tree or choice.policy.fans_out)
        return is_plain or self._hits.weight >= PROOF

    def factor(self, choice: Choice) -> float:
        """What it brought over what was forecast, of late."""
        correction = self._corrections.get(choice)
        return 1.0 if correction is None else correction.factor

    def told(self, cohort: Cohort, conditions: Conditions, *, branches: bool) -> dict[str, float]:
        """What is told of a choice for a cohort (inference.proto, SpeculationStats.estimates)."""
        times = self._drafters[cohort.like.drafter]
        members, _ = self._shares(cohort)
        return {
            "sequences_alike": float(members),
            **self.steps.estimates(),
            "step_ms": conditions.step_ms(0, 0),
            "pass_ms": times.pass_ms(members, branches=branches),
            "round_trip_ms": times.round_trip_ms,
        }
