"""A step on a GPU: one array of integers with all its inputs except weights and KV.

`lay_out` writes the array on the host, `read_inputs` reads it on the device, and model code gets a
`DeviceStep` (forward.Step).

Chains come first, packed: these are slices in which each token sees all tokens before it. Slices
with a tree follow, all padded to one width. A shape gives the size of each part of the array. A
step may be laid out in a larger shape than it needs, that of a captured graph; padding then refers
to the scratch page.

Shapes: T tokens, B sequences, P pages of a table, W tokens of a tree's slice, K keys beside a stem.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workers.engine.cuda.attention import Ragged, Trees, attend, attend_trees
from workers.engine.cuda.kv_cache import PAGE_SIZE, LayerPages, PagedKV, slot_of
from workers.engine.slices import Slice, is_tree, paths_of, positions_of

Ints = NDArray[np.int32]
Array = TypeVar("Array", Ints, Tensor)
_FEW = 64
"""Up to this number of slots, building a list is faster than building arrays."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes that determine the parts of the array.

    `chain_tokens`: tokens of all chains. `chain_width`: tokens of the longest chain. `tree_keys`:
    keys beside the stem of a tree. `filler`, if not 0: the last chain consists of this number of
    padding tokens, with which the step has a number of rows that products must have (linears.py).
    """

    num_chains: int
    chain_tokens: int
    chain_width: int
    num_trees: int = 0
    tree_width: int = 0
    tree_keys: int = 0
    filler: int = 0

    @property
    def num_tokens(self) -> int:
        return self.chain_tokens + self.num_trees * self.tree_width

    @property
    def num_rows(self) -> int:
        """The number of tokens whose logits can be requested; they come first."""
        return self.num_tokens - self.filler

    def parts(self, table_pages: int) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the array's parts, in order."""
        return {
            "token_ids": (self.num_tokens,),
            "positions": (self.num_tokens,),
            "slots": (self.num_tokens,),
            "logit_rows": (self.num_rows,),
            "chain_ends": (self.num_chains + 1,),
            "chain_used": (self.num_chains,),
            "chain_table": (self.num_chains, table_pages),
            "tree_ends": (self.num_trees + 1,),
            "tree_used": (self.num_trees,),
            "tree_table": (self.num_trees, table_pages),
            "tree_slots": (self.num_trees, self.tree_keys),
            "tree_seen": (self.num_trees, self.tree_width, self.tree_keys),
        }

    def size(self, table_pages: int) -> int:
        """The number of integers in the whole array."""
        return sum(map(prod, self.parts(table_pages).values()))


@dataclass(frozen=True, slots=True)
class Layout:
    """A step laid out in a shape, on the host.

    `chain_lengths`: (queries, keys) of each chain. `tree_lengths`: (queries, keys of the stem) of
    each tree. `logit_rows`: the indices of the requested rows among the T tokens, in the order of
    the slices.
    """

    shape: Shape
    array: Ints
    chain_lengths: tuple[tuple[int, int], ...]
    tree_lengths: tuple[tuple[int, int], ...]
    logit_rows: tuple[int, ...]


def stem_of(piece: Slice) -> int:
    """The end of a tree slice's stem: every fed token sees all slots before it."""
    assert piece.tree_start is not None
    return min(piece.start, piece.tree_start)


def end_of(piece: Slice) -> int:
    """The slot after the last fed token."""
    return piece.start + len(piece.token_ids)


def exact_shape(slices: Sequence[Slice]) -> Shape:
    """The smallest shape for a step."""
    chains = [len(piece.token_ids) for piece in slices if not is_tree(piece)]
    trees = [piece for piece in slices if is_tree(piece)]
    return Shape(
        num_chains=len(chains),
        chain_tokens=sum(chains),
        chain_width=max(chains, default=0),
        num_trees=len(trees),
        tree_width=max((len(piece.token_ids) for piece in trees), default=0),
        tree_keys=max((end_of(piece) - stem_of(piece) for piece in trees), default=0),
    )


def lay_out(
    slices: Sequence[Slice], shape: Shape, *, table_pages: int, scratch_block: int, even: bool
) -> Layout:
    """The layout of a step in `shape`. `even`: each chain is padded to `chain_width` tokens."""
    writer = _Writer(shape, table_pages, scratch_block)
    chains = [i for i, piece in enumerate(slices) if not is_tree(piece)]
    trees = [i for i, piece in enumerate(slices) if is_tree(piece)]
    first_rows: dict[int, int] = {}
    lengths: list[tuple[int, int]] = []
    at = 0
    for row in range(shape.num_chains):
        piece = slices[chains[row]] if row < len(chains) else None
        if shape.filler and row == shape.num_chains - 1:
            width = shape.filler
        else:
            width = shape.chain_width if even or piece is None else len(piece.token_ids)
        if piece is not None:
            first_rows[chains[row]] = at
        lengths.append((width, writer.chain(row, at, width, piece)))
        at += width
    assert at == shape.chain_tokens, "the chains fill their part"
    stems: list[tuple[int, int]] = []
    for row in range(shape.num_trees):
        piece = slices[trees[row]] if row < len(trees) else None
        if piece is not None:
            first_rows[trees[row]] = at
        stems.append((shape.tree_width, writer.tree(row, at, piece)))
        at += shape.tree_width
    rows = [
        first_rows[i] + len(piece.token_ids) - piece.num_logits + number
        for i, piece in enumerate(slices)
        for number in range(piece.num_logits)
    ]
    return Layout(shape, writer.array, tuple(lengths), tuple(stems), writer.rows(rows))


class _Writer:
    """Fills the array. Parts that are not written are padding."""

    def __init__(self, shape: Shape, table_pages: int, scratch_block: int) -> None:
        self._shape = shape
        self._scratch_slot = scratch_block * PAGE_SIZE
        self.array: Ints = np.zeros(shape.size(table_pages), dtype=np.int32)
        self._parts = split(self.array, shape, table_pages)
        for name in ("slots", "tree_slots"):
            self._parts[name].fill(self._scratch_slot)
        for name in ("chain_table", "tree_table"):
            self._parts[name].fill(scratch_block)
        self._parts["tree_ends"][:] = np.arange(shape.num_trees + 1) * shape.tree_width
        # A padding token of a tree sees one key, so that its sums are finite.
        self._parts["tree_seen"][:, :, :1] = 1

    def rows(self, rows: Sequence[int]) -> tuple[int, ...]:
        """Write the requested rows, padded with row 0."""
        self._parts["logit_rows"][: len(rows)] = rows
        return tuple(rows)

    def chain(self, row: int, at: int, width: int, piece: Slice | None) -> int:
        """Write a chain of `width` tokens, padded at its end. Returns its number of keys."""
        start = 0 if piece is None else self._tokens(at, piece)
        if piece is not None:
            self._table("chain_table", row, piece)
        self._parts["chain_ends"][row + 1] = at + width
        self._parts["chain_used"][row] = start + width
        return start + width

    def tree(self, row: int, at: int, piece: Slice | None) -> int:
        """Write a slice with a tree. Returns the number of keys in its stem."""
        if piece is None:
            return 0
        self._tokens(at, piece)
        self._table("tree_table", row, piece)
        stem, end = stem_of(piece), end_of(piece)
        self._parts["tree_used"][row] = stem
        self._parts["tree_slots"][row, : end - stem] = _slots_of(piece, stem)
        assert piece.tree_start is not None
        chain = piece.tree_start - piece.start
        first = max(0, -chain)
        # A node sees its path; a token before the tree sees itself and all tokens before it.
        seen = np.tri(end - piece.start, end - stem, piece.start - stem, dtype=np.int32)
        seen[max(0, chain) :, piece.tree_start - stem :] = paths_of(piece.parents)[first:]
        self._parts["tree_seen"][row, : len(seen), : end - stem] = seen
        return stem

    def _tokens(self, at: int, piece: Slice) -> int:
        fed = slice(at, at + len(piece.token_ids))
        self._parts["token_ids"][fed] = piece.token_ids
        self._parts["positions"][fed] = positions_of(piece)
        self._parts["slots"][fed] = _slots_of(piece, piece.start)
        return piece.start

    def _table(self, name: str, row: int, piece: Slice) -> None:
        """Write the pages that hold tokens. Padding after the last one reads the scratch page."""
        pages = -(-end_of(piece) // PAGE_SIZE)
        self._parts[name][row, :pages] = piece.block_table[:pages]


def _slots_of(piece: Slice, first: int) -> Sequence[int] | Ints:
    """The indices among all slots of a sequence's tokens from slot `first` on."""
    end, table = end_of(piece), piece.block_table
    if end - first <= _FEW:
        return [slot_of(table, slot) for slot in range(first, end)]
    pages = range(first // PAGE_SIZE, -(-end // PAGE_SIZE))
    in_page = np.arange(PAGE_SIZE, dtype=np.int32)
    slots = [in_page + table[page] * PAGE_SIZE for page in pages]
    return np.concatenate(slots)[first % PAGE_SIZE :][: end - first]


def split(array: Array, shape: Shape, table_pages: int) -> dict[str, Array]:
    """Views of the array's parts."""
    views: dict[str, Array] = {}
    first = 0
    for name, size in shape.parts(table_pages).items():
        count = prod(size)
        views[name] = array[first : first + count].reshape(size)
        first += count
    return views


@dataclass(frozen=True, slots=True)
class DeviceInputs:
    """The array's parts on the device, in the dtypes that model and attention take."""

    token_ids_T: Tensor
    position_ids_T: Tensor
    slots_T: Tensor
    logit_rows: Tensor
    chains: Ragged | None
    trees: Trees | None


@dataclass(frozen=True, slots=True)
class Heads:
    """The heads of a token on this rank: queries, then keys, then one value per key."""

    num_queries: int
    num_keys: int


def read_inputs(array: Tensor, layout: Layout, *, table_pages: int) -> DeviceInputs:
    """Views and conversions of an array that is on the device. Pure, since graphs capture it."""
    shape = layout.shape
    parts = split(array, shape, table_pages)

    def ragged(kind: str, width: int, lengths: tuple[tuple[int, int], ...]) -> Ragged:
        return Ragged(
            parts[f"{kind}_ends"], parts[f"{kind}_used"], parts[f"{kind}_table"], width, lengths
        )

    chains = trees = None
    if shape.num_chains:
        width = max(shape.chain_width, shape.filler)
        chains = ragged("chain", width, layout.chain_lengths)
    if shape.num_trees:
        trees = Trees(
            ragged("tree", shape.tree_width, layout.tree_lengths),
            parts["tree_slots"].to(torch.int64),
            parts["tree_seen"].to(torch.bool),
        )
    return DeviceInputs(
        parts["token_ids"].to(torch.int64),
        parts["positions"].to(torch.int64),
        parts["slots"].to(torch.int64),
        parts["logit_rows"],
        chains,
        trees,
    )


class DeviceStep:
    """A step as model code sees it (forward.Step).

    `logit_rows`: the indices of the requested rows among the T tokens, int64, on the device.
    """

    def __init__(
        self,
        inputs: DeviceInputs,
        logit_rows: Tensor,
        cache: PagedKV,
        heads: Heads,
    ) -> None:
        self._inputs = inputs
        self._logit_rows = logit_rows
        self._cache = cache
        self._heads = heads

    @property
    def token_ids_T(self) -> Tensor:
        return self._inputs.token_ids_T

    @property
    def position_ids_T(self) -> Tensor:
        return self._inputs.position_ids_T

    @property
    def logit_rows(self) -> Tensor:
        return self._logit_rows

    @property
    def slots_T(self) -> Tensor:
        """The slot of each token's keys and values, int64. All padding shares one slot."""
        return self._inputs.slots_T

    def pages(self, layer: int) -> LayerPages:
        """A layer's keys and values."""
        return self._cache.layers[layer]

    def attend(
        self,
        rows_TAD: Tensor,
        layer: int,
        scaling: float,
        *,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """Store a layer's keys and values, attend, and return [T x query heads, D].

        `window` has no effect, and `softcap` must be None: models that need them are refused at
        load.
        """
        assert softcap is None, softcap
        pages = self.pages(layer)
        num_queries, num_keys = self._heads.num_queries, self._heads.num_keys
        query_TAD, keys_THD, values_THD = rows_TAD.split((num_queries, num_keys, num_keys), dim=1)
        pages.keys_SHD.index_copy_(0, self.slots_T, keys_THD)
        pages.values_SHD.index_copy_(0, self.slots_T, values_THD)
        return self.attend_stored(query_TAD, layer, scaling)

    def attend_stored(self, query_TAD: Tensor, layer: int, scaling: float) -> Tensor:
        """Attend to keys and values that are already stored. Returns [T x query heads, D]."""
        inputs, pages = self._inputs, self.pages(layer)
        parts: list[Tensor] = []
        num_chained = query_TAD.shape[0]
        if inputs.trees is not None:
            num_trees, width, _ = inputs.trees.seen_BWK.shape
            num_chained -= num_trees * width
        if inputs.chains is not None:
            output, _ = attend(query_TAD[:num_chained], pages, inputs.chains, scaling, causal=True)
            parts.append(output)
        if inputs.trees is not None:
            output = attend_trees(
                query_TAD[num_chained:].contiguous(), pages, inputs.trees, scaling
            )
            parts.append(output)
        joined = parts[0] if len(parts) == 1 else torch.cat(parts)
        return joined.reshape(-1, joined.shape[2])
