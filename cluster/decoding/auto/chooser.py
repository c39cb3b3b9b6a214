"""Policy `auto`: it learns from every step and pass, and chooses policy and window for the batch.

What is tried: each policy that the requests allow with each window, and plain decoding. All
sequences have the same choice. How it is measured: a forecast (forecast.py) from measured times
(timings.py) and acceptance gives tokens per millisecond, and what a choice brought over what was
forecast corrects it. How it is chosen: the best one; drafting begins only for TO_DRAFT more.

One price holds for every row of a step: the tokens that the batch loses by its time. A sequence
verifies the candidates that are worth this price by its own acceptance; one whose drafts fail has
none.

On the target's host drafting may cost more than it gains. There, on a cold server, one sequence
drafts for a step, and then none for a few steps. The first choice compares both.

Where drafting does not pay, the batch rests: it decodes plainly. What is not in use must be looked
at now and then. The time that a look lost is measured, and the next one comes when this is REGRET
of the time between them:

- a probe while the batch rests: some sequences draft for a few steps;
- a test of plain decoding while it drafts, if drafter and target share a host: all rest for a few
  steps, because only then it shows how long a step takes without drafting beside it;
- a probe of a sequence that has no candidates while others do.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from cluster.decoding.auto.choices import (
    CHAIN,
    FIRST_GUESS,
    FIRST_WINDOW,
    OFF,
    Choice,
    Pilot,
    Rate,
    drafting_choices,
)
from cluster.decoding.auto.forecast import Conditions, Forecast, lockstep, run_ahead
from cluster.decoding.auto.timings import DraftTimes, Mean, StepModel
from cluster.decoding.counts import CountedVerdict, Foresight
from cluster.decoding.events import DrafterJoined, Proposed, StepDone, is_believable
from cluster.decoding.instructions import RunStep
from cluster.decoding.policy import forks_within
from cluster.decoding.token_tree import TokenTree

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

TO_DRAFT = 0.06
"""Drafting that begins must promise this much on top: the drafter first reads what is new to it."""

GAIN_TO_BRANCH = 1.02
"""Branches must promise this much more than a chain: each keeps the drafter and the driver busy."""

_TRUST = 20.0
"""Steps for which a forecast is trusted, against what came of it."""


@dataclass(slots=True)
class Drafter:
    """What is known of a drafter."""

    shares_host: bool
    times: DraftTimes = field(default_factory=DraftTimes)
    acceptance: Rate = field(default_factory=lambda: Rate(FIRST_GUESS))
    hits: Rate = field(default_factory=lambda: Rate(FIRST_HIT_RATE))


@dataclass(frozen=True, slots=True)
class Plan:
    """The choice for the batch. With `OFF` it rests.

    `price`: tokens that a row costs the batch. `rate`: its expected tokens/ms; `forecast`: without
    correction by what came of earlier forecasts. `patience`: seconds that a step may wait. `told`:
    the estimates behind it, for statistics.
    """

    choice: Choice
    window: int = 1
    price: float = 0.0
    rate: float = 0.0
    forecast: float = 1.0
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
        self._factors: dict[Choice, Mean] = {}  # What a choice brought, over its forecasts.
        self._batch: list[Pilot] = []  # Pilots of the sequences that decode.
        self._coming = 0  # Sequences whose prompts are still being read.
        self._worth = 0.0  # Expected tokens of this step's windows.
        self._step = self._decide_at = self._decisions = 0
        self._decided_for = 0  # Sequences of the batch at the last choice.
        self._look_at = 0  # When the next probe or test of plain decoding begins.
        self._looking = 0  # Steps that are left of it.
        self._looks = 2
        self._lost_ms = math.inf  # By the last look.
        self._reads = False  # At the start: whether a drafter reads the prompt of a sequence.
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
            if not self._shares_host or not self._reads:
                pilot.follow(CHAIN, FIRST_WINDOW)
                self._reads = True
            else:
                pilot.rest()
        elif plan.rests or self._looking:
            pilot.rest()
        else:
            # While prompts are computed drafters run far ahead, so it begins with a small window.
            pilot.follow(CHAIN, FIRST_WINDOW)

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
        times = drafter.times
        beside_ms = 1000 * seconds if drafter.shares_host else 0.0
        self.steps.heard(event.now, len(proposals), beside_ms)
        # In a rest, what arrives was begun before, and may have read as well.
        all_rest = (self._plan is not None and self._plan.rests) != (self._looking > 0)
        # A pass adds one level to a tree, which may come in several proposals.
        first = {one.sequence_id: one for one in reversed(proposals)}
        tokens = sum([1 if one.parents else len(one.token_ids) for one in first.values()])
        if tokens and seconds > 0 and not catches_up and not all_rest:
            grows = len(first) < len(proposals)
            times.add_pass(len(first), tokens / event.passes, 1000 * event.seconds_a_pass, grows)
        waiting = [one for one in continued if one.restarted_at is not None]
        if waiting and not catches_up and times.known:
            ms = median([1000 * (event.now - (one.restarted_at or 0.0)) for one in waiting])
            if is_believable(ms / 1000):
                times.add_restart(ms, len(first), waits=waiting[0].choice.policy.waits)
        for pilot in self._batch if catches_up else waiting:
            pilot.restarted_at = None

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
            self._count_hits(known, verdict)
        self._steer(pilot)

    def estimates(self) -> dict[str, float]:
        """The estimates for the target and each drafter, by name, for statistics."""
        found = self.steps.estimates()
        for name, one in self._drafters.items():
            if one.times.known:
                found[f"{name}.pass_ms"] = one.times.pass_ms(len(self._batch) or 1)
                found[f"{name}.round_trip_ms"] = one.times.round_trip_ms.value
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

    def _count_hits(self, drafter: Drafter, verdict: CountedVerdict) -> None:
        sequences = self.steps.last.sequences
        if verdict.firsts is not None:
            missed = verdict.firsts[: verdict.accepted].count(False)
            if missed:
                drafter.hits.add(missed, missed, of=sequences)
        if verdict.foresight in (Foresight.BRANCH, Foresight.OTHERS):
            hit = verdict.foresight is Foresight.BRANCH
            drafter.hits.add(1, int(hit), of=sequences)

    def _correct(self, now: float) -> None:
        """Compare what the plan brought since the last step with its forecast."""
        before, self._last_at = self._last_at, now
        worth, self._worth = self._worth, 0.0
        plan, last = self._plan, self.steps.last
        if plan is None or before is None:
            return
        elapsed_ms = (now - before) * 1000
        if self._looking:
            self._lost_ms += elapsed_ms - (worth / plan.rate if plan.rate else 0.0)
            return
        # In three times a step's time there was nothing to do for a while.
        alone = self._one_group and not last.has_prefill and 0 < elapsed_ms <= 3 * last.ms
        if worth and alone:
            factor = self._factors.setdefault(plan.choice, Mean(1.0, _TRUST))
            factor.add(worth / (plan.forecast * elapsed_ms))

    def _factor(self, choice: Choice) -> float:
        """What came of the choice over its forecasts."""
        return self._factors[choice].value if choice in self._factors else 1.0

    def _look(self) -> None:
        """Begin or end a probe or a test of plain decoding."""
        plan = self._plan
        if plan is None:
            if self._looking:
                self._looking -= 1
                if self.steps.knows_toll:
                    self._looking = 0
            elif self.steps.last.drafting_ms and not (
                self.steps.last.has_prefill or self.steps.knows_toll
            ):
                self._looking = TEST_STEPS
            return
        if self._looking:
            self._looking -= 1
            if not self._looking:
                self._decide_at, self._decisions = self._step, 0
                self._next_look()
            return
        ms = self.steps.ms(self.steps.last.sequences)
        if plan.rests and self._rested_ms and ms < 0.8 * self._rested_ms:
            self._look_at = self._step  # The host is faster now: what was too slow may pay.
        beside = plan.choice.policy.drafting_is_free and self._shares_host
        if self._step < self._look_at or not (plan.rests or beside):
            return
        self._looks += 1
        self._lost_ms = 0.0
        self._look_at = self._step + LEAST_APART
        if plan.rests:
            self._looking, self._rested_ms = PROBE_STEPS, ms
            for one in self._drafters.values():
                one.acceptance.doubt()
                one.hits.doubt()
                one.times.keep(FIRST_PASSES - 1)
            self._factors.clear()
        else:
            self._looking = TEST_STEPS

    def _next_look(self) -> None:
        """Choose when to look next, by what the last look cost."""
        # What was believed first is the least certain, so the first looks come sooner.
        lost_steps = self._lost_ms / max(1e-3, self.steps.last.ms)
        apart = min(lost_steps / REGRET, LEAST_APART * 2**self._looks)
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
                    self._take(Plan(OFF))
                return
        self._decisions += 1
        self._decide_at = self._step + min(STANDS, max(1, self._decisions // 2))
        self._decided_for = len(batch)
        self._take(self._best(batch, drafter))

    def _take(self, plan: Plan) -> None:
        before, self._plan = self._plan, plan
        if before is None or before.rests is not plan.rests:
            self._rested_ms = self.steps.ms(self.steps.last.sequences) if plan.rests else 0.0
            self._next_look()

    def _best(self, batch: list[Pilot], drafter: Drafter) -> Plan:
        """The best plan."""
        before = self._plan
        chances = [pilot.acceptance.value for pilot in batch]
        price = before.price if before is not None and not before.rests else 0.0
        members = [one for one in chances if one > price] or [max(chances)]
        acceptance = sum(members) / len(members)
        sequences = max(self.steps.last.sequences, len(batch))
        others = sequences - len(members)

        def rate(forecast: Forecast) -> float:
            return (len(members) * forecast.tokens + others + self._coming) / forecast.ms

        plain = Forecast(1.0, 0.0, self.steps.ms(sequences))
        plain_rate = rate(plain) * self._factor(OFF)
        windows = _windows(
            max([pilot.window for pilot in batch]), max([pilot.limit for pilot in batch])
        )
        found = [(0.0, OFF, 1, plain)]
        for choice in drafting_choices():
            if not self._may(choice, batch, drafter, len(members), sequences):
                continue
            given = self._conditions(choice, drafter, acceptance, len(members), sequences)
            share = self._factor(choice) / (GAIN_TO_BRANCH if choice.policy.fans_out else 1)
            for window in windows:
                forecast = _forecast(choice, given, window)
                found.append((rate(forecast) * share, choice, window, forecast))
        worth, choice, window, forecast = max(found, key=lambda one: one[0])
        rows = sequences + len(members) * forecast.candidates
        price = self.steps.ms_per_row(sequences, rows) * worth
        pass_ms = drafter.times.pass_ms(len(members))
        told = {
            **self.steps.estimates(),
            "step_ms": plain.ms,
            "sequences_alike": float(len(members)),
            "pass_ms": pass_ms,
            "round_trip_ms": drafter.times.round_trip_ms.value,
            "window": float(window),
            "tokens_per_ms": worth / sequences,
            "plain_tokens_per_ms": plain_rate / sequences,
        }
        if worth < plain_rate * (1 + TO_DRAFT * (before is None or before.rests)):
            return Plan(OFF, window, price, plain_rate, rate(plain), told=told)
        passes = window / max(1.0, drafter.times.tokens_a_pass.value)
        drafting_ms = drafter.times.restart_ms(len(members)) + passes * pass_ms
        patience = PATIENCE * drafting_ms / 1000
        return Plan(choice, window, price, worth, rate(forecast), patience, told)

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
        if not policy.fans_out:
            return True
        # On the target's cores branches would also compete with the driver, which reads each one.
        if drafter.shares_host and not (self.steps.knows_toll and self.steps.toll <= FREE_TOLL):
            return False
        if not drafter.times.covers(members):
            return False  # They add rows to a pass, and it is not known yet what rows cost.
        crowd = max(members, sequences // max(1, self._num_drafters))
        return forks_within(1, pace=0.0, crowd=crowd) > 0

    def _conditions(
        self, choice: Choice, drafter: Drafter, acceptance: float, members: int, sequences: int
    ) -> Conditions:
        """What a forecast of a choice rests on."""
        times, policy = drafter.times, choice.policy

        def step_ms(candidates: float, drafting_ms: float) -> float:
            rows = sequences + members * candidates
            return self.steps.ms(rows, drafting_ms if drafter.shares_host else 0.0)

        pass_ms = times.pass_ms(members, grows=policy.fans_out)
        hits = drafter.hits.value if policy.fans_out else 0.0
        groups = self._num_groups if policy.replicates else 1
        return Conditions(
            acceptance=acceptance,
            step_ms=step_ms,
            pass_ms=pass_ms,
            tokens_a_pass=times.tokens_a_pass.value,
            restart_ms=times.restart_ms(members, waits=policy.waits, grows=policy.fans_out),
            crowd=members,
            hit_rate=hits,
            branch_length=step_ms(0.0, 0.0) / pass_ms / groups / 2,
            second_chance=hits if choice.is_tree else 0.0,
            groups=groups,
        )

    def _steer(self, pilot: Pilot) -> None:
        """Have a sequence follow the plan, or what is looked at."""
        plan = self._plan
        if plan is None:
            if self._looking:
                pilot.rest()
            elif pilot.rests and not (
                self._shares_host and any(not one.rests for one in self._batch)
            ):
                pilot.follow(CHAIN, FIRST_WINDOW)
            return
        pilot.told, pilot.patience = plan.told, plan.patience
        if self._looking:
            probes = plan.rests and self._probing < max(1, self.steps.last.sequences // PROBED)
            if probes and pilot.rests:
                self._probing += 1
                pilot.acceptance.doubt()
                pilot.trying = self._looking
                pilot.follow(CHAIN, PROBE_WINDOW)
            elif not plan.rests:
                pilot.rest()
            return
        if plan.rests:
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
            pilot.acceptance.doubt()
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
