"""Policy `auto`: it learns from every step and pass, and chooses policy and window for the batch.

The choice is one for the whole batch: the policy and window with the most expected tokens per
millisecond. The tokens are forecast for each policy (forecast.py), the time by the parts of a step
(timings.py). One price holds for every row of a step: the tokens that the batch loses by its time.
A sequence verifies the candidates that are worth this price by its own acceptance; one whose drafts
fail has none.

On the target's host drafting may cost more than it gains. There, on a cold server, one sequence
drafts for a step, and then none for a few steps. The first choice compares both.

Where drafting does not pay, the batch rests: it decodes plainly. What a choice that is not in use
would bring must be looked at now and then. The time that a look lost is measured, and the next one
comes when this is REGRET of the time between them:

- a probe while the batch rests: some sequences draft for a few steps;
- a test of plain decoding while it drafts, if drafter and target share a host: all rest for a few
  steps, because only then it shows how long a step takes without drafting beside it;
- a probe of a sequence that has no candidates while others do.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from cluster.decoding.auto.choices import (
    CHAIN,
    FANOUT,
    FIRST_GUESS,
    FIRST_WINDOW,
    OFF,
    Choice,
    Pilot,
    Rate,
    drafting_choices,
)
from cluster.decoding.auto.forecast import (
    Conditions,
    Forecast,
    granted_ahead,
    lockstep,
    off,
    run_ahead,
)
from cluster.decoding.auto.timings import DraftTimes, Mean, StepModel
from cluster.decoding.counts import CountedVerdict, Foresight
from cluster.decoding.events import DrafterJoined, Proposed, StepDone, is_believable
from cluster.decoding.instructions import RunStep
from cluster.decoding.policy import forks_within
from cluster.decoding.token_tree import TokenTree, lead_length

REGRET = 0.01
"""The share of the speed that looking at other choices may cost."""

STANDS = 8
"""Steps until a choice is made again. The first choices, and those after a look or after the batch
grew or shrank by half, are made again sooner."""

TEST_STEPS, PROBE_STEPS, PROBE_WINDOW = 3, 5, 1
"""Steps of a test of plain decoding, the first of which still has drafting beside it; steps of a
probe, at most, and its window. The smallest window is enough: the drafter's next token is compared
with the verdict's own one as well."""

LEAST_APART = 16
"""Steps between two looks, at least."""

PROBED = 16
"""One sequence of this number is probed at a time."""

FIRST_PASSES = 3
"""Passes of a drafter before a choice is made, unless it needs more than STANDS steps for them. The
first pass of a process takes many times as long as later ones: the median of three ignores it."""

FIRST_HIT_RATE = 0.5
"""Share of refused candidates whose place a branch holds, assumed before any is observed."""

PATIENCE = 3.0
"""Upper bound on a wait, as a multiple of a window's expected drafting time. It limits what a
drafter that hangs can cost."""

FREE_TOLL = 0.05
"""The most that a millisecond of drafting may add to a step of a target that has its own cores."""

LEAST_GAIN, MOST_GAIN = 0.01, 0.05
"""Bounds on the gain that another choice must promise. In between, it is the standard error."""

TO_DRAFT = 0.05
"""Drafting that begins must promise this much on top: the drafter first reads what is new to it."""

GAIN_TO_BRANCH = 1.02
"""Branches must promise this much more than a chain: each keeps the drafter and the driver busy."""

_TRUST, _RECENT = 20.0, 0.98
"""Steps for which a forecast is trusted, against what came of it; weight of earlier steps."""

_UNSETTLED = 3
"""Steps after a change whose outcome still stems from what was before."""

_FADED = 6.0
"""The most trials that earlier ones count for when a probe begins."""


@dataclass(slots=True)
class Drafter:
    """What is known of a drafter."""

    shares_host: bool
    times: DraftTimes = field(default_factory=DraftTimes)
    acceptance: Rate = field(default_factory=lambda: Rate(FIRST_GUESS))
    hits: Rate = field(default_factory=lambda: Rate(FIRST_HIT_RATE))
    hit_length: Mean = field(default_factory=Mean)
    caught_up: bool = False  # Whether its last pass may have read a prompt.


@dataclass(frozen=True, slots=True)
class Plan:
    """The choice for the batch. With `OFF` it rests.

    `price`: tokens that a row costs the batch. `rate`: expected tokens/ms of the batch, `plain`:
    those of plain decoding. `promised`: the rate without correction by what came of earlier
    forecasts.
    """

    choice: Choice
    window: int
    price: float = 0.0
    rate: float = 0.0
    plain: float = 0.0
    promised: float = 1.0
    patience: float = math.inf
    told: Mapping[str, float] = field(default_factory=dict)

    @property
    def rests(self) -> bool:
        """Whether it is plain decoding."""
        return self.choice is OFF

    def window_for(self, acceptance: float) -> int:
        """The candidates whose chance is worth their price, for a sequence; 0: none."""
        if self.choice.policy.waits or self.choice.is_tree:
            return self.window if acceptance > self.price or self.choice.is_tree else 0
        if acceptance <= self.price:
            return 0
        if self.price <= 0 or acceptance >= 1:
            return self.window
        return max(1, min(self.window, int(math.log(self.price) / math.log(acceptance))))


class AutoChooser:
    """Steers each sequence that has a Pilot. Times are seconds, estimates milliseconds."""

    def __init__(self, *, observes: bool = True) -> None:
        """`observes`: False if no request will ever have the policy `auto`."""
        self.observes = observes
        self.choices: dict[str, int] = {}
        """Verdicts by the chosen policy, over all sequences."""
        self.steps = StepModel()
        self._drafters: dict[str, Drafter] = {}
        self._plan: Plan | None = None  # None: nothing is known yet.
        # Tokens brought, and forecast: of a choice, and of all with branches (True) or without.
        self._factors: dict[Choice | bool, tuple[float, float]] = {}
        self._batch: list[Pilot] = []  # Pilots of the sequences that decode.
        self._coming = 0  # Sequences whose prompts are still being read.
        self._worth = 0.0  # Expected tokens of this step's windows.
        self._step = self._changed_at = self._decide_at = self._decisions = 0
        self._decided_for = 0  # Sequences of the batch at the last choice.
        self._look_at = 0  # When the next probe or test of plain decoding begins.
        self._looking = 0  # Steps that are left of it.
        self._looks = 2
        # At the start: a sequence reads its prompt; the first test of plain decoding has begun.
        self._reads = self._tested = False
        self._drafting = False  # Whether any sequence of the batch drafts.
        # A step's time and the batch's tokens/ms before the present look, and what it has lost.
        self._usual_ms, self._usual_rate, self._lost_ms = 1.0, 0.0, 0.0
        self._lost_steps = 1.0  # The loss of the last look, in steps.
        self._rested_ms = 0.0  # Time of a step when the rest began.
        self._probing = 0
        self._asked_at: int | None = None  # The step when a drafter without a pass was asked.
        self._last_at: float | None = None
        self._one_group = True  # Answers of several groups overlap, so no time is that of one.
        self._num_drafters, self._num_groups = 0, 1

    # What the scheduler tells.

    def joined(self, event: DrafterJoined) -> None:
        """A drafter joined. What was known of one of this name does not hold any more."""
        self._drafters[event.drafter] = Drafter(event.shares_host)

    def admitted(self, pilot: Pilot) -> None:
        """A sequence begins: with the present choice, or with the first that is tried."""
        assert self.observes, "it was told that it would have nothing to choose"
        plan = self._plan
        if plan is None:
            # On the target's host one sequence tries first, since drafting may cost more than it
            # gains. Its drafter reads a long prompt while the target does.
            if not self._shares_host or (pilot.catches_up and not self._reads):
                pilot.follow(CHAIN, FIRST_WINDOW)
                self._reads = True
            else:
                pilot.rest()
        elif plan.rests or self._looking:
            pilot.rest()
        elif plan.choice.policy.replicates:
            pilot.follow(FANOUT, FIRST_WINDOW)  # Only a running one shows if a group is to spare.
        elif plan.choice.policy.waits:
            pilot.follow(CHAIN, FIRST_WINDOW)
        else:
            # While prompts are computed drafters run far ahead, so it begins with a small window.
            pilot.follow(plan.choice, min(plan.window, FIRST_WINDOW * pilot.branches))

    def sent(self, now: float, step: RunStep, ahead: Sequence[str | None]) -> None:
        """A step goes out to the target. `ahead`: drafters that may draft while it computes."""
        if not self.observes:
            return
        drafts = any(
            one.shares_host for name in set(ahead) if (one := self._drafters.get(name or ""))
        )
        self.steps.sent(now, step, drafts=drafts)
        # A choice takes milliseconds. But for the first ones, it is made while the target computes.
        if self._plan is not None and self._step >= self._decide_at:
            self._decide()

    def drafted(self, event: Proposed, continued: list[Pilot], *, catches_up: bool) -> None:
        """A pass of a drafter arrived. `continued`: sequences whose committed text it continues.

        `catches_up`: it may have read a prompt, or what was committed during a rest. Such a
        pass says nothing of the time of others, nor of how soon the drafter answers a verdict.
        """
        if not self.observes:
            return
        seconds, proposals = event.believable_seconds, event.proposals
        drafter = self._drafters.setdefault(event.drafter, Drafter(shares_host=False))
        # The next pass reads what was committed while the drafter read.
        caught_up, drafter.caught_up = drafter.caught_up, catches_up
        catches_up |= caught_up
        times = drafter.times
        between = drafter.shares_host and self.steps.is_idle
        beside_ms = 1000 * seconds if drafter.shares_host else 0.0
        self.steps.heard(event.now, len(proposals), beside_ms)
        waiting = [one for one in continued if one.restarted_at is not None]
        if waiting and not catches_up:
            ms = median([1000 * (event.now - (one.restarted_at or 0.0)) for one in waiting])
            if is_believable(ms / 1000):
                times.add_restart(ms, kind=_kind(waiting[0].choice))
        for pilot in self._batch if catches_up else waiting:
            pilot.restarted_at = None
        # In a rest, what arrives was begun before, and may have read as well.
        all_rest = (self._plan is not None and self._plan.rests) != (self._looking > 0)
        if not proposals or seconds <= 0 or catches_up or all_rest:
            return
        # A pass adds one level to a tree, which may come in several proposals.
        told: dict[int, int] = {}
        grown: set[int] = set()
        for one in proposals:
            before = told.get(one.sequence_id, 0)
            told[one.sequence_id] = before + 1
            if before or one.parents:
                grown.add(one.sequence_id)
        tokens = len(grown) + sum(
            [len(one.token_ids) for one in proposals if one.sequence_id not in grown]
        )
        if not tokens:
            return  # It only tells that it has nothing more to propose: no pass was computed.
        times.heard(event.now, 1000 * seconds)
        kind = "branches" if grown else "between" if between else "chain"
        tokens = max(1, tokens // event.passes)
        times.add_pass(batch=len(told), tokens=tokens, ms=1000 * event.seconds_a_pass, kind=kind)

    def answered(
        self, event: StepDone, batch: list[Pilot], *, coming: int, drafters: int, groups: int
    ) -> None:
        """A step came back. Call before its verdicts are handed in.

        `batch`: pilots of the group's sequences that decode. `coming`: number of others,
        whose prompts are still being read. `drafters`: how many can be used. `groups`: how many
        target groups can verify a sequence.
        """
        self._step += 1
        self.steps.answered(event)
        self._batch, self._coming = batch, coming
        self._num_drafters, self._num_groups = drafters, groups
        self._probing = sum([pilot.trying > 0 for pilot in self._batch])
        self._drafting = any(not pilot.rests for pilot in self._batch)
        self._one_group &= event.group == 0
        self._correct(event.now)
        self._look()
        changed = not 2 / 3 < len(self._batch) / max(1, self._decided_for) < 3 / 2
        if changed:
            self._decide_at, self._decisions = self._step, min(self._decisions, STANDS)
        if self._step >= self._decide_at and (changed or self._decisions < STANDS):
            self._decide()

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
        name = pilot.choice.name
        for choices in (pilot.choices, self.choices):
            choices[name] = choices.get(name, 0) + 1
        if tree.num_candidates or pilot.rests or drafter is None:
            pilot.restarted_at = None
        elif pilot.restarted_at is None:
            pilot.restarted_at = now
        if drafter is None:
            return
        known = self._drafters.setdefault(drafter, Drafter(shares_host=False))
        if drafter != pilot.drafter:
            pilot.meets(drafter, known.acceptance)
        tried, right = pilot.trials(verdict)
        sequences = self.steps.last.sequences
        if tried:
            pilot.acceptance.add(tried, right)
            known.acceptance.add(tried, right, of=sequences)
        self._worth += _expected(pilot.acceptance.value, verdict)
        if pilot.choice.policy.fans_out:
            self._count_hits(known, pilot, verdict, tree)
        self._steer(pilot)

    def estimates(self) -> dict[str, float]:
        """The estimates for the target and each drafter, by name, for statistics."""
        found = self.steps.estimates()
        for name, one in self._drafters.items():
            if one.times.known:
                found[f"{name}.pass_ms"] = one.times.pass_ms(len(self._batch) or 1)
                found[f"{name}.round_trip_ms"] = one.times.round_trip_ms
            if one.acceptance.weight:
                found[f"{name}.acceptance"] = one.acceptance.value
            if one.hits.weight:
                found[f"{name}.hit_rate"] = one.hits.value
        return found

    # How it learns and decides.

    @property
    def _shares_host(self) -> bool:
        """Whether a drafter is on the target's host."""
        return any(one.shares_host for one in self._drafters.values())

    @property
    def _branches_are_free(self) -> bool:
        """Whether drafters on the target's host have cores or a GPU of their own.

        On the target's cores they would also compete with the driver, which reads each branch.
        """
        return self.steps.known_toll and self.steps.toll <= FREE_TOLL

    def _count_hits(
        self, drafter: Drafter, pilot: Pilot, verdict: CountedVerdict, tree: TokenTree
    ) -> None:
        if self._step < self._changed_at + _UNSETTLED:
            return
        sequences = self.steps.last.sequences
        if verdict.firsts is not None:
            missed = verdict.firsts[: verdict.accepted].count(False)
            if missed:
                drafter.hits.add(missed, missed, of=sequences)
        if verdict.foresight in (Foresight.BRANCH, Foresight.OTHERS):
            hit = verdict.foresight is Foresight.BRANCH
            drafter.hits.add(1, int(hit), of=sequences)
            if hit:
                drafter.hit_length.add(lead_length(tree.root, pilot.window), of=sequences)

    def _correct(self, now: float) -> None:
        """Compare what the plan brought since the last step with its forecast."""
        before, self._last_at = self._last_at, now
        worth, self._worth = self._worth, 0.0
        plan = self._plan
        if self._looking and plan is not None and before is not None:
            rate = self._usual_rate
            self._lost_ms += (now - before) * 1000 - (worth / rate if rate else 0.0)
        settled = self._step > self._changed_at + _UNSETTLED and not self._looking
        settled &= not any(pilot.catches_up and not pilot.rests for pilot in self._batch)
        if before is None or plan is None or not (settled and self._one_group):
            return
        elapsed_ms = (now - before) * 1000
        if self.steps.last.has_prefill or not is_believable(now - before):
            return
        if not worth or elapsed_ms > 3 * self.steps.last.ms:
            return  # There was nothing to do for a while.
        share = worth / (plan.promised * elapsed_ms)
        keys: tuple[Choice | bool, ...] = (plan.choice, plan.choice.policy.fans_out)
        for key in keys:
            brought, forecast = self._factors.get(key, (_TRUST, _TRUST))
            self._factors[key] = (_RECENT * brought + share, _RECENT * forecast + 1.0)

    def _factor(self, choice: Choice) -> float:
        """What came of the choice over its forecasts; if it is new, of others with branches."""
        known = self._factors.get(choice)
        if known is None and choice.policy.fans_out:
            known = self._factors.get(True)
        return known[0] / known[1] if known is not None else 1.0

    def _look(self) -> None:
        """Begin or end a probe or a test of plain decoding."""
        plan = self._plan
        if plan is None:
            if self._looking:
                self._looking -= 1
                if self.steps.known_toll:
                    self._looking = 0
            elif self.steps.last.drafting_ms and self._batch and not self._tested:
                self._looking, self._tested = TEST_STEPS, True
            return
        if self._looking:
            self._looking -= 1
            if not self._looking:
                self._decide_at, self._changed_at = self._step, self._step
                self._decisions = 0
                self._lost_steps = max(0.0, self._lost_ms / self._usual_ms)
                self._next_look()
            return
        ms = self.steps.recent_ms
        if plan.rests and self._rested_ms and ms < 0.8 * self._rested_ms:
            self._look_at = self._step  # The host is faster now: what was too slow may pay.
        beside = plan.choice.policy.drafting_is_free and self._shares_host
        if self._step < self._look_at or not (plan.rests or beside):
            return
        self._looks += 1
        self._lost_ms, self._usual_ms = 0.0, max(1e-3, self.steps.last.ms)
        self._usual_rate = self.steps.last.sequences / self._usual_ms if plan.rests else plan.rate
        self._look_at = self._step + LEAST_APART
        if plan.rests:
            self._looking, self._rested_ms = PROBE_STEPS, ms
            for one in self._drafters.values():
                one.acceptance.fade(_FADED)
                one.hits.fade(_FADED)
                one.times.keep(FIRST_PASSES - 1)
            self._factors.clear()
        else:
            self._looking = TEST_STEPS

    def _next_look(self) -> None:
        """Choose when to look next, by what the last look cost."""
        # What was believed first is the least certain, so the first looks come sooner.
        apart = min(self._lost_steps / REGRET, LEAST_APART * 2**self._looks)
        self._look_at = self._step + max(LEAST_APART, round(apart))

    def _decide(self) -> None:
        """Choose for the batch, by what is known now."""
        batch = [pilot for pilot in self._batch if pilot.drafter is not None]
        if not batch or self._looking or not self.steps.known:
            return
        names = [pilot.drafter for pilot in batch]
        most = max(set(names), key=names.count)  # The drafter of most of them.
        assert most is not None
        drafter = self._drafters[most]
        if drafter.times.num_passes < FIRST_PASSES or not drafter.acceptance.weight:
            # A drafter that does not answer in the time of some steps cannot keep up with them.
            self._asked_at = self._step if self._asked_at is None else self._asked_at
            if self._step < self._asked_at + STANDS:
                return
            if not drafter.times.known:
                if not (self._plan and self._plan.rests):
                    self._take(Plan(OFF, 1))
                return
        self._decisions += 1
        self._decide_at = self._step + min(STANDS, max(1, self._decisions // 2))
        self._decided_for = len(batch)
        self._take(self._best(batch, drafter))

    def _take(self, plan: Plan) -> None:
        before, self._plan = self._plan, plan
        if before is None or before.choice is not plan.choice:
            self._changed_at = self._step
            if before is None or before.rests is not plan.rests:
                self._rested_ms = self.steps.recent_ms if plan.rests else 0.0
                self._next_look()

    def _best(self, batch: list[Pilot], drafter: Drafter) -> Plan:
        """The best plan."""
        before = self._plan
        chances = [pilot.acceptance.value for pilot in batch]
        price = before.price if before is not None and not before.rests else 0.0
        members = [one for one in chances if one > price] or [max(chances)]
        acceptance = sum(members) / len(members)
        sequences = max(self.steps.last.sequences, len(batch))
        conditions = self._conditions(drafter, acceptance, len(members), sequences)
        others = sequences - len(members)

        def rate(forecast: Forecast) -> float:
            return (len(members) * forecast.tokens + others + self._coming) / forecast.ms

        plain_forecast = off(conditions)
        plain = rate(plain_forecast) * self._factor(OFF)
        largest = max([pilot.window for pilot in batch])
        limit = max([pilot.limit for pilot in batch])
        found: list[tuple[float, Choice, int, Forecast]] = []
        for choice in drafting_choices():
            if not self._may(choice, batch, drafter, len(members), sequences):
                continue
            policy = choice.policy
            given = self._given(conditions, choice, drafter, len(members))
            tried: list[tuple[float, Choice, int, Forecast]] = []
            for window in _windows(largest, limit):
                forecast = _forecast(choice, given, window)
                worth = rate(forecast) * self._factor(choice)
                tried.append((worth, choice, window, forecast))
            best = max(tried, key=lambda one: one[0])
            worth = best[0]
            if policy.fans_out:
                found.append((worth / GAIN_TO_BRANCH, *best[1:]))
            elif given.restart_ms < plain_forecast.ms:
                found.append(best)
            else:  # The grant of a small window runs out far away, which no forecast shows.
                found.append([one for one in tried if one[0] >= worth * (1 - LEAST_GAIN)][-1])
        best = max(found, key=lambda one: one[0], default=(0.0, OFF, 1, plain_forecast))
        same = [one for one in found if before is not None and one[1] is before.choice]
        gain = self._least_gain(drafter, conditions)
        if same:
            kept = max(same, key=lambda one: one[0])
            best = kept if best[0] < kept[0] * (1 + gain) else best
        worth, choice, window, forecast = best
        margin = gain + TO_DRAFT if before is None or before.rests else 0.0
        drafts = worth >= plain * (1 + margin)
        rows = sequences + len(members) * forecast.candidates
        price = self.steps.ms_per_row(sequences, rows) * worth
        told = {
            **self.steps.estimates(),
            "step_ms": plain_forecast.ms,
            "sequences_alike": float(len(members)),
            "pass_ms": conditions.pass_ms,
            "round_trip_ms": drafter.times.round_trip_ms,
            "window": float(window),
            "tokens_per_ms": worth / sequences,
            "plain_tokens_per_ms": plain / sequences,
        }
        if not drafts:
            return Plan(OFF, window, price, worth, plain, rate(plain_forecast), told=told)
        passes = window / max(1.0, conditions.tokens_a_pass)
        drafting_ms = conditions.restart_ms + passes * conditions.pass_ms
        patience = PATIENCE * drafting_ms / 1000
        return Plan(choice, window, price, worth, plain, rate(forecast), patience, told)

    def _least_gain(self, drafter: Drafter, conditions: Conditions) -> float:
        """The gain that a change must promise: the standard error of a forecast, as a share."""
        chance = conditions.acceptance
        error = min(drafter.acceptance.error, chance)
        lower, upper = (
            run_ahead(replace(conditions, acceptance=one), FIRST_WINDOW).tokens_per_ms
            for one in (chance - error, min(1.0, chance + error))
        )
        return min(MOST_GAIN, max(LEAST_GAIN, (upper - lower) / (upper + lower)))

    def _may(
        self, choice: Choice, batch: list[Pilot], drafter: Drafter, members: int, sequences: int
    ) -> bool:
        """Whether the batch can have a choice."""
        policy = choice.policy
        if not any(pilot.allows(choice) for pilot in batch):
            return False
        if policy.needs.drafters > self._num_drafters or policy.needs.groups > self._num_groups:
            return False
        if policy.waits and members < sequences:
            return False  # Beside others, a sequence that waits misses steps.
        if policy.fans_out:
            if drafter.shares_host and not self._branches_are_free:
                return False
            if not drafter.times.covers(members):
                return False  # They add rows to a pass, and it is not known yet what rows cost.
            crowd = max(members, sequences // max(1, self._num_drafters))
            return forks_within(1, pace=0.0, crowd=crowd) > 0
        return True

    def _conditions(
        self, drafter: Drafter, acceptance: float, members: int, sequences: int
    ) -> Conditions:
        steps, others = self.steps, sequences - members
        shares = drafter.shares_host

        def step_ms(candidates: float, drafting_ms: float) -> float:
            rows = others + members * (1 + candidates)
            beside = drafting_ms if shares else 0.0
            return steps.ms(rows, sequences, drafting_ms=beside)

        times = drafter.times
        return Conditions(
            acceptance=acceptance,
            step_ms=step_ms,
            pass_ms=times.pass_ms(members) + times.pause_ms,
            tokens_a_pass=times.tokens_a_pass.value,
            restart_ms=times.restart_ms(members),
            crowd=members,
        )

    def _given(
        self, conditions: Conditions, choice: Choice, drafter: Drafter, members: int
    ) -> Conditions:
        """`conditions`, completed by the gain and the cost of a choice."""
        times = drafter.times
        if choice.policy.waits:
            pass_ms = times.pass_ms(members, kind="between") + times.pause_ms
            return replace(
                conditions, pass_ms=pass_ms, restart_ms=times.restart_ms(members, kind="between")
            )
        if not choice.policy.fans_out:
            return conditions
        pass_ms = times.pass_ms(members, kind="branches") + times.pause_ms
        ahead = conditions.step_ms(0.0, 0.0) / pass_ms
        length = drafter.hit_length
        window = self._plan.window if self._plan is not None else FIRST_WINDOW
        pace = 0.0 if self._plan is not None and self._plan.choice.is_tree else ahead
        forks = forks_within(granted_ahead(window), pace=pace, crowd=max(1, members))
        rows = members * (1 + forks)
        pass_ms = times.pass_ms(members, kind="branches", rows=rows) + times.pause_ms
        hits = drafter.hits.value
        groups = self._num_groups if choice.policy.replicates else 1
        return replace(
            conditions,
            pass_ms=pass_ms,
            restart_ms=times.restart_ms(members, kind="branches"),
            hit_rate=hits,
            branch_length=(length.value if length.weight else ahead / 2) / groups,
            second_chance=hits if choice.is_tree else 0.0,
            groups=groups,
        )

    def _steer(self, pilot: Pilot) -> None:
        """Have a sequence follow the plan, or what is looked at."""
        plan = self._plan
        if plan is None:
            if self._looking:
                pilot.rest()
            elif pilot.rests and not (self._shares_host and self._drafting):
                pilot.follow(CHAIN, FIRST_WINDOW)
            return
        pilot.told, pilot.patience = plan.told, plan.patience
        if self._looking:
            probes = plan.rests and self._probing < max(1, self.steps.last.sequences // PROBED)
            if probes and pilot.rests:
                self._probing += 1
                pilot.acceptance.fade(_FADED)
                pilot.trying = self._looking
                pilot.follow(CHAIN, PROBE_WINDOW)
            elif not plan.rests:
                pilot.rest()
            return
        if plan.rests:
            if not pilot.rests:
                pilot.rest()
            return
        window = plan.window_for(pilot.acceptance.value)
        if window or pilot.trying:
            pilot.trying = max(0, pilot.trying - 1) if not window else 0
            pilot.cut_for = 0
            pilot.follow(plan.choice, window or PROBE_WINDOW)
            return
        pilot.rest()
        pilot.cut_for += 1
        most = max(1, self.steps.last.sequences // PROBED)
        apart = max(LEAST_APART, PROBE_STEPS * plan.price / REGRET)
        if pilot.cut_for >= apart and self._probing < most:
            self._probing += 1
            pilot.acceptance.fade(_FADED)
            pilot.trying = PROBE_STEPS


def _expected(acceptance: float, verdict: CountedVerdict) -> float:
    """Tokens to expect of a verdict's window, so that luck has no effect."""
    if verdict.firsts is not None:
        return float(verdict.committed)
    return sum([acceptance**place for place in range(verdict.depth + 1)])


def _windows(before: int, limit: int) -> list[int]:
    """Powers of two up to twice the window before, and at least up to twice the first one, since
    larger steps must be measured first.
    """
    most = max(1, min(limit, 2 * max(before, FIRST_WINDOW)))
    return sorted({1 << power for power in range(most.bit_length())} | {most})


def _forecast(choice: Choice, conditions: Conditions, window: int) -> Forecast:
    if not choice.policy.drafting_is_free:
        return lockstep(conditions, window)
    return run_ahead(conditions, window, is_tree=choice.is_tree)


def _kind(choice: Choice) -> str:
    """The kind of passes and restarts of a choice (DraftTimes)."""
    if choice.policy.waits:
        return "between"
    return "branches" if choice.policy.fans_out else "chain"
