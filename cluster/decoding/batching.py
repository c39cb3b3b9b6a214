"""Which sequences a step takes, how much of each, and in which KV blocks.

Decoding sequences come first, the oldest before the youngest; what is left of the step's token
budget goes to prefill chunks. When blocks run out, the youngest sequence gives its own back and
is computed again later.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from cluster.decoding.instructions import RunStep, Slice
from cluster.decoding.policies import Wait
from cluster.decoding.sequence import Sequence
from paceline.errors import PromptTooLongError
from paceline.sampling import SequenceSpec
from workers.engine.block_pool import BlockPool, blocks_for


@dataclass(frozen=True, slots=True)
class Target:
    """What the scheduler knows of the target group."""

    vocab_size: int
    max_model_len: int
    block_size: int
    pool: BlockPool

    @property
    def room(self) -> int:
        """Most tokens that a sequence can have."""
        return min(self.max_model_len, self.pool.num_blocks * self.block_size)


@dataclass(slots=True)
class _Draft:
    """A step while it is being put together."""

    budget: int
    slices: list[Slice] = field(default_factory=list)
    opens: list[tuple[int, SequenceSpec]] = field(default_factory=list)
    members: set[int] = field(default_factory=set)


class Batching:
    """Waiting and running sequences, and the block tables of the running ones."""

    def __init__(self, *, max_num_seqs: int, max_step_tokens: int, wait_seconds: float) -> None:
        if not 1 <= max_num_seqs <= max_step_tokens:
            raise ValueError(
                f"a step of {max_step_tokens} tokens cannot hold {max_num_seqs} sequences"
            )
        self._max_num_seqs = max_num_seqs
        self._max_step_tokens = max_step_tokens
        self._wait_seconds = wait_seconds
        self.target: Target | None = None
        self.waiting: deque[Sequence] = deque()
        self.running: dict[int, Sequence] = {}
        self.wake_at: float | None = None
        self._closes: list[int] = []
        self._last_step = 0

    def join_target(self, target: Target) -> None:
        """A fresh target: nothing is known to it."""
        self.target = target
        self._last_step = 0

    def lose_target(self) -> None:
        """All KV is gone; running sequences wait again, in their order."""
        self.target = None
        self._closes.clear()
        for sequence in reversed(self.running.values()):
            sequence.forget_kv()
            self.waiting.appendleft(sequence)
        self.running.clear()

    def check_fits(self, prompt_length: int, max_tokens: int) -> None:
        """Raise PromptTooLongError when such a sequence could never be held."""
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

    def admit(self) -> list[Sequence]:
        """Move sequences from waiting to running while there is room; returns those moved."""
        target, admitted = self.target, []
        while target and self.waiting and len(self.running) < self._max_num_seqs:
            sequence = self.waiting[0]
            wanted = blocks_for(
                sequence.tree.num_committed + sequence.request.window, target.block_size
            )
            # What running prefills will still take is spoken for.
            promised = sum(
                blocks_for(other.tree.num_committed, target.block_size) - len(other.block_table)
                for other in self.running.values()
                if other.prefilling
            )
            if self.running and wanted + promised > target.pool.num_free:
                break
            self.waiting.popleft()
            self.running[sequence.sequence_id] = sequence
            admitted.append(sequence)
        return admitted

    def remove(self, sequence: Sequence) -> None:
        """The sequence ended; it is in no step. Its blocks are free from the next step on."""
        if self.running.pop(sequence.sequence_id, None) is None:
            self.waiting.remove(sequence)
        self._release(sequence)

    def plan(self, now: float) -> RunStep | None:
        """The next step, or None when there is nothing to do; sets `wake_at` for those who wait."""
        self.wake_at = None
        if self.target is None:
            return None
        draft = _Draft(self._max_step_tokens)
        decoding = self._decoding_windows(now)
        spare = draft.budget - len(decoding)
        for sequence, wanted in decoding:
            # Candidates of a tree take KV positions of their own, more than its depth.
            room = self.target.room - sequence.tree.num_committed
            window = min(wanted, spare, room)
            if self._take(draft, sequence, 1, window):
                spare -= window
        for sequence in list(self.running.values()):
            missing = sequence.tree.num_committed - sequence.kv_length
            if missing > 1 and draft.budget > 0:
                self._take(draft, sequence, min(missing, draft.budget), 0)
        if not draft.slices and not self._closes:
            return None
        self._last_step += 1
        step = RunStep(
            self._last_step, tuple(draft.opens), tuple(self._closes), tuple(draft.slices)
        )
        self._closes.clear()
        return step

    def check_integrity(self) -> None:
        """Assert that blocks are neither leaked nor shared and tables cover what was computed."""
        for sequence in [*self.waiting, *self.running.values()]:
            sequence.tree.check_integrity()
        for sequence in self.waiting:
            assert not sequence.block_table
            assert sequence.in_flight is None
        if self.target is not None:
            running = self.running.values()
            self.target.pool.check_integrity(sequence.block_table for sequence in running)
            for sequence in running:
                assert sequence.kv_length <= len(sequence.block_table) * self.target.block_size
                assert sequence.kv_length < sequence.tree.num_committed

    def _decoding_windows(self, now: float) -> list[tuple[Sequence, int]]:
        """Sequences that may decode now, with the windows that their policies want."""
        ready = []
        for sequence in self.running.values():
            if sequence.prefilling:
                continue
            window = sequence.policy.window(sequence.draft_view(), now, self._wait_seconds)
            if isinstance(window, Wait):
                self.wake_at = min(window.until, self.wake_at or window.until)
            elif sequence.num_paths:
                # Merged paths are fewer candidates: how many must not decide how deep it goes.
                ready.append((sequence, sequence.request.window))
            else:
                ready.append((sequence, window))
        return ready

    def _take(self, draft: _Draft, sequence: Sequence, count: int, window: int) -> bool:
        """Add a slice of `count` committed tokens and `window` candidates, if blocks allow."""
        start = sequence.kv_length
        if sequence.sequence_id not in self.running:
            return False  # It gave its blocks to an older one a moment ago.
        if not self._cover(draft, sequence, start + count + window):
            return False
        if not sequence.open_at_target:
            draft.opens.append((sequence.sequence_id, sequence.request.spec))
            sequence.open_at_target = True
        tree = sequence.tree
        candidates = tree.pin(window, num_paths=sequence.num_paths)
        sequence.in_flight = Slice(
            sequence_id=sequence.sequence_id,
            start=start,
            token_ids=(*tree.token_ids[start : start + count], *candidates.token_ids),
            window=len(candidates.token_ids),
            verdict=start + count == tree.num_committed,
            new_blocks=tuple(sequence.block_table[sequence.blocks_sent :]),
            parents=candidates.parents,
            kv_moves=sequence.kv_moves,
            multiplicities=candidates.multiplicities,
            distributions=candidates.distributions,
            top_tokens=sequence.wants_top_tokens,
        )
        sequence.kv_moves = ()
        sequence.blocks_sent = len(sequence.block_table)
        draft.slices.append(sequence.in_flight)
        draft.members.add(sequence.sequence_id)
        draft.budget -= count + window
        return True

    def _cover(self, draft: _Draft, sequence: Sequence, length: int) -> bool:
        """Give the sequence blocks for `length` positions, taking them from younger ones."""
        assert self.target is not None
        pool = self.target.pool
        wanted = blocks_for(length, self.target.block_size) - len(sequence.block_table)
        while wanted > pool.num_free:
            youngest = next(reversed(self.running.values()))
            if youngest is sequence or youngest.sequence_id in draft.members:
                return False
            del self.running[youngest.sequence_id]
            self._release(youngest)
            self.waiting.appendleft(youngest)
        if wanted > 0:
            sequence.block_table.extend(pool.allocate(wanted))
        return True

    def _release(self, sequence: Sequence) -> None:
        if self.target is not None:
            self.target.pool.free(sequence.block_table)
        if sequence.open_at_target:
            self._closes.append(sequence.sequence_id)
        sequence.forget_kv()
