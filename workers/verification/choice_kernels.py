"""The kernels that choose tokens; kernel_choice.py launches them in order.

A program processes one block of a row's vocabulary (or of its ranks, sorted by log weight). It
stores its best token as one integer, a key that orders by value first and id second.

Suffixes: B the tokens of a block. V is the vocabulary size; `words` are the two words of the key of
a row's seed.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

from workers.verification.noise_kernel import gumbel, philox
from workers.verification.philox import LANES

# The rows of a few small tensors. Not specialized, so that kernels are compiled once, and not again
# if one is aligned to 16 bytes.
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
        first, second, third, fourth = philox(
            counters, row, words, words_stride, positions, sample_indices
        )
        words_B = tl.interleave(tl.interleave(first, third), tl.interleave(second, fourth))
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
    """Stores the key of the best score among the kept ranks of a block; if none, the lowest key."""
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
    """The int64 keys of float32 values. A larger value has a larger key; NaN is above all.

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
