"""A matcher without a grammar library, for tiny vocabularies."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


class Remainders:
    """A Matcher without llguidance. It allows a token unless the text's sum modulo 3 becomes 0."""

    def __init__(self, vocab_size: int) -> None:
        self._size = vocab_size
        self._taken: list[int] = []

    def _allows(self, token_ids: Sequence[int]) -> bool:
        return (sum(token_ids) + len(token_ids)) % 3 != 0

    def advance(self, token_ids: Sequence[int]) -> int:
        count = self.accepts(token_ids)
        self._taken += token_ids[:count]
        return count

    def accepts(self, token_ids: Sequence[int]) -> int:
        for count in range(len(token_ids)):
            if not self._allows([*self._taken, *token_ids[: count + 1]]):
                return count
        return len(token_ids)

    def retreat(self, count: int) -> None:
        assert 0 <= count <= len(self._taken)
        del self._taken[len(self._taken) - count :]

    def allowed_V(self) -> NDArray[np.bool_]:
        return np.array([self._allows([*self._taken, one]) for one in range(self._size)])

    def forced(self) -> list[int]:
        return []
