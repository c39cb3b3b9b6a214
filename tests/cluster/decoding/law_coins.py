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
from workers.verification.draft_probs import SparseProbs


@dataclass
class NamedCoins:
    """Coins by name. A name's uniform that was tested before lies where the tests left it."""

    coins: Coins
    _fixed: dict[tuple[object, ...], object] = field(default_factory=dict)
    _spans: dict[tuple[object, ...], tuple[float, float]] = field(default_factory=dict)

    def choice(self, name: tuple[object, ...], probs: Sequence[float]) -> int:
        """A side with these probabilities; by the same name always of the same ones."""
        told = tuple(probs)
        known = self._fixed.get(name)
        if known is None:
            known = self._fixed[name] = (self.coins.toss(probs), told)
        assert isinstance(known, tuple)
        side, before = known
        assert before == told, f"the noise {name} is used for two distributions"
        assert isinstance(side, int)
        return side

    def below(self, name: tuple[object, ...], probability: float) -> bool:
        """Whether a uniform is below this."""
        low, high = self._spans.get(name, (0.0, 1.0))
        cut = min(max(probability, low), high)
        share = (cut - low) / (high - low)
        is_below = self.coins.toss([share, 1 - share]) == 0
        self._spans[name] = (low, cut) if is_below else (cut, high)
        return is_below


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
