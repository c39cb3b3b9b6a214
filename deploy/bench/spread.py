"""How far a figure that was taken over few prompts may be from that over many."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeVar

TokensAndSteps = tuple[int, int]
"""Output tokens of a prompt, and the steps that they took."""

T = TypeVar("T")


def length_of(by_prompt: Sequence[TokensAndSteps]) -> float:
    """Committed tokens over steps, of all prompts together."""
    return sum(tokens for tokens, _ in by_prompt) / sum(steps for _, steps in by_prompt)


def length_ratio(
    pairs: Sequence[tuple[TokensAndSteps, TokensAndSteps]],
) -> float:
    """The length of the first of each pair over that of the second."""
    return length_of([one for one, _ in pairs]) / length_of([other for _, other in pairs])


def jackknife_error(samples: Sequence[T], figure: Callable[[Sequence[T]], float]) -> float | None:
    """The standard error of a figure over prompts: each is left out in turn (Tukey 1958).

    None for a single prompt, of which nothing can be said.
    """
    count = len(samples)
    if count < 2:
        return None
    without = [figure([*samples[:at], *samples[at + 1 :]]) for at in range(count)]
    mean = sum(without) / count
    return math.sqrt((count - 1) / count * sum((one - mean) ** 2 for one in without))
