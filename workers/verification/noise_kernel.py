"""noise.py's Philox words and Gumbel noise in Triton, for kernels to call.

Rounds and constants are those of philox.py, so the integers are the same, bit for bit. Logarithms
are the device's.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

from workers.verification.noise import Purpose
from workers.verification.philox import KEY_STEPS, MULTIPLIERS, ROUNDS

INTERPRETED = bool(triton.knobs.runtime.interpret)
"""Whether kernels run in Triton's interpreter, on CPU tensors. It has no libdevice."""

_PURPOSE = tl.constexpr(int(Purpose.COUPLED))
_LARGEST_V = tl.constexpr(1 - 2.0**-24)
_WORD_STEP = tl.constexpr(2.0**-32)
_MULTIPLIER_0, _MULTIPLIER_1 = map(tl.constexpr, MULTIPLIERS)
_KEY_STEP_0, _KEY_STEP_1 = map(tl.constexpr, KEY_STEPS)
_ROUNDS = tl.constexpr(ROUNDS)


@triton.jit
def philox(counters, row, words, words_stride, positions, sample_indices):
    """The four words of each counter (philox.py) in a row's stream."""
    key_0 = tl.load(words + row)
    key_1 = tl.load(words + words_stride + row)
    even_0 = counters.to(tl.uint32)
    even_1 = tl.zeros_like(even_0) + _PURPOSE
    odd_0 = tl.load(positions + row).to(tl.uint32)
    odd_1 = tl.load(sample_indices + row).to(tl.uint32)
    for _ in tl.static_range(_ROUNDS):
        high_0, low_0 = tl.umulhi(even_0, _MULTIPLIER_0), even_0 * _MULTIPLIER_0
        high_1, low_1 = tl.umulhi(even_1, _MULTIPLIER_1), even_1 * _MULTIPLIER_1
        even_0 = high_1 ^ odd_0 ^ key_0.to(tl.uint32)
        even_1 = high_0 ^ odd_1 ^ key_1.to(tl.uint32)
        odd_0, odd_1 = low_1, low_0
        key_0 += _KEY_STEP_0
        key_1 += _KEY_STEP_1
    return even_0, odd_0, even_1, odd_1


@triton.jit
def gumbel(words, INTERPRETED: tl.constexpr):
    """noise.py's Gumbel noise of uint32 words, with each step rounded to float32."""
    v = tl.minimum((words.to(tl.float32) + 0.5) * _WORD_STEP, _LARGEST_V)
    if INTERPRETED:
        # log1p, computed with the rounding error of 1 - v in float64.
        rest = 1.0 - v.to(tl.float64)
        exponential = -(tl.log(rest) * (v / (1.0 - rest))).to(tl.float32)
        return -tl.log(exponential)
    else:
        return -libdevice.log(-libdevice.log1p(-v))
