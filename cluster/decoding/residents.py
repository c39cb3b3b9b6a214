"""The sequences that run on a target group, and the KV blocks that they hold.

Sequences are let in while blocks are free. When blocks run out, the youngest sequence gives its own
back and is computed again later; it keeps its place in the order of arrival. Sequences that other
groups serve as well (replicas) give theirs back first.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

from cluster.decoding.prefix_cache import PrefixCache
from cluster.decoding.sequence import Replica, Sequence
from cluster.decoding.waiting import WaitingLine
from paceline.errors import PromptTooLongError
from workers.engine.block_pool import blocks_for


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


class Residents:
    """The running sequences of a target group and their block tables."""

    def __init__(self, waiting: WaitingLine, *, group: int, max_num_seqs: int) -> None:
        """`waiting`: the line of all groups; `group`: the number of this one."""
        self._group = group
        self._max_num_seqs = max_num_seqs
        self.preemptions = 0
        """How often a sequence gave its blocks to an older one."""
        self.target: Target | None = None
        self.waiting = waiting
        self.running: dict[int, Sequence] = {}
        self.leaving: dict[int, Sequence] = {}
        """Sequences that ended or left during a step. Their blocks are free once it is answered."""
        self.closes: list[int] = []
        """Ids of sequences that ended, to be closed at the target with the next step."""
        self._promised: int | None = None
        """Blocks that running prefills will still take; None: to be counted."""

    @property
    def kv(self) -> PrefixCache:
        """The block pool of the target, which must have joined."""
        assert self.target is not None
        return self.target.kv

    def join_target(self, target: Target) -> None:
        """A target joined. It is fresh: it knows no sequence."""
        self.target = target

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
        """The sequence that is tried alone here, if one is (suspects.py)."""
        suspects = self.waiting.suspects
        return suspects.first_of(self.running.values()) if suspects else None

    def has_room_for(self, sequence: Sequence) -> bool:
        """Whether a waiting sequence could run here now."""
        target = self.target
        if target is None or len(self.running) >= self._max_num_seqs:
            return False
        if sequence.sequence_id in self.leaving or self.suspect is not None:
            return False
        if not self.running:
            return True
        # Running prefills will still take blocks, so these are spoken for.
        if self._promised is None:
            self._promised = sum(map(self._promised_to, self.running.values()))
        wanted = target.kv.wanted(sequence, sequence.tree.num_committed + sequence.request.window)
        return wanted + self._promised <= target.kv.num_available

    def recount(self) -> None:
        """What running sequences hold or want may have changed since the last `has_room_for`.

        `let_in` and `remove` see to that themselves, so that letting in many sequences counts
        each once.
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
