"""Our kernel for the nodes of trees: against float64, and their bits against those of chains."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from tests.tiny import make_tiny_checkpoint
from tests.workers.engine.cuda.engines import make_engine
from tests.workers.engine.cuda.test_attention_kernel import (
    ANY_SCRATCH,
    INTERPRETED,
    KINDS,
    NO_SCRATCH,
    SCALING,
    TOLERANCE,
    expected,
    random_layer,
    random_queries,
    run,
)
from workers.engine.cuda import attention
from workers.engine.cuda.kv_cache import KEY_BLOCK, PAGE_SIZE, LayerPages
from workers.engine.cuda.tree_kernel import attend_paths
from workers.engine.self_test import trees_are_invariant

pytestmark = [pytest.mark.release, pytest.mark.usefixtures("products_row_by_row")]

Node = tuple[Tensor, int, Sequence[int]]
"""A node's query [A, D], the number of keys of its stem, and the slots of its path."""


def attend(
    trees: Sequence[Sequence[Node]],
    layer: LayerPages,
    tables: Sequence[Sequence[int]],
    scratch_bytes: int,
) -> Tensor:
    """One call. The stem of tree b is in the pages `tables[b]`."""
    device = layer.keys_NPHD.device
    rows, shared, ends = [], [], [0]
    for paths, table in zip(trees, tables, strict=True):
        stem = paths[0][1]
        shared.append(stem // KEY_BLOCK * KEY_BLOCK)
        beside = [slot(table, position) for position in range(shared[-1], stem)]
        rows += [beside + list(path) for _, _, path in paths]
        ends.append(ends[-1] + len(paths))
    slots_TK = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.int32)
    for number, row in enumerate(rows):
        slots_TK[number, : len(row)] = torch.tensor(row)
    return attend_paths(
        torch.stack([query for paths in trees for query, _, _ in paths]),
        layer,
        torch.tensor(ends, dtype=torch.int32, device=device),
        torch.tensor(shared, dtype=torch.int32, device=device),
        torch.tensor(tables, dtype=torch.int32, device=device),
        slots_TK.to(device),
        torch.tensor([len(row) for row in rows], dtype=torch.int32, device=device),
        SCALING,
        scratch_bytes=scratch_bytes,
    )


def slot(table: Sequence[int], position: int) -> int:
    return table[position // PAGE_SIZE] * PAGE_SIZE + position % PAGE_SIZE


def as_chain(layer: LayerPages, table: Sequence[int], path: Node, page: int) -> Tensor:
    """The output of the same query in a chain whose last positions have the path's KV.

    The chain has a copy of its last pages, in page `page` and the next one.
    """
    query_AD, stem, slots = path
    first = stem // PAGE_SIZE
    pages = [*table[:first], page, page + 1]
    for one in (layer.keys_SHD, layer.values_SHD):
        for position in range(first * PAGE_SIZE, stem):
            one[slot(pages, position)] = one[slot(table, position)]
        for number, source in enumerate(slots):
            one[slot(pages, stem + number)] = one[source]
    return run([query_AD[None]], layer, [pages], [stem + len(slots)])[0][0]


@pytest.mark.parametrize("scratch_bytes", [NO_SCRATCH, ANY_SCRATCH])
@pytest.mark.parametrize("stem", [0, 250, 256, 500])
@pytest.mark.parametrize(("device", "dtype"), KINDS)
def test_a_node_has_the_bits_of_a_chain(
    device: torch.device, dtype: torch.dtype, stem: int, scratch_bytes: int
) -> None:
    """Paths that end before, at and after the bounds of blocks and units, beside another tree."""
    layer = random_layer(device, dtype, pages=9, heads=2, head_size=16)
    table, other = [6, 1], [2, 0]
    generator = torch.Generator().manual_seed(stem)
    # Pages 3 to 5 have the nodes of the trees, pages 7 and 8 the chains.
    slots = (3 * PAGE_SIZE + torch.randperm(3 * PAGE_SIZE, generator=generator)).tolist()
    queries = random_queries(5, 6, layer)
    paths = [
        (query, stem, slots[:length])
        for query, length in zip(queries, (1, 2, 6, 12, 70), strict=True)
    ]
    paths[2] = (queries[2], stem, slots[100:106])
    beside = [(queries[0], 40, slots[7:9])]
    output_TAD = attend([beside, paths], layer, [other, table], scratch_bytes)
    assert output_TAD.dtype == dtype
    for number, path in enumerate(paths):
        assert torch.equal(output_TAD[1 + number], as_chain(layer, table, path, 7)), number
    assert torch.equal(output_TAD[0], as_chain(layer, other, beside[0], 7))


@pytest.mark.parametrize(("heads", "group", "head_size"), [(2, 8, 64), (1, 70, 16), (2, 2, 80)])
@pytest.mark.parametrize(("device", "dtype"), KINDS)
def test_outputs(
    device: torch.device, dtype: torch.dtype, heads: int, group: int, head_size: int
) -> None:
    """Against float64. What no node sees is NaN."""
    layer = random_layer(device, dtype, pages=4, heads=heads, head_size=head_size)
    queries = random_queries(2, heads * group, layer) * (4 / head_size**0.5)
    path = [2 * PAGE_SIZE + 9, 2 * PAGE_SIZE + 3]
    for one in (layer.keys_SHD, layer.values_SHD):
        one[70:PAGE_SIZE] = torch.nan
        one[2 * PAGE_SIZE + 4 : 2 * PAGE_SIZE + 9] = torch.nan
    paths = [(queries[0], 70, path[:1]), (queries[1], 70, path)]
    output_TAD = attend([paths], layer, [[0, 1]], ANY_SCRATCH)
    for one in (layer.keys_SHD, layer.values_SHD):
        one[70], one[71] = one[path[0]].clone(), one[path[1]].clone()
    for number in range(2):
        wanted, _ = expected(queries[number][None], layer, [0, 1], 71 + number, causal=True)
        assert (output_TAD[number].double().cpu() - wanted[0]).abs().max() < TOLERANCE[dtype]


@pytest.mark.parametrize(("device", "dtype"), KINDS)
def test_another_slot_is_noticed(device: torch.device, dtype: torch.dtype) -> None:
    """Negative control: another path changes the output, only of that node."""
    layer = random_layer(device, dtype, pages=2, heads=1, head_size=16)
    queries = random_queries(2, 2, layer)
    paths = [(queries[0], 10, [300, 301]), (queries[1], 10, [300, 302])]
    changed = [paths[0], (queries[1], 10, [300, 303])]
    before, after = (attend([one], layer, [[0, 1]], ANY_SCRATCH) for one in (paths, changed))
    assert torch.equal(before[0], after[0])
    assert (before[1] - after[1]).abs().max() > TOLERANCE[dtype]


@INTERPRETED
def test_trees_of_an_engine_keep_the_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Logits of a tree's nodes have the bits of chains, through all layers of a model."""
    engine = make_engine(make_tiny_checkpoint(tmp_path), "cpu", batch_invariant=True)
    for name in ("can_use_kernel", "can_run_kernels"):
        monkeypatch.setattr(attention, name, lambda *_: True)
    with torch.inference_mode():
        assert trees_are_invariant(engine)
    assert not caplog.messages
