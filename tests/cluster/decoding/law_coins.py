"""Coins in the place of noise: each falls on each of its sides in turn, once for each name.

Asked for again, a number is the same, so a coin that is used twice shows in the law.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from numpy.typing import NDArray

from paceline.sampling import SequenceSpec
from tests.workers.verification.enumeration import Coins
from workers.drafting import draw
from workers.verification.candidates import SparseProbs


@dataclass
class NamedCoins:
    """Coins by name. A name stands for one uniform, which lies where earlier uses left it."""

    coins: Coins
    _spans: dict[tuple[object, ...], tuple[float, float]] = field(default_factory=dict)

    def choice(self, name: tuple[object, ...], probs: Sequence[float]) -> int:
        """A side with these probabilities: that which the name's uniform falls on.

        The sides lie end to end from 0 to 1. So by the same name the same probabilities give the
        same side, and two drafters that draw with one noise from two distributions often agree.
        """
        low, high = self._spans.get(name, (0.0, 1.0))
        ends = [*itertools.accumulate(probs)]
        last = max(side for side, probability in enumerate(probs) if probability > 0)
        ends[last:] = [1.0] * (len(ends) - last)  # rounding must not open another side
        parts = [
            (max(low, start), min(high, end))
            for start, end in zip([0.0, *ends], ends, strict=False)
        ]
        side = self.coins.toss([max(0.0, end - start) / (high - low) for start, end in parts])
        self._spans[name] = parts[side]
        return side

    def below(self, name: tuple[object, ...], probability: float) -> bool:
        """Whether a uniform is below this."""
        return self.choice(name, (probability, 1 - probability)) == 0


@dataclass
class WindowCoins:
    """The coins of one window, named by position as KeyedCoins are."""

    named: NamedCoins
    first_position: int

    def order(self, depth: int, num_tests: int) -> Sequence[int]:
        orders = list(itertools.permutations(range(num_tests)))
        name = ("order", self.first_position + depth)
        return orders[self.named.choice(name, [1 / len(orders)] * len(orders))]

    def accepts(self, depth: int, number: int, probability: float) -> bool:
        return self.named.below(("test", self.first_position + depth, number), probability)

    def token(self, depth: int, residual_V: NDArray[np.float64]) -> int:
        probs = (residual_V / residual_V.sum()).tolist()
        return self.named.choice(("residual", self.first_position + depth), probs)


def draw_with(named: NamedCoins, patch: pytest.MonkeyPatch) -> None:
    """Let the drafter's draws fall as the coins say, each named as its noise is."""

    def independent(
        kept: SparseProbs, spec: SequenceSpec, position: int, numbers: Sequence[int]
    ) -> tuple[int, ...]:
        exact = kept.exact()
        probs, ids = exact.probs_M.tolist(), exact.token_ids_M.tolist()
        return tuple(
            ids[named.choice(("draft", spec.seed, position, number), probs)] for number in numbers
        )

    def chain_token(kept: SparseProbs, spec: SequenceSpec, position: int) -> int:
        return independent(kept, spec, position, (0,))[0]

    def without_replacement(
        kept: SparseProbs, spec: SequenceSpec, position: int, num_children: int
    ) -> tuple[int, ...]:
        left = kept.exact()
        drawn: list[int] = []
        for number in range(min(num_children, left.token_ids_M.size)):
            name = ("draft", spec.seed, position, "after", number)
            drawn.append(int(left.token_ids_M[named.choice(name, left.probs_M.tolist())]))
            left = left.without(drawn[-1])
        return tuple(drawn)

    patch.setattr(draw, "draw_independent", independent)
    patch.setattr(draw, "draw_chain_token", chain_token)
    patch.setattr(draw, "draw_without_replacement", without_replacement)
