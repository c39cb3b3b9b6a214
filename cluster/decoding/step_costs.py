"""What steps cost and bring at present: what a drafter must know to stop by cost."""

from __future__ import annotations

from dataclasses import dataclass

_DECAY = 0.98


@dataclass(slots=True)
class StepCosts:
    """Decayed sums over decoding steps: a line of step time by candidates, and the token rate."""

    _weight: float = 0.0
    _candidates: float = 0.0
    _ms: float = 0.0
    _candidates_squared: float = 0.0
    _candidates_ms: float = 0.0
    _tokens: float = 0.0
    _elapsed_ms: float = 0.0
    _last_done: float | None = None

    def add(self, now: float, *, candidates: int, step_seconds: float, tokens: int) -> None:
        """A decoding step was answered at `now`; it committed `tokens`."""
        step_ms = step_seconds * 1000
        self._weight = self._weight * _DECAY + 1
        self._candidates = self._candidates * _DECAY + candidates
        self._ms = self._ms * _DECAY + step_ms
        self._candidates_squared = self._candidates_squared * _DECAY + candidates**2
        self._candidates_ms = self._candidates_ms * _DECAY + candidates * step_ms
        if self._last_done is not None:
            self._tokens = self._tokens * _DECAY + tokens
            self._elapsed_ms = self._elapsed_ms * _DECAY + (now - self._last_done) * 1000
        self._last_done = now

    def pause(self) -> None:
        """The target had nothing to do: the time until the next answer is not the steps'."""
        self._last_done = None

    @property
    def tokens_per_ms(self) -> float:
        """Committed tokens per millisecond; 0: not known yet."""
        return self._tokens / self._elapsed_ms if self._elapsed_ms > 0 else 0.0

    @property
    def step_ms(self) -> float:
        """The mean; 0: not known yet."""
        return self._ms / self._weight if self._weight else 0.0

    @property
    def ms_per_candidate(self) -> float:
        """What one more candidate adds to a step, at least 0 (least squares)."""
        spread = self._weight * self._candidates_squared - self._candidates**2
        if spread <= 1e-9 * max(1.0, self._candidates_squared):
            return 0.0
        slope = (self._weight * self._candidates_ms - self._candidates * self._ms) / spread
        return max(0.0, slope)
