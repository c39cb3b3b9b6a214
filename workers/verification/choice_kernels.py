"""Triton kernels that choose the target's own tokens, with the arithmetic of device_choice.py.

A program processes one block of a row's vocabulary (or of its ranks, sorted by log weight). It
stores its best token as one integer, a key that orders by value first and id second. Noise and
scores are not written to memory. All blocks have the same size, whatever the number of rows, so a
row's bits depend on that row only. Rounds and constants are those of noise.py, so the integers are
the same, bit for bit; logarithms are the device's. Import this module only where kernels can run.

Suffixes: B tokens of a block, R rows, P blocks of the vocabulary, V size of the vocabulary; the
leading 2 is a pair of Philox words. `words`: for each row, the two words of its seed's key.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from workers.process.kernels import on_device
from workers.verification.device_choice import RowParams
from workers.verification.noise import KEY_STEPS, LANES, MULTIPLIERS, ROUNDS, Purpose

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
    """The four words of each counter (noise.py) in a row's stream."""
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


# Small tensors with one entry per row. Kernels are not specialized on their alignment: Triton would
# compile a kernel again when one of them happens to be aligned to 16 bytes.
_UNALIGNED = ["words", "positions", "sample_indices", "temperatures", "greedy", "top_k"]
_UNALIGNED += ["top_p", "log_min_p", "num_below"]

_LANES = tl.constexpr(LANES)
_LOWEST_KEY = tl.constexpr(-(2**63))
_LARGEST_ID = tl.constexpr(2**31 - 1)
_NAN_BITS = tl.constexpr(0x7FC00000)


@triton.jit
def likeliest_kernel(logits, stride, keys, V: tl.constexpr, BLOCK: tl.constexpr):
    """Stores the key of a block's largest logit."""
    row, ids = _place(V, BLOCK)
    logits_B = tl.load(logits + row * stride + ids, mask=ids < V, other=-float("inf"))
    tl.store(keys + tl.program_id(0), tl.max(_key(logits_B, ids), axis=0))


@triton.jit(do_not_specialize_on_alignment=_UNALIGNED, do_not_specialize=["words_stride"])
def draw_kernel(
    logits,
    stride,
    likeliest,
    words,
    words_stride,
    positions,
    sample_indices,
    temperatures,
    greedy,
    keys,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
    PADDED: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Stores the key of a block's best score. For greedy rows it stores nothing."""
    row, ids = _place(V, BLOCK)
    if tl.load(greedy + row) == 0:
        logits_B = tl.load(logits + row * stride + ids, mask=ids < V, other=-float("inf"))
        largest = _value(_best(likeliest, row, tl.cdiv(V, BLOCK), PADDED))
        log_weights_B = tl.div_rn(logits_B - largest, tl.load(temperatures + row))
        # A counter yields the words of four tokens.
        counters = tl.program_id(0) % tl.cdiv(V, BLOCK) * (BLOCK // _LANES)
        counters += tl.arange(0, BLOCK // _LANES)
        word_0, word_1, word_2, word_3 = philox(
            counters, row, words, words_stride, positions, sample_indices
        )
        words_B = tl.interleave(tl.interleave(word_0, word_2), tl.interleave(word_1, word_3))
        scores_B = log_weights_B + gumbel(words_B, INTERPRETED)
        tl.store(keys + tl.program_id(0), tl.max(_key(scores_B, ids), axis=0))


@triton.jit(do_not_specialize_on_alignment=_UNALIGNED)
def log_weights_kernel(
    logits,
    stride,
    likeliest,
    temperatures,
    log_weights,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Logits minus the row's largest, divided by the row's temperature."""
    row, ids = _place(V, BLOCK)
    logits_B = tl.load(logits + row * stride + ids, mask=ids < V, other=0.0)
    largest = _value(_best(likeliest, row, tl.cdiv(V, BLOCK), PADDED))
    log_weights_B = tl.div_rn(logits_B - largest, tl.load(temperatures + row))
    tl.store(log_weights + row * V + ids, log_weights_B, mask=ids < V)


@triton.jit(do_not_specialize_on_alignment=_UNALIGNED)
def weights_kernel(
    log_weights,
    top_k,
    weights,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Unnormalized probabilities of the tokens that top-k keeps, by rank."""
    row, ranks = _place(V, BLOCK)
    log_weights_B = tl.load(log_weights + row * V + ranks, mask=ranks < V, other=0.0)
    weights_B = tl.exp(log_weights_B) if INTERPRETED else libdevice.exp(log_weights_B)
    kept_B = log_weights_B >= _kth(log_weights, top_k, row, V)
    weights_B = tl.where(kept_B, weights_B, 0.0).to(tl.float64)
    tl.store(weights + row * V + ranks, weights_B, mask=ranks < V)


@triton.jit(do_not_specialize_on_alignment=_UNALIGNED, do_not_specialize=["words_stride"])
def draw_sorted_kernel(
    log_weights,
    sorted_ids,
    words,
    words_stride,
    positions,
    sample_indices,
    top_k,
    top_p,
    num_below,
    log_min_p,
    keys,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Stores the key of the best score of a block's kept ranks; the lowest key if none is kept."""
    row, ranks = _place(V, BLOCK)
    log_weights_B = tl.load(log_weights + row * V + ranks, mask=ranks < V, other=-float("inf"))
    kept_B = (ranks < V) & (log_weights_B >= _kth(log_weights, top_k, row, V))
    kept_B &= ranks <= tl.where(tl.load(top_p + row) < 1.0, tl.load(num_below + row), V)
    kept_B &= log_weights_B >= tl.load(log_min_p + row)
    best = tl.full((), _LOWEST_KEY, tl.int64)
    # The kept tokens have the first ranks, so most blocks have none.
    if tl.max(kept_B.to(tl.int32), axis=0) > 0:
        ids = tl.load(sorted_ids + row * V + ranks, mask=kept_B, other=0).to(tl.int32)
        first, second, third, fourth = philox(
            ids // _LANES, row, words, words_stride, positions, sample_indices
        )
        lanes = ids % _LANES
        words_B = tl.where(
            lanes < 2, tl.where(lanes == 0, first, second), tl.where(lanes == 2, third, fourth)
        )
        scores_B = log_weights_B + gumbel(words_B, INTERPRETED)
        best = tl.max(tl.where(kept_B, _key(scores_B, ids), _LOWEST_KEY), axis=0)
    tl.store(keys + tl.program_id(0), best)


@triton.jit(do_not_specialize_on_alignment=_UNALIGNED)
def finish_kernel(
    likeliest,
    drawn,
    greedy,
    token_ids,
    largest,
    num_blocks,
    PADDED: tl.constexpr,
):
    """A row's token and its largest logit."""
    row = tl.program_id(0).to(tl.int64)
    likeliest_key = _best(likeliest, row, num_blocks, PADDED)
    value = _value(likeliest_key)
    # If a row has no token, report the NaN or infinity that is the reason.
    is_likeliest = (tl.load(greedy + row) != 0) | (value - value != 0.0)
    key = tl.where(is_likeliest, likeliest_key, _best(drawn, row, num_blocks, PADDED))
    tl.store(token_ids + row, (key & _LARGEST_ID).to(tl.int32) ^ _LARGEST_ID)
    tl.store(largest + row, value)


@triton.jit
def _place(V: tl.constexpr, BLOCK: tl.constexpr):
    """The program's row, and its tokens (or ranks)."""
    num_blocks: tl.constexpr = tl.cdiv(V, BLOCK)
    block = tl.program_id(0) % num_blocks
    return (tl.program_id(0) // num_blocks).to(tl.int64), block * BLOCK + tl.arange(0, BLOCK)


@triton.jit
def _key(values, ids):
    """The int64 keys of float32 values. A larger value has a larger key; NaN has the largest.

    Among equal values the lowest id has the largest key.
    """
    bits = tl.where(values == 0.0, 0.0, values).to(tl.int32, bitcast=True)  # -0 equals 0
    bits = tl.where(values != values, _NAN_BITS, bits)
    order = bits ^ ((bits >> 31) & _LARGEST_ID)
    return (order.to(tl.int64) << 32) | (ids ^ _LARGEST_ID).to(tl.int64)


@triton.jit
def _value(key):
    """The value of a key."""
    order = (key >> 32).to(tl.int32)
    return (order ^ ((order >> 31) & _LARGEST_ID)).to(tl.float32, bitcast=True)


@triton.jit
def _best(keys, row, num_blocks, PADDED: tl.constexpr):
    """The largest of a row's keys."""
    blocks = tl.arange(0, PADDED)
    mask = blocks < num_blocks
    return tl.max(tl.load(keys + row * num_blocks + blocks, mask=mask, other=_LOWEST_KEY), axis=0)


@triton.jit
def _kth(log_weights, top_k, row, V: tl.constexpr):
    """The log weight of the last token that top-k keeps, from sorted log weights."""
    return tl.load(log_weights + row * V + tl.minimum(tl.load(top_k + row), V) - 1)


BLOCK = 2048
"""Number of tokens that one program processes."""

_OPTIONS = {"INTERPRETED": INTERPRETED, "num_warps": 4}


def choose_by_kernels(logits_RV: Tensor, rows: RowParams) -> tuple[Tensor, Tensor]:
    """choose_rows for adjusted logits: int32 and float32 [R].

    Takes 16 bytes per row and block of the vocabulary; with filters it also sorts each row.
    """
    with on_device(logits_RV.device):
        likeliest_RP = _likeliest(logits_RV)
        drawn_RP = None
        if rows.filters:
            drawn_RP = _draw_filtered(logits_RV, likeliest_RP, rows)
        elif rows.draws:
            drawn_RP = _draw(logits_RV, likeliest_RP, rows)
        return _finish(likeliest_RP, drawn_RP, rows)


def _likeliest(logits_RV: Tensor) -> Tensor:
    """The key [R, P] of the largest logit in each block."""
    keys_RP = _new_keys(logits_RV)
    likeliest_kernel[(keys_RP.numel(),)](
        logits_RV, logits_RV.stride(0), keys_RP, logits_RV.shape[1], BLOCK, num_warps=4
    )
    return keys_RP


def _draw(logits_RV: Tensor, likeliest_RP: Tensor, rows: RowParams) -> Tensor:
    """The key [R, P] of the best score in each block; for greedy rows nothing is written."""
    keys_RP = _new_keys(logits_RV)
    draw_kernel[(keys_RP.numel(),)](
        logits_RV,
        logits_RV.stride(0),
        likeliest_RP,
        rows.keys_2R,
        rows.keys_2R.stride(0),
        rows.positions_R,
        rows.sample_indices_R,
        rows.temperature_R,
        rows.greedy_R,
        keys_RP,
        logits_RV.shape[1],
        BLOCK,
        triton.next_power_of_2(likeliest_RP.shape[1]),
        **_OPTIONS,
    )
    return keys_RP


def _draw_filtered(logits_RV: Tensor, likeliest_RP: Tensor, rows: RowParams) -> Tensor:
    """As `_draw`, for the tokens that top-k, top-p and min-p keep, in blocks of ranks."""
    keys_RP = _new_keys(logits_RV)
    grid = (keys_RP.numel(),)
    padded = triton.next_power_of_2(keys_RP.shape[1])
    vocab_size = logits_RV.shape[1]
    log_weights_RV = torch.empty_like(logits_RV, memory_format=torch.contiguous_format)
    log_weights_kernel[grid](
        logits_RV,
        logits_RV.stride(0),
        likeliest_RP,
        rows.temperature_R,
        log_weights_RV,
        vocab_size,
        BLOCK,
        padded,
        num_warps=4,
    )
    # Stable: among tokens that tie, the lowest ids come first.
    sorted_RV, ids_RV = log_weights_RV.sort(dim=1, descending=True, stable=True)
    weights_RV = torch.empty_like(sorted_RV, dtype=torch.float64)
    weights_kernel[grid](sorted_RV, rows.top_k_R, weights_RV, vocab_size, BLOCK, **_OPTIONS)
    wanted_R1 = rows.top_p_R[:, None] * weights_RV.sum(dim=1, keepdim=True)
    num_below_R = (weights_RV.cumsum(dim=1) < wanted_R1).sum(dim=1)
    draw_sorted_kernel[grid](
        sorted_RV,
        ids_RV,
        rows.keys_2R,
        rows.keys_2R.stride(0),
        rows.positions_R,
        rows.sample_indices_R,
        rows.top_k_R,
        rows.top_p_R,
        num_below_R,
        rows.log_min_p_R,
        keys_RP,
        vocab_size,
        BLOCK,
        **_OPTIONS,
    )
    return keys_RP


def _finish(
    likeliest_RP: Tensor, drawn_RP: Tensor | None, rows: RowParams
) -> tuple[Tensor, Tensor]:
    """Ids and largest logits [R], from the best of each block."""
    num_rows, num_blocks = likeliest_RP.shape
    token_ids_R = torch.empty(num_rows, dtype=torch.int32, device=likeliest_RP.device)
    largest_R = torch.empty(num_rows, dtype=torch.float32, device=likeliest_RP.device)
    finish_kernel[(num_rows,)](
        likeliest_RP,
        likeliest_RP if drawn_RP is None else drawn_RP,
        rows.greedy_R,
        token_ids_R,
        largest_R,
        num_blocks,
        triton.next_power_of_2(num_blocks),
        num_warps=1,
    )
    return token_ids_R, largest_R


def _new_keys(logits_RV: Tensor) -> Tensor:
    """Uninitialized int64 [R, P]."""
    num_rows, vocab_size = logits_RV.shape
    assert logits_RV.dtype == torch.float32, logits_RV.dtype
    assert logits_RV.stride(1) == 1, logits_RV.stride()
    shape = (num_rows, triton.cdiv(vocab_size, BLOCK))
    return torch.empty(shape, dtype=torch.int64, device=logits_RV.device)
