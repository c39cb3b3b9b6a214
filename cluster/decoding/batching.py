"""Which sequences a step holds, how many tokens of each, and in which KV blocks.

Decoding sequences come first, the oldest before the youngest. Prefill chunks follow, as many tokens
as the step's budget leaves and as decoding sequences can bear (prefill.py). Each target group has a
batch of its own. Waiting sequences of all groups form one line in the order of arrival. None
overtakes another, so none waits forever.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from cluster.decoding.draft_view import view_of
from cluster.decoding.instructions import OpenAtTarget, RunStep, Slice
from cluster.decoding.lookahead import Wait
from cluster.decoding.prefill import PrefillCosts, share_prefill, start_of
from cluster.decoding.residents import Residents, Target
from cluster.decoding.sequence import Sequence
from cluster.decoding.waiting import WaitingLine


@dataclass(slots=True)
class _Draft:
    """A step that is being put together. `members`: ids of the sequences in it."""

    budget: int
    slices: list[Slice] = field(default_factory=list)
    opens: list[OpenAtTarget] = field(default_factory=list)
    members: set[int] = field(default_factory=set)


class Batching(Residents):
    """Puts the steps of one target group together."""

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
        super().__init__(waiting, group=group, max_num_seqs=max_num_seqs)
        self._max_step_tokens = max_step_tokens
        self._wait_seconds = wait_seconds
        self._prefill_costs = PrefillCosts()
        self.hit_tokens = 0
        """Committed tokens whose KV sequences found in the cache."""
        self.wake_at: float | None = None
        self._last_step = 0
        self._suspect_is_next = True

    def join_target(self, target: Target) -> None:
        """A target joined. It is fresh: it knows no sequence."""
        super().join_target(target)
        self._last_step = 0

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

    def _step_of(self, members: Iterable[Sequence], now: float) -> RunStep | None:
        """A step of these running sequences alone; None: there is nothing to do for them."""
        assert self.target is not None
        draft = _Draft(self._max_step_tokens)
        decoding, prefilling = self._windows(members, now)
        to_prefill = self._to_prefill(prefilling) if prefilling else []
        spare, room = draft.budget - len(decoding), self.target.room
        for sequence, wanted in decoding:
            # Tokens that other groups committed meanwhile come first.
            lacking = min(sequence.lacking, 1 + spare)
            left = spare + 1 - lacking if lacking == sequence.lacking else 0
            # Each candidate of a tree takes a KV position of its own.
            window = min(wanted, left, room - sequence.tree.num_committed)
            if self._take(draft, sequence, lacking, window):
                spare -= window + lacking - 1
        self._take_prefill(draft, to_prefill)
        if not draft.slices:
            return None  # Closes go with the next step. Until then nobody needs to know of them.
        self._last_step += 1
        step = RunStep(
            self._last_step,
            tuple(draft.opens),
            tuple(self.closes),
            tuple(draft.slices),
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
            patience = min(self._wait_seconds, sequence.patience)
            window = sequence.policy.window(view_of(sequence), now, patience)
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
        # For each sequence that has not begun: index in its block table of its first own block.
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

    def _take_prefill(self, draft: _Draft, sequences: list[Sequence]) -> None:
        """Add prefill chunks to the step, the oldest sequence's first."""
        if not sequences:
            return
        fed = sum(len(part.token_ids) for part in draft.slices)
        left = [one for one in sequences if one.sequence_id in self.running]
        if not left:
            return
        missing = [one.tree.num_committed - one.kv.length for one in left]
        bearable = draft.budget
        if fed:
            start = start_of([one.kv.length for one in left], missing)
            bearable = self._prefill_costs.chunk_beside(fed, start)
        shares = share_prefill(missing, min(draft.budget, bearable))
        for sequence, count in zip(left, shares, strict=True):
            if count:
                self._take(draft, sequence, count, 0)

    def _take(self, draft: _Draft, sequence: Sequence, count: int, window: int) -> bool:
        """Add `count` committed tokens and `window` candidates, if blocks allow; whether it did."""
        held = sequence.kv
        start = held.length
        if sequence.sequence_id not in self.running:
            return False  # It just gave its blocks to an older one.
        if not self.cover(sequence, start + count + window, but=draft.members):
            return False
        if not held.open_at_target:
            self._open(draft, sequence)
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
        )
        held.moves = ()
        held.blocks_sent = len(held.block_table)
        draft.slices.append(held.in_flight)
        draft.members.add(sequence.sequence_id)
        draft.budget -= count + window
        return True

    def _open(self, draft: _Draft, sequence: Sequence) -> None:
        """Open a sequence at the target, which learns where the KV of its first tokens lies."""
        assert self.target is not None
        held = sequence.kv
        start = held.length
        held.blocks_sent = start // self.target.kv.block_size
        draft.opens.append(
            OpenAtTarget(
                sequence.sequence_id,
                sequence.request.spec,
                shared_blocks=tuple(held.block_table[: held.blocks_sent]),
                token_ids=tuple(sequence.tree.token_ids[:start]),
            )
        )
        held.open_at_target = True
        self.hit_tokens += start
