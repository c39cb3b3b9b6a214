"""The start-up self-test: is a row of logits bit-equal in any batch, window and prefill split?
And in a tree?

It tests this on the worker's own machine, with its kernels and its number of threads. It overwrites
the engine's KV blocks, so it runs before any sequence exists.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from workers.engine.kv_blocks import blocks_for
from workers.engine.slices import Slice

if TYPE_CHECKING:
    from workers.engine.engine import Engine

_log = logging.getLogger(__name__)


_PAST_BLOCK = 12
"""Tokens of the longer sequence after its first block: attention adds two blocks of keys."""
_COMPANIONS = 20
"""Maximum number of other sequences in a step of the larger batch."""
_PARENTS = (0, 0, 1, 1, 2, 3, 6, 5)
"""The tree whose rows are compared with those of chains. Two paths are compared."""
_TREE_START = 67
"""Its place: keys in two of our kernels' blocks, and not at the begin of one."""
_TAIL = 20
"""The number of rows that are compared, the last ones; they lie in both blocks."""
_WINDOWS = (1, 2, 3, 5, 9)
"""The sizes of the pieces in which the tail is fed. Their sum is _TAIL."""


def rows_are_invariant(engine: Engine) -> bool:
    """Whether several ways to compute the same rows give the same bits. This takes some 12 steps.

    The ways: the prompt at once; the tail in windows; the prompt in two parts in blocks that are
    not neighbors, beside another sequence of another length; a window in a large batch; and, if
    torch has several threads, with one thread. Blocks are overwritten, so call it before any
    sequence exists.
    """
    size = engine.block_size
    length = min(size + _PAST_BLOCK, engine.max_model_len, engine.num_blocks * size // 2)
    tail = min(_TAIL, length - 2)
    if tail < 2:
        return False
    generator = torch.Generator().manual_seed(20)
    token_ids = torch.randint(engine.info.vocab_size, (length,), generator=generator).tolist()
    needed = blocks_for(length, engine.block_size)
    first = list(range(needed))
    second = list(range(needed, engine.num_blocks))[::-1][:needed]
    trial = _Trial(engine, token_ids, length - tail)
    expected = trial.at_once(first)
    # All ways run, even after a difference: the ranks of a group must run the same steps.
    others = [trial.in_windows(first)]
    if len(second) == needed:
        others.append(trial.in_company(first, second))
        others.append(trial.in_a_batch(first, second))
    if torch.get_num_threads() > 1:
        others.append(trial.on_one_thread(first))
    return all(torch.equal(rows, expected) for rows in others)


def trees_are_invariant(engine: Engine) -> bool:
    """Whether the nodes of a tree have the bits of chains. If not, the log says what follows.

    Overwrites blocks, as rows_are_invariant does. It feeds 75 tokens, or returns True if the engine
    has room for fewer.
    """
    num_nodes = len(_PARENTS)
    end = _TREE_START
    if min(engine.max_model_len, engine.num_blocks * engine.block_size) < end + num_nodes:
        return True
    token_ids = [(7 * token + 3) % engine.info.vocab_size for token in range(end + num_nodes)]
    table = range(blocks_for(end + num_nodes, engine.block_size))
    engine.step([Slice(table, 0, token_ids[:end], 0)])
    tree_TV = engine.step([Slice(table, end, token_ids[end:], num_nodes, end, _PARENTS)])
    same = True
    for node in (num_nodes, num_nodes - 1):
        path: list[int] = []
        while node:
            path.insert(0, node - 1)
            node = _PARENTS[node - 1]
        ids = [token_ids[end + one] for one in path]
        same &= torch.equal(engine.step([Slice(table, end, ids, len(ids))]), tree_TV[path])
    if not same:
        _log.warning(
            "trees of candidates keep the law, not the text: on this worker their rows differ in "
            "rounding from those of plain decoding (docs/rules.md)"
        )
    return same


class _Trial:
    """The ways to compute the rows from `tail_start` on."""

    def __init__(self, engine: Engine, token_ids: list[int], tail_start: int) -> None:
        self.engine = engine
        self.token_ids = token_ids
        self.tail_start = tail_start

    def piece(self, table: Sequence[int], start: int, end: int, num_logits: int) -> Slice:
        return Slice(table, start, self.token_ids[start:end], num_logits)

    def at_once(self, table: Sequence[int]) -> Tensor:
        end = len(self.token_ids)
        return self.engine.step([self.piece(table, 0, end, end - self.tail_start)])

    def in_windows(self, table: Sequence[int]) -> Tensor:
        """The tail in windows, over the KV that `at_once` left before it."""
        rows: list[Tensor] = []
        start = self.tail_start
        for width in _WINDOWS:
            end = min(start + width, len(self.token_ids))
            if end > start:
                rows.append(self.engine.step([self.piece(table, start, end, end - start)]))
            start = end
        return torch.cat(rows)

    def in_company(self, first: Sequence[int], second: Sequence[int]) -> Tensor:
        """The prompt in two parts in other blocks, each beside a slice of the first sequence."""
        middle, end = self.tail_start // 2, len(self.token_ids)
        self.engine.step([self.piece(second, 0, middle, 0), self.piece(first, 0, 1, 1)])
        step = [self.piece(first, 1, 8, 3), self.piece(second, middle, end, end - self.tail_start)]
        return self.engine.step(step)[3:]

    def in_a_batch(self, first: Sequence[int], second: Sequence[int]) -> Tensor:
        """The tail as one window, over the KV that `in_company` left, beside single tokens."""
        end, size = len(self.token_ids), self.engine.block_size
        others = [
            self.piece([block] * -(-end // size), 0, 1, 1)
            for block in (*first, *range(2 * len(first), self.engine.num_blocks))
            if block not in second
        ][:_COMPANIONS]
        window = self.piece(second, self.tail_start, end, end - self.tail_start)
        return self.engine.step([*others, window])[len(others) :]

    def on_one_thread(self, table: Sequence[int]) -> Tensor:
        """The prompt in two steps with one thread. The number of threads is restored."""
        threads, half = torch.get_num_threads(), (self.tail_start + len(self.token_ids)) // 2
        torch.set_num_threads(1)
        try:
            rows = self.engine.step([self.piece(table, 0, half, half - self.tail_start)])
            end = len(self.token_ids)
            return torch.cat([rows, self.engine.step([self.piece(table, half, end, end - half)])])
        finally:
            torch.set_num_threads(threads)
