"""Pearson's test against exact probabilities, for tests of a law."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

# A standard normal exceeds this with probability 1e-6.
_Z = 4.7534


def statistic(counts: NDArray[np.int64], probs: NDArray[np.float64]) -> float:
    """Sum of (observed - expected)^2 / expected; every expected count should be 5 or more."""
    expected = counts.sum() * probs
    assert expected.min() >= 5, "too few draws for this test to mean anything"
    return float(((counts - expected) ** 2 / expected).sum())


def bound(degrees: int) -> float:
    """The value that a chi-square variable of `degrees` degrees exceeds with probability 1e-6.

    Wilson and Hilferty: (X / d)^(1/3) is nearly normal with mean 1 - 2 / (9 d) and variance 2 / (9
    d). (5 degrees: 36.4 here, 35.9 exactly.)
    """
    variance = 2 / (9 * degrees)
    return degrees * (1 - variance + _Z * math.sqrt(variance)) ** 3


def follows(counts: NDArray[np.int64], probs: NDArray[np.float64]) -> bool:
    """Whether the counts are likely under the probabilities. Wrongly False once in a million."""
    return statistic(counts, probs) < bound(len(probs) - 1)
