"""Which sequences a step holds, how many tokens of each, and in which KV blocks.

Decoding sequences come first, the oldest before the youngest. Prefill chunks follow, as many tokens
as the step's budget allows and as decoding sequences can bear (prefill.py). Each target group has a
batch of its own. Waiting sequences of all groups form one line in the order of arrival. No sequence
overtakes another, so none waits forever.

Sequences are let in while blocks are free. When blocks run out, the youngest sequence gives its own
back and is computed again later; it keeps its place in the order of arrival. Sequences that other
groups serve as well (replicas) give their blocks back first.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable
from dataclasses import dataclass, field

from cluster.decoding.instructions import OpenAtTarget, RunStep, Slice
from cluster.decoding.policy import Wait, window_of
from cluster.decoding.prefill import PrefillCosts, share_prefill, start_of
from cluster.decoding.prefix_cache import PrefixCache
from cluster.decoding.sequence import Replica, Sequence
from cluster.decoding.waiting import WaitingLine
from paceline.errors import PromptTooLongError
from workers.engine.kv_blocks import blocks_for


@dataclass(slots=True)
class _NewStep:
    """A step that is being put together. `members`: ids of the sequences in it."""

    budget: int
    slices: list[Slice] = field(default_factory=list)
    opens: list[OpenAtTarget] = field(default_factory=list)
    members: set[int] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Target:
    """What the scheduler knows of a target group."""

    vocab_size: int
    max_model_len: int
    kv: PrefixCache

    @property
    def room(self) -> int:
        """The most tokens that a sequence can have."""
        return min(self.max_model_len, self.kv.num_blocks * self.kv.block_size)


class Batching:
    """Puts the steps of one target group together, of the sequences that run there."""

    def __init__(
        self,
        waiting: WaitingLine,
        *,
        group: int = 0,
        max_num_seqs: int = 64,
        max_step_tokens: int = 512,
        wait_seconds: float = 1.0,
    ) -> None:
        """`waiting`: the line of all groups. `group`: the number of this one."""
        if not 1 <= max_num_seqs <= max_step_tokens:
            raise ValueError(
                f"a step of {max_step_tokens} tokens cannot hold {max_num_seqs} sequences"
            )
        self._group = group
        self._max_num_seqs = max_num_seqs
        self._max_step_tokens = max_step_tokens
        self._wait_seconds = wait_seconds
        self.waiting = waiting
        self.target: Target | None = None
        self.retires = False
        """Whether this group lets nobody in, since it leaves the target."""
        self.running: dict[int, Sequence] = {}
        self.expected: list[Sequence] = []
        """Sequences that will move here from groups that retire, once their steps are answered."""
        self.leaving: dict[int, Sequence] = {}
        """Sequences that ended or left during a step. Their blocks are free once it is answered."""
        self.closes: list[int] = []
        """Ids of sequences that ended, to be closed at the target with the next step."""
        self.preemptions = 0
        """How often a sequence gave its blocks to an older one."""
        self.hit_tokens = 0
        """Committed tokens whose KV sequences found in the cache."""
        self.wake_at: float | None = None
        self._prefill_costs = PrefillCosts()
        self._promised: int | None = None
        """Blocks that running prefills will still take; None: to be counted."""
        self._last_step = 0
        self._suspect_is_next = True

    @property
    def kv(self) -> PrefixCache:
        assert self.target is not None
        return self.target.kv

    def join_target(self, target: Target) -> None:
        """A target joined. It is fresh: it knows no sequence."""
        self.target = target
        self._last_step = 0

    def lose_target(self) -> None:
        """The target is gone, and all KV with it. Running sequences wait again, in their order."""
        self.target = None
        self.closes.clear()
        self.leaving.clear()
        for sequence in self.running.values():
            sequence.forget_kv()
            self._stand_back(sequence)
        self.running.clear()

    def check_fits(self, prompt_length: int, max_tokens: int) -> None:
        """Raise PromptTooLongError if such a sequence could never be held here."""
        target = self.target
        if target is None:
            return
        if prompt_length + max_tokens > target.room:
            raise PromptTooLongError(
                "prompt",
                f"{prompt_length} prompt tokens and {max_tokens} to generate exceed the "
                f"{target.room} tokens that a sequence may have here; "
                "shorten the prompt or max_tokens",
            )

    @property
    def suspect(self) -> Sequence | None:
        """The sequence that is tried alone here, if one is (waiting.py)."""
        suspects = self.waiting.suspects
        return suspects.first_of(self.running.values()) if suspects else None

    def has_room_for(self, sequence: Sequence) -> bool:
        """Whether a sequence that waits, or runs in another group, could run here now."""
        target = self.target
        if target is None or self.retires:
            return False
        if len(self.running) + len(self.expected) >= self._max_num_seqs:
            return False
        if sequence.sequence_id in self.leaving or self.suspect is not None:
            return False
        if not self.running and not self.expected:
            return True
        # Running prefills will still take blocks, so these blocks are reserved.
        if self._promised is None:
            self._promised = sum(map(self._promised_to, self.running.values()))
        wanted = sum(map(self._wanted_by, [sequence, *self.expected]))
        return wanted + self._promised <= target.kv.num_available

    def _wanted_by(self, sequence: Sequence) -> int:
        """Free blocks that a sequence of the line, or of another group, will take here."""
        length = sequence.tree.num_committed + sequence.request.window
        if sequence.kv.group is not None:  # Its block table is that group's.
            return blocks_for(length, self.kv.block_size)
        return self.kv.wanted(sequence, length)

    def recount(self) -> None:
        """Have the next `has_room_for` count again: what running sequences hold may have changed.

        `let_in` and `remove` adjust the count themselves, so letting in many sequences counts each
        sequence once.
        """
        self._promised = None

    def let_in(self, sequence: Sequence) -> None:
        """Run a sequence or a replica, in its place in the order of arrival."""
        sequence.kv.group = self._group
        if self._promised is not None:
            self._promised += self._promised_to(sequence)
        last = next(reversed(self.running.values()), None)
        self.running[sequence.sequence_id] = sequence
        if last is not None and last.order > sequence.order:
            self.running = dict(sorted(self.running.items(), key=lambda item: item[1].order))

    def remove(self, sequence: Sequence) -> None:
        """A sequence ended here. Its blocks become free once its step in flight is answered."""
        del self.running[sequence.sequence_id]
        self.recount()
        if sequence.kv.in_flight is not None:
            self.leaving[sequence.sequence_id] = sequence
        else:
            self._release(sequence)

    def left(self, sequence_id: int) -> None:
        """A sequence that is leaving had its last step answered: free its blocks."""
        self._release(self.leaving.pop(sequence_id))

    def cover(self, sequence: Sequence, length: int, *, but: Container[int]) -> bool:
        """Give the sequence blocks for `length` positions, if need be from younger sequences.

        Sequences with an id in `but` are in the step already and keep theirs. Returns whether the
        sequence has the blocks now.
        """
        assert self.target is not None
        kv = self.target.kv
        wanted = blocks_for(length, kv.block_size) - len(sequence.kv.block_table)
        if wanted <= 0:
            return True
        while wanted > kv.num_available:
            youngest = self._youngest()
            if youngest is sequence or youngest.sequence_id in but:
                return False
            if isinstance(sequence, Replica) and not isinstance(youngest, Replica):
                return False
            self.give_back(youngest)
            self.preemptions += 1
        sequence.kv.block_table.extend(kv.allocate(wanted))
        return True

    def give_back(self, sequence: Sequence) -> None:
        """Take a sequence that is in no step out of the batch. It is computed again later."""
        del self.running[sequence.sequence_id]
        self._release(sequence)
        self._stand_back(sequence)

    def answered(self, step: RunStep, step_seconds: float) -> int:
        """Learn what a step cost. Returns its number of prefill tokens."""
        decoding = prefill = 0
        positions = 0.0
        for part in step.slices:
            count = len(part.token_ids)
            if part.decodes:
                decoding += count
            else:
                prefill += count
                positions += count * (part.start + count / 2)
        self._prefill_costs.add(
            decoding_tokens=decoding,
            prefill_tokens=prefill,
            step_seconds=step_seconds,
            position=positions / prefill if prefill else 0.0,
        )
        return prefill

    def plan(self, now: float) -> RunStep | None:
        """The next step; None: nothing to do. Sets `wake_at` if a sequence waits."""
        self.wake_at = None
        if self.target is None:
            return None
        suspect = self.suspect
        if suspect is None:
            return self._step_of(self.running.values(), now)
        # A suspect is tried alone in every other step, so others wait for one step at most.
        others = [one for one in self.running.values() if one is not suspect]
        turns = [(True, [suspect]), (False, others)]
        for is_trial, members in turns if self._suspect_is_next else reversed(turns):
            step = self._step_of(members, now)
            if step is not None:
                self._suspect_is_next = not is_trial
                return step
        return None

    def check_integrity(self) -> None:
        """Assert that blocks are neither leaked nor shared and tables cover what is computed."""
        for sequence in [*self.waiting, *self.running.values()]:
            sequence.tree.check_integrity()
        for sequence in self.waiting:
            assert not sequence.kv.block_table
            assert sequence.kv.in_flight is None
            assert sequence.kv.group is None
        for one in (self.running.values(), self.waiting):
            order = [sequence.order for sequence in one]
            assert order == sorted(order), "a sequence lost its place"
        if self.target is not None:
            running, kv = self.running.values(), self.target.kv
            kv.check_integrity([*running, *self.leaving.values()])
            for sequence in running:
                held = sequence.kv
                assert held.length <= len(held.block_table) * kv.block_size
                assert held.length < sequence.tree.num_committed

    def _step_of(self, members: Iterable[Sequence], now: float) -> RunStep | None:
        """A step of these running sequences alone; None: there is nothing to do for them."""
        assert self.target is not None
        new = _NewStep(self._max_step_tokens)
        decoding, prefilling = self._windows(members, now)
        to_prefill = self._to_prefill(prefilling) if prefilling else []
        spare, room = new.budget - len(decoding), self.target.room
        for sequence, wanted in decoding:
            # Tokens that other groups committed meanwhile come first.
            lacking = min(sequence.lacking, 1 + spare)
            left = spare + 1 - lacking if lacking == sequence.lacking else 0
            # Each candidate of a tree takes a KV position of its own.
            window = min(wanted, left, room - sequence.tree.num_committed)
            if self._take(new, sequence, lacking, window):
                spare -= window + lacking - 1
        self._take_prefill(new, to_prefill)
        if not new.slices:
            return None  # Closes go with the next step. The target does not need them earlier.
        self._last_step += 1
        step = RunStep(
            self._last_step,
            tuple(new.opens),
            tuple(self.closes),
            tuple(new.slices),
            group=self._group,
        )
        self.closes.clear()
        return step

    def _windows(
        self, members: Iterable[Sequence], now: float
    ) -> tuple[list[tuple[Sequence, int]], list[Sequence]]:
        """Members that decode now, with the windows of their policies; and members that prefill."""
        ready, prefilling = [], []
        for sequence in members:
            if sequence.prefilling:
                prefilling.append(sequence)
                continue
            if sequence.foretells:
                held = min(sequence.tree.num_candidates, sequence.request.window)
                ready.append((sequence, held))
                continue
            patience = min(self._wait_seconds, sequence.patience)
            window = window_of(sequence.policy, sequence.view, now, patience)
            if isinstance(window, Wait):
                if window.until < math.inf:
                    self.wake_at = min(window.until, self.wake_at or window.until)
            elif sequence.num_paths:
                # Merged paths have fewer candidates, which must not change how deep a window goes.
                ready.append((sequence, sequence.window))
            else:
                ready.append((sequence, window))
        return ready, prefilling

    def _to_prefill(self, sequences: list[Sequence]) -> list[Sequence]:
        """The sequences to prefill now, the oldest first.

        A sequence whose first block an older one is about to compute waits for that block.
        """
        assert self.target is not None
        kv = self.target.kv
        # For each sequence that has not begun: the index of its first own block in its block table.
        first_of: dict[int, int] = {}
        for sequence in sequences:
            if not sequence.kv.open_at_target:
                kv.adopt(sequence)
                first_of[sequence.sequence_id] = len(sequence.kv.block_table)
        if not first_of:
            return sequences
        indices, chosen = set(first_of.values()), []
        being_computed: set[bytes] = set()
        for sequence in sequences:
            first = first_of.get(sequence.sequence_id)
            if first is not None and kv.key_at(sequence, first) in being_computed:
                continue
            ahead = (kv.key_at(sequence, index) for index in indices)
            being_computed.update(key for key in ahead if key is not None)
            chosen.append(sequence)
        return chosen

    def _take_prefill(self, new: _NewStep, sequences: list[Sequence]) -> None:
        """Add prefill chunks to the step, the oldest sequence's first."""
        if not sequences:
            return
        fed = sum(len(part.token_ids) for part in new.slices)
        left = [one for one in sequences if one.sequence_id in self.running]
        if not left:
            return
        missing = [one.tree.num_committed - one.kv.length for one in left]
        bearable = new.budget
        if fed:
            start = start_of([one.kv.length for one in left], missing)
            bearable = self._prefill_costs.chunk_beside(fed, start)
        shares = share_prefill(missing, min(new.budget, bearable))
        for sequence, count in zip(left, shares, strict=True):
            if count:
                self._take(new, sequence, count, 0)

    def _take(self, new: _NewStep, sequence: Sequence, count: int, window: int) -> bool:
        """Add `count` committed tokens and `window` candidates, if blocks allow; whether it did."""
        held = sequence.kv
        start = held.length
        if sequence.sequence_id not in self.running:
            return False  # It just gave its blocks to an older one.
        if not self.cover(sequence, start + count + window, but=new.members):
            return False
        if not held.open_at_target:
            self._open(new, sequence)
        tree = sequence.tree
        if sequence.policy.replicates:
            candidates = tree.chain_of(window)
        else:
            candidates = tree.pin(window, num_paths=sequence.num_paths)
        held.in_flight = Slice(
            sequence_id=sequence.sequence_id,
            start=start,
            token_ids=(*tree.token_ids[start : start + count], *candidates.token_ids),
            window=len(candidates.token_ids),
            verdict=start + count == tree.num_committed,
            new_blocks=tuple(held.block_table[held.blocks_sent :]),
            parents=candidates.parents,
            kv_moves=held.moves,
            multiplicities=candidates.multiplicities,
            distributions=candidates.distributions,
            top_tokens=sequence.wants_top_tokens,
            logprobs_of=sequence.logprobs_of(start, start + count),
        )
        held.moves = ()
        held.blocks_sent = len(held.block_table)
        new.slices.append(held.in_flight)
        new.members.add(sequence.sequence_id)
        new.budget -= count + window
        return True

    def _open(self, new: _NewStep, sequence: Sequence) -> None:
        """Open a sequence at the target, which learns where the KV of its first tokens lies."""
        assert self.target is not None
        held = sequence.kv
        start = held.length
        held.blocks_sent = start // self.target.kv.block_size
        new.opens.append(
            OpenAtTarget(
                sequence.sequence_id,
                sequence.request.spec,
                shared_blocks=tuple(held.block_table[: held.blocks_sent]),
                token_ids=tuple(sequence.tree.token_ids[:start]),
            )
        )
        held.open_at_target = True
        self.hit_tokens += start
        if sequence.cached_tokens is None:
            sequence.cached_tokens = min(start, len(sequence.request.prompt_token_ids))

    def _youngest(self) -> Sequence:
        """The sequence that gives back first: the youngest replica, else the youngest."""
        running = reversed(self.running.values())
        return next((one for one in running if isinstance(one, Replica)), None) or next(
            reversed(self.running.values())
        )

    def _stand_back(self, sequence: Sequence) -> None:
        """A sequence runs here no more: it waits, or other groups serve it without this one."""
        if isinstance(sequence, Replica):
            sequence.lead.replicas.remove(sequence)
        else:
            self.waiting.put_back(sequence)

    def _promised_to(self, running: Sequence) -> int:
        return self.kv.wanted(running, running.tree.num_committed) if running.prefilling else 0

    def _release(self, sequence: Sequence) -> None:
        if self.target is not None:
            self.target.kv.release(sequence)
        if sequence.kv.open_at_target:
            self.closes.append(sequence.sequence_id)
        sequence.forget_kv()
