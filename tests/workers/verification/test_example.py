"""The example by which the library introduces itself."""

from __future__ import annotations

import doctest

from workers import verification


def test_the_example_runs() -> None:
    found = doctest.testmod(verification)
    assert found.attempted > 10
    assert found.failed == 0
