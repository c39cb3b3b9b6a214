"""The fastest of some settings, found with short probes in a bounded time (successive halving).

Every setting decodes a few tokens of one prompt; the faster half goes on to another prompt and to
twice as many tokens, until one is left or the time is up (Karnin et al. 2013, "Almost optimal
exploration in multi-armed bandits").
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeVar

from deploy.bench.contenders import Contender
from deploy.bench.interleave import Prompts

C = TypeVar("C", bound=Contender)

PROBE_TOKENS = 8
"""Tokens of the first probes; each round doubles them."""


def find_fastest(
    contenders: Sequence[C],
    prompts: Prompts,
    *,
    max_tokens: int,
    seconds: float,
    clock: Callable[[], float],
    on_probe: Callable[[str], None] = lambda name: None,
) -> C:
    """The contender with the fewest seconds a token in the last round that was finished.

    The first round warms everything up: it drops nobody. No probe begins once `seconds` of `clock`
    have gone, so that the last one alone can pass them. A round that was cut short does not count;
    where that was the first after the warm-up, those of it that were probed are compared, and where
    nobody was, the first contender is taken.
    """
    until = clock() + seconds
    left = list(contenders)
    tokens = PROBE_TOKENS
    number = 0
    while len(left) > 1:
        costs: list[tuple[float, int]] = []
        for place, contender in enumerate(left):
            if clock() >= until:
                return left[min(costs)[1]] if number == 1 and costs else left[0]
            on_probe(contender.name)
            sample = contender.decode(prompts[number % len(prompts)], min(tokens, max_tokens))
            costs.append((sample.seconds / max(1, len(sample.token_ids)), place))
        if number > 0:
            left = [left[place] for _, place in sorted(costs)[: math.ceil(len(left) / 2)]]
            tokens *= 2
        number += 1
    return left[0]
