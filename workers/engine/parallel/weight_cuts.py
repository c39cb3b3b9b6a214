"""Computes which rows or columns of a whole tensor a rank holds.

Pure arithmetic: a Cut says how a rank's tensor is composed of runs of the whole tensor along one
dimension. The rest of the rank's tensor is zero: padding, if the degree does not divide the size.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from paceline.errors import ConfigError

_VOCABULARY_UNIT = 4
"""A rank's part of the vocabulary begins at a multiple of this: float32 rows are aligned then."""
_UNITS = (128, 64, 32, 16, 8, 4, 2)
"""Preferred units for cutting a dimension: kernels are faster with multiples of these."""
_LARGEST_IMBALANCE = 64
"""A unit that gives ranks unequal shares is used if a rank gets at least this many units."""


@dataclass(frozen=True, slots=True)
class Place:
    """A rank's number, and the number of ranks."""

    rank: int = 0
    degree: int = 1


@dataclass(frozen=True, slots=True)
class Span:
    """`count` indices: from `start` on in the whole tensor, from `at` on in the rank's tensor."""

    at: int
    start: int
    count: int


@dataclass(frozen=True, slots=True)
class Cut:
    """A rank's tensor has `size` along `dim`. The spans fill it; the rest is zero."""

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
    """Divide the heads. All ranks get the same number, so that their KV blocks have equal size.

    Each KV head's queries are cut into the number of parts that minimizes the ranks' work. A KV
    head is held by each rank that has one of its parts. Raises ConfigError if there are more ranks
    than query heads.
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
    """This rank's indices of a dimension that can be cut anywhere."""
    unit = _unit(size, degree)
    first, end = (number * (size // unit) // degree * unit for number in (rank, rank + 1))
    return range(first, end)


def even_cut(size: int, *, degree: int, rank: int, dim: int, copies: int = 1) -> Cut:
    """The cut of a dimension with `copies` runs of `size`, one after another (gate and up)."""
    part = even_part(size, degree=degree, rank=rank)
    spans = [Span(i * len(part), i * size + part.start, len(part)) for i in range(copies)]
    return Cut(dim, copies * len(part), tuple(spans))


def join_cuts(cuts: Sequence[Cut], whole_sizes: Sequence[int]) -> Cut:
    """The cut of a tensor that joins others one after another (queries, keys and values)."""
    spans: list[Span] = []
    at = start = 0
    for cut, whole in zip(cuts, whole_sizes, strict=True):
        for span in cut.spans:
            _extend(spans, Span(at + span.at, start + span.start, span.count))
        at += cut.size
        start += whole
    return Cut(cuts[0].dim, at, tuple(spans))


def vocabulary_part(vocab_size: int, *, degree: int, rank: int) -> range:
    """This rank's token ids. All parts have the same length, but the last ones may be shorter."""
    width = vocabulary_width(vocab_size, degree=degree)
    return range(min(rank * width, vocab_size), min((rank + 1) * width, vocab_size))


def vocabulary_width(vocab_size: int, *, degree: int) -> int:
    """The number of rows per rank; rows beyond the vocabulary are padding."""
    if degree == 1:
        return vocab_size
    return -(-vocab_size // (degree * _VOCABULARY_UNIT)) * _VOCABULARY_UNIT


def vocabulary_cut(vocab_size: int, *, degree: int, rank: int) -> Cut:
    """The rows of the embedding and of the LM head."""
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
    """Append a span, or lengthen the last one if the span continues it."""
    if spans:
        last = spans[-1]
        goes_on = last.start + last.count == span.start and last.at + last.count == span.at
        if goes_on:
            spans[-1] = Span(last.at, last.start, last.count + span.count)
            return
    spans.append(span)
