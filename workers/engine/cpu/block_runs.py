"""The KV blocks that the attention of a group of slices reads, as runs of neighbors.

A chunk is the content of one block: 128 positions of a slice. Shapes: B slices of the group, C
chunks, R query rows (step_plan.py).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

HIDDEN = -1e30
"""Added to the scores of positions that a row may not see. Finite, so that no row is all -inf."""


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
    """[count, 1, R, 128]; HIDDEN where a row may not see a position, else 0."""


class Use(NamedTuple):
    """A block that holds a chunk of a slice. A tuple, because a long text has many to sort."""

    block: int
    slice_index: int
    chunk: int


def runs_of_blocks(tables: Sequence[Sequence[int]]) -> list[list[Use]]:
    """All blocks in runs of neighbors, so that few calls read them all.

    A block that several slices share is in one run per slice.
    """
    runs: list[list[Use]] = []
    by_last: defaultdict[int, list[list[Use]]] = defaultdict(list)
    for use in sorted(
        Use(block, index, chunk)
        for index, table in enumerate(tables)
        for chunk, block in enumerate(table)
    ):
        if by_last[use.block - 1]:
            run = by_last[use.block - 1].pop(0)
        else:
            run = []
            runs.append(run)
        run.append(use)
        by_last[use.block].append(run)
    return runs


def make_run(uses: Sequence[Use], mask_BC: Tensor) -> Run:
    """The run of these neighbors. `mask_BC`: the mask of each slice and chunk."""
    first = uses[0]
    owners = [use.slice_index for use in uses]
    chunks = [use.chunk for use in uses]
    one = owners[0] if len(set(owners)) == 1 else None
    if one is not None and chunks == list(range(first.chunk, first.chunk + len(uses))):
        mask_CR = mask_BC[one, first.chunk : first.chunk + len(uses)]
    else:
        mask_CR = mask_BC[owners, chunks]
    slices_C = torch.tensor(owners) if one is None else None
    return Run(first.block, len(uses), one, slices_C, mask_CR)


def spread_chunks(
    computed: Sequence[Use], chunks: Sequence[int]
) -> tuple[Tensor | None, Tensor | None]:
    """`spread` and `absent_BC` of a group whose slices have `chunks` chunks each."""
    max_chunks = max(chunks)
    spread = [0] * (len(chunks) * max_chunks)
    for place, use in enumerate(computed):
        spread[use.slice_index * max_chunks + use.chunk] = place
    in_order = spread == list(range(len(computed)))
    if min(chunks) == max_chunks:
        return None if in_order else torch.tensor(spread), None
    absent = [[0.0] * count + [HIDDEN] * (max_chunks - count) for count in chunks]
    return torch.tensor(spread), torch.tensor(absent)[:, :, None, None]
