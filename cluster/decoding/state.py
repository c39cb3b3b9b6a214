"""The scheduler's state: target groups, sequences and drafters, and operations on them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace
from itertools import chain

from cluster.decoding.auto.auto import Auto
from cluster.decoding.batching import Batching
from cluster.decoding.counts import Totals
from cluster.decoding.drafters import Drafters
from cluster.decoding.instructions import Finish, FinishReason, Instruction, Refuse, RunStep
from cluster.decoding.sequence import Replica, Sequence
from cluster.decoding.timings import StepCosts, Utilization
from cluster.decoding.waiting import WaitingLine
from paceline.errors import PacelineError
from paceline.generation import SpeculationStats


@dataclass(slots=True)
class TargetGroup:
    """One of the groups that serve the target's model. They share only the waiting line."""

    number: int
    batching: Batching
    step: RunStep | None = None
    answered_at: int = 0
    """Number of answered steps, over all groups, when this one last answered without suspects."""

    @property
    def joined(self) -> bool:
        return self.batching.target is not None

    @property
    def is_open(self) -> bool:
        """Whether it can step, and lets sequences in."""
        return self.joined and not self.batching.retires

    def cost_of(self, sequence: Sequence) -> tuple[int, int, bool]:
        """Sort key for placing a sequence: first what it costs the others here, then itself."""
        known = self.batching.kv.num_known(sequence)
        return self.num_leads, -known, self.step is not None

    @property
    def num_leads(self) -> int:
        """Sequences that run here, without the replicas of other groups' sequences."""
        running = self.batching.running.values()
        return len(running) - sum(isinstance(one, Replica) for one in running)

    def drop_replicas(self) -> bool:
        """Drop all replicas here; their own groups go on alone. Returns whether there were any."""
        replicas = [one for one in self.batching.running.values() if isinstance(one, Replica)]
        for one in replicas:
            self.drop(one)
        return bool(replicas)

    def drop(self, replica: Replica) -> None:
        """Drop a replica; the other groups of its sequence go on without this one."""
        self.batching.remove(replica)
        replica.lead.replicas.remove(replica)

    def check_integrity(self) -> None:
        self.batching.check_integrity()
        in_flight = {part.sequence_id for part in self.step.slices} if self.step else set()
        running, leaving = self.batching.running, self.batching.leaving
        stepping = {s.sequence_id for s in running.values() if s.kv.in_flight is not None}
        assert in_flight == stepping | leaving.keys()
        assert not stepping & leaving.keys()
        assert all(s.kv.group == self.number for s in running.values())
        for one in running.values():
            assert not isinstance(one, Replica) or one in one.lead.replicas


@dataclass(slots=True)
class Deferred:
    """Instructions that wait until the next step is sent: to drafters first, then to callers."""

    drafters: list[Instruction] = field(default_factory=list)
    callers: list[Instruction] = field(default_factory=list)


class DecodingState:
    """All sequences, block pools, grants and counts."""

    def __init__(
        self, new_group: Callable[[int], TargetGroup], waiting: WaitingLine, *, serves_auto: bool
    ) -> None:
        """`new_group`: makes a target group, given its number. There is none before `scale`."""
        self._new_group = new_group
        self.groups: tuple[TargetGroup, ...] = ()
        self.waiting = waiting
        self.paused: dict[int, Sequence] = {}
        """Sequences whose callers do not read. They have no place, KV blocks or drafters."""
        self.costs = StepCosts()
        self.drafters = Drafters(self.costs)
        self.auto = Auto(observes=serves_auto)
        self.totals = Totals()
        self.utilization = Utilization()

    def scale(self, now: float, num_groups: int) -> None:
        """Have this number of target groups (events.TargetScaled)."""
        for group in self.groups[num_groups:]:
            group.batching.retires = True
            group.drop_replicas()
        self.forget_retired()
        if not any(group.batching.retires for group in self.groups):
            more = range(len(self.groups), num_groups)
            self.groups = (*self.groups, *map(self._new_group, more))
        self.utilization.scale(now, num_groups)

    def forget_retired(self) -> None:
        """Forget groups that have left the target. Numbers stay without gaps."""
        while self.groups and self.groups[-1].batching.retires and not self.groups[-1].joined:
            self.groups = self.groups[:-1]

    @property
    def running(self) -> Collection[Sequence]:
        """The running sequences of all groups, without replicas."""
        if len(self.groups) == 1:
            return self.groups[0].batching.running.values()
        everywhere = chain.from_iterable(group.batching.running.values() for group in self.groups)
        return [one for one in everywhere if not isinstance(one, Replica)]

    def sequences(self) -> Iterable[Sequence]:
        """All sequences: paused, then waiting, then running ones."""
        return chain(self.paused.values(), self.waiting, self.running)

    def find(self, sequence_id: int) -> Sequence | None:
        """The sequence with this id; None: it has ended."""
        if sequence_id in self.paused:
            return self.paused[sequence_id]
        running = self.find_running(sequence_id)
        if running is not None:
            return running
        return next((s for s in self.waiting if s.sequence_id == sequence_id), None)

    def find_running(self, sequence_id: int) -> Sequence | None:
        """The running sequence with this id; None: none runs."""
        for group in self.groups:
            running = group.batching.running.get(sequence_id)
            if running is not None:
                return running.lead if isinstance(running, Replica) else running
        return None

    @property
    def vocab_size(self) -> int | None:
        """Size of the target's vocabulary; None: no group can step."""
        targets = (group.batching.target for group in self.groups)
        return next((target.vocab_size for target in targets if target is not None), None)

    def speculation(self) -> SpeculationStats:
        """Statistics of speculation over all sequences."""
        shares = self.utilization.of_all(self.drafters.names)
        return replace(
            self.totals.counts.speculation(),
            target_idle=shares.target_idle,
            drafter_idle=shares.drafter_idle,
            efficiency=shares.efficiency,
            choices=dict(self.auto.choices),
            estimates=self.auto.estimates(),
        )

    @property
    def groups_each(self) -> int:
        """Groups that each running sequence could have to itself, at least 1."""
        if len(self.groups) == 1 or self.waiting:
            return 1
        num_open = sum(group.is_open for group in self.groups)
        return max(1, num_open // max(1, len(self.running)))

    @property
    def at_work(self) -> bool:
        return any(
            group.joined and (group.batching.running or self.waiting) for group in self.groups
        )

    def admit(self) -> bool:
        """Let waiting sequences in, in order, each to the best group. Returns whether any was.

        While a suspect waits for room, or a sequence that runs in a group that retires has none
        elsewhere, all others wait too.
        """
        count = len(self.waiting)
        for group in self.groups:
            group.batching.expected.clear()
        has_retiring = any(group.batching.retires for group in self.groups)
        is_held = has_retiring and not self._move_out()
        self._go_on_elsewhere()
        for group in self.groups:
            group.batching.recount()
        while self.waiting and not is_held:
            first = self.waiting.first
            able = [group for group in self.groups if group.batching.has_room_for(first)]
            if able:
                self.waiting.let_in(first)
                self._let_in(first, able)
            elif not self._drop_replicas():
                break
        return len(self.waiting) < count

    def _let_in(self, sequence: Sequence, able: Iterable[TargetGroup]) -> None:
        """Run a sequence in the best of the groups that have room for it."""
        group = min(able, key=lambda group: group.cost_of(sequence))
        group.drop_replicas()
        group.batching.let_in(sequence)

    def _move_out(self) -> bool:
        """Move sequences out of groups that retire, as far as others have room: they are computed
        again there. One in a step moves once it is answered; until then its room is kept. Returns
        whether all have room.
        """
        for group in self.groups:
            group.batching.recount()
        all_fit = True
        for group in [group for group in self.groups if group.batching.retires]:
            for sequence in list(group.batching.running.values()):
                if sequence.replicas:  # It goes on where these are.
                    if group.step is None:
                        group.batching.give_back(sequence)
                    continue
                able = [one for one in self.groups if one.batching.has_room_for(sequence)]
                if not able:
                    all_fit = False
                elif group.step is None:
                    group.batching.give_back(sequence)
                    self.waiting.remove(sequence)
                    self._let_in(sequence, able)
                else:
                    best = min(able, key=lambda one: one.cost_of(sequence))
                    best.batching.expected.append(sequence)
        return all_fit

    def _group_of(self, running: Sequence) -> TargetGroup:
        assert running.kv.group is not None
        return self.groups[running.kv.group]

    def _drop(self, replica: Replica) -> None:
        self._group_of(replica).drop(replica)

    def _drop_replicas(self) -> bool:
        dropped = [group.drop_replicas() for group in self.groups]
        return any(dropped)

    def _go_on_elsewhere(self) -> None:
        """Move sequences that lost their place in a group to another group that serves them."""
        if len(self.groups) == 1:
            return
        for sequence in self.sequences():
            while sequence.replicas and not sequence.policy.replicates:
                self._drop(sequence.replicas[-1])  # `auto` chose another policy for it.
        for sequence in [one for one in self.waiting if one.replicas]:
            self.waiting.remove(sequence)
            sequence.kv = sequence.replicas.pop(0).kv
            self._group_of(sequence).batching.running[sequence.sequence_id] = sequence

    def share_groups(self, out: Deferred) -> None:
        """Give free groups in turn to running sequences whose policy uses several groups."""
        if len(self.groups) == 1 or self.waiting:
            return
        suspects = self.waiting.suspects
        takers = [
            one
            for one in self.running
            if one.policy.replicates
            and not one.paused
            and one.sequence_id not in suspects
            # A replica may take over, and then has a prompt without log probabilities.
            and not one.lacks_prompt_logprobs
        ]
        if not takers:
            return
        spare = sum(group.is_open and not group.num_leads for group in self.groups)
        most = -(-spare // len(takers))
        for taker in takers:
            while len(taker.replicas) > most:
                self._drop(taker.replicas[-1])
        for group in self.groups:
            if not group.is_open or group.batching.running:
                continue
            taker = min(takers, key=lambda one: (len(one.replicas), one.order))
            if taker.sequence_id not in group.batching.leaving:
                replica = Replica.of(taker)
                taker.replicas.append(replica)
                group.batching.let_in(replica)
                self.drafters.grant(taker, out.drafters)

    def assign(self, out: Deferred) -> None:
        running = self.running
        self.drafters.share_out(running, out.drafters)  # Sequences with several give some back.
        for sequence in running:
            self.drafters.assign(sequence, out.drafters)
        self.drafters.share_out(running, out.drafters)

    def sent(self, now: float, step: RunStep, out: Deferred) -> None:
        """A step went out to its group: `auto` learns of it, and some policies grant by it."""
        running = self.groups[step.group].batching.running
        ahead = [one.drafter for one in running.values() if one.policy.drafting_is_free]
        self.auto.sent(now, step, ahead)
        for part in step.slices:
            sequence = running[part.sequence_id]
            if sequence.policy.grants_by_step:
                self.drafters.grant(sequence, out.drafters)

    def drop_replicas_of(self, sequence: Sequence) -> None:
        """Let the first group of a sequence serve it alone."""
        for replica in list(sequence.replicas):
            self._drop(replica)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out of all batches, or out of the line: it ends."""
        self.waiting.suspects.forget(sequence.sequence_id)
        if self.paused.pop(sequence.sequence_id, None) is None:
            self._take_out(sequence)

    def _take_out(self, sequence: Sequence) -> None:
        self.drop_replicas_of(sequence)
        if sequence.kv.group is None:
            self.waiting.remove(sequence)
        else:
            self._group_of(sequence).batching.remove(sequence)

    def refuse(self, sequence: Sequence, error: PacelineError, out: Deferred) -> None:
        self.remove(sequence)
        self.drafters.release(sequence, out.drafters)
        out.callers.append(Refuse(sequence.sequence_id, error))

    def pause(self, sequence: Sequence, out: Deferred) -> None:
        """Stop decoding a sequence until `resume`. A step in flight is answered first."""
        sequence.paused = True
        self.drafters.release(sequence, out.drafters)
        self.drop_replicas_of(sequence)
        if sequence.kv.in_flight is None:
            self._take_out(sequence)
            self.paused[sequence.sequence_id] = sequence

    def resume(self, now: float, sequence: Sequence) -> None:
        """Decode a sequence again. It waits in its place in the order of arrival, unless a step of
        it is still in flight."""
        sequence.paused = False
        sequence.ready_since = now
        if self.paused.pop(sequence.sequence_id, None) is not None:
            self.waiting.put_back(sequence)

    def finish(self, now: float, sequence: Sequence, reason: FinishReason, out: Deferred) -> None:
        self.remove(sequence)
        self.drafters.release(sequence, out.drafters)
        self.totals.finished += 1
        stats, count = sequence.stats(now, self.utilization), sequence.counts.committed
        out.callers.append(Finish(sequence.sequence_id, reason, stats, count))
