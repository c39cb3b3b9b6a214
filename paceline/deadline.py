"""How long a caller waits for a request, from the moment at which it asks."""

from __future__ import annotations

import math
import time

from paceline.errors import DeadlineError, InvalidRequestError

LONGEST_SECONDS = 1e8
"""Three years: the longest timeout that a caller may give. Python's locks refuse a few hundred."""


def checked_seconds(name: str, seconds: float | None) -> float | None:
    """`seconds`, if they are a timeout or None. Raises InvalidRequestError naming `name`."""
    if seconds is None:
        return None
    expected = f"expected seconds above 0, at most {LONGEST_SECONDS:.0e}, or None"
    if not isinstance(seconds, int | float) or not 0 < seconds <= LONGEST_SECONDS:
        raise InvalidRequestError(name, f"{expected}; got {seconds!r}")
    return float(seconds)


class Deadline:
    """When a request to `address` must have ended; never, without a timeout."""

    def __init__(self, address: str, timeout: float | None) -> None:
        self._address = address
        self._timeout = timeout
        self._at = math.inf if timeout is None else time.monotonic() + timeout

    def left(self) -> float | None:
        """Seconds, at least 0; None without a timeout."""
        return None if self._timeout is None else max(0.0, self._at - time.monotonic())

    def or_within(self, seconds: float) -> Deadline:
        """This one; without a timeout, one that is `seconds` from now."""
        return self if self._timeout is not None else Deadline(self._address, seconds)

    def error(self) -> DeadlineError:
        """That it has passed."""
        return DeadlineError(
            f"the request to the server at {self._address} did not end within its timeout of "
            f"{self._timeout:g} s, and was cancelled"
        )
