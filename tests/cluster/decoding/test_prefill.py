"""How much prefill a step takes, and whose."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cluster.decoding.prefill import MIN_CHUNK, PrefillCosts, share_prefill


def test_as_little_as_may_be_while_nothing_is_known() -> None:
    assert PrefillCosts().chunk_beside(4) == MIN_CHUNK


def test_a_chunk_costs_no_more_than_the_decoding_step_beside_it() -> None:
    costs = PrefillCosts()
    for _ in range(20):
        costs.add(decoding_tokens=4, prefill_tokens=0, step_seconds=0.040)
        beside = costs.chunk_beside(4)
        costs.add(decoding_tokens=4, prefill_tokens=beside, step_seconds=0.040 + 0.0005 * beside)
    assert 76 <= costs.chunk_beside(4) <= 80


def test_a_cheap_chunk_at_most_doubles_and_a_dear_one_is_not_repeated() -> None:
    costs = PrefillCosts()
    costs.add(decoding_tokens=4, prefill_tokens=0, step_seconds=0.010)
    costs.add(decoding_tokens=4, prefill_tokens=32, step_seconds=0.010)
    assert costs.chunk_beside(4) == 64
    costs.add(decoding_tokens=4, prefill_tokens=64, step_seconds=0.050)
    assert costs.chunk_beside(4) < 64
    for _ in range(9):
        costs.add(decoding_tokens=4, prefill_tokens=16, step_seconds=9.0)
    assert costs.chunk_beside(4) == MIN_CHUNK, "prefill goes on whatever it costs"


def test_a_batch_of_a_size_not_seen_is_taken_for_a_cheaper_one() -> None:
    costs = PrefillCosts()
    costs.add(decoding_tokens=0, prefill_tokens=512, step_seconds=0.512)
    costs.add(decoding_tokens=16, prefill_tokens=0, step_seconds=0.160)
    for _ in range(5):
        costs.add(decoding_tokens=16, prefill_tokens=100, step_seconds=0.260)
    of_sixteen = costs.chunk_beside(16)
    assert costs.chunk_beside(64) == of_sixteen
    assert costs.chunk_beside(4) <= of_sixteen / 3


@given(st.lists(st.integers(1, 2000), max_size=12), st.integers(1, 512))
def test_shares_use_the_budget_and_half_of_it_is_the_oldests(
    missing: list[int], budget: int
) -> None:
    shares = share_prefill(missing, budget)
    assert all(0 <= share <= lacks for share, lacks in zip(shares, missing, strict=True))
    assert sum(shares) == min(budget, sum(missing))
    if missing:
        assert shares[0] >= min(missing[0], budget / 2)


def test_the_other_half_goes_to_those_that_lack_least() -> None:
    assert share_prefill([1500, 300, 20, 40], 100) == [50, 0, 20, 30]
    assert share_prefill([10, 300], 100) == [10, 90]
    assert share_prefill([300, 5], 100) == [95, 5]


def test_chunks_grow_even_where_no_step_is_without_prefill() -> None:
    costs = PrefillCosts()
    chunks = []
    for _ in range(12):
        chunks.append(costs.chunk_beside(4))
        costs.add(decoding_tokens=4, prefill_tokens=chunks[-1], step_seconds=0.02)
    assert chunks[0] == MIN_CHUNK
    assert chunks[-1] >= 512, "the step takes no longer for them"


def test_as_much_prefill_as_decoding_is_always_bearable() -> None:
    """Also where prefill alone looked dear: twice the tokens take at most twice as long."""
    costs = PrefillCosts()
    costs.add(decoding_tokens=0, prefill_tokens=16, step_seconds=0.018)
    for decoding_tokens in (8, 40, 300):
        assert costs.chunk_beside(decoding_tokens) == max(MIN_CHUNK, decoding_tokens)
        costs.add(decoding_tokens=decoding_tokens, prefill_tokens=MIN_CHUNK, step_seconds=0.018)
