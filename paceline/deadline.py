"""How long a caller waits for a request, counted from the call."""

from __future__ import annotations

import math
import time

from paceline.errors import DeadlineError, InvalidRequestError

LONGEST_SECONDS = 1e8
"""Longest timeout of a caller, about three years. Python's locks refuse some hundred years."""


def checked_seconds(name: str, seconds: float | None) -> float | None:
    """`seconds` as a float, or None. Raises InvalidRequestError, which names the field `name`."""
    if seconds is None:
        return None
    expected = f"expected seconds above 0, at most {LONGEST_SECONDS:.0e}, or None"
    if not isinstance(seconds, int | float) or not 0 < seconds <= LONGEST_SECONDS:
        raise InvalidRequestError(name, f"{expected}; got {seconds!r}")
    return float(seconds)


class Deadline:
    """When a request to `address` must have ended. Without a timeout: never."""

    def __init__(self, address: str, timeout: float | None) -> None:
        self._address = address
        self._timeout = timeout
        self._at = math.inf if timeout is None else time.monotonic() + timeout

    def left(self) -> float | None:
        """Seconds that are left, at least 0; None without a timeout."""
        return None if self._timeout is None else max(0.0, self._at - time.monotonic())

    def or_within(self, seconds: float) -> Deadline:
        """This deadline; without a timeout, one `seconds` from now."""
        return self if self._timeout is not None else Deadline(self._address, seconds)

    def error(self) -> DeadlineError:
        """The error to raise when the deadline has passed."""
        return DeadlineError(
            f"the request to the server at {self._address} did not end within its timeout of "
            f"{self._timeout:g} s, and was cancelled"
        )
