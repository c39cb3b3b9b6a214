"""Random schedules of the scheduler with troublesome drafters, targets and callers.

Drafters lag, burst, reorder, repeat, go silent, send garbage, come and go. The clock jumps. Of
several target groups, one answers late or is lost. Callers stop reading and read again. The text
must stay that of plain decoding, and all invariants must hold after each event (World.send). A
schedule is a tape of bytes that decides what happens next, so a failure shrinks to a short one.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Self

from cluster.decoding.events import (
    Admitted,
    Cancelled,
    DraftDeclined,
    DrafterJoined,
    DrafterLost,
    Paused,
    Proposal,
    Proposed,
    Resumed,
    Tick,
)
from cluster.decoding.instructions import (
    DraftInstruction,
)
from cluster.decoding.policy import POLICIES, policy_named
from cluster.decoding.scheduler import Scheduler
from tests.cluster.decoding.pretended_drafter import PretendedDrafter
from tests.cluster.decoding.true_text import request, true_token
from tests.cluster.decoding.world import World

NAMES = ("a", "b", "c")
JUMPS = (0.0, 0.001, 0.02, 3.0, 1000.0)
"""Jumps of the driver's clock, in seconds: it stands still, or much time passes at once."""

DURATIONS = (0.003, 0.0, -1.0, math.inf, math.nan, 1e300)
"""Durations of a pass that drafters report, in seconds."""


class Tape:
    """Choices read from bytes. After the last byte it always makes the first choice."""

    def __init__(self, tape: bytes) -> None:
        self._bytes = iter(tape)
        self.ended = False

    def choose(self, count: int) -> int:
        """Choose one of `count`."""
        byte = next(self._bytes, None)
        self.ended = byte is None
        return 0 if byte is None else byte % count


@dataclass
class FarDrafter(PretendedDrafter):
    """A drafter at the end of a link. Messages of both sides wait until they are let through."""

    to_drafter: list[DraftInstruction] = field(default_factory=list)
    to_driver: list[tuple[Proposal, ...]] = field(default_factory=list)

    def tell(self, message: DraftInstruction) -> None:
        self.to_drafter.append(message)

    def hear(self, count: int) -> None:
        """Deliver the next `count` messages of the driver."""
        for message in self.to_drafter[:count]:
            super().tell(message)
        del self.to_drafter[:count]


class Schedule:
    """One schedule: about three requests, up to three drafters, up to three target groups."""

    policies = tuple(POLICIES)
    rules = frozenset({"coupled"})
    """The rules for which the drafters can draft."""
    most_tokens = 24
    wrong_one_in = 4

    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        self.num_groups = 1 + tape.choose(3)
        scheduler = Scheduler(
            max_num_seqs=2, max_step_tokens=32, wait_seconds=5.0, num_groups=self.num_groups
        )
        self.world = World(scheduler, num_groups=self.num_groups)
        self.far: dict[str, FarDrafter] = {}
        self.sent: list[tuple[str, tuple[Proposal, ...]]] = []
        self.seen: Counter[str] = Counter()
        """Counts of what happened, so that a test can check that schedules reach their cases."""
        for group in range(self.num_groups):
            self.world.join_target(group)
        for _ in range(1 + tape.choose(3)):
            self.admit()
        self.come_or_go(NAMES[0])

    def admit(self) -> None:
        world, tape = self.world, self.tape
        policy = self.policies[tape.choose(len(self.policies))]
        narrow = policy_named(policy).needs.chains_only
        number = len(world.requests) + 1
        asked = request(
            number,
            tuple(range(number, number + 1 + tape.choose(6))),
            policy=policy,
            max_tokens=1 + tape.choose(self.most_tokens),
            window=2 + tape.choose(6),
            branches=1 if narrow else 1 + tape.choose(2),
            rule=self.choose_rule(),
            prompt_logprobs=None if number % 3 else 0,
        )
        world.send(Admitted(world.now, asked))

    def choose_rule(self) -> str:
        """Choose the rule of the next request."""
        return "coupled"

    def guess(self, path: list[int], seed: int) -> int:
        wrong = self.tape.choose(self.wrong_one_in) == 0
        return self.tape.choose(50) if wrong else true_token(path, seed)

    def act(self) -> None:
        """Let the next event of the tape happen."""
        world, tape = self.world, self.tape
        there = sorted(self.far) or NAMES
        name = there[tape.choose(len(there))]
        drafter = self.far.get(name)
        match tape.choose(16):
            case 0 | 1 | 2:
                steps = list(world.steps)  # of several groups, any may be the next to answer
                if steps:
                    world.answer(steps[tape.choose(len(steps))])
            case 3 | 4 | 5 if drafter is not None:
                drafter.hear(len(drafter.to_drafter))
                drafter.to_driver.append(drafter.run_pass())
                self.deliver(name, 0)
            case 6 | 7 if drafter is not None:
                drafter.hear(1 + tape.choose(4))  # it lags behind
                for _ in range(1 + tape.choose(3)):
                    if proposals := drafter.run_pass():
                        drafter.to_driver.append(proposals)
                        self.seen["lag"] += bool(drafter.to_drafter)
            case 8 if drafter is not None:
                self.seen["burst"] += len(drafter.to_driver) > 2
                while drafter.to_driver:  # the latest first or the oldest
                    self.deliver(name, -1 if tape.choose(2) else 0)
            case 9 if self.sent:
                late_name, late = self.sent[tape.choose(len(self.sent))]
                self.seen["repeat"] += bool(late)
                world.send(Proposed(world.now, late_name, late))
            case 10:
                self.send_garbage(name)
            case 11:
                self.come_or_go(NAMES[tape.choose(3)])
            case 12:
                jump = JUMPS[tape.choose(len(JUMPS))]
                self.seen["jump while a step runs"] += jump > 100 and bool(world.steps)
                self.seen["jump while one waits"] += jump > 100 and world.wake_at is not None
                world.now += jump
                world.send(Tick(world.now))
            case 13 if tape.choose(4) == 0:
                group = tape.choose(len(world.scheduler._state.groups))
                if world.scheduler._state.groups[group].joined:
                    self.seen["target lost in a step"] += group in world.steps
                    world.lose_target(group)
                if group < self.num_groups and (not world.target_joined or tape.choose(2)):
                    world.join_target(group)
            case 13 if tape.choose(4) == 0:
                self.end_retired()
                self.scale(1 + tape.choose(3))
            case 14:
                victim = 1 + tape.choose(len(world.requests))
                if tape.choose(3) == 0:
                    self.seen["cancelled in a step"] += self.in_a_step(victim)
                    world.send(Cancelled(world.now, victim))
                elif drafter is not None:
                    self.decline(name, victim)
            case 15 if tape.choose(2):
                self.pause_or_resume(1 + tape.choose(len(world.requests)))
            case 15:
                if len(world.requests) < 5:
                    self.admit()

    def scale(self, num_groups: int) -> None:
        """Add target groups, which join at once, or have some retire.

        As the driver does, it adds none while another retires, and ends those that are idle.
        """
        world = self.world
        retiring = [one for one in world.scheduler._state.groups if one.batching.retires]
        if num_groups > self.num_groups and retiring:
            return
        self.seen["scaled down in a step"] += any(one >= num_groups for one in world.steps)
        joining = range(self.num_groups, num_groups)
        self.num_groups = num_groups
        world.scale(num_groups)
        for group in joining:
            world.join_target(group)
        if not world.target_joined:
            world.join_target(0)

    def end_retired(self) -> None:
        """End target groups that retire and in which nothing runs."""
        for group in reversed(self.world.scheduler._state.groups[self.num_groups :]):
            if group.joined and not self.world.scheduler.is_busy(group.number):
                self.seen["retired"] += 1
                self.world.lose_target(group.number)

    def decline(self, name: str, victim: int) -> None:
        """A drafter declines a sequence, whether it works for it or not."""
        self.world.send(DraftDeclined(self.world.now, name, victim))

    def deliver(self, name: str, index: int) -> None:
        """Deliver one message of a drafter, perhaps after others that it sent later."""
        proposals = self.far[name].to_driver.pop(index)
        self.seen["reorder"] += bool(proposals and index and any(self.far[name].to_driver))
        self.sent.append((name, proposals))
        told = 0.003 if self.tape.choose(2) else DURATIONS[self.tape.choose(len(DURATIONS))]
        self.world.send(Proposed(self.world.now, name, proposals, pass_seconds=told))

    def send_garbage(self, name: str) -> None:
        """Send well-formed garbage: candidates at a wrong place, in another shape, or of no
        sequence.
        """
        world, tape = self.world, self.tape
        tokens = tuple(tape.choose(60) for _ in range(tape.choose(5)))
        parents = tuple(tape.choose(index + 1) for index in range(len(tokens)))
        wrong = Proposal(1 + tape.choose(4), tape.choose(30), tape.choose(256), tokens, True)
        if self.sent:
            _, proposals = self.sent[tape.choose(len(self.sent))]
            for one in proposals[:1]:
                wrong = replace(one, token_ids=tokens, parents=parents, last=True)
        before = world.scheduler.totals.dropped_proposals
        world.send(Proposed(world.now, name, (wrong,)))
        dropped = world.scheduler.totals.dropped_proposals > before
        self.seen["garbage dropped" if dropped else "garbage taken in"] += bool(tokens)

    def pause_or_resume(self, sequence_id: int) -> None:
        """The caller of a request stops reading, or reads again."""
        world = self.world
        if sequence_id in world.paused:
            self.seen["resumed in its last step"] += self.in_a_step(sequence_id)
            world.send(Resumed(world.now, sequence_id))
        else:
            self.seen["paused in a step"] += self.in_a_step(sequence_id)
            running = {one.sequence_id for one in world.scheduler._state.running}
            self.seen["paused while it waits"] += not running.issuperset({sequence_id})
            world.send(Paused(world.now, sequence_id))

    def in_a_step(self, sequence_id: int) -> bool:
        steps = self.world.steps.values()
        return any(part.sequence_id == sequence_id for step in steps for part in step.slices)

    def come_or_go(self, name: str) -> None:
        world = self.world
        if name in self.far:
            drafting = [one for one in world.scheduler._state.running if one.drafter == name]
            self.seen["drafter lost"] += any(one.tree.num_candidates for one in drafting)
            del self.far[name], world.drafters[name]
            world.send(DrafterLost(world.now, name))
        else:
            drafter = FarDrafter(self.guess, self.tape.choose)
            self.far[name] = world.drafters[name] = drafter
            longest = 12 + self.tape.choose(60)
            world.send(DrafterJoined(world.now, name, longest, rules=self.rules))

    def drain(self) -> None:
        """End everything without any further word from drafters.

        Paused requests delay nothing: they end last, once their callers read again.
        """
        self.drain_but_paused()
        for sequence_id in sorted(self.world.paused):
            self.world.send(Resumed(self.world.now, sequence_id))
        self.drain_but_paused()
        self.end_retired()
        assert len(self.world.scheduler._state.groups) == self.num_groups

    def drain_but_paused(self) -> None:
        """Run until all requests whose callers read have ended."""
        world = self.world
        for _ in range(500):
            if world.ended | world.paused >= world.requests.keys() and not world.steps:
                return
            self.seen["silence"] += any(self.far) and world.step is None  # a step waits for it
            if world.step is not None:
                world.answer()
            else:
                assert world.wake_at is not None, "nothing to wait for"
                world.now = max(world.now, world.wake_at)
                world.send(Tick(world.now))
        raise AssertionError("it does not end")

    @classmethod
    def run(cls, tape: bytes) -> Self:
        """Run a whole schedule."""
        schedule = cls(Tape(tape))
        while not schedule.tape.ended:
            schedule.act()
        schedule.drain()
        return schedule

    @classmethod
    def run_many(cls, count: int, *, num_bytes: int, seed: int) -> Counter[str]:
        """Run `count` schedules on tapes of `num_bytes` bytes from a fixed seed. Returns what
        happened.
        """
        draw, seen = random.Random(seed), Counter[str]()
        for _ in range(count):
            seen += cls.run(draw.randbytes(num_bytes)).seen
        return seen


class FewThatGoWell(Schedule):
    """Schedules of one or two sequences with mostly right drafts, so windows follow each other.

    Between the events of the tape, all drafters draft, and now and then a group answers.
    """

    most_tokens = 60
    wrong_one_in = 12
    answered_one_in = 3

    def act(self) -> None:
        super().act()
        self.go_well()

    def go_well(self) -> None:
        """Deliver a pass of each drafter, and perhaps answer a step."""
        for name, drafter in self.far.items():
            drafter.hear(len(drafter.to_drafter))
            drafter.to_driver.append(drafter.run_pass())
            self.deliver(name, 0)
        late = list(self.world.steps)
        if late and self.tape.choose(self.answered_one_in) == 0:
            self.world.answer(late[self.tape.choose(len(late))])

    def admit(self) -> None:
        if self.world.scheduler.num_running < 2:
            super().admit()
