"""The noise of noise.py in torch, for tensors on any device: the same integers, bit for bit.

torch has no unsigned 64-bit arithmetic on GPUs. Words are in the low halves of int64. A product
wraps like an unsigned one, and bits above a word are masked before they matter.

Shapes: R rows, N counters, V vocabulary; the leading 2 is a pair of Philox words.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from workers.verification.noise import Purpose
from workers.verification.philox import KEY_STEPS, LANES, MULTIPLIERS, ROUNDS

_LOW_WORD = 0xFFFFFFFF
_LARGEST_V = 1 - 2.0**-24


def philox_words(even_2RN: Tensor, odd_2R1: Tensor, keys_2R1: Tensor) -> Tensor:
    """Philox 4x32-10 of int64 counters (words 0 and 2; words 1 and 3): int64 words [R, N, 4]."""
    multipliers_211, steps = _constants(even_2RN.device)
    round_keys = (keys_2R1 + steps) & _LOW_WORD
    odd_2RN = odd_2R1
    for number in range(ROUNDS):
        product_2RN = even_2RN * multipliers_211
        even_2RN = ((product_2RN >> 32).flip(0) ^ odd_2RN ^ round_keys[number]) & _LOW_WORD
        odd_2RN = product_2RN.flip(0)
    odd_2RN = odd_2RN & _LOW_WORD
    return torch.stack((even_2RN[0], odd_2RN[0], even_2RN[1], odd_2RN[1]), dim=-1)


def gumbel_noise_RV(
    keys_2R: Tensor,
    positions_R: Tensor,
    sample_indices_R: Tensor,
    *,
    vocab_size: int,
    purpose: Purpose = Purpose.COUPLED,
) -> Tensor:
    """Float32 Gumbel noise [R, V]: row r is gumbel_noise_V for that row's seed and position.

    All arguments are int64 and on one device, where the noise is computed. The integers are those
    of noise.py; the logarithms are the device's, and may differ from numpy's in the last bit.
    """
    num_rows = positions_R.shape[0]
    counters_N = torch.arange(-(-vocab_size // LANES), device=positions_R.device)
    even_2RN = torch.stack((counters_N, torch.full_like(counters_N, int(purpose))))[:, None]
    odd_2R1 = torch.stack((positions_R, sample_indices_R))[:, :, None]
    words_RN4 = philox_words(even_2RN, odd_2R1, keys_2R[:, :, None])
    noise_RV = words_RN4.reshape(num_rows, -1)[:, :vocab_size].to(torch.float32)
    noise_RV = noise_RV.add_(0.5).mul_(2.0**-32).clamp_max_(_LARGEST_V)
    return noise_RV.neg_().log1p_().neg_().log_().neg_()


@functools.cache
def _constants(device: torch.device) -> tuple[Tensor, Tensor]:
    """Multipliers [2, 1, 1], and what each round adds to the key, [rounds, 2, 1, 1].

    Made on the device, once: host data would be copied to it while the host waits.
    """
    steps_21, multipliers_21 = (
        torch.stack([torch.full((1,), word, dtype=torch.int64, device=device) for word in words])
        for words in (KEY_STEPS, MULTIPLIERS)
    )
    numbers_N = torch.arange(ROUNDS, device=device)
    steps_N2 = (numbers_N[:, None] * steps_21[:, 0]) & _LOW_WORD
    return multipliers_21[:, :, None], steps_N2[:, :, None, None]
