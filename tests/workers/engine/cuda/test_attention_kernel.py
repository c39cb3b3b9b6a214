"""Our attention kernel: its results, and that a row's bits depend on no other row.

Without a GPU, Triton's interpreter runs it with small sizes, in float16 and float32, because it
cannot multiply bfloat16.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from tests.workers.compiling import compile_launches
from tests.workers.engine.cuda.launches import (
    launch_attention,
    launch_attention_of_other_models,
)
from workers.engine.cuda.attention_kernel import SCRATCH_BYTES, attend_pages, num_units, share_out
from workers.engine.cuda.kv_cache import PAGE_SIZE, CudaKvCache, LayerPages

pytestmark = pytest.mark.release

INTERPRETED = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="there is a GPU, so nothing is interpreted"
)
CPU, GPU = torch.device("cpu"), torch.device("cuda")
KINDS = [
    pytest.param(CPU, torch.float32, id="cpu-float32", marks=INTERPRETED),
    pytest.param(CPU, torch.float16, id="cpu-float16", marks=INTERPRETED),
    pytest.param(GPU, torch.float16, id="cuda-float16", marks=pytest.mark.gpu),
    pytest.param(GPU, torch.bfloat16, id="cuda-bfloat16", marks=pytest.mark.gpu),
]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 0.002, torch.bfloat16: 0.02}
SCALING = 0.3
NO_SCRATCH, ANY_SCRATCH = 0, 1 << 40
"""Scratch bytes with which programs fold at once, and with which they store units first."""


def random_layer(
    device: torch.device, dtype: torch.dtype, *, pages: int, heads: int, head_size: int
) -> LayerPages:
    cache = CudaKvCache(
        num_layers=1,
        num_heads=heads,
        head_size=head_size,
        num_blocks=pages,
        dtype=dtype,
        device=device,
    )
    generator = torch.Generator().manual_seed(2)
    for one in (cache.layers[0].keys_NPHD, cache.layers[0].values_NPHD):
        one.copy_(torch.randn(one.shape, generator=generator))
    return cache.layers[0]


def random_queries(count: int, heads: int, layer: LayerPages) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    queries = torch.randn(count, heads, layer.keys_NPHD.shape[3], generator=generator)
    return queries.to(layer.keys_NPHD)


def run(
    queries: Sequence[Tensor],
    layer: LayerPages,
    tables: Sequence[Sequence[int]],
    used: Sequence[int],
    *,
    causal: bool = True,
    scratch_bytes: int = ANY_SCRATCH,
) -> tuple[Tensor, Tensor]:
    """One call: sequence i has `queries[i]` [W, A, D], `used[i]` keys, and pages `tables[i]`."""

    def ints(values: object) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=layer.keys_NPHD.device)

    ends = [0, *itertools.accumulate(len(one) for one in queries)]
    output_TAD, lse_AT = attend_pages(
        torch.cat(list(queries)),
        layer,
        ints(ends),
        ints(used),
        ints(tables),
        SCALING,
        causal=causal,
        scratch_bytes=scratch_bytes,
    )
    return output_TAD, lse_AT


def expected(
    query_WAD: Tensor, layer: LayerPages, table: Sequence[int], used: int, *, causal: bool
) -> tuple[Tensor, Tensor]:
    """Outputs [W, A, D] and log-sum-exps [A, W] in float64, by definition."""
    width, num_query_heads, _ = query_WAD.shape
    keys_KHD, values_KHD = (
        one[list(table)].flatten(0, 1)[:used].double().cpu()
        for one in (layer.keys_NPHD, layer.values_NPHD)
    )
    group = num_query_heads // keys_KHD.shape[1]
    keys_AKD, values_AKD = (
        one.repeat_interleave(group, dim=1).transpose(0, 1) for one in (keys_KHD, values_KHD)
    )
    query_AWD = query_WAD.double().cpu().transpose(0, 1)
    scores_AWK = query_AWD @ keys_AKD.transpose(1, 2) * SCALING
    if causal:
        seen_WK = torch.ones(width, used, dtype=torch.bool).tril(used - width)
        scores_AWK = scores_AWK.masked_fill(~seen_WK, -torch.inf)
    return (scores_AWK.softmax(-1) @ values_AKD).transpose(0, 1), scores_AWK.logsumexp(-1)


SHAPES = {
    "single tokens": [(1, 1), (1, 255), (1, 256), (1, 257), (1, 700)],
    "windows": [(1, 300), (5, 514), (9, 256)],
    "no keys before": [(5, 5), (23, 23)],
}


@pytest.mark.parametrize("scratch_bytes", [NO_SCRATCH, ANY_SCRATCH])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("device", "dtype"), [KINDS[0], *KINDS[2:]])
def test_outputs_and_sums(
    device: torch.device, dtype: torch.dtype, shape: str, causal: bool, scratch_bytes: int
) -> None:
    """Around the bounds of units and pages, with tables in any order and three heads in a group."""
    layer = random_layer(device, dtype, pages=9, heads=2, head_size=16)
    lengths = SHAPES[shape]
    tables = [[(3 * row + 4 * page) % 9 for page in range(3)] for row in range(len(lengths))]
    queries = random_queries(sum(width for width, _ in lengths), 6, layer)
    check(
        queries.split([width for width, _ in lengths]),
        layer,
        tables,
        [keys for _, keys in lengths],
        causal=causal,
        scratch_bytes=scratch_bytes,
    )


@pytest.mark.parametrize(("device", "dtype"), KINDS)
def test_long_slices(device: torch.device, dtype: torch.dtype) -> None:
    layer = random_layer(device, dtype, pages=9, heads=2, head_size=16)
    queries = random_queries(17 + 70 + 1, 6, layer).split([17, 70, 1])
    tables = [[1, 5, 0], [8, 2, 3], [4, 4, 4]]
    given: dict[str, Any] = {"causal": True, "scratch_bytes": NO_SCRATCH}
    check(queries, layer, tables, [260, 600, 768], **given)


def check(
    queries: Sequence[Tensor],
    layer: LayerPages,
    tables: Sequence[Sequence[int]],
    used: Sequence[int],
    *,
    causal: bool,
    scratch_bytes: int,
) -> None:
    """Compare one call with float64."""
    output_TAD, lse_AT = run(
        queries, layer, tables, used, causal=causal, scratch_bytes=scratch_bytes
    )
    dtype = layer.keys_NPHD.dtype
    assert output_TAD.dtype == dtype
    assert lse_AT.dtype == torch.float32
    wanted = [
        expected(query, layer, table, keys, causal=causal)
        for query, table, keys in zip(queries, tables, used, strict=True)
    ]
    wanted_TAD = torch.cat([one for one, _ in wanted])
    wanted_AT = torch.cat([one for _, one in wanted], dim=1)
    assert (output_TAD.double().cpu() - wanted_TAD).abs().max() < TOLERANCE[dtype]
    assert (lse_AT.double().cpu() - wanted_AT).abs().max() < TOLERANCE[dtype]


@pytest.mark.parametrize("scratch_bytes", [NO_SCRATCH, ANY_SCRATCH])
@pytest.mark.parametrize(
    ("heads", "group", "head_size"), [(2, 1, 80), (1, 70, 16), (1, 8, 64), (2, 4, 8), (1, 2, 256)]
)
@pytest.mark.parametrize(("device", "dtype"), KINDS)
def test_sizes_of_heads(
    device: torch.device,
    dtype: torch.dtype,
    heads: int,
    group: int,
    head_size: int,
    scratch_bytes: int,
) -> None:
    """Sizes that are not powers of two, and more heads in a group than a tile has rows."""
    layer = random_layer(device, dtype, pages=3, heads=heads, head_size=head_size)
    # Scores of a few units for any head size, as with hidden states.
    queries = random_queries(3, heads * group, layer) * (4 / head_size**0.5)
    check(
        queries.split([1, 2]),
        layer,
        [[2, 0], [1, 2]],
        [270, 500],
        causal=True,
        scratch_bytes=scratch_bytes,
    )


@pytest.mark.parametrize(("device", "dtype"), [KINDS[0], *KINDS[2:]])
def test_units_of_all_sizes(device: torch.device, dtype: torch.dtype) -> None:
    """A sequence that reaches the third size of units. Both ways give the same bits."""
    layer = random_layer(device, dtype, pages=9, heads=1, head_size=16)
    queries = [random_queries(1, 1, layer)]
    table = [(5 * page + page // 9) % 9 for page in range(276)]
    used = 66_700
    output_TAD, lse_AT = run(queries, layer, [table], [used], scratch_bytes=NO_SCRATCH)
    stored_TAD, stored_AT = run(queries, layer, [table], [used], scratch_bytes=ANY_SCRATCH)
    assert torch.equal(output_TAD, stored_TAD)
    assert torch.equal(lse_AT, stored_AT)
    wanted_TAD, wanted_AT = expected(queries[0], layer, table, used, causal=True)
    assert (output_TAD.double().cpu() - wanted_TAD).abs().max() < TOLERANCE[dtype]
    assert (lse_AT.double().cpu() - wanted_AT).abs().max() < TOLERANCE[dtype]


@pytest.mark.usefixtures("products_row_by_row")
@pytest.mark.parametrize(("device", "dtype"), KINDS)
def test_bits_of_a_row_are_its_own(device: torch.device, dtype: torch.dtype) -> None:
    """A token's row in a window of 70, alone, in other windows, and beside other sequences.

    Both ways to fold are tested.
    """
    layer = random_layer(device, dtype, pages=9, heads=2, head_size=32)
    width, used, table, other = 70, 600, [7, 2, 5], [1, 8, 4]
    queries = random_queries(width, 4, layer)
    strangers = random_queries(40, 4, layer)
    output_TAD, lse_AT = run([queries], layer, [table], [used], scratch_bytes=NO_SCRATCH)

    def compare(first: int, rows: int, *, before: int, after: int, scratch_bytes: int) -> None:
        """Compare `rows` rows from `first`, between windows of another sequence."""
        slices, tables, lengths = [queries[first : first + rows]], [table], [used - width + first]
        lengths[0] += rows
        if before:
            slices.insert(0, strangers[:before])
            tables.insert(0, other)
            lengths.insert(0, 290)
        if after:
            slices.append(strangers[:after])
            tables.append(other)
            lengths.append(767)
        outputs, sums = run(slices, layer, tables, lengths, scratch_bytes=scratch_bytes)
        chosen = slice(before, before + rows)
        assert torch.equal(outputs[chosen], output_TAD[first : first + rows])
        assert torch.equal(sums[:, chosen], lse_AT[:, first : first + rows])

    for scratch_bytes in (NO_SCRATCH, ANY_SCRATCH):
        for first in (0, 1, 17, 69):
            compare(first, 1, before=0, after=0, scratch_bytes=scratch_bytes)
        compare(3, 9, before=1, after=0, scratch_bytes=scratch_bytes)
        compare(8, 17, before=5, after=3, scratch_bytes=scratch_bytes)
    compare(0, 70, before=40, after=1, scratch_bytes=NO_SCRATCH)
    compare(40, 30, before=0, after=0, scratch_bytes=ANY_SCRATCH)


@pytest.mark.parametrize(("device", "dtype"), KINDS)
def test_other_orders_of_the_sums_are_noticed(device: torch.device, dtype: torch.dtype) -> None:
    """Negative control of the test above: the same keys in another order give other bits."""
    layer = random_layer(device, dtype, pages=3, heads=1, head_size=32)
    queries = random_queries(32, 2, layer)
    _, lse_AT = run([queries], layer, [[0, 1, 2]], [768], causal=False)
    _, turned_AT = run([queries], layer, [[1, 2, 0]], [768], causal=False)
    assert not torch.equal(lse_AT, turned_AT)
    assert (lse_AT - turned_AT).abs().max() < 1e-5


@pytest.mark.parametrize("scratch_bytes", [NO_SCRATCH, ANY_SCRATCH])
@pytest.mark.parametrize(("device", "dtype"), KINDS)
def test_sequences_without_keys(
    device: torch.device, dtype: torch.dtype, scratch_bytes: int
) -> None:
    """They get finite results and disturb no others: stems of trees, and padding."""
    layer = random_layer(device, dtype, pages=3, heads=1, head_size=16)
    queries = random_queries(7, 2, layer).split([2, 3, 2])
    tables = [[0, 1], [1, 2], [2, 0]]
    given: dict[str, Any] = {"causal": False, "scratch_bytes": scratch_bytes}
    output_TAD, lse_AT = run(queries, layer, tables, [0, 300, 0], **given)
    assert output_TAD.isfinite().all()
    assert lse_AT.isfinite().all()
    alone_TAD, alone_AT = run(queries[1:2], layer, tables[1:2], [300], **given)
    assert torch.equal(output_TAD[2:5], alone_TAD)
    assert torch.equal(lse_AT[:, 2:5], alone_AT)


@pytest.mark.parametrize(("device", "dtype"), KINDS)
def test_nothing_is_read_that_was_not_stored(
    device: torch.device, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first tile of 60 tokens ends before the unit that the last one begins."""

    def poisoned(like: Tensor, size: Any, **given: Any) -> Tensor:
        # Triton's interpreter also allocates a copy like this, by its number of bytes.
        sizes = (size,) if isinstance(size, int) else size
        made = like.new_zeros(sizes, **given)
        return made.fill_(torch.nan) if made.is_floating_point() else made

    layer = random_layer(device, dtype, pages=3, heads=1, head_size=16)
    queries = random_queries(61, 3, layer).split([60, 1])
    monkeypatch.setattr(Tensor, "new_empty", poisoned)
    given: dict[str, Any] = {"causal": True, "scratch_bytes": ANY_SCRATCH}
    check(queries, layer, [[0, 2], [1, 1]], [290, 1], **given)


def test_what_units_take_is_bounded() -> None:
    """In a model of 131,072 positions with 8 key/value heads and 32 query heads of 128:

    64 tokens of one sequence are shared out. A long chunk, or many sequences, are not.
    """
    units = num_units(131_072 + PAGE_SIZE)
    assert num_units(16_384) == 64
    assert num_units(16_385) == 65
    assert units == 64 + 48 + 17

    def programs(num_tokens: int, num_sequences: int) -> int:
        return share_out(
            units,
            8 * (num_tokens // 16 + num_sequences),
            unit_bytes=4 * num_tokens * 32 * 130,
            scratch_bytes=SCRATCH_BYTES,
        )

    assert programs(64, 2) == 22
    assert programs(64, 17) > 1
    assert programs(64, 64) == 1
    assert programs(256, 17) == 1
    assert programs(2048, 1) == 1
    assert share_out(1, 8, unit_bytes=1, scratch_bytes=8) == 1


@pytest.mark.parametrize("launch", [launch_attention, launch_attention_of_other_models])
def test_the_kernels_compile_for_an_h100(launch: Callable[[], None], tmp_path: Path) -> None:
    """They compile once for all token counts, with tensor cores, without spills, and fuse no
    product with a sum. Each kernel: units stored or folded, for chains and for trees.
    """
    found = compile_launches(launch, tmp_path)
    models = 1 if launch is launch_attention else 2
    numbers = {name: len(variants) for name, variants in found.items()}
    assert numbers == {
        "attend_kernel": 4 * models,
        "fold_stored_kernel": 2 * models,
        "attend_paths_kernel": models,
    }
    variants = [one for ones in found.values() for one in ones]
    assert not any(one.fused or one.spills for one in variants), found
    assert all(one.products for name in found for one in found[name] if "fold" not in name), found
