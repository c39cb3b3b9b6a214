"""The estimates of the chooser of `auto`, and what a forecast is worth by these estimates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from cluster.decoding.auto.cohorts import (
    FANOUT,
    FIRST_GUESS,
    UNSETTLED,
    Acceptance,
    Choice,
    Cohort,
    Correction,
    Pilot,
)
from cluster.decoding.auto.forecast import (
    Conditions,
    Forecast,
    StepMs,
    chain_outlook,
    granted_ahead,
    shape_of,
)
from cluster.decoding.counts import CountedVerdict, Foresight
from cluster.decoding.events import Proposed, is_believable
from cluster.decoding.policy import forks_within
from cluster.decoding.timings import DraftTimes, Mean, StepModel
from cluster.decoding.token_tree import TokenTree
from cluster.decoding.windows import lead_length

FIRST_HIT_RATE = 0.5
"""Hit rate assumed for branches before any is observed, high enough that they are tried."""

_DOUBT = 4.0

FIRST_FORKS = 0.5
"""Proposals a pass for each position that may fork, before any was seen."""

TOLD_A_CANDIDATE = 1.5
"""Proposals for each candidate that a step may verify, in a tree without branches sent ahead. The
drafter sends each node once, and sends new nodes after a wrong one. So the number is 1 if most
candidates are right, and 1.5 if few are.
"""

PROOF = 5.0
"""A policy with branches counts as known once its decayed number of verdicts against the first
candidate reaches this. Six verdicts do."""

_LEAST_MS = 1e-3


class Hits:
    """Hit rates and lengths of branches, by policy; a part of the beliefs."""

    def __init__(self) -> None:
        # By name of the policy: the share of positions with a wrong first candidate where another
        # one was right. By choice: the candidates then held after it.
        self._rates: dict[str, Mean] = {}
        self._lengths: dict[Choice, Mean] = {}

    @property
    def weight(self) -> float:
        """Decayed number of verdicts against a first candidate, over all rates."""
        return sum(rate.weight for rate in self._rates.values())

    def rates(self) -> dict[str, float]:
        """The counted rates, by the policy that made the second guesses."""
        return {policy: rate.value for policy, rate in self._rates.items()}

    def count(
        self,
        pilot: Pilot,
        verdict: CountedVerdict,
        rights: Sequence[bool],
        tree: TokenTree,
        *,
        of: int,
    ) -> None:
        """Learn from a verdict on a sequence.

        `rights`: whether its first candidates were right. `tree`: what the verdict left. `of`:
        sequences of the step.
        """
        rate = self._rates.setdefault(_foreseen_as(pilot.choice), Mean())
        for _ in range(rights[: verdict.accepted].count(False)):
            rate.add(1.0, of=of)
        if verdict.foresight in (Foresight.BRANCH, Foresight.OTHERS):
            hit = verdict.foresight is Foresight.BRANCH
            # Nothing was sent ahead, so a position with one candidate says nothing of second ones.
            if hit or verdict.refused_all or pilot.choice.policy.fans_out:
                rate.add(float(hit), of=of)
            if hit:
                lengths = self._lengths.setdefault(pilot.choice, Mean())
                lengths.add(lead_length(tree.root, pilot.window), of=of)

    def rate(self, choice: Choice) -> float:
        """The hit rate, near that of other policies while little is known of this one's."""
        own, likely = _foreseen_as(choice), FIRST_HIT_RATE
        for policy, rate in self._rates.items():
            likely = _leaning(rate, likely) if policy is not own else likely
        return _leaning(self._rates.get(own), likely)

    def branch_length(self, choice: Choice, *, likely: float) -> float:
        """Candidates held after a hit, near `likely` while little is known."""
        return _leaning(self._lengths.get(choice), likely)


def _foreseen_as(choice: Choice) -> str:
    """Name of the policy whose branches a choice uses. With several groups these are fanout's."""
    return FANOUT.policy.name if choice.policy.replicates else choice.policy.name


def _leaning(mean: Mean | None, prior: float) -> float:
    """The mean, drawn towards `prior` while it rests on few values."""
    if mean is None:
        return prior
    return (mean.value * mean.weight + prior * _DOUBT) / (mean.weight + _DOUBT)


class Beliefs:
    """Observes every step and pass. Events carry seconds; estimates are milliseconds."""

    def __init__(self) -> None:
        self.steps = StepModel()
        self._drafters: dict[str, DraftTimes] = {}
        self._acceptances: dict[str, Acceptance] = {}
        self._corrections: dict[Choice, Correction] = {}
        self._hits = Hits()
        self._forks = Mean()  # Positions that may fork, of sequences with branches.
        self._tokens = Mean()  # Tokens of a verdict.

    @property
    def sequences(self) -> int:
        """Sequences that decoded in the last step."""
        return self.steps.last.sequences

    def estimates(self) -> dict[str, float]:
        """The estimates for the target and each drafter, by name, for statistics."""
        found = self.steps.estimates()
        for name, times in self._drafters.items():
            if times.known:
                found[f"{name}.pass_ms"] = times.pass_ms(self.sequences)
                found[f"{name}.round_trip_ms"] = times.round_trip_ms
        for name, acceptance in self._acceptances.items():
            found[f"{name}.acceptance"] = acceptance.mean
        for policy, rate in self._hits.rates().items():
            found[f"{policy}.hit_rate"] = rate
        return found

    def drafted(self, event: Proposed) -> None:
        """Learn from a pass of a drafter."""
        self.steps.heard(len(event.proposals))
        if not event.proposals or event.believable_seconds <= 0:
            return
        # A pass adds one level to a tree, which may come in several proposals.
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
        """Learn how long a drafter took to answer a verdict.

        Candidates of the pass continue what is committed of this sequence.
        """
        if pilot.restarted_at is None:
            return
        times = self._drafters.get(event.drafter)
        seconds = event.now - pilot.restarted_at
        if times is not None and is_believable(seconds):
            times.add_restart(seconds * 1000, branches=pilot.policy.fans_out)
        pilot.restarted_at = None

    def acceptance(self, drafter: str) -> Acceptance:
        """The acceptance of everything that the drafter drafted."""
        return self._acceptances.setdefault(drafter, Acceptance(FIRST_GUESS))

    def learn(
        self, pilot: Pilot, cohort: Cohort, verdict: CountedVerdict, now: float, tree: TokenTree
    ) -> None:
        """Learn from a verdict on a sequence of this cohort. `tree`: what the verdict left."""
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
            else:  # A miss counts only once the first branches have come, or should have.
                beside = tree.num_candidates - lead_length(tree.root, tree.num_candidates)
                passed = 1 / (1 + self._restart_steps(cohort))
                pilot.until_branches = 0.0 if beside else pilot.until_branches - passed
        elif pilot.choice.is_tree:
            self._hits.count(pilot, verdict, rights, tree, of=self.sequences)

    def _forks_of(self, pilot: Pilot, cohort: Cohort) -> int:
        """Positions of the sequence's chain that may fork."""
        times = self._drafters.get(cohort.like.drafter)
        pass_ms = times.pass_ms(self.sequences, branches=True) if times else 0.0
        bounded = pass_ms and not pilot.choice.is_tree
        pace = self.steps.last.ms / pass_ms if bounded else 0.0
        crowd = max(1, cohort.members)
        return forks_within(granted_ahead(pilot.window), pace=pace, crowd=crowd)

    def _correct(self, pilot: Pilot, cohort: Cohort, verdict: CountedVerdict, now: float) -> None:
        """Compare the tokens since the previous verdict with what the policy promised.

        The promise is scaled by the present time of a step, which other estimates cover.
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
        # Count the tokens to expect of the window, not those that came, so that luck has no effect.
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
        """Whether what the sequence holds and drafts no longer stems from the policy before."""
        return pilot.verdicts > UNSETTLED + self._restart_steps(cohort)

    def _restart_steps(self, cohort: Cohort) -> float:
        """Steps that pass until the cohort's drafter answers a verdict."""
        times = self._drafters.get(cohort.like.drafter)
        restart_ms = times.restart_ms() if times is not None and times.known else 0.0
        return restart_ms / max(self.steps.last.ms, _LEAST_MS)

    def conditions(self, cohort: Cohort) -> Conditions | None:
        """The conditions of forecasts for the whole cohort; None: too little was seen yet."""
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
        """A step's time, as a function of each member's candidates and proposals.

        `hopeful`: see `given`.
        """
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
        """How many sequences of the batch are in the cohort, and how many are not."""
        members = max(1, cohort.members)
        return members, max(0, self.sequences - members)

    def given(
        self, choice: Choice, conditions: Conditions, cohort: Cohort, crowd: int
    ) -> Conditions:
        """`conditions`, completed by the gain and the cost of a choice's branches or trees.

        `crowd`: sequences of the drafter. If the choice is not proven, only a few sequences try it.
        Then assume that it costs nothing more to read more proposals than ever arrived in a step.
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
        """Proposals a pass for a sequence, for each position that may fork."""
        if not (times.branch_messages.known and self._forks.known):
            return FIRST_FORKS
        return times.branch_messages.value / max(1.0, self._forks.value)

    def worth(self, forecast: Forecast, conditions: Conditions, cohort: Cohort) -> float:
        """Tokens/ms that each member adds to the batch, less what other sequences lose by it."""
        members, others = self._shares(cohort)
        others_lose = 1 / conditions.step_ms(0, 0) - 1 / forecast.step_ms
        lost = others * max(1.0, self._tokens.value) * others_lose / members
        return forecast.tokens_per_ms - lost

    def is_bearable(self, candidates: int, chance: float) -> bool:
        """Whether trying a sequence costs the batch nothing if each candidate has this chance."""
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
        """Whether branches sent ahead may pay, by what is known."""
        return self._hits.rate(FANOUT) >= FIRST_HIT_RATE / 2

    def proven(self, choice: Choice) -> bool:
        """Whether enough is known of the choice for all members to follow it."""
        is_plain = not (choice.is_tree or choice.policy.fans_out)
        return is_plain or self._hits.weight >= PROOF

    def factor(self, choice: Choice) -> float:
        """Recent tokens of the choice over its forecasts; 1 while nothing is known."""
        correction = self._corrections.get(choice)
        return 1.0 if correction is None else correction.factor

    def told(self, cohort: Cohort, conditions: Conditions, *, branches: bool) -> dict[str, float]:
        """What the statistics say of a choice (inference.proto, SpeculationStats.estimates)."""
        times = self._drafters[cohort.like.drafter]
        members, _ = self._shares(cohort)
        return {
            "sequences_alike": float(members),
            **self.steps.estimates(),
            "step_ms": conditions.step_ms(0, 0),
            "pass_ms": times.pass_ms(members, branches=branches),
            "round_trip_ms": times.round_trip_ms,
        }
