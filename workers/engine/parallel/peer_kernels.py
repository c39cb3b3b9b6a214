"""Triton kernels in which ranks add and gather tensors through each other's memory.

Each rank has a buffer that all ranks can read and write (peers.py). A kernel writes this rank's
part into its own buffer, raises a flag in every rank's buffer, waits for the flags of all ranks,
and then reads their parts. Sums are made in float32 in the order of the ranks and rounded once, so
that all ranks get the same bits, wherever a row lies.

The buffer is divided into slots, and a program uses one slot. A slot has one flag for each rank,
and room for two parts. An epoch counts the uses of a slot, and flags have the epoch as their value.
Uses alternate between the two parts. A rank overwrites a part two uses later, after all ranks have
raised their flags for the use between. A rank raises that flag only after it has read the part. So
one wait per use suffices.

Of few rows, each rank reads all ranks' parts whole (one shot). Of many rows, each rank adds up a
part of the features of every row and passes it on (two shots, each a use of the slot): a rank then
reads less than two rows' bytes for a row, instead of one for each rank. Both give the same bits.

All ranks must launch the same kernels in the same order. A program waits for the same program of
the other ranks, so programs must start in the order of their numbers, as GPUs do.

A rank that waits in vain looks at the stop word now and then. Once this is set, waits end at once,
and results are meaningless (group.py then ends the group).

Shapes: T rows, N features, W ranks, E numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from workers.engine.cuda.float8_kernels import Rounded, store_row, warps_of
from workers.engine.cuda.linears import RoundedRows, Rounding
from workers.process.kernels import on_device

INTERPRETED = bool(triton.knobs.runtime.interpret)
"""Whether kernels run in Triton's interpreter, on CPU tensors. It has no assembly."""
NUM_SLOTS = 128
"""Slots for rows. A sum has at most as many programs, so that a GPU runs them all at once."""
TWO_SHOT_ROWS = 512
"""From this number of rows on, three or more ranks add in two shots: a second wait for each row,
and less to read. Not measured: no machine with several GPUs was available.
"""
GATHER_SLOT = NUM_SLOTS
"""The slot of `gather`."""
FLAG_BYTES = 8
_POLLS_PER_LOOK = tl.constexpr(256)
"""Polls of the flags before a look at the stop word, which is in the host's memory."""


@dataclass(frozen=True, slots=True)
class Table:
    """What kernels need to reach all ranks' buffers.

    `addresses`: int64 [W + 1] on the device: the address of each rank's buffer, then that of the
    stop word. `epochs`: int64, one per slot. `part_bytes`: the size of a part, a multiple of 16.
    """

    addresses: Tensor
    epochs: Tensor
    rank: int
    degree: int
    part_bytes: int

    def fits(self, rows: Tensor) -> bool:
        """Whether the kernels can add tensors of this form."""
        return rows.dim() > 0 and rows.shape[-1] * rows.element_size() <= self.part_bytes


def num_bytes_of(degree: int, part_bytes: int) -> int:
    """The size of a rank's buffer: flags, then two parts, for each slot."""
    return (NUM_SLOTS + 1) * (_flag_bytes(degree) + 2 * part_bytes)


def sum_rows(table: Table, part_TN: Tensor, num_rows: int | None) -> Tensor:
    """The sum of all ranks' `part_TN`, which has rows of at most `part_bytes`.

    Rows from `num_rows` on are padding: they are this rank's own. None: no rows are padding.
    """
    total_TN = torch.empty_like(part_TN, memory_format=torch.contiguous_format)
    _launch(table, part_TN, total_TN, num_rows)
    return total_TN


def sum_add_and_norm(
    table: Table,
    hidden_TN: Tensor,
    part_TN: Tensor,
    num_rows: int | None,
    weight_N: Tensor,
    epsilon: float,
    rounding: Rounding | None = None,
) -> Tensor | RoundedRows:
    """Add the sum of all ranks' `part_TN` to `hidden_TN` in place, return the RMS norm of that.

    The sum over the ranks, the sum with `hidden_TN`, and the norm are rounded once each, as in
    layer_kernels.add_and_norm after `sum_rows`. With `rounding`, the result is then in float8.
    """
    assert hidden_TN.is_contiguous()
    assert hidden_TN.shape == part_TN.shape
    assert hidden_TN.dtype == part_TN.dtype == weight_N.dtype
    normed_TN = torch.empty_like(hidden_TN) if rounding is None else hidden_TN
    num_hidden, size = hidden_TN.shape
    rounded = Rounded(num_hidden, size, rounding, hidden_TN)
    _launch(table, part_TN, normed_TN, num_rows, hidden_TN, weight_N, epsilon, rounded)
    return rounded.rows or normed_TN


def gather(table: Table, mine_E: Tensor) -> Tensor:
    """All ranks' numbers (int64), [W, E] in the order of the ranks. E is at most part_bytes / 8."""
    assert mine_E.dtype == torch.int64
    size = mine_E.numel()
    assert size * mine_E.element_size() <= table.part_bytes, size
    all_WE = mine_E.new_empty((table.degree, size))
    if size:
        with on_device(mine_E.device):
            gather_kernel[(1,)](
                mine_E.contiguous(),
                all_WE,
                size,
                table.addresses,
                table.epochs,
                RANK=table.rank,
                DEGREE=table.degree,
                FLAGS=_flag_bytes(table.degree),
                PART=table.part_bytes,
                SLOT=GATHER_SLOT,
                BLOCK=triton.next_power_of_2(table.part_bytes // 8),
                INTERPRETED=INTERPRETED,
                num_warps=warps_of(table.part_bytes // 8),
            )
    return all_WE


def _launch(
    table: Table,
    part_TN: Tensor,
    result_TN: Tensor,
    num_rows: int | None,
    hidden_TN: Tensor | None = None,
    weight_N: Tensor | None = None,
    epsilon: float = 0.0,
    rounded: Rounded | None = None,
) -> None:
    rounded = rounded or Rounded(0, 0, None, part_TN)
    height, size = part_TN.shape
    assert size * part_TN.element_size() <= table.part_bytes, part_TN.shape
    block = triton.next_power_of_2(size)
    num_added = height if num_rows is None else min(num_rows, height)
    chunk = _chunk_of(table, part_TN) if num_added >= TWO_SHOT_ROWS else 0
    with on_device(part_TN.device):
        sum_kernel[(min(height, NUM_SLOTS),)](
            part_TN.contiguous(),
            part_TN if hidden_TN is None else hidden_TN,
            part_TN if weight_N is None else weight_N,
            result_TN,
            *rounded.arguments,
            epsilon,
            height,
            num_added,
            table.addresses,
            table.epochs,
            SIZE=size,
            BLOCK=block,
            RANK=table.rank,
            DEGREE=table.degree,
            FLAGS=_flag_bytes(table.degree),
            PART=table.part_bytes,
            CHUNK=chunk,
            CHUNK_BLOCK=triton.next_power_of_2(max(chunk, 1)),
            HAS_NORM=weight_N is not None,
            **rounded.constants,
            INTERPRETED=INTERPRETED,
            num_warps=warps_of(block),
            # The bits of a row are the same in one shot and in two.
            enable_fp_fusion=False,
        )


def _chunk_of(table: Table, part_TN: Tensor) -> int:
    """The features that each rank adds up, a multiple of 16 bytes; 0: two ranks gain nothing."""
    if table.degree < 3:
        return 0
    multiple = 16 // part_TN.element_size()
    return -(-part_TN.shape[1] // (table.degree * multiple)) * multiple


def _flag_bytes(degree: int) -> int:
    """The bytes of a slot's flags, a multiple of 16."""
    return -(-degree * FLAG_BYTES // 16) * 16


@triton.jit
def _slot(address, slot, FLAGS: tl.constexpr, PART: tl.constexpr):
    """The address of a slot in the buffer at `address`."""
    return address + slot * (FLAGS + 2 * PART)


@triton.jit
def _meet(
    addresses,
    slot,
    epoch,
    RANK: tl.constexpr,
    DEGREE: tl.constexpr,
    FLAGS: tl.constexpr,
    PART: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Raise this rank's flags of a slot, and wait for those of all ranks.

    What any thread of the program wrote before can then be read by the program of each rank.
    """
    ranks = tl.arange(0, _power_of_2(DEGREE))
    inside = ranks < DEGREE
    epochs = tl.zeros_like(ranks).to(tl.int64) + epoch
    own = _slot(tl.load(addresses + RANK), slot, FLAGS, PART)
    mine = (own + ranks * 8).to(tl.pointer_type(tl.int64))
    stop = tl.load(addresses + DEGREE).to(tl.pointer_type(tl.int32))
    tl.debug_barrier()  # all threads have written
    if INTERPRETED:
        buffers = tl.load(addresses + ranks, mask=inside, other=0)
        theirs = (_slot(buffers, slot, FLAGS, PART) + RANK * 8).to(tl.pointer_type(tl.int64))
        tl.atomic_xchg(theirs, epochs, mask=inside, sem="release", scope="sys")
    else:
        # Thread r raises the flag at rank r. Over PCIe, GPUs have stores but may lack atomics.
        tl.inline_asm_elementwise(
            """
            {
                .reg .pred is_rank;
                .reg .u32 thread;
                .reg .u64 place;
                mov.u32 thread, %tid.x;
                setp.lt.u32 is_rank, thread, $4;
                mad.wide.u32 place, thread, 8, $1;
                @is_rank ld.global.u64 place, [place];
                add.u64 place, place, $2;
                @is_rank st.release.sys.global.u64 [place], $3;
                mov.u32 $0, 0;
            }
            """,
            "=r,l,l,l,r",
            [addresses, _slot(RANK * 8, slot, FLAGS, PART), epoch, DEGREE],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    polls = 0
    waits = 1
    while waits != 0:
        flags = tl.atomic_add(mine, epochs * 0, mask=inside, sem="acquire", scope="sys")
        missing = tl.where(inside & (flags < epochs), 1, 0)
        waits = tl.max(missing, axis=0)
        polls += 1
        if polls % _POLLS_PER_LOOK == 0 and tl.load(stop, volatile=True) != 0:
            waits = 0
    tl.debug_barrier()  # no thread reads before


@triton.constexpr_function
def _power_of_2(size):
    return triton.next_power_of_2(size)


@triton.jit(do_not_specialize=["height", "num_rows"])
def sum_kernel(
    part,
    hidden,
    weight,
    result,
    steps,
    scales,
    input_scale,
    epsilon,
    height,
    num_rows,
    addresses,
    epochs,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    RANK: tl.constexpr,
    DEGREE: tl.constexpr,
    FLAGS: tl.constexpr,
    PART: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNK_BLOCK: tl.constexpr,
    HAS_NORM: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Processes each row whose number modulo the number of programs is the program's.

    CHUNK: the features that each rank adds up; 0: each rank adds up all.
    """
    DTYPE: tl.constexpr = part.dtype.element_ty
    slot = tl.program_id(0).to(tl.int64)
    places = tl.arange(0, BLOCK)
    inside = places < SIZE
    epoch = tl.load(epochs + slot)
    row = slot
    while row < height:
        at = row * SIZE + places
        own = tl.load(part + at, mask=inside, other=0.0)
        total = own.to(tl.float32)
        if row < num_rows:
            epoch += 1
            offset = FLAGS + (epoch % 2) * PART
            buffer = _slot(tl.load(addresses + RANK), slot, FLAGS, PART) + offset
            written = tl.multiple_of(buffer.to(tl.pointer_type(DTYPE)), 16)
            tl.store(written + places, own, mask=inside)
            _meet(addresses, slot, epoch, RANK, DEGREE, FLAGS, PART, INTERPRETED)
            total = tl.zeros((BLOCK,), tl.float32)
            if CHUNK > 0:
                in_chunk = tl.arange(0, CHUNK_BLOCK)
                mine = RANK * CHUNK + in_chunk
                is_mine = (in_chunk < CHUNK) & (mine < SIZE)
                added = tl.zeros((CHUNK_BLOCK,), tl.float32)
                for rank in tl.static_range(DEGREE):
                    buffer = _slot(tl.load(addresses + rank), slot, FLAGS, PART) + offset
                    others = tl.multiple_of(buffer.to(tl.pointer_type(DTYPE)), 16)
                    added += tl.load(others + mine, mask=is_mine, other=0.0).to(tl.float32)
                epoch += 1
                offset = FLAGS + (epoch % 2) * PART
                buffer = _slot(tl.load(addresses + RANK), slot, FLAGS, PART) + offset
                written = tl.multiple_of(buffer.to(tl.pointer_type(DTYPE)), 16)
                tl.store(written + mine, added.to(DTYPE), mask=is_mine)
                _meet(addresses, slot, epoch, RANK, DEGREE, FLAGS, PART, INTERPRETED)
            for rank in tl.static_range(DEGREE):
                buffer = _slot(tl.load(addresses + rank), slot, FLAGS, PART) + offset
                others = tl.multiple_of(buffer.to(tl.pointer_type(DTYPE)), 16)
                is_its = inside
                if CHUNK > 0:
                    is_its = inside & (places >= rank * CHUNK) & (places < (rank + 1) * CHUNK)
                # In two shots, one rank has each feature: the sum is that rank's number.
                total += tl.load(others + places, mask=is_its, other=0.0).to(tl.float32)
        summed = total.to(DTYPE)
        if HAS_NORM:
            values = tl.load(hidden + at, mask=inside, other=0.0).to(tl.float32)
            added = (values + summed.to(tl.float32)).to(DTYPE)
            tl.store(hidden + at, added, mask=inside)
            values = added.to(tl.float32)
            factors = tl.load(weight + places, mask=inside, other=0.0).to(tl.float32)
            scale = tl.rsqrt(tl.sum(values * values, axis=0) / SIZE + epsilon)
            summed = (values * scale * factors).to(DTYPE)
        store_row(
            summed,
            result,
            steps,
            scales,
            input_scale,
            row,
            0,
            height,
            SIZE,
            BLOCK,
            WIDTH,
            HAS_SCALE,
        )
        row += tl.num_programs(0)
    tl.store(epochs + slot, epoch)


@triton.jit(do_not_specialize=["size"])
def gather_kernel(
    mine,
    everyone,
    size,
    addresses,
    epochs,
    RANK: tl.constexpr,
    DEGREE: tl.constexpr,
    FLAGS: tl.constexpr,
    PART: tl.constexpr,
    SLOT: tl.constexpr,
    BLOCK: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Copies every rank's numbers."""
    slot = tl.program_id(0).to(tl.int64) + SLOT
    places = tl.arange(0, BLOCK)
    inside = places < size
    epoch = tl.load(epochs + slot) + 1
    offset = FLAGS + (epoch % 2) * PART
    buffer = _slot(tl.load(addresses + RANK), slot, FLAGS, PART) + offset
    numbers = tl.load(mine + places, mask=inside, other=0)
    tl.store(buffer.to(tl.pointer_type(tl.int64)) + places, numbers, mask=inside)
    _meet(addresses, slot, epoch, RANK, DEGREE, FLAGS, PART, INTERPRETED)
    for rank in tl.static_range(DEGREE):
        buffer = _slot(tl.load(addresses + rank), slot, FLAGS, PART) + offset
        others = tl.load(buffer.to(tl.pointer_type(tl.int64)) + places, mask=inside, other=0)
        tl.store(everyone + rank * size + places, others, mask=inside)
    tl.store(epochs + slot, epoch)
