"""The beat of outcomes: verdicts come once a step, so a drafter knows when to expect the next.

A pass that would still run when the outcome comes loses what follows the outcome if what it drafts
is refused: the next pass, which begins where the text really goes, begins late by that. So it is
better held back, unless what it drafts is likely enough of use.
"""

from __future__ import annotations

from dataclasses import dataclass

QUIET_SECONDS = 0.0001
QUIET_SECONDS_OF_MANY = 0.0003
"""After a message, the next one is waited for so long before a pass begins. gRPC hands messages
over one by one; with several sequences open, those that a step brought should share a pass."""
_KEPT = 0.8
"""Of the time between outcomes, so much is remembered from one to the next."""
_PAUSE = 4.0
"""So many times as long as usual is no beat: requests came or went."""
_PATIENCE = 0.3
"""An outcome may be later than expected by so much of a pass, before one begins without it."""


@dataclass(slots=True)
class Rhythm:
    """When the outcomes of one driver came. Times are seconds of the drafter's clock."""

    _last: float | None = None
    _period: float = 0.0

    def beat(self, now: float) -> None:
        """Outcomes came."""
        if self._last is not None:
            since = now - self._last
            if not self._period:
                self._period = since
            elif since < _PAUSE * self._period:
                self._period = _KEPT * self._period + (1 - _KEPT) * since
        self._last = now

    def share_after(self, now: float, pass_seconds: float) -> float:
        """Of a pass that begins now, how much would lie after the next outcome: 0 to 1.

        0 too where the outcome is overdue: who knows when it comes.
        """
        if self._last is None or not self._period or not pass_seconds:
            return 0.0
        left = self._last + self._period - now
        if left >= pass_seconds or now >= self.give_up_at(pass_seconds):
            return 0.0
        return min(1.0, 1 - left / pass_seconds)

    def give_up_at(self, pass_seconds: float) -> float:
        """Until when a pass is held back for the next outcome."""
        assert self._last is not None
        return self._last + self._period + _PATIENCE * pass_seconds
