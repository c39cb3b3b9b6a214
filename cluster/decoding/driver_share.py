"""How much of the time the driver works, and so for how many chains it can read the proposals.

Each drafter that is added sends a message a pass, and a proposal for each of its chains. The driver
is one: where it has no time left, the target waits for it, and more drafts make all slower.
"""

from __future__ import annotations

from dataclasses import dataclass

_MOST = 0.85
"""Of its time the driver should work no more than so much: an answer that finds it busy waits."""
_DECAY = 0.6
"""Of what was seen, so much is remembered from one step to the next."""

MOST_READ = 128.0
"""Chains and branches of all drafters together, whatever time there is: those of two drafters that
grow as many as they may (policies.py). Of more hardly any is of use.
"""


@dataclass(slots=True)
class DriverShare:
    """Decayed sums over steps: what the driver worked, and for how many chains for how long."""

    most_chains: float = MOST_READ
    """As many chains and branches as would keep it busy for all the time that it should work, if
    all its work were theirs. What is not makes that too few; with more of them it comes closer from
    step to step.
    """
    _worked: float = 0.0
    _chain_seconds: float = 0.0
    _last: float | None = None

    def answered(
        self, now: float, *, driver_seconds: float, step_seconds: float, chains: int
    ) -> None:
        """A step was answered; drafters have leave for so many chains and branches at present."""
        before, self._last = self._last, now
        if before is None or driver_seconds <= 0:
            return
        # The time beyond is that in which there was nothing to do.
        elapsed = min(now - before, step_seconds + driver_seconds)
        self._worked = _DECAY * self._worked + driver_seconds
        self._chain_seconds = _DECAY * self._chain_seconds + chains * elapsed
        if self._chain_seconds:
            self.most_chains = min(MOST_READ, _MOST * self._chain_seconds / self._worked)
