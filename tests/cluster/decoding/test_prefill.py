"""How much prefill a step takes, and of which sequences."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.decoding.prefill import LEAST_ROOM, PROMISED, PrefillCosts, share_prefill

BUDGET = 512
MOST = PROMISED / LEAST_ROOM
"""Upper bound on a step's time, as a multiple of a plain step's, if steps take what is expected."""

StepMs = Callable[[int], float]


def dear(tokens: int) -> float:
    """A device whose time is almost only for tokens."""
    return 1 + 10 * tokens


def linear(tokens: int) -> float:
    return 10 + tokens


def processor(tokens: int) -> float:
    """A few tokens are free: this project's demo model on a CPU."""
    return max(16, 9 + 1.25 * tokens)


def bent(tokens: int) -> float:
    return max(12, 0.25 * tokens)


def accelerator(tokens: int) -> float:
    """Bound by memory up to 300 tokens and more."""
    return max(10, 0.03 * tokens) + 0.002 * tokens


def flat(_: int) -> float:
    return 20


DEVICES: list[StepMs] = [dear, linear, processor, bent, accelerator, flat]


def best_chunk(step_ms: StepMs, decoding: int) -> int:
    """The largest chunk that keeps the promise with the room that we leave."""
    fits = (p for p in range(1, BUDGET) if step_ms(decoding + p) <= MOST * step_ms(decoding))
    return max(fits, default=1)


class Device:
    """A device with given step times. Keeps the longest step over the same without prefill."""

    def __init__(self, step_ms: StepMs, noise: Callable[[], float] = lambda: 1.0) -> None:
        self.costs = PrefillCosts()
        self.longest = 0.0
        self.chunks: list[int] = []
        self._step_ms = step_ms
        self._noise = noise

    def step(self, decoding: int, most: int = BUDGET) -> int:
        """Run one step with as much prefill as allowed. Returns the number of prefill tokens."""
        chunk = min(most, self.costs.chunk_beside(decoding)) if decoding else most
        step_ms = self._step_ms(decoding + chunk)
        if decoding:
            self.longest = max(self.longest, step_ms / self._step_ms(decoding))
        self.chunks.append(chunk)
        self.costs.add(
            decoding_tokens=decoding,
            prefill_tokens=chunk,
            step_seconds=step_ms * self._noise() / 1000,
        )
        return chunk


@pytest.mark.parametrize("decoding", [1, 4, 16, 64])
@pytest.mark.parametrize("step_ms", DEVICES)
def test_no_step_is_too_long_from_the_first_one_and_soon_chunks_are_the_largest_bearable(
    step_ms: StepMs, decoding: int
) -> None:
    """Nothing is known at first, and no step comes without prefill by itself."""
    device = Device(step_ms)
    for _ in range(60):
        device.step(decoding)
    assert device.longest <= PROMISED
    best = best_chunk(step_ms, decoding)
    assert max(device.chunks) <= best + 1
    assert device.chunks[14] >= 0.75 * best - 1, "fifteen steps were not enough to find it"
    assert device.chunks[-1] >= 0.9 * best - 1, "what needs no room is not made use of"
    assert device.chunks.count(0) <= 5, "measuring what a step takes without costs steps"


@pytest.mark.parametrize("step_ms", DEVICES)
def test_prefill_alone_tells_the_price_before_anybody_decodes(step_ms: StepMs) -> None:
    device = Device(step_ms)
    device.step(0, most=300)
    for _ in range(4):
        device.step(4)
    assert device.longest <= PROMISED
    assert device.chunks[-1] >= 0.6 * min(300, best_chunk(step_ms, 4)) - 1


@pytest.mark.parametrize("step_ms", DEVICES)
def test_a_batch_of_sixteen_fills_in_near_the_shortest_time(step_ms: StepMs) -> None:
    """Each prompt of 300 tokens joins those that decode; none of them ends meanwhile.

    The first time takes a few steps more: those that measure a step without prefill.
    """
    device, total_ms, ideal_ms = Device(step_ms), 0.0, 0.0
    for decoding in range(16):
        left, best = 300, best_chunk(step_ms, decoding) if decoding else BUDGET
        whole, rest = divmod(left, best)
        ideal_ms += whole * step_ms(decoding + best) + (step_ms(decoding + rest) if rest else 0)
        while left:
            chunk = device.step(decoding, most=left)
            total_ms += step_ms(decoding + chunk)
            left -= chunk
    assert device.longest <= PROMISED
    assert total_ms <= 1.25 * ideal_ms + 10 * step_ms(16)


@pytest.mark.parametrize("step_ms", [linear, processor, bent, accelerator])
def test_the_promise_holds_while_batches_grow_and_shrink_and_prompts_come_and_go(
    step_ms: StepMs,
) -> None:
    """Steps are 10 % off, and the host delays one in thirty."""
    luck = random.Random(5)

    def noise() -> float:
        return 4.0 if luck.random() < 0.03 else luck.uniform(0.95, 1.05)

    device, decoding = Device(step_ms, noise), 1
    for _ in range(4000):
        if luck.random() < 0.3:
            decoding = min(64, max(0, decoding + luck.choice((-9, -2, -1, 1, 2, 9))))
        device.step(decoding, most=luck.choice((0, 3, 40, BUDGET)) or int(not decoding))
    assert device.longest <= PROMISED
    assert sum(device.chunks) > 20 * len(device.chunks)


def test_a_device_that_became_slower_or_quicker_is_found_out() -> None:
    costs = PrefillCosts()
    for scale in (1.0, 4.0, 0.25):
        for _ in range(80):
            chunk = costs.chunk_beside(4)
            step_ms = scale * linear(4 + chunk) if chunk else linear(4)
            costs.add(decoding_tokens=4, prefill_tokens=chunk, step_seconds=step_ms / 1000)
        assert costs.chunk_beside(4) > 0
    assert costs.chunk_beside(4) > 60


def test_what_a_larger_batch_can_bear_is_not_asked_of_a_smaller_one() -> None:
    device = Device(linear)
    for decoding in (64, 60, 40, 33, 16, 8, 4, 2, 1):
        for _ in range(8):
            device.step(decoding)
    assert device.longest <= PROMISED


def test_slow_steps_of_fewer_say_nothing_where_the_size_itself_is_known() -> None:
    costs = PrefillCosts()
    costs.add(decoding_tokens=0, prefill_tokens=300, step_seconds=0.3)
    for decoding, seconds in ((1, 0.1), (4, 0.02)):
        for _ in range(5):
            costs.add(decoding_tokens=decoding, prefill_tokens=0, step_seconds=seconds)
    assert costs.chunk_beside(4) == int((PROMISED / LEAST_ROOM - 1) * 20)


def test_what_comes_before_a_chunk_makes_its_tokens_dear() -> None:
    """Each prompt of 1,500 tokens has larger chunks at its beginning, and no step is too long."""
    costs, longest = PrefillCosts(), 0.0
    for _ in range(3):
        start, chunks = 0, []
        while start < 1500:
            chunk = min(costs.chunk_beside(4, start), 1500 - start)
            position = start + chunk / 2
            step_ms = 30 + chunk * (1.2 + 0.0012 * position)
            costs.add(
                decoding_tokens=4,
                prefill_tokens=chunk,
                step_seconds=step_ms / 1000,
                position=position,
            )
            longest = max(longest, step_ms / 30)
            start += chunk
            chunks += [chunk] if chunk else []
    assert longest <= PROMISED
    assert chunks[0] > 1.5 * chunks[-2]


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
