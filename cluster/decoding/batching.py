"""Which sequences a step takes, how much of each, and in which KV blocks.

Decoding sequences come first, the oldest before the youngest; then prefill chunks, as many tokens
as the step's budget leaves and as those who decode can bear (prefill.py). Sequences are let in by
free blocks, in the order in which they came: none overtakes, so none waits for ever. When blocks
run out, the youngest sequence gives its own back and is computed again later; it keeps its place in
that order. Each target group has a batch of its own; those who wait are in one line for all groups.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from cluster.decoding.instructions import OpenAtTarget, RunStep, Slice
from cluster.decoding.policies import Wait
from cluster.decoding.prefill import PrefillCosts, share_prefill
from cluster.decoding.prefix_cache import PrefixCache
from cluster.decoding.sequence import Sequence
from cluster.decoding.waiting import WaitingLine
from paceline.errors import PromptTooLongError
from workers.engine.block_pool import blocks_for


@dataclass(frozen=True, slots=True)
class Target:
    """What the scheduler knows of the target group."""

    vocab_size: int
    max_model_len: int
    kv: PrefixCache

    @property
    def room(self) -> int:
        """Most tokens that a sequence can have."""
        return min(self.max_model_len, self.kv.num_blocks * self.kv.block_size)


@dataclass(slots=True)
class _Draft:
    """A step while it is being put together."""

    budget: int
    slices: list[Slice] = field(default_factory=list)
    opens: list[OpenAtTarget] = field(default_factory=list)
    members: set[int] = field(default_factory=set)


class Batching:
    """The running sequences of a target group and their block tables."""

    def __init__(
        self,
        waiting: WaitingLine,
        *,
        group: int = 0,
        max_num_seqs: int = 64,
        max_step_tokens: int = 512,
        wait_seconds: float = 1.0,
    ) -> None:
        """`waiting`: the line of all groups; `group`: the number of this one."""
        if not 1 <= max_num_seqs <= max_step_tokens:
            raise ValueError(
                f"a step of {max_step_tokens} tokens cannot hold {max_num_seqs} sequences"
            )
        self._group = group
        self._max_num_seqs = max_num_seqs
        self._max_step_tokens = max_step_tokens
        self._wait_seconds = wait_seconds
        self._prefill_costs = PrefillCosts()
        self.preemptions = 0
        """How often a sequence gave its blocks to an older one."""
        self.hit_tokens = 0
        """Tokens that sequences found computed."""
        self.target: Target | None = None
        self.waiting = waiting
        self.running: dict[int, Sequence] = {}
        self.wake_at: float | None = None
        self._closes: list[int] = []
        self._last_step = 0

    @property
    def kv(self) -> PrefixCache:
        """The blocks of the target that there is."""
        assert self.target is not None
        return self.target.kv

    def join_target(self, target: Target) -> None:
        """A fresh target: nothing is known to it."""
        self.target = target
        self._last_step = 0

    def lose_target(self) -> None:
        """All KV is gone; running sequences wait again, in their order."""
        self.target = None
        self._closes.clear()
        for sequence in self.running.values():
            sequence.forget_kv()
            self.waiting.put_back(sequence)
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

    def has_room_for(self, sequence: Sequence) -> bool:
        """Whether a sequence that waits could run here now."""
        target = self.target
        if target is None or len(self.running) >= self._max_num_seqs:
            return False
        length = sequence.tree.num_committed + sequence.request.window
        # What running prefills will still take is spoken for.
        promised = sum(
            target.kv.wanted(other, other.tree.num_committed)
            for other in self.running.values()
            if other.prefilling
        )
        wanted = target.kv.wanted(sequence, length)
        return not self.running or wanted + promised <= target.kv.num_available

    def let_in(self, sequence: Sequence) -> None:
        """Run a sequence that no longer waits; it keeps its place among those who came."""
        sequence.group = self._group
        last = next(reversed(self.running.values()), None)
        self.running[sequence.sequence_id] = sequence
        if last is not None and last.order > sequence.order:
            self.running = dict(sorted(self.running.items(), key=lambda item: item[1].order))

    def remove(self, sequence: Sequence) -> None:
        """The sequence ended; it is in no step. Its blocks are free from the next step on."""
        del self.running[sequence.sequence_id]
        self._release(sequence)

    def answered(self, step: RunStep, step_seconds: float) -> int:
        """Learn what a step cost; returns how many tokens of it were prefill."""
        fed = decoding = 0
        for part in step.slices:
            count = len(part.token_ids)
            fed += count
            if part.verdict and count == 1 + part.window:
                decoding += count
        self._prefill_costs.add(
            decoding_tokens=decoding, prefill_tokens=fed - decoding, step_seconds=step_seconds
        )
        return fed - decoding

    def plan(self, now: float) -> RunStep | None:
        """The next step, or None when there is nothing to do; sets `wake_at` for those who wait."""
        self.wake_at = None
        if self.target is None:
            return None
        draft = _Draft(self._max_step_tokens)
        to_prefill = self._to_prefill()
        decoding = self._decoding_windows(now)
        spare, room = draft.budget - len(decoding), self.target.room
        for sequence, wanted in decoding:
            # Candidates of a tree take KV positions of their own, more than its depth.
            window = min(wanted, spare, room - sequence.tree.num_committed)
            if self._take(draft, sequence, 1, window):
                spare -= window
        self._take_prefill(draft, to_prefill)
        if not draft.slices and not self._closes:
            return None
        self._last_step += 1
        step = RunStep(
            self._last_step,
            tuple(draft.opens),
            tuple(self._closes),
            tuple(draft.slices),
            group=self._group,
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
            assert sequence.group is None
        for one in (self.running.values(), self.waiting):
            order = [sequence.order for sequence in one]
            assert order == sorted(order), "a sequence lost its place"
        if self.target is not None:
            running, kv = self.running.values(), self.target.kv
            kv.check_integrity(running)
            for sequence in running:
                assert sequence.kv_length <= len(sequence.block_table) * kv.block_size
                assert sequence.kv_length < sequence.tree.num_committed

    def _decoding_windows(self, now: float) -> list[tuple[Sequence, int]]:
        """Sequences that may decode now, with the windows that their policies want."""
        ready = []
        for sequence in self.running.values():
            if sequence.prefilling:
                continue
            patience = min(self._wait_seconds, sequence.patience)
            window = sequence.policy.window(sequence.draft_view(), now, patience)
            if isinstance(window, Wait):
                self.wake_at = min(window.until, self.wake_at or window.until)
            elif sequence.num_paths:
                # Merged paths are fewer candidates: how many must not decide how deep it goes.
                ready.append((sequence, sequence.window))
            else:
                ready.append((sequence, window))
        return ready

    def _to_prefill(self) -> list[Sequence]:
        """Sequences to prefill now, the oldest first.

        One that would begin with a block which an older one is about to compute waits for it.
        """
        assert self.target is not None
        kv, chosen = self.target.kv, []
        being_computed: set[bytes] = set()
        for sequence in self.running.values():
            if not sequence.prefilling:
                continue
            if not sequence.open_at_target:
                kv.adopt(sequence)
                if kv.next_key(sequence) in being_computed:
                    continue
            being_computed.update(kv.keys_ahead(sequence))
            chosen.append(sequence)
        return chosen

    def _take_prefill(self, draft: _Draft, sequences: list[Sequence]) -> None:
        """Add prefill chunks, the oldest sequence's first."""
        fed = sum(len(part.token_ids) for part in draft.slices)
        bearable = self._prefill_costs.chunk_beside(fed) if fed else draft.budget
        left = [one for one in sequences if one.sequence_id in self.running]
        missing = [one.tree.num_committed - one.kv_length for one in left]
        shares = share_prefill(missing, min(draft.budget, bearable))
        for sequence, count in zip(left, shares, strict=True):
            if count:
                self._take(draft, sequence, count, 0)

    def _take(self, draft: _Draft, sequence: Sequence, count: int, window: int) -> bool:
        """Add a slice of `count` committed tokens and `window` candidates, if blocks allow."""
        start = sequence.kv_length
        if sequence.sequence_id not in self.running:
            return False  # It gave its blocks to an older one a moment ago.
        if not self._cover(draft, sequence, start + count + window):
            return False
        if not sequence.open_at_target:
            self._open(draft, sequence)
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
        kv = self.target.kv
        wanted = blocks_for(length, kv.block_size) - len(sequence.block_table)
        while wanted > kv.num_available:
            youngest = next(reversed(self.running.values()))
            if youngest is sequence or youngest.sequence_id in draft.members:
                return False
            del self.running[youngest.sequence_id]
            self._release(youngest)
            self.waiting.put_back(youngest)
            self.preemptions += 1
        if wanted > 0:
            sequence.block_table.extend(kv.allocate(wanted))
        return True

    def _open(self, draft: _Draft, sequence: Sequence) -> None:
        """Begin the sequence at the target, which is told where the KV of its first tokens is."""
        assert self.target is not None
        start, kv = sequence.kv_length, self.target.kv
        sequence.blocks_sent = start // kv.block_size
        draft.opens.append(
            OpenAtTarget(
                sequence.sequence_id,
                sequence.request.spec,
                shared_blocks=tuple(sequence.block_table[: sequence.blocks_sent]),
                token_ids=tuple(sequence.tree.token_ids[:start]),
            )
        )
        sequence.open_at_target = True
        self.hit_tokens += start

    def _release(self, sequence: Sequence) -> None:
        if self.target is not None:
            self.target.kv.release(sequence)
        if sequence.open_at_target:
            self._closes.append(sequence.sequence_id)
        sequence.forget_kv()
