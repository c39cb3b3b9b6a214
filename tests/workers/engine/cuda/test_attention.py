"""Attention over pages: causal and whole, with and without keys, nodes of trees."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from workers.engine.cuda.attention import Ragged, Trees, attend, attend_trees
from workers.engine.cuda.kv_cache import PAGE_SIZE, CudaKvCache, LayerPages

HEADS, KV_HEADS, HEAD_SIZE, PAGES = 6, 2, 16, 7
SCALING = 0.3
TABLES = [[4, 1, 6], [0, 5, 2], [3, 3, 3]]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.02}
KINDS = [
    ("cpu", torch.float32),
    pytest.param("cuda", torch.float32, marks=pytest.mark.gpu),
    pytest.param("cuda", torch.bfloat16, marks=pytest.mark.gpu),
]


def random_layer(device: str, dtype: torch.dtype) -> LayerPages:
    cache = CudaKvCache(
        num_layers=1,
        num_heads=KV_HEADS,
        head_size=HEAD_SIZE,
        num_blocks=PAGES,
        dtype=dtype,
        device=torch.device(device),
    )
    layer = cache.layers[0]
    generator = torch.Generator().manual_seed(2)
    for pages in (layer.keys_NPHD, layer.values_NPHD):
        pages.copy_(torch.randn(pages.shape, generator=generator))
    return layer


def random_queries(count: int, device: str, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(count, HEADS, HEAD_SIZE, generator=generator).to(device, dtype)


def ragged(lengths: Sequence[tuple[int, int]], device: str) -> Ragged:
    ends = [0]
    for width, _ in lengths:
        ends.append(ends[-1] + width)
    return Ragged(
        torch.tensor(ends, dtype=torch.int32, device=device),
        torch.tensor([used for _, used in lengths], dtype=torch.int32, device=device),
        torch.tensor(TABLES[: len(lengths)], dtype=torch.int32, device=device),
        max(width for width, _ in lengths),
        lengths,
    )


def slots_of(sequence: int, slots: Sequence[int]) -> list[int]:
    return [TABLES[sequence][s // PAGE_SIZE] * PAGE_SIZE + s % PAGE_SIZE for s in slots]


def expected_row(
    query_AD: torch.Tensor, layer: LayerPages, slots: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The attention of one query over these slots, head by head, by definition."""
    keys = layer.keys_SHD[list(slots)].double().cpu()
    values = layer.values_SHD[list(slots)].double().cpu()
    outputs, sums = [], []
    for head, query_D in enumerate(query_AD.double().cpu()):
        scores = keys[:, head // (HEADS // KV_HEADS)] @ query_D * SCALING
        outputs.append(scores.softmax(0) @ values[:, head // (HEADS // KV_HEADS)])
        sums.append(scores.logsumexp(0))
    return torch.stack(outputs), torch.stack(sums)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("device", "dtype"), KINDS)
def test_each_query_sees_its_keys(device: str, dtype: torch.dtype, causal: bool) -> None:
    """A single query, several over two pages, and a sequence of exactly one page."""
    lengths = [(1, 300), (9, 514), (5, PAGE_SIZE)]
    layer, queries = random_layer(device, dtype), random_queries(15, device, dtype)
    output_TAD, lse_AT = attend(queries, layer, ragged(lengths, device), SCALING, causal=causal)
    assert output_TAD.dtype == dtype
    token = 0
    for sequence, (width, used) in enumerate(lengths):
        for row in range(width):
            seen = used - width + row + 1 if causal else used
            slots = slots_of(sequence, range(seen))
            output_AD, lse_A = expected_row(queries[token], layer, slots)
            assert (output_TAD[token].double().cpu() - output_AD).abs().max() < TOLERANCE[dtype]
            assert (lse_AT[:, token].double().cpu() - lse_A).abs().max() < TOLERANCE[dtype]
            token += 1


@pytest.mark.parametrize(("device", "dtype"), KINDS)
def test_nodes_see_shared_keys_and_their_paths(device: str, dtype: torch.dtype) -> None:
    """Trees of several widths, after 320 shared keys, after none, and after one block."""
    shared, widths, num_slots = [320, 0, 64], [4, 1, 7], 6
    generator = torch.Generator().manual_seed(7)
    counts = torch.randint(1, num_slots + 1, (sum(widths),), generator=generator)
    paths = torch.randint(PAGES * PAGE_SIZE, (sum(widths), num_slots), generator=generator)
    layer, queries = random_layer(device, dtype), random_queries(sum(widths), device, dtype)
    trees = Trees(
        ragged(list(zip(widths, shared, strict=True)), device),
        paths.to(device, torch.int32),
        counts.to(device, torch.int32),
    )
    output_TAD = attend_trees(queries, layer, trees, SCALING)
    assert output_TAD.dtype == dtype
    sequences = [number for number, width in enumerate(widths) for _ in range(width)]
    for token, sequence in enumerate(sequences):
        slots = slots_of(sequence, range(shared[sequence]))
        slots += paths[token, : counts[token]].tolist()
        output_AD, _ = expected_row(queries[token], layer, slots)
        assert (output_TAD[token].double().cpu() - output_AD).abs().max() < TOLERANCE[dtype]
