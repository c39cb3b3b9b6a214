"""The beat of outcomes: verdicts come once per step, so a drafter can predict the next one.

Suppose a pass is running when an outcome arrives that refuses its draft. The next pass, which
begins where the text really goes on, then begins late. So it is better to hold the pass back,
unless its draft is likely enough to be right.
"""

from __future__ import annotations

from dataclasses import dataclass

QUIET_SECONDS = 0.0001
QUIET_SECONDS_OF_MANY = 0.0003
"""Seconds without a message after which a pass begins, for one open sequence and for several. gRPC
delivers messages one by one; messages caused by the same step should share a pass.
"""
_KEPT = 0.8
"""Weight of the old value in the moving average of the time between outcomes."""
_PAUSE = 4.0
"""A gap above this multiple of the average is ignored as a pause: requests came or went."""
_PATIENCE = 0.3
"""How late an outcome may be before a pass begins without it, as a share of a pass's duration."""


@dataclass(slots=True)
class Rhythm:
    """When the outcomes of one driver came. Times are seconds of the drafter's clock."""

    _last: float | None = None
    _period: float = 0.0

    def beat(self, now: float) -> None:
        """Note that outcomes came at time `now`."""
        if self._last is not None:
            since = now - self._last
            if not self._period:
                self._period = since
            elif since < _PAUSE * self._period:
                self._period = _KEPT * self._period + (1 - _KEPT) * since
        self._last = now

    def share_after(self, now: float, pass_seconds: float) -> float:
        """The share, 0 to 1, of a pass beginning now that would lie after the next outcome.

        0 as well if the outcome is overdue, since nobody knows when it will come.
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
