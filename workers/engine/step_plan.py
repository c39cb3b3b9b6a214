"""What a step needs besides weights and KV, computed once and used by every layer.

The slices of a step are packed into one row of T tokens. For attention they are sorted into groups
of equal width, so that a group's queries are one tensor [B, H, R, D]: B slices, H key/value heads,
R query rows (tokens x query heads that share a key head, padded to a multiple of 4), D head size. A
token's A heads come one after another: its queries, its keys, its values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from workers.engine.block_pool import blocks_for
from workers.engine.cpu.block_runs import HIDDEN, Run, make_run, runs_of_blocks, spread_chunks
from workers.engine.cpu.kv_cache import BLOCK_SIZE
from workers.engine.slices import Slice, is_tree, node_positions, positions_of, unrelated_slots

_ROW_MULTIPLE = 4
"""The attention kernel rounds differently in tiles of fewer than 4 query rows."""
_WIDE = 16
"""Slices up to this width are padded to a common width, separately for those that decode and those
that prefill. A wider slice is a group of its own.
"""


@dataclass(frozen=True, slots=True)
class Group:
    """Slices whose attention is computed together."""

    num_slices: int
    num_rows: int
    max_chunks: int
    gather: Tensor
    """[B x H x R] rows of the group's queries among all heads, viewed as [T x A, D]."""
    runs: tuple[Run, ...]
    spread: Tensor | None
    """For each of B x max_chunks its computed chunk; any chunk where a slice has no such chunk.

    None if chunks are computed in this order already.
    """
    absent_BC: Tensor | None
    """HIDDEN for chunks that a slice does not have, else 0. None: all slices have equally many."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """A step, ready to run."""

    token_ids_T: Tensor
    position_ids_T: Tensor
    num_tokens: int
    """Number of tokens fed; the tensors may hold padding after them."""
    first_slot: int
    slots_T: Tensor | None
    """The slot of each token, or None if they follow the first one by one."""
    groups: tuple[Group, ...]
    scatter: Tensor
    """For each row of the result, viewed as [T x query heads, D], its row among the groups'."""
    logit_rows: Tensor
    window: int | None
    windowed_groups: tuple[Group, ...]
    """As `groups`, for layers with a sliding window; empty if there are none."""

    def groups_of(self, window: int | None) -> tuple[Group, ...]:
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

    `window`: that of the model's sliding-window layers, if sequences may outgrow it.
    """
    packed = _pack(slices)
    num_tokens, slots = len(packed.token_ids), packed.slots
    padding = max(0, min_tokens - num_tokens)
    in_a_run = slots[-1] - slots[0] == num_tokens - 1 and slots == list(
        range(slots[0], slots[0] + num_tokens)
    )
    batches = _batches(slices, packed.offsets, num_query_heads, num_kv_heads)
    groups = tuple(_make_group(pieces, rows) for pieces, rows, _ in batches)
    windowed = [] if window is None else [_make_group(p, r, window) for p, r, _ in batches]
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


_Batch = tuple[list[Slice], "_Rows", list[int]]
"""The slices of a group, their query rows, and each slice's first token in the step."""


def _batches(
    slices: Sequence[Slice], offsets: Sequence[int], num_query_heads: int, num_kv_heads: int
) -> list[_Batch]:
    narrow = [i for i, piece in enumerate(slices) if len(piece.token_ids) <= _WIDE]
    # A piece of a prompt must not widen the queries of the sequences that decode beside it.
    decoding = [i for i in narrow if slices[i].num_logits == len(slices[i].token_ids)]
    prefilling = [i for i in narrow if slices[i].num_logits < len(slices[i].token_ids)]
    wide = [[i] for i, piece in enumerate(slices) if len(piece.token_ids) > _WIDE]
    batches: list[_Batch] = []
    for members in [one for one in (decoding, prefilling, *wide) if one]:
        pieces, firsts = [slices[i] for i in members], [offsets[i] for i in members]
        batches.append((pieces, _Rows(pieces, firsts, num_query_heads, num_kv_heads), firsts))
    return batches


def _scatter(batches: Sequence[_Batch], num_fed: int, num_query_heads: int) -> Tensor:
    scatter_TH = torch.zeros(num_fed, num_query_heads, dtype=torch.int64)
    first_row = 0
    for pieces, rows, offsets in batches:
        for index, (piece, offset) in enumerate(zip(pieces, offsets, strict=True)):
            rows.scatter_into(scatter_TH[offset : offset + len(piece.token_ids)], index, first_row)
        first_row += len(pieces) * rows.num_kv_heads * rows.count
    return scatter_TH.view(-1)


class _Rows:
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


def _make_group(pieces: Sequence[Slice], rows: _Rows, window: int | None = None) -> Group:
    chunks = [blocks_for(piece.start + len(piece.token_ids), BLOCK_SIZE) for piece in pieces]
    max_chunks = max(chunks)
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
    orders = runs_of_blocks(
        [piece.block_table[:n] for piece, n in zip(pieces, chunks, strict=True)]
    )
    spread, absent_BC = spread_chunks([use for order in orders for use in order], chunks)
    return Group(
        num_slices=len(pieces),
        num_rows=rows.count,
        max_chunks=max_chunks,
        gather=rows.gather,
        runs=tuple(make_run(order, mask_BC) for order in orders),
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
