"""What prefill adds to a step, learned from the steps that had some.

A fixed part, a part for each token, and one for each token and each position before it, which
attention reads and multiplies: after 1,400 tokens of a prompt one more takes this project's engine
on a CPU two and a half times as long as the first ones did. The parts are fitted by least squares,
none of them below 0, and change slowly. How dear all of it is may change at once, with whatever
else a host does: that is the median of the last steps over what was expected of them.

Chunks are chosen by this very price, so that steps take about as long whatever is in them: a fixed
part alone would explain that as well. It is believed as far as chunks differ at like positions.
"""

from __future__ import annotations

import math
import statistics
from collections import deque

_DECAY = 0.98
"""What a step counts for the parts when the next one came: some fifty count."""
_PENALTY = 0.5
"""On the square of the fixed part, for each step that counts."""
_SWEEPS = 4
_RECENT = 11
_HICCUP = 1.5
"""A step counts for the parts as at most so many times what was expected."""


class PrefillPrice:
    """Milliseconds that a chunk adds: level x (fixed + tokens x (each + further x position))."""

    __slots__ = ("_level", "_moments", "_parts", "_products", "_recent")

    def __init__(self) -> None:
        # Of a step's features, (tokens, tokens x position, 1): with each other, and with its ms.
        self._moments = [[0.0] * 3 for _ in range(3)]
        self._products = [0.0] * 3
        self._parts = [0.0] * 3
        # Tokens, position and ms of the last chunks that were compared.
        self._recent: deque[tuple[int, float, float]] = deque(maxlen=_RECENT)
        self._level = 1.0

    @property
    def is_known(self) -> bool:
        """Whether anything was learned."""
        return self._moments[2][2] > 0

    @property
    def is_tried(self) -> bool:
        """Whether what is expected was compared with what came, often enough to rely on it."""
        return len(self._recent) == _RECENT

    @property
    def fixed_ms(self) -> float:
        """What a chunk adds however small it is."""
        return self._level * self._parts[2]

    def learn(self, tokens: int, position: float, ms: float, *, is_usual: bool) -> None:
        """A chunk of so many tokens, at `position` on the mean, added so much.

        `is_usual`: it was of the size that is chosen, so it tells how dear all of it is now.
        """
        if is_usual:
            self._recent.append((tokens, position, ms))
        if expected := self.ms(tokens, position):
            ms = min(ms, _HICCUP * expected)
        features = (float(tokens), tokens * position, 1.0)
        for row, one in enumerate(features):
            self._products[row] = self._products[row] * _DECAY + one * ms
            moments = self._moments[row]
            for column, other in enumerate(features):
                moments[column] = moments[column] * _DECAY + one * other
        self._fit()
        expected_and_ms = [(self._parts_ms(*chunk[:2]), chunk[2]) for chunk in self._recent]
        ratios = [ms / expected for expected, ms in expected_and_ms if expected]
        self._level = statistics.median(ratios) if ratios else 1.0

    def ms(self, tokens: int, position: float) -> float:
        """What such a chunk should add; 0 where nothing is known."""
        return self._level * self._parts_ms(tokens, position)

    def tokens_for(self, ms: float, start: float) -> float:
        """How many tokens from position `start` on should add so much."""
        each, further, fixed = self._parts
        level, first = self._level, each + further * start
        if not level or not (first or further):
            return math.inf
        left = max(0.0, ms / level - fixed)
        # Their mean position lies half of them behind the start.
        return 2 * left / (first + math.sqrt(first * first + 2 * further * left) or math.inf)

    def _parts_ms(self, tokens: int, position: float) -> float:
        each, further, fixed = self._parts
        return fixed + tokens * (each + further * position)

    def _fit(self) -> None:
        """Part by part from the last fit on: what steps do not tell apart stays as it was."""
        for _ in range(_SWEEPS):
            for row, moments in enumerate(self._moments):
                own = moments[row] * (1 + _PENALTY) if row == 2 else moments[row]
                if own:
                    others = [moments[column] * self._parts[column] for column in range(3)]
                    missing = self._products[row] - sum(others) + others[row]
                    self._parts[row] = max(0.0, missing / own)
