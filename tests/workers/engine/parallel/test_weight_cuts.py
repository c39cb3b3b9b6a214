"""Division of heads, widths and the vocabulary: every part is somewhere, and sums are right."""

from __future__ import annotations

import pytest
import torch

from paceline.errors import ConfigError
from workers.engine.parallel.weight_cuts import (
    Cut,
    even_cut,
    even_part,
    head_cut,
    join_cuts,
    split_heads,
    vocabulary_part,
    vocabulary_width,
)

HEADS = [(6, 2), (8, 8), (64, 8), (7, 1), (10, 5), (12, 4), (3, 3)]
DEGREES = [1, 2, 3, 4, 5, 7, 8, 16]


def apply(cut: Cut, whole: torch.Tensor) -> torch.Tensor:
    shape = list(whole.shape)
    shape[cut.dim] = cut.size
    part = torch.zeros(shape)
    for span in cut.spans:
        part.narrow(cut.dim, span.at, span.count).copy_(
            whole.narrow(cut.dim, span.start, span.count)
        )
    return part


@pytest.mark.parametrize(("queries", "keys"), HEADS)
@pytest.mark.parametrize("degree", DEGREES)
def test_every_query_head_is_at_one_rank_beside_its_keys(
    queries: int, keys: int, degree: int
) -> None:
    if degree > queries:
        with pytest.raises(ConfigError, match=f"is {degree}, but the model has {queries} attent"):
            split_heads(queries, keys, degree=degree, rank=0)
        return
    splits = [split_heads(queries, keys, degree=degree, rank=rank) for rank in range(degree)]
    placed = [head for split in splits for head in split.query_heads if head is not None]
    assert sorted(placed) == list(range(queries))
    for split in splits:
        assert len(split.query_heads) == len(splits[0].query_heads)
        share, rest = divmod(len(split.query_heads), len(split.kv_heads))
        assert rest == 0
        for place, head in enumerate(split.query_heads):
            if head is not None:
                assert split.kv_heads[place // share] == head // (queries // keys)


def test_heads_are_neither_padded_nor_repeated_where_the_degree_divides() -> None:
    split = split_heads(64, 8, degree=4, rank=1)
    assert split.query_heads == tuple(range(16, 32))
    assert split.kv_heads == (2, 3)
    assert split_heads(64, 8, degree=16, rank=3).kv_heads == (1,)


@pytest.mark.parametrize("degree", DEGREES)
@pytest.mark.parametrize("size", [112, 96, 11008, 14336, 37])
def test_even_parts_cover_a_dimension_once(size: int, degree: int) -> None:
    parts = [even_part(size, degree=degree, rank=rank) for rank in range(degree)]
    assert [index for part in parts for index in part] == list(range(size))
    assert max(map(len, parts)) <= size / degree * (1 + 2 / 64) + 1


def test_parts_of_usual_widths_are_multiples_of_what_kernels_like() -> None:
    for rank in range(3):
        assert len(even_part(14336, degree=3, rank=rank)) % 32 == 0


@pytest.mark.parametrize("degree", [1, 2, 3, 4])
def test_products_of_parts_add_up_to_the_whole(degree: int) -> None:
    head_size, queries, keys = 4, 6, 2
    torch.manual_seed(degree)
    packed = torch.randn(head_size * (queries + 2 * keys), 8)
    whole_q = packed[: head_size * queries]
    out = torch.randn(8, head_size * queries)
    rows = torch.randn(3, 8)
    total = torch.zeros(3, 8)
    for rank in range(degree):
        split = split_heads(queries, keys, degree=degree, rank=rank)
        q_cut = head_cut(split.query_heads, head_size=head_size, dim=0)
        kv_cut = head_cut(split.kv_heads, head_size=head_size, dim=0)
        joined = join_cuts([q_cut, kv_cut, kv_cut], [head_size * n for n in (queries, keys, keys)])
        part = apply(joined, packed)
        assert torch.equal(part[: q_cut.size], apply(q_cut, whole_q))
        assert torch.equal(part[-kv_cut.size :], apply(kv_cut, packed[-head_size * keys :]))
        columns = apply(head_cut(split.query_heads, head_size=head_size, dim=1), out)
        total += rows @ part[: q_cut.size].T @ columns.T
    assert torch.allclose(total, rows @ whole_q.T @ out.T, atol=1e-4)


def test_gate_and_up_in_one_tensor_are_cut_each() -> None:
    packed = torch.arange(20.0)[:, None]
    parts = [apply(even_cut(10, degree=3, rank=r, dim=0, copies=2), packed)[:, 0] for r in range(3)]
    gates = torch.cat([part[: len(part) // 2] for part in parts])
    ups = torch.cat([part[len(part) // 2 :] for part in parts])
    assert torch.equal(torch.cat([gates, ups]), packed[:, 0])


@pytest.mark.parametrize(("size", "degree"), [(384, 3), (300, 4), (32000, 7), (259, 16)])
def test_the_vocabulary_is_cut_where_noise_is_made(size: int, degree: int) -> None:
    parts = [vocabulary_part(size, degree=degree, rank=rank) for rank in range(degree)]
    assert [token_id for part in parts for token_id in part] == list(range(size))
    assert all(part.start % 4 == 0 for part in parts if part)
    assert all(len(part) <= vocabulary_width(size, degree=degree) for part in parts)
