"""The plan of a step on a CPU: indices and masks that are computed once and used by every layer.

The slices of a step are packed into one row of T tokens. For attention they are sorted into groups,
and those of a group are padded to one width. So a group's queries are one tensor [B, H, R, D]: B
slices, H key/value heads, R query rows (tokens x query heads that share a key head, padded to a
multiple of 4), D head size. A token's A heads come one after another: its queries, its keys, its
values.

A chunk is the content of one KV block: 128 positions of a slice. A group's blocks are read in runs
of C neighbors, so that few calls read them all.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from workers.engine.cpu.kv_cache import BLOCK_SIZE
from workers.engine.kv_blocks import blocks_for
from workers.engine.slices import Slice, is_tree, node_positions, positions_of, unrelated_slots

HIDDEN = -1e30
"""Added to the scores of positions that a row must not see. Not -inf: a row may see none at all."""
_ROW_MULTIPLE = 4
"""The attention kernel rounds differently in tiles of fewer than 4 query rows."""
_WIDE = 16
"""Slices up to this width are padded to a common width, separately for those that decode and those
that prefill. A wider slice is a group of its own.
"""


@dataclass(frozen=True, slots=True)
class SliceGroup:
    """Slices whose attention is computed together."""

    num_slices: int
    num_rows: int
    max_chunks: int
    gather: Tensor
    """[B x H x R] rows of the group's queries among all heads, viewed as [T x A, D]."""
    runs: tuple[Run, ...]
    spread: Tensor | None
    """For each slice and chunk, B x max_chunks in all, its index among the computed chunks.

    The index is arbitrary if a slice has no such chunk. None: chunks are computed in this order.
    """
    absent_BC: Tensor | None
    """HIDDEN for chunks that a slice does not have, else 0. None: all slices have max_chunks."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """A step, ready to run."""

    token_ids_T: Tensor
    position_ids_T: Tensor
    num_tokens: int
    """Number of tokens fed; the tensors may hold padding after them."""
    first_slot: int
    slots_T: Tensor | None
    """The slot of each token. None: `first_slot` and those after it."""
    groups: tuple[SliceGroup, ...]
    scatter: Tensor
    """For each row of the result [T x query heads, D], its row among those of all groups."""
    logit_rows: Tensor
    window: int | None
    windowed_groups: tuple[SliceGroup, ...]
    """As `groups`, for layers with a sliding window; empty if there are none."""

    def groups_of(self, window: int | None) -> tuple[SliceGroup, ...]:
        """The groups for a layer with this window. A window that was not planned has no effect."""
        return self.groups if window is None or self.window != window else self.windowed_groups


def make_plan(
    slices: Sequence[Slice],
    *,
    num_query_heads: int,
    num_kv_heads: int,
    min_tokens: int,
    window: int | None = None,
) -> StepPlan:
    """Plan a step over `slices`, none of them empty, padded to `min_tokens` tokens.

    `window`: the number of positions that a token of the model's sliding-window layers sees; None
    if no sequence can outgrow it.
    """
    packed = _pack(slices)
    num_tokens, slots = len(packed.token_ids), packed.slots
    padding = max(0, min_tokens - num_tokens)
    in_a_run = slots[-1] - slots[0] == num_tokens - 1 and slots == list(
        range(slots[0], slots[0] + num_tokens)
    )
    batches = _batches(slices, packed.offsets, num_query_heads, num_kv_heads)
    groups = tuple(_slice_group(pieces, rows) for pieces, rows, _ in batches)
    windowed = [] if window is None else [_slice_group(p, r, window) for p, r, _ in batches]
    return StepPlan(
        token_ids_T=torch.tensor(packed.token_ids + packed.token_ids[-1:] * padding),
        position_ids_T=torch.tensor(packed.positions + packed.positions[-1:] * padding),
        num_tokens=num_tokens,
        first_slot=slots[0],
        slots_T=None if in_a_run else torch.tensor(slots),
        groups=groups,
        scatter=_scatter(batches, num_tokens + padding, num_query_heads),
        logit_rows=torch.tensor(packed.logit_rows, dtype=torch.int64),
        window=window,
        windowed_groups=tuple(windowed),
    )


@dataclass(slots=True)
class _Packed:
    """The tokens of all slices one after another, with the KV slot of each.

    `logit_rows`: the tokens whose logits are requested. `offsets`: where each slice begins.
    """

    token_ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    logit_rows: list[int] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)


def _pack(slices: Sequence[Slice]) -> _Packed:
    packed = _Packed()
    for piece in slices:
        packed.offsets.append(len(packed.token_ids))
        packed.token_ids.extend(piece.token_ids)
        num_tokens = len(packed.token_ids)
        packed.positions.extend(positions_of(piece))
        for slot in range(piece.start, piece.start + len(piece.token_ids)):
            block = piece.block_table[slot // BLOCK_SIZE]
            packed.slots.append(block * BLOCK_SIZE + slot % BLOCK_SIZE)
        packed.logit_rows.extend(range(num_tokens - piece.num_logits, num_tokens))
    return packed


_Batch = tuple[list[Slice], "_QueryRows", list[int]]
"""The slices of a group, their query rows, and each slice's first token in the step."""


def _batches(
    slices: Sequence[Slice], offsets: Sequence[int], num_query_heads: int, num_kv_heads: int
) -> list[_Batch]:
    narrow = [i for i, piece in enumerate(slices) if len(piece.token_ids) <= _WIDE]
    # A piece of a prompt must not widen the queries of sequences that decode in the same step.
    decoding = [i for i in narrow if slices[i].num_logits == len(slices[i].token_ids)]
    prefilling = [i for i in narrow if slices[i].num_logits < len(slices[i].token_ids)]
    wide = [[i] for i, piece in enumerate(slices) if len(piece.token_ids) > _WIDE]
    batches: list[_Batch] = []
    for members in [one for one in (decoding, prefilling, *wide) if one]:
        pieces, firsts = [slices[i] for i in members], [offsets[i] for i in members]
        batches.append((pieces, _QueryRows(pieces, firsts, num_query_heads, num_kv_heads), firsts))
    return batches


def _scatter(batches: Sequence[_Batch], num_fed: int, num_query_heads: int) -> Tensor:
    scatter_TH = torch.zeros(num_fed, num_query_heads, dtype=torch.int64)
    first_row = 0
    for pieces, rows, offsets in batches:
        for index, (piece, offset) in enumerate(zip(pieces, offsets, strict=True)):
            rows.scatter_into(scatter_TH[offset : offset + len(piece.token_ids)], index, first_row)
        first_row += len(pieces) * rows.num_kv_heads * rows.count
    return scatter_TH.view(-1)


class _QueryRows:
    """The query rows of a group.

    With S query heads per key head, row r of key head h is token r // S of its slice and query head
    h * S + r % S.
    """

    def __init__(
        self,
        pieces: Sequence[Slice],
        offsets: Sequence[int],
        num_query_heads: int,
        num_kv_heads: int,
    ) -> None:
        self.share = num_query_heads // num_kv_heads
        self.num_kv_heads = num_kv_heads
        self.num_query_heads = num_query_heads
        heads_per_token = num_query_heads + 2 * num_kv_heads
        self.width = max(len(piece.token_ids) for piece in pieces)
        self.count = -(-self.width * self.share // _ROW_MULTIPLE) * _ROW_MULTIPLE
        row_R = torch.arange(self.count)
        last_B1 = torch.tensor([[len(piece.token_ids) - 1] for piece in pieces])
        self.token_BR = torch.minimum(row_R[None] // self.share, last_B1)
        head_HR = torch.arange(num_kv_heads)[:, None] * self.share + row_R[None] % self.share
        token_B1R = (self.token_BR + torch.tensor(offsets)[:, None])[:, None]
        self.gather = (token_B1R * heads_per_token + head_HR).reshape(-1)

    def scatter_into(self, target_TH: Tensor, index: int, first_row: int) -> None:
        """Write, for each (token, query head) of slice `index`, the row of its result."""
        heads = torch.arange(self.num_query_heads)
        tokens_T1 = torch.arange(target_TH.shape[0])[:, None]
        base = first_row + (index * self.num_kv_heads + heads // self.share) * self.count
        target_TH.copy_(base + tokens_T1 * self.share + heads % self.share)


def _slice_group(
    pieces: Sequence[Slice], rows: _QueryRows, window: int | None = None
) -> SliceGroup:
    counts = [blocks_for(piece.start + len(piece.token_ids), BLOCK_SIZE) for piece in pieces]
    max_chunks = max(counts)
    row_slot_BR = rows.token_BR + torch.tensor([[piece.start] for piece in pieces])
    slot_CK = torch.arange(max_chunks * BLOCK_SIZE).view(max_chunks, 1, 1, BLOCK_SIZE)
    hidden = slot_CK > row_slot_BR[:, None, None, :, None]
    for index, piece in enumerate(pieces):
        if is_tree(piece):
            unrelated_RS = unrelated_slots(piece, max_chunks * BLOCK_SIZE)[rows.token_BR[index]]
            by_chunk = unrelated_RS.view(rows.count, max_chunks, 1, BLOCK_SIZE)
            hidden[index] |= by_chunk.permute(1, 2, 0, 3)
    if window is not None:
        for index, piece in enumerate(pieces):
            hidden[index] |= _before_window(piece, rows.token_BR[index], max_chunks, window)
    mask_BC = torch.zeros(hidden.shape).masked_fill_(hidden, HIDDEN)
    runs = _runs_of_blocks([piece.block_table[:n] for piece, n in zip(pieces, counts, strict=True)])
    spread, absent_BC = _spread_chunks([chunk for run in runs for chunk in run], counts)
    return SliceGroup(
        num_slices=len(pieces),
        num_rows=rows.count,
        max_chunks=max_chunks,
        gather=rows.gather,
        runs=tuple(_make_run(run, mask_BC) for run in runs),
        spread=spread,
        absent_BC=absent_BC,
    )


def _before_window(piece: Slice, token_R: Tensor, num_chunks: int, window: int) -> Tensor:
    """[chunks, 1, R, 128]: the slots whose positions are before the window of each row."""
    position_S = torch.arange(num_chunks * BLOCK_SIZE)
    fed_T = torch.tensor(positions_of(piece))
    if is_tree(piece):
        nodes = torch.tensor(node_positions(piece))
        position_S[piece.tree_start :][: len(nodes)] = nodes
    before_RS = position_S <= fed_T[token_R][:, None] - window
    return before_RS.view(-1, num_chunks, 1, BLOCK_SIZE).permute(1, 2, 0, 3)


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive blocks, of one slice or several: `count` blocks from `first_block` on."""

    first_block: int
    count: int
    slice_index: int | None
    """The slice of all blocks, if there is only one."""
    slices_C: Tensor | None
    """The slice of each block, if there are several."""
    mask_CR: Tensor
    """[count, 1, R, 128]; HIDDEN where a row must not see a position, else 0."""


class _Chunk(NamedTuple):
    """A chunk of a slice, and the block that holds it. A tuple, because a step sorts many."""

    block: int
    slice_index: int
    number: int


def _runs_of_blocks(tables: Sequence[Sequence[int]]) -> list[list[_Chunk]]:
    """The chunks of all tables in runs of neighboring blocks.

    A block that several slices share is in one run per slice.
    """
    runs: list[list[_Chunk]] = []
    by_last: defaultdict[int, list[list[_Chunk]]] = defaultdict(list)
    for chunk in sorted(
        _Chunk(block, index, number)
        for index, table in enumerate(tables)
        for number, block in enumerate(table)
    ):
        if by_last[chunk.block - 1]:
            run = by_last[chunk.block - 1].pop(0)
        else:
            run = []
            runs.append(run)
        run.append(chunk)
        by_last[chunk.block].append(run)
    return runs


def _make_run(chunks: Sequence[_Chunk], mask_BC: Tensor) -> Run:
    """The run of these chunks. `mask_BC`: the mask of each slice and chunk."""
    first = chunks[0]
    owners = [chunk.slice_index for chunk in chunks]
    numbers = [chunk.number for chunk in chunks]
    one = owners[0] if len(set(owners)) == 1 else None
    if one is not None and numbers == list(range(first.number, first.number + len(chunks))):
        mask_CR = mask_BC[one, first.number : first.number + len(chunks)]
    else:
        mask_CR = mask_BC[owners, numbers]
    slices_C = torch.tensor(owners) if one is None else None
    return Run(first.block, len(chunks), one, slices_C, mask_CR)


def _spread_chunks(
    computed: Sequence[_Chunk], counts: Sequence[int]
) -> tuple[Tensor | None, Tensor | None]:
    """`spread` and `absent_BC` of a group. `counts`: the number of chunks of each slice."""
    max_chunks = max(counts)
    spread = [0] * (len(counts) * max_chunks)
    for place, chunk in enumerate(computed):
        spread[chunk.slice_index * max_chunks + chunk.number] = place
    in_order = spread == list(range(len(computed)))
    if min(counts) == max_chunks:
        return None if in_order else torch.tensor(spread), None
    absent = [[0.0] * count + [HIDDEN] * (max_chunks - count) for count in counts]
    return torch.tensor(spread), torch.tensor(absent)[:, :, None, None]
