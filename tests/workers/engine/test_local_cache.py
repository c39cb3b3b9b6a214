"""A drafter's bookkeeping: token ids, blocks, truncation."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import OverloadedError
from workers.engine.kv_blocks import BlockPool
from workers.engine.local_cache import LocalCache

BLOCK = 4


def test_a_sequence_grows_and_is_truncated() -> None:
    cache = LocalCache(num_blocks=5, block_size=BLOCK)
    sequence = cache.open("a")
    sequence.extend([1, 2, 3, 4, 5])
    assert len(sequence.block_table) == 2
    piece = sequence.pending_slice(limit=3)
    assert (piece.start, piece.token_ids, piece.num_logits) == (0, [1, 2, 3], 0)
    sequence.mark_stored(3)
    piece = sequence.pending_slice()
    assert (piece.start, piece.token_ids, piece.num_logits) == (3, [4, 5], 1)
    sequence.mark_stored(2)
    assert sequence.num_stored == len(sequence)
    sequence.truncate_to(4)
    assert (len(sequence), sequence.num_stored, len(sequence.block_table)) == (4, 4, 1)
    sequence.extend([9])
    assert sequence.token_ids == [1, 2, 3, 4, 9]
    assert sequence.num_stored == len(sequence) - 1
    cache.check_integrity()
    cache.close("a")
    cache.open("b").extend(range(5 * BLOCK))
    cache.check_integrity()


def test_a_full_pool_refuses_and_changes_nothing() -> None:
    cache = LocalCache(num_blocks=2, block_size=BLOCK)
    sequence = cache.open(1)
    sequence.extend(range(5))
    with pytest.raises(OverloadedError, match="1 KV blocks wanted, 0 free"):
        sequence.extend(range(4))
    assert len(sequence) == 5
    cache.check_integrity()


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["extend", "truncate", "store", "close"]),
            st.integers(0, 2),
            st.integers(0, 9),
        ),
        max_size=40,
    )
)
def test_blocks_are_never_lost_or_shared(events: list[tuple[str, int, int]]) -> None:
    cache = LocalCache(num_blocks=8, block_size=BLOCK)
    sequences = {name: cache.open(name) for name in range(3)}
    for kind, name, amount in events:
        sequence = sequences[name]
        if kind == "extend":
            try:
                sequence.extend(range(amount))
            except OverloadedError:
                held = sum(len(one.block_table) for one in sequences.values())
                assert 8 - held < 3, "refused though there was room"
        elif kind == "truncate":
            sequence.truncate_to(min(amount, len(sequence)))
        elif kind == "store":
            sequence.mark_stored(len(sequence.pending_slice(limit=amount).token_ids))
        elif kind == "close":
            cache.close(name)
            sequences[name] = cache.open(name)
        cache.check_integrity()


def test_the_integrity_check_sees_a_block_that_is_held_twice() -> None:
    pool = BlockPool(4)
    first = pool.allocate(2)
    pool.check_integrity([first])
    with pytest.raises(AssertionError, match="leaked or shared"):
        pool.check_integrity([first, first[:1]])
    with pytest.raises(AssertionError, match="leaked or shared"):
        pool.check_integrity([first[:1]])
