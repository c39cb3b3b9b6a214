"""Coins that are a pure function of the request's seed and the position; retries keep them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from paceline.sampling import SequenceSpec
from workers.verification.candidates import CandidateTree
from workers.verification.choice import draw
from workers.verification.noise import Purpose, uniforms_N

_FIRST_ORDER_NUMBER = 1 << 16
"""Candidate numbers from here on order the tests of a node; lower ones are for the tests."""


class KeyedCoins:
    """The coins of one window. `first_position` is the position of the token after the prefix."""

    def __init__(self, tree: CandidateTree, spec: SequenceSpec, first_position: int) -> None:
        self._spec = spec
        self._first_position = first_position
        most_tests = max((len(tree.copies(node)) for node in range(len(tree) + 1)), default=0)
        depths = np.arange(tree.height, dtype=np.int64)
        numbers = np.arange(most_tests, dtype=np.int64)
        # All tests of the window at once, since a call costs more than the numbers that it makes.
        self._uniforms_DN = self._uniforms(
            np.repeat(depths, most_tests), np.tile(numbers, tree.height)
        ).reshape(tree.height, most_tests)

    def order(self, depth: int, num_tests: int) -> Sequence[int]:
        numbers = np.arange(_FIRST_ORDER_NUMBER, _FIRST_ORDER_NUMBER + num_tests, dtype=np.int64)
        keys = self._uniforms(np.full(num_tests, depth, dtype=np.int64), numbers)
        order: list[int] = np.argsort(keys, kind="stable").tolist()
        return order

    def accepts(self, depth: int, number: int, probability: float) -> bool:
        return bool(self._uniforms_DN[depth, number] < probability)

    def token(self, depth: int, residual_V: NDArray[np.float64]) -> int:
        return draw(residual_V, self._spec, self._first_position + depth, purpose=Purpose.RESIDUAL)

    def _uniforms(
        self, depths_N: NDArray[np.int64], numbers_N: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        return uniforms_N(
            self._first_position + depths_N,
            numbers_N,
            seed=self._spec.seed,
            purpose=Purpose.ACCEPTANCE,
            sample_index=self._spec.sample_index,
        )
