"""Parameters of a test that CI leaves out: `make test-long` runs them, before a release."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def at_release(values: Iterable[Any]) -> list[Any]:
    """The values for `parametrize`, marked `release`. A tuple is one set of several parameters."""
    marks = pytest.mark.release
    return [
        pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=marks)
        for value in values
    ]
