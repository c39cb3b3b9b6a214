"""Which rows or columns of a whole tensor a rank holds.

Pure arithmetic: a Cut tells how a rank's tensor is put together from runs of the whole one along
one dimension. What no run fills is zero: padding, where a degree does not divide.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from paceline.errors import ConfigError

NOISE_LANES = 4
"""A rank's part of the vocabulary begins at a multiple: noise is made four ids at a time."""
_UNITS = (128, 64, 32, 16, 8, 4, 2)
"""Sizes in whose multiples a dimension is cut where that costs little: kernels like them."""
_LARGEST_IMBALANCE = 64
"""A unit is taken when it is at most one part in so many of a rank's share."""


@dataclass(frozen=True, slots=True)
class Span:
    """`count` indices from `start` of the whole tensor, which go to `at` of the rank's."""

    at: int
    start: int
    count: int


@dataclass(frozen=True, slots=True)
class Cut:
    """A rank's tensor has `size` along `dim`; the spans fill it, the rest is zero."""

    dim: int
    size: int
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class HeadSplit:
    """A rank's heads, by their numbers in the whole model; None is padding.

    Query head i uses KV head i // (query heads / KV heads), as in the whole model.
    """

    query_heads: tuple[int | None, ...]
    kv_heads: tuple[int | None, ...]


def split_heads(num_query_heads: int, num_kv_heads: int, *, degree: int, rank: int) -> HeadSplit:
    """Share heads out. All ranks have equally many, so that they have equally large KV blocks.

    Each KV head's queries are cut into as many parts as makes the ranks' work least; the KV head is
    held by each rank that has one of its parts. Raises ConfigError for more ranks than query heads.
    """
    if degree > num_query_heads:
        raise ConfigError(
            f"tensor_parallel is {degree}, but the model has {num_query_heads} attention heads "
            f"({num_kv_heads} for keys and values): expected at most {num_query_heads}"
        )
    share = num_query_heads // num_kv_heads

    def cost(parts: int) -> tuple[int, int]:
        units = -(-num_kv_heads * parts // degree)
        return units * -(-share // parts), units

    parts = min(range(1, share + 1), key=cost)
    width = -(-share // parts)
    num_units = -(-num_kv_heads * parts // degree)
    first, end = (number * num_kv_heads * parts // degree for number in (rank, rank + 1))
    query_heads: list[int | None] = []
    kv_heads: list[int | None] = []
    for unit in range(first, first + num_units):
        kv_head, part = divmod(unit, parts)
        own = range(part * width, min((part + 1) * width, share)) if unit < end else range(0)
        heads: list[int | None] = [kv_head * share + query for query in own]
        query_heads += heads + [None] * (width - len(heads))
        kv_heads.append(kv_head if unit < end else None)
    return HeadSplit(tuple(query_heads), tuple(kv_heads))


def head_cut(heads: Iterable[int | None], *, head_size: int, dim: int) -> Cut:
    """The rows or columns of these heads."""
    spans: list[Span] = []
    size = 0
    for head in heads:
        if head is not None:
            _extend(spans, Span(size, head * head_size, head_size))
        size += head_size
    return Cut(dim, size, tuple(spans))


def even_part(size: int, *, degree: int, rank: int) -> range:
    """This rank's run of a dimension that can be cut anywhere."""
    unit = _unit(size, degree)
    first, end = (number * (size // unit) // degree * unit for number in (rank, rank + 1))
    return range(first, end)


def even_cut(size: int, *, degree: int, rank: int, dim: int, copies: int = 1) -> Cut:
    """Of a dimension that holds `copies` such runs of `size` one after another (gate and up)."""
    part = even_part(size, degree=degree, rank=rank)
    spans = [Span(i * len(part), i * size + part.start, len(part)) for i in range(copies)]
    return Cut(dim, copies * len(part), tuple(spans))


def join_cuts(cuts: Sequence[Cut], whole_sizes: Sequence[int]) -> Cut:
    """The cut of a tensor in which others lie one after another (queries, keys and values)."""
    spans: list[Span] = []
    at = start = 0
    for cut, whole in zip(cuts, whole_sizes, strict=True):
        for span in cut.spans:
            _extend(spans, Span(at + span.at, start + span.start, span.count))
        at += cut.size
        start += whole
    return Cut(cuts[0].dim, at, tuple(spans))


def vocabulary_part(vocab_size: int, *, degree: int, rank: int) -> range:
    """This rank's token ids. All parts but the last ones have the same length."""
    width = vocabulary_width(vocab_size, degree=degree)
    return range(min(rank * width, vocab_size), min((rank + 1) * width, vocab_size))


def vocabulary_width(vocab_size: int, *, degree: int) -> int:
    """Token ids for which each rank has a row; those beyond the vocabulary are padding."""
    if degree == 1:
        return vocab_size
    return -(-vocab_size // (degree * NOISE_LANES)) * NOISE_LANES


def vocabulary_cut(vocab_size: int, *, degree: int, rank: int) -> Cut:
    """Rows of the embedding and of the LM head."""
    part = vocabulary_part(vocab_size, degree=degree, rank=rank)
    width = vocabulary_width(vocab_size, degree=degree)
    return Cut(0, width, (Span(0, part.start, len(part)),) if part else ())


def _unit(size: int, degree: int) -> int:
    for unit in _UNITS:
        whole = size % unit == 0
        if whole and (size // unit % degree == 0 or unit * degree * _LARGEST_IMBALANCE <= size):
            return unit
    return 1


def _extend(spans: list[Span], span: Span) -> None:
    """Append a span, or lengthen the last one where it goes on."""
    if spans:
        last = spans[-1]
        goes_on = last.start + last.count == span.start and last.at + last.count == span.at
        if goes_on:
            spans[-1] = Span(last.at, last.start, last.count + span.count)
            return
    spans.append(span)
