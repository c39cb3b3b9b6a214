"""Attention over pages and beside the stems of trees: `python -m scripts.check_kernels attention`.

torch's figures are those of its varlen_attn over keys without pages, which every torch has that has
the function. The engine's use of it needs pages too (attention.py).

The words of its lines:

- `bits`: windows of a prefill's rows are computed again: alone and beside other sequences, with
  units folded as they are computed and with stored units. The figure is the number of windows whose
  rows have the bits of the prefill.
- `control`: torch's rows have other bits. So the comparison can fail.
- `context C batch B width W`: the last W tokens of B sequences of C tokens. Shown are the largest
  errors of an output and of a log-sum-exp against float64, our kernels' before torch's. Timed calls
  use the pages of several layers in turn, so that the device's cache has no keys of long contexts.
  `floor`: the time to read keys and values once at 3 TB/s.
- `float8 pages`: they give the bits of pages that hold the same numbers in the queries' dtype. Both
  are timed; keys and values may stay in the device's cache.
- `trees`: B trees of W nodes after stems of S tokens; kernels and torch are compared.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.varlen import AuxRequest, varlen_attn

from scripts.check_kernels.cases import CALLS, WRONG, Case, by_torch, times, verdict
from workers.engine.cuda.attention import Ragged, Trees, attend, attend_trees, can_use_kernel
from workers.engine.cuda.attention_kernel import SCRATCH_BYTES, attend_pages
from workers.engine.cuda.kv_cache import FLOAT8, KEY_BLOCK, PAGE_SIZE, CudaKvCache, LayerPages
from workers.engine.cuda.tree_kernel import attend_paths

_ERRORS = {torch.bfloat16: 0.02, torch.float32: 1e-5}
"""Largest errors of outputs and log-sum-exps that count as rounding."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """The heads of a model, and the sizes of the cases."""

    num_queries: int
    num_keys: int
    head_size: int
    dtype: torch.dtype
    table_pages: int
    step_tokens: int
    """A captured step has a multiple of this number of tokens; a chain of padding fills it up."""
    chains: Sequence[tuple[int, int, int]]
    """(context, batch, width)"""
    trees: Sequence[tuple[int, int, int]]
    """(stem, batch, width)"""
    layer_bytes: int
    """Maximum bytes of keys and values that calls use in turn: several times a device's cache."""
    prefill: int
    widths: Sequence[int]
    firsts: Sequence[int]

    @property
    def scaling(self) -> float:
        return float(self.head_size**-0.5)


LARGE = Sizes(
    num_queries=32,
    num_keys=8,
    head_size=128,
    dtype=torch.bfloat16,
    table_pages=33,
    step_tokens=64,
    chains=[*product((512, 4096, 16384), (1, 16), (1, 9)), (512, 64, 1), (2048, 1, 2048)],
    trees=[(512, 1, 17), (4096, 8, 33)],
    layer_bytes=400_000_000,
    prefill=2048,
    widths=(1, 2, 9, 17, 64, 333),
    firsts=(0, 1, 255, 256, 1000, 1023, 1500),
)
SMALL = Sizes(
    num_queries=4,
    num_keys=2,
    head_size=16,
    dtype=torch.float32,
    table_pages=4,
    step_tokens=8,
    chains=[(300, 1, 1), (20, 3, 9)],
    trees=[(40, 2, 5)],
    layer_bytes=0,
    prefill=20,
    widths=(5,),
    firsts=(0, 9),
)


def make_cases(device: torch.device, *, small: bool) -> Iterator[Case]:
    """The cases of this check. `small`: with tiny sizes, and no times."""
    sizes = SMALL if small else LARGE
    if small and device.type == "cuda":
        sizes = replace(SMALL, dtype=torch.bfloat16, head_size=64)
    check = AttentionCheck(device, sizes)
    yield Case("bits", check.bits)
    yield Case("control", check.control)
    for chain in check.sizes.chains[-4:]:
        name = "float8 pages: context {} batch {} width {}".format(*chain)
        yield Case(name, lambda chain=chain: check.float8(*chain))
    for chain in check.sizes.chains:
        name = "context {} batch {} width {}".format(*chain)
        yield Case(name, lambda chain=chain: check.chains(*chain))
    for tree in check.sizes.trees:
        name = "trees: stem {} batch {} width {}".format(*tree)
        yield Case(name, lambda tree=tree: check.trees(*tree))


class AttentionCheck:
    """The cases, for some sizes on some device."""

    def __init__(self, device: torch.device, sizes: Sizes) -> None:
        self.sizes = sizes
        self._device = device

    def bits(self) -> str:
        prefill, (cache, queries, table) = self.sizes.prefill, self._prefill()
        whole = self._ragged([(prefill, prefill)], [table], cache)
        output_TAD, lse_AT = self._by_kernels(queries, cache.layers[0], whole)
        count, wrong = 0, []
        for width, first, num_others, scratch_bytes in product(
            self.sizes.widths, (*self.sizes.firsts, None), (0, 2), (0, 1 << 40)
        ):
            begin = prefill - width if first is None else first
            end, at = begin + width, 7 * num_others
            ragged = self._ragged(
                [*[(7, 7 + prefill // 4)] * num_others, (width, end)],
                [*[table[-3:]] * num_others, table],
                cache,
            )
            rows = torch.cat([queries[:7]] * num_others + [queries[begin:end]])
            output, lse = self._by_kernels(
                rows, cache.layers[0], ragged, scratch_bytes=scratch_bytes
            )
            same = torch.equal(output[at:], output_TAD[begin:end])
            same &= torch.equal(lse[:, at:], lse_AT[:, begin:end])
            count += 1
            if not same:
                wrong.append((width, begin, num_others, scratch_bytes))
        found = f"{count - len(wrong)} of {count} windows have the bits of a prefill of {prefill}"
        if self._device.type == "cpu":
            # The interpreter multiplies with numpy, with which a row's bits depend on its place.
            return f"{found} (not judged in a dry run)"
        return f"{found}, {WRONG}: {wrong[:6]}" if wrong else found

    def control(self) -> str:
        prefill, (cache, queries, table) = self.sizes.prefill, self._prefill()
        whole = self._ragged([(prefill, prefill)], [table], cache)
        alone = self._ragged([(1, prefill)], [table], cache)
        output_TAD, _ = self._by_kernels(queries, cache.layers[0], whole)
        output_1AD, _ = self._by_torch(queries[-1:], cache.layers[0], alone)
        return verdict(not torch.equal(output_1AD, output_TAD[-1:]), "other bits")

    def chains(self, context: int, batch: int, width: int) -> str:
        sizes = self.sizes
        pages = -(-context // PAGE_SIZE)
        token_bytes = 2 * sizes.num_keys * sizes.head_size * sizes.dtype.itemsize
        num_bytes = batch * context * token_bytes
        num_layers = max(1, min(CALLS, sizes.layer_bytes // num_bytes))
        cache = self._cache(batch * pages, num_layers)
        order = torch.randperm(batch * pages, generator=torch.Generator().manual_seed(0)).tolist()
        tables = [order[row * pages : (row + 1) * pages] for row in range(batch)]
        lengths = [(width, context)] * batch
        filler = -batch * width % sizes.step_tokens
        if filler:
            lengths.append((filler, filler))
        filled = [*tables, [cache.scratch_block]] if filler else tables
        ragged = self._ragged(lengths, filled, cache)
        queries = self._queries(batch * width + filler)
        layer = cache.layers[0]
        rows = sorted({0, width // 2, width - 1})
        window = slice((batch - 1) * width, batch * width)
        expected, expected_lse = self._exact(queries[window], layer, tables[-1], context, rows)
        words, finite = [], True
        for who, attended in (("kernels", self._by_kernels), ("torch", self._by_torch)):
            output_TAD, lse_AT = attended(queries, layer, ragged)
            error = float((output_TAD[window][rows].double() - expected).abs().max())
            error_lse = float((lse_AT[:, window][:, rows].double() - expected_lse).abs().max())
            words.append(f"{who} {error:.1e} and {error_lse:.1e}")
            if who == "kernels":
                small = max(error, error_lse) <= _ERRORS[sizes.dtype]
                finite = bool(output_TAD.isfinite().all() and lse_AT.isfinite().all())
        ways: dict[str, Callable[[int], object]] = {
            "kernels": lambda n: self._by_kernels(queries, cache.layers[n % num_layers], ragged)
        }
        if can_use_kernel(self._device, sizes.dtype, sizes.head_size):
            copies = [self._contiguous(one, ragged) for one in cache.layers]
            ways["torch"] = lambda n: copies[n % num_layers](queries)
        timed = times(**ways)
        judged = f"{verdict(small, 'small')}, {verdict(finite, 'finite')}"
        return f"errors {', '.join(words)}, {judged}; {timed} (floor {num_bytes / 3e6:.1f})"

    def float8(self, context: int, batch: int, width: int) -> str:
        """Pages of float8, beside pages that hold the same numbers in the queries' dtype."""
        sizes, pages = self.sizes, -(-context // PAGE_SIZE)
        wide = self._cache(batch * pages, num_layers=1)
        narrow = CudaKvCache(
            num_layers=1,
            num_heads=sizes.num_keys,
            head_size=sizes.head_size,
            num_blocks=batch * pages,
            dtype=FLOAT8,
            device=self._device,
        )
        of_float8, of_dtype = narrow.layers[0], wide.layers[0]
        for name in ("keys_NPHD", "values_NPHD"):
            getattr(of_float8, name).copy_(getattr(of_dtype, name))
            getattr(of_dtype, name).copy_(getattr(of_float8, name))
        tables = [list(range(row * pages, (row + 1) * pages)) for row in range(batch)]
        ragged = self._ragged([(width, context)] * batch, tables, wide)
        queries = self._queries(batch * width)
        outputs = [self._by_kernels(queries, one, ragged)[0] for one in (of_float8, of_dtype)]
        timed = times(
            float8=lambda _: self._by_kernels(queries, of_float8, ragged),
            same=lambda _: self._by_kernels(queries, of_dtype, ragged),
        )
        return f"{verdict(torch.equal(*outputs), 'equal')}; {timed}"

    def trees(self, stem: int, batch: int, width: int) -> str:
        sizes = self.sizes
        pages = -(-(stem + width) // PAGE_SIZE)
        cache = self._cache(batch * pages, num_layers=1)
        tables = [list(range(row * pages, (row + 1) * pages)) for row in range(batch)]
        shared = stem // KEY_BLOCK * KEY_BLOCK
        generator = torch.Generator().manual_seed(3)
        path_slots = stem - shared + torch.rand(batch, width, width, generator=generator).argsort(2)
        path_slots += (shared + PAGE_SIZE * pages * torch.arange(batch))[:, None, None]
        trees = Trees(
            self._ragged([(width, shared)] * batch, tables, cache),
            path_slots.view(batch * width, width).to(self._device, torch.int32),
            torch.randint(1, width + 1, (batch * width,), generator=generator).to(
                self._device, torch.int32
            ),
        )
        queries = self._queries(batch * width)

        layer = cache.layers[0]

        def by_kernels(_: int = 0) -> Tensor:
            part = trees.shared
            pages = (part.cu_seq_B, part.used_B, part.table_BP)
            own = (trees.slots_TK, trees.counts_T)
            return attend_paths(queries, layer, *pages, *own, sizes.scaling)

        def as_torch(_: int = 0) -> Tensor:
            with by_torch():
                return attend_trees(queries, layer, trees, sizes.scaling)

        apart = float((by_kernels().double() - as_torch().double()).abs().max())
        small = verdict(apart <= 2 * _ERRORS[sizes.dtype], "small")
        timed = times(kernels=by_kernels, torch=as_torch)
        return f"apart {apart:.1e}, {small}; {timed}"

    def _prefill(self) -> tuple[CudaKvCache, Tensor, list[int]]:
        """Pages, the queries of a prefill, and its block table, whose pages are in no order."""
        pages = -(-self.sizes.prefill // PAGE_SIZE)
        cache = self._cache(5 * pages, num_layers=1)
        order = torch.randperm(5 * pages, generator=torch.Generator().manual_seed(5)).tolist()
        queries = self._queries(self.sizes.prefill)
        return cache, queries, order[:pages]

    def _cache(self, num_blocks: int, num_layers: int) -> CudaKvCache:
        cache = CudaKvCache(
            num_layers=num_layers,
            num_heads=self.sizes.num_keys,
            head_size=self.sizes.head_size,
            num_blocks=num_blocks,
            dtype=self.sizes.dtype,
            device=self._device,
        )
        generator = torch.Generator(self._device).manual_seed(1)
        for layer in cache.layers:
            layer.keys_NPHD.normal_(generator=generator)
            layer.values_NPHD.normal_(generator=generator)
        return cache

    def _queries(self, count: int) -> Tensor:
        shape = (count, self.sizes.num_queries, self.sizes.head_size)
        generator = torch.Generator(self._device).manual_seed(6)
        drawn = torch.randn(shape, device=self._device, generator=generator)
        return drawn.to(self.sizes.dtype)

    def _ragged(
        self, lengths: list[tuple[int, int]], tables: list[list[int]], cache: CudaKvCache
    ) -> Ragged:
        """`lengths`: (queries, keys) of each sequence. `tables`: its pages; padded by scratch."""
        size = max(self.sizes.table_pages, 1 + max(len(table) for table in tables))
        rows = [table + [cache.scratch_block] * (size - len(table)) for table in tables]
        ends = torch.tensor([0, *(width for width, _ in lengths)]).cumsum(0)
        return Ragged(
            ends.to(self._device, torch.int32),
            torch.tensor([keys for _, keys in lengths], dtype=torch.int32, device=self._device),
            torch.tensor(rows, dtype=torch.int32, device=self._device),
            max(width for width, _ in lengths),
            lengths,
        )

    def _by_kernels(
        self,
        query_TAD: Tensor,
        layer: LayerPages,
        ragged: Ragged,
        *,
        scratch_bytes: int = SCRATCH_BYTES,
    ) -> tuple[Tensor, Tensor]:
        return attend_pages(
            query_TAD,
            layer,
            ragged.cu_seq_B,
            ragged.used_B,
            ragged.table_BP,
            self.sizes.scaling,
            causal=True,
            scratch_bytes=scratch_bytes,
        )

    def _by_torch(
        self, query_TAD: Tensor, layer: LayerPages, ragged: Ragged
    ) -> tuple[Tensor, Tensor]:
        """By varlen_attn, if it supports the tensors; it gets keys without pages."""
        if not can_use_kernel(query_TAD.device, query_TAD.dtype, query_TAD.shape[2]):
            with by_torch():
                return attend(query_TAD, layer, ragged, self.sizes.scaling, causal=True)
        return self._contiguous(layer, ragged)(query_TAD)

    def _contiguous(
        self, layer: LayerPages, ragged: Ragged
    ) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
        """varlen_attn over a copy of the keys in which each sequence's follow one another."""
        sizes = self.sizes
        slots = torch.cat(
            [
                (table_P[:, None] * PAGE_SIZE + torch.arange(PAGE_SIZE, device=self._device))
                .flatten()[:num_keys]
                .to(torch.int64)
                for table_P, (_, num_keys) in zip(ragged.table_BP, ragged.lengths, strict=True)
            ]
        )
        keys, values = (one.index_select(0, slots) for one in (layer.keys_SHD, layer.values_SHD))
        ends = torch.tensor([0, *(num_keys for _, num_keys in ragged.lengths)]).cumsum(0)
        known = inspect.signature(varlen_attn).parameters
        options: dict[str, Any] = {"return_aux": AuxRequest(lse=True)}
        if "window_size" in known:
            options |= {"window_size": (-1, 0), "scale": sizes.scaling}
        else:
            options |= {"is_causal": True}
        if "enable_gqa" in known:
            options |= {"enable_gqa": True}
        else:
            group = sizes.num_queries // sizes.num_keys
            keys, values = (one.repeat_interleave(group, dim=1) for one in (keys, values))
        lengths = (ragged.cu_seq_B, ends.to(self._device, torch.int32))
        widths = (max(2, ragged.max_width), max(num_keys for _, num_keys in ragged.lengths))

        def run(query_TAD: Tensor) -> tuple[Tensor, Tensor]:
            result = varlen_attn(query_TAD, keys, values, *lengths, *widths, **options)
            assert isinstance(result, tuple), "varlen_attn was asked for log-sum-exps"
            return result

        return run

    def _exact(
        self, query_WAD: Tensor, layer: LayerPages, table: list[int], context: int, rows: list[int]
    ) -> tuple[Tensor, Tensor]:
        """Float64 outputs [rows, A, D] and log-sum-exps [A, rows] of some of a window's rows."""
        keys_KHD, values_KHD = (
            one[table].flatten(0, 1)[:context].double()
            for one in (layer.keys_NPHD, layer.values_NPHD)
        )
        outputs, sums = [], []
        for row in rows:
            seen = context - query_WAD.shape[0] + row + 1
            query_HGD = query_WAD[row].double().view(keys_KHD.shape[1], -1, keys_KHD.shape[2])
            scores_HGK = torch.einsum("hgd,khd->hgk", query_HGD, keys_KHD[:seen])
            scores_HGK = scores_HGK * self.sizes.scaling
            output_HGD = torch.einsum("hgk,khd->hgd", scores_HGK.softmax(-1), values_KHD[:seen])
            outputs.append(output_HGD.flatten(0, 1))
            sums.append(scores_HGK.logsumexp(-1).flatten())
        return torch.stack(outputs), torch.stack(sums, dim=1)
