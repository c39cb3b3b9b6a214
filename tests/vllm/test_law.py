"""At a temperature, the first two tokens have vLLM's own law without speculation."""

from __future__ import annotations

from collections import Counter

import numpy as np

from tests.vllm.conftest import World
from tests.vllm.servers import VllmServer

SAMPLES, AT_ONCE = 3000, 30
PROMPT = [5, 77, 300, 12, 9]


def _pairs(server: VllmServer, temperature: float) -> Counter[tuple[int, ...]]:
    """How often each pair of first tokens came. (vLLM on a CPU ends at a request with a seed whose
    prompt is read in chunks.)"""
    found: Counter[tuple[int, ...]] = Counter()
    for _ in range(SAMPLES // AT_ONCE):
        choices = server.ask(
            PROMPT, n=AT_ONCE, max_tokens=3, ignore_eos=True, temperature=temperature
        )
        found.update(tuple(choice[:2]) for choice in choices)
    return found


def _statistic(one: Counter[tuple[int, ...]], other: Counter[tuple[int, ...]]) -> tuple[float, int]:
    """Pearson's statistic of two samples of one size, and its degrees of freedom.

    Pairs that came fewer than ten times together are one class.
    """
    keys = [key for key in one.keys() | other.keys() if one[key] + other[key] >= 10]
    rows = [(one[key], other[key]) for key in keys]
    rest = SAMPLES - sum(row[0] for row in rows), SAMPLES - sum(row[1] for row in rows)
    counts = np.array([*rows, rest] if sum(rest) else rows, dtype=float)
    expected = counts.sum(1, keepdims=True) / 2
    return float(((counts - expected) ** 2 / expected).sum()), len(counts) - 1


def test_the_law_of_two_tokens(world: World) -> None:
    """The bound is five standard deviations above the mean (chi-square: df, sqrt(2 df))."""
    plain = _pairs(world.plain, 0.5)
    ours = _pairs(world.ours, 0.5)
    value, degrees = _statistic(plain, ours)
    assert degrees > 5
    assert value < degrees + 5 * (2 * degrees) ** 0.5
    # Negative control: another temperature has another law, and this many samples show it.
    value, degrees = _statistic(plain, _pairs(world.plain, 0.6))
    assert value > degrees + 5 * (2 * degrees) ** 0.5
