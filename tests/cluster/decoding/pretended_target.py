"""A target that keeps token ids in its KV blocks, for tests of the scheduler without I/O.

It stores a hash of the whole prefix beside each token, and answers from what it reads there. So a
wrong rollback, a block that is shared by mistake, or a lost prefix gives wrong text.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from cluster.decoding.events import SequenceVerdict
from cluster.decoding.instructions import RunStep, Slice
from paceline.generation import TokenLogprobs
from tests.cluster.decoding.true_text import true_logprobs, true_token

BLOCK_SIZE = 4


@dataclass
class PretendedTarget:
    """Stores (token id, hash of the tokens up to it) where a real target stores keys and values."""

    block_size: int = BLOCK_SIZE
    kv: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)
    tables: dict[int, list[int]] = field(default_factory=dict)
    seeds: dict[int, int] = field(default_factory=dict)
    prompt_logprobs: dict[int, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
    """Those that the last step asked for."""
    max_slices: int = 0
    num_trees: int = 0
    num_shared: int = 0

    def run(self, step: RunStep) -> tuple[SequenceVerdict, ...]:
        """Apply a step and answer it."""
        for sequence_id in step.close:
            del self.tables[sequence_id]
        for opened in step.open:
            assert opened.sequence_id not in self.tables
            self.tables[opened.sequence_id] = list(opened.shared_blocks)
            self.seeds[opened.sequence_id] = opened.spec.seed
            self.num_shared += len(opened.shared_blocks)
        self.prompt_logprobs = {
            part.sequence_id: tuple(
                true_logprobs(position, token_id)
                for position, token_id in enumerate(part.logprobs_of, start=part.start + 1)
            )
            for part in step.slices
            if part.logprobs_of
        }
        ids = [part.sequence_id for part in step.slices]
        assert len(ids) == len(set(ids))
        self.max_slices = max(self.max_slices, len(ids))
        verdicts = [self._run_slice(part) for part in step.slices]
        return tuple(verdict for verdict in verdicts if verdict is not None)

    def _run_slice(self, part: Slice) -> SequenceVerdict | None:
        table = self.tables[part.sequence_id]

        def slot(position: int) -> tuple[int, int]:
            return table[position // self.block_size], position % self.block_size

        for source, to in part.kv_moves:
            self.kv[slot(to)] = self.kv[slot(source)]
        table.extend(part.new_blocks)
        end = part.start + len(part.token_ids)
        committed = end - part.window
        parents = part.parents or tuple(range(part.window))
        for position, token_id in zip(range(part.start, end), part.token_ids, strict=True):
            before = position - 1
            if position >= committed:
                before = committed - 1 + parents[position - committed]
            seen = self.kv[slot(before)][1] if before >= 0 else 0
            self.kv[slot(position)] = token_id, hash((seen, token_id))
        if not part.verdict:
            return None
        read = [self.kv[slot(position)] for position in range(end)]
        path, seen = [], 0
        for token_id, computed_after in read[:committed]:
            path.append(token_id)
            seen = hash((seen, token_id))
            assert computed_after == seen, "KV that was computed after other tokens"
        candidates = [token_id for token_id, _ in read[committed:]]
        self.num_trees += bool(part.parents)
        accepted, node = [], 0
        while True:
            chosen = true_token(path, self.seeds[part.sequence_id])
            fitting = (i for i, t in enumerate(candidates) if parents[i] == node and t == chosen)
            index = next(fitting, None)
            if index is None:
                break
            accepted.append(index)
            path.append(chosen)
            node = index + 1
        is_first = accepted == list(range(len(accepted)))
        told = () if is_first and not part.parents else tuple(accepted)
        path.append(chosen)
        logprobs = tuple(
            true_logprobs(position, path[position]) for position in range(committed, len(path))
        )
        return SequenceVerdict(part.sequence_id, len(accepted), chosen, told, logprobs=logprobs)
