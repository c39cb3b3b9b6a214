"""Which blocks are shared, and which are given up first when room is needed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cluster.decoding.prefix_cache import PrefixCache
from cluster.decoding.sequence import Sequence
from tests.cluster.decoding.true_text import request
from workers.engine.kv_blocks import BlockKeys, KvKind

SIZE = 4
KIND = KvKind(SIZE, "float32", b"files")


def computed(cache: PrefixCache, prompt: tuple[int, ...], *, tenant: str = "") -> Sequence:
    """A sequence whose prompt was computed, with the blocks that the cache had of it."""
    sequence = Sequence.admitted(request(1, prompt, tenant=tenant), 0.0)
    cache.adopt(sequence)
    length = len(prompt)
    held = sequence.kv
    held.block_table += cache.allocate(-(-length // SIZE) - len(held.block_table))
    held.open_at_target = True
    held.length = length - 1
    cache.keep(sequence)
    return sequence


def found(cache: PrefixCache, prompt: tuple[int, ...], *, tenant: str = "") -> int:
    """The number of a prompt's tokens in the cache. Changes only the order of use."""
    sequence = Sequence.admitted(request(2, prompt, tenant=tenant), 0.0)
    cache.adopt(sequence)
    cache.release(sequence)
    return sequence.kv.length


A = (*range(1, 9), 30)
B = (*range(11, 19), 30)


def test_a_sequence_that_ended_leaves_its_full_blocks() -> None:
    cache = PrefixCache(8, KIND)
    sequence = computed(cache, A)
    cache.check_integrity([sequence])
    cache.release(sequence)
    cache.check_integrity([])
    assert cache.num_available == 8
    assert found(cache, A) == 8
    assert found(cache, (*A[:4], 40, 41)) == 4
    assert found(cache, (*B[:4], *A[4:])) == 0, "equal blocks after other tokens are not equal"
    assert found(cache, A, tenant="x") == 0


def test_the_longest_unused_goes_first_and_of_a_prefix_its_end() -> None:
    cache = PrefixCache(6, KIND)
    for prompt in (A, B):
        cache.release(computed(cache, prompt))
    assert found(cache, A) == 8  # used again, after B
    taken = cache.allocate(3)  # two are free
    assert (found(cache, B), found(cache, A)) == (4, 8)
    taken += cache.allocate(2)
    assert (found(cache, B), found(cache, A)) == (0, 4)
    assert len(set(taken)) == 5


def test_a_tenant_that_floods_the_cache_pushes_out_its_own_blocks_alone() -> None:
    cache = PrefixCache(8, KIND)
    cache.release(computed(cache, A, tenant="one"))
    for begin in range(100, 200, 10):
        cache.release(computed(cache, tuple(range(begin, begin + 9)), tenant="many"))
        cache.check_integrity([])
    assert found(cache, A, tenant="one") == 8
    assert found(cache, tuple(range(190, 199)), tenant="many") == 8


def test_blocks_that_somebody_reads_are_not_to_be_had() -> None:
    cache = PrefixCache(6, KIND)
    first, second = computed(cache, A), computed(cache, A)
    assert second.kv.block_table[:2] == first.kv.block_table[:2]
    assert cache.num_available == 2
    cache.release(first)
    assert cache.num_available == 3, "its last block; the others are read by the second"
    cache.check_integrity([second])
    waiting = Sequence.admitted(request(3, A), 0.0)
    assert cache.wanted(waiting, len(A)) == 1
    cache.release(second)
    assert cache.wanted(waiting, len(A)) == 3, "what nobody reads takes room once it is read"


def test_what_two_computed_at_once_is_kept_once() -> None:
    cache = PrefixCache(8, KIND)
    sequences = [Sequence.admitted(request(number, A), 0.0) for number in (1, 2)]
    for sequence in sequences:
        sequence.kv.block_table = cache.allocate(3)
        sequence.kv.length = 8
    for sequence in sequences:
        cache.keep(sequence)
        cache.check_integrity(sequences)
    for sequence in sequences:
        cache.release(sequence)
    cache.check_integrity([])
    assert found(cache, A) == 8


def test_kv_of_an_accepted_path_that_was_moved_is_not_shared() -> None:
    cache = PrefixCache(8, KIND)
    sequence = Sequence.admitted(request(1, A), 0.0)
    sequence.kv.block_table = cache.allocate(3)
    sequence.kv.length = 8
    sequence.kv.plain_until = 6
    cache.keep(sequence)
    cache.release(sequence)
    assert found(cache, A) == 4


@pytest.mark.parametrize(
    "other",
    [
        replace(KIND, block_size=2),
        replace(KIND, dtype="int8"),
        replace(KIND, checkpoint_digest=b""),
    ],
)
def test_keys_tell_what_made_the_blocks(other: KvKind) -> None:
    """Blocks of different kinds or tenants have different keys, whatever the tokens."""
    keys = [
        set(BlockKeys(kind, tenant=tenant).first(2, A))
        for kind, tenant in ((KIND, ""), (KIND, "x"), (other, ""))
    ]
    assert [len(one) for one in keys] == [2, 2, 2]
    assert len(set.union(*keys)) == 6


def test_a_sequence_that_was_on_another_target_has_new_keys() -> None:
    """It offers its blocks under the keys of the target that holds them."""
    sequence = computed(PrefixCache(8, replace(KIND, block_size=2 * SIZE)), A)
    cache = PrefixCache(8, KIND)
    sequence.forget_kv()
    sequence.kv.block_table = cache.allocate(3)
    sequence.kv.length = 8
    cache.keep(sequence)
    assert found(cache, A) == 8
