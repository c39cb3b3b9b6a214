"""A step on a GPU: one array of integers with all its inputs except weights and KV.

`lay_out` writes the array on the host, `read_inputs` reads it on the device, and model code gets a
`DeviceStep` (forward.Step).

Chains come first: these are slices in which each token sees all tokens before it. Slices with a
tree follow. Each slice has its own number of tokens. A shape gives the size of each part of the
array. A step may be laid out in a larger shape than it needs, that of a captured graph. Then one
more chain and one more tree consist of padding, which refers to the scratch page.

Shapes: T tokens, B sequences, P pages of a table, K slots of a path.
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
from workers.engine.cuda.kv_cache import KEY_BLOCK, PAGE_SIZE, CudaKvCache, LayerPages, slot_of
from workers.engine.slices import Slice, is_tree, paths_of, positions_of

Ints = NDArray[np.int32]
Array = TypeVar("Array", Ints, Tensor)
_FEW = 64
"""Up to this number of slots, building a list is faster than building arrays."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes that determine the parts of the array.

    `num_chains`, `chain_tokens`: of all slices without a tree. `num_trees`, `tree_tokens`: of all
    others. `path_slots`: the most slots that a token of a tree lists. `num_rows`: the most tokens
    whose logits can be requested. Padding takes one chain, and one tree. `filler`: the last
    tokens of the chains, which are always padding.
    """

    num_chains: int
    chain_tokens: int
    num_trees: int = 0
    tree_tokens: int = 0
    path_slots: int = 0
    num_rows: int = 0
    filler: int = 0

    @property
    def num_tokens(self) -> int:
        return self.chain_tokens + self.tree_tokens

    @property
    def num_used(self) -> int:
        """Tokens from this number on are always padding."""
        return self.num_tokens if self.num_trees else self.num_tokens - self.filler

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
            "path_slots": (self.tree_tokens, self.path_slots),
            "path_counts": (self.tree_tokens,),
        }

    def size(self, table_pages: int) -> int:
        """The number of integers in the whole array."""
        return sum(map(prod, self.parts(table_pages).values()))

    def holds(self, exact: Shape) -> bool:
        """Whether a step of this exact shape can be laid out in this shape."""
        return (
            exact.chain_tokens <= self.chain_tokens - self.filler
            and exact.num_chains + (exact.chain_tokens < self.chain_tokens) <= self.num_chains
            and exact.tree_tokens <= self.tree_tokens
            and exact.num_trees + (exact.tree_tokens < self.tree_tokens) <= self.num_trees
            and exact.path_slots <= self.path_slots
            and exact.num_rows <= self.num_rows
        )


@dataclass(frozen=True, slots=True)
class Layout:
    """A step laid out in a shape, on the host.

    `chain_lengths`: (queries, keys) of each chain. `tree_lengths`: (queries, shared keys) of each
    tree. `logit_rows`: the indices of the requested rows among the T tokens, in the order of the
    slices.
    """

    shape: Shape
    array: Ints
    chain_lengths: tuple[tuple[int, int], ...]
    tree_lengths: tuple[tuple[int, int], ...]
    logit_rows: tuple[int, ...]


def shared_keys_of(piece: Slice) -> int:
    """The slots before all fed tokens and before the tree, as whole blocks of keys.

    A token's path lists the slots after them that it sees.
    """
    assert piece.tree_start is not None
    return min(piece.start, piece.tree_start) // KEY_BLOCK * KEY_BLOCK


def end_of(piece: Slice) -> int:
    """The slot after the last fed token."""
    return piece.start + len(piece.token_ids)


def exact_shape(slices: Sequence[Slice]) -> Shape:
    chains = [len(piece.token_ids) for piece in slices if not is_tree(piece)]
    trees = [piece for piece in slices if is_tree(piece)]
    return Shape(
        num_chains=len(chains),
        chain_tokens=sum(chains),
        num_trees=len(trees),
        tree_tokens=sum(len(piece.token_ids) for piece in trees),
        path_slots=max(
            (max(positions_of(piece)) + 1 - shared_keys_of(piece) for piece in trees), default=0
        ),
        num_rows=sum(piece.num_logits for piece in slices),
    )


def lay_out(
    slices: Sequence[Slice], shape: Shape, *, table_pages: int, scratch_block: int
) -> Layout:
    """The layout of a step in `shape`, which must hold it."""
    assert shape.holds(exact_shape(slices)), (shape, exact_shape(slices))
    writer = _Writer(shape, table_pages, scratch_block)
    first_rows: dict[int, int] = {}
    for i in sorted(range(len(slices)), key=lambda i: is_tree(slices[i])):
        first_rows[i] = writer.tree(slices[i]) if is_tree(slices[i]) else writer.chain(slices[i])
    rows = [
        first_rows[i] + len(piece.token_ids) - piece.num_logits + number
        for i, piece in enumerate(slices)
        for number in range(piece.num_logits)
    ]
    return writer.finish(rows)


class _Writer:
    """Fills the array. Parts that are not written are padding."""

    def __init__(self, shape: Shape, table_pages: int, scratch_block: int) -> None:
        self._shape = shape
        self._pages = table_pages
        scratch_slot = scratch_block * PAGE_SIZE
        self._array: Ints = np.zeros(shape.size(table_pages), dtype=np.int32)
        self._parts = split(self._array, shape, table_pages)
        for name in ("slots", "path_slots"):
            self._parts[name].fill(scratch_slot)
        for name in ("chain_table", "tree_table"):
            self._parts[name].fill(scratch_block)
        # A token of padding sees one key, so that its sums are finite.
        self._parts["path_counts"].fill(1)
        self._chains: list[tuple[int, int]] = []
        self._trees: list[tuple[int, int]] = []
        self._chained = 0
        self._in_trees = 0

    def chain(self, piece: Slice) -> int:
        """Write a slice without a tree. Returns the row of its first token."""
        at = self._chained
        self._table("chain_table", len(self._chains), piece)
        self._tokens(at, piece)
        self._chains.append((len(piece.token_ids), end_of(piece)))
        self._chained += len(piece.token_ids)
        return at

    def tree(self, piece: Slice) -> int:
        """Write a slice with a tree. Returns the row of its first token."""
        first, width = self._in_trees, len(piece.token_ids)
        at = self._shape.chain_tokens + first
        self._table("tree_table", len(self._trees), piece)
        self._tokens(at, piece)
        end, shared = end_of(piece), shared_keys_of(piece)
        assert piece.tree_start is not None
        num_chained = piece.tree_start - piece.start
        # A node sees its path; a token before the tree sees itself and all tokens before it.
        seen = np.tri(width, end - shared, piece.start - shared, dtype=np.bool_)
        nodes = paths_of(piece.parents)[max(0, -num_chained) :]
        seen[max(0, num_chained) :, piece.tree_start - shared :] = nodes
        counts = seen.sum(axis=1)
        tokens, seen_slots = seen.nonzero()
        numbers = np.arange(len(tokens)) - np.repeat(counts.cumsum() - counts, counts)
        slots = np.asarray(_slots_of(piece, shared), dtype=np.int32)
        self._parts["path_slots"][first + tokens, numbers] = slots[seen_slots]
        self._parts["path_counts"][first : first + width] = counts
        self._trees.append((width, shared))
        self._in_trees += width
        return at

    def finish(self, rows: list[int]) -> Layout:
        """Write padding, the ends of all slices, and the requested rows."""
        shape = self._shape
        missing = shape.chain_tokens - self._chained
        if missing:
            # Its last token sees `missing` keys, if its table has that number.
            self._chains.append((missing, min(missing, self._pages * PAGE_SIZE)))
        if shape.tree_tokens > self._in_trees:
            self._trees.append((shape.tree_tokens - self._in_trees, 0))
        self._chains += [(0, 0)] * (shape.num_chains - len(self._chains))
        self._trees += [(0, 0)] * (shape.num_trees - len(self._trees))
        for kind, lengths in (("chain", self._chains), ("tree", self._trees)):
            if lengths:
                widths, used = zip(*lengths, strict=True)
                self._parts[f"{kind}_ends"][1:] = np.cumsum(widths)
                self._parts[f"{kind}_used"][:] = used
        self._parts["logit_rows"][: len(rows)] = rows
        return Layout(shape, self._array, tuple(self._chains), tuple(self._trees), tuple(rows))

    def _tokens(self, at: int, piece: Slice) -> None:
        fed = slice(at, at + len(piece.token_ids))
        self._parts["token_ids"][fed] = piece.token_ids
        self._parts["positions"][fed] = positions_of(piece)
        self._parts["slots"][fed] = _slots_of(piece, piece.start)

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

    def ragged(kind: str, num_tokens: int, lengths: tuple[tuple[int, int], ...]) -> Ragged:
        ends, used, table = (parts[f"{kind}_{name}"] for name in ("ends", "used", "table"))
        return Ragged(ends, used, table, num_tokens, lengths)

    chains = trees = None
    if shape.num_chains:
        chains = ragged("chain", shape.chain_tokens, layout.chain_lengths)
    if shape.num_trees:
        trees = Trees(
            ragged("tree", shape.tree_tokens, layout.tree_lengths),
            parts["path_slots"],
            parts["path_counts"],
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
        cache: CudaKvCache,
        heads: Heads,
    ) -> None:
        self._inputs = inputs
        self.token_ids_T = inputs.token_ids_T
        self.position_ids_T = inputs.position_ids_T
        self.slots_T = inputs.slots_T
        """The slot of each token's keys and values, int64. All padding shares one slot."""
        self.logit_rows = logit_rows
        self._cache = cache
        self._heads = heads

    def pages(self, layer: int) -> LayerPages:
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
        pages.store(self.slots_T, keys_THD, values_THD)
        return self.attend_stored(query_TAD, layer, scaling)

    def attend_stored(
        self, query_TAD: Tensor, layer: int, scaling: float, input_scale: Tensor | None = None
    ) -> Tensor:
        """Attend to keys and values that are already stored. Returns [T x query heads, D].

        With `input_scale`, outputs are in float8 if our own kernels attend (attention.attend).
        """
        inputs, pages = self._inputs, self.pages(layer)
        parts: list[Tensor] = []
        num_chained = query_TAD.shape[0]
        if inputs.trees is not None:
            num_chained -= inputs.trees.counts_T.shape[0]
        if inputs.chains is not None:
            output, _ = attend(
                *(query_TAD[:num_chained], pages, inputs.chains, scaling),
                causal=True,
                input_scale=input_scale,
            )
            parts.append(output)
        if inputs.trees is not None:
            output = attend_trees(
                query_TAD[num_chained:].contiguous(), pages, inputs.trees, scaling, input_scale
            )
            parts.append(output)
        # torch joins bytes of every kind, but not every kind of float8 on every device.
        joined = parts[0]
        if len(parts) > 1:
            joined = torch.cat([part.view(torch.uint8) for part in parts]).view(joined.dtype)
        return joined.reshape(-1, joined.shape[2])
