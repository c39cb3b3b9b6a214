"""CUDA graphs of whole forward passes, one for each shape that decoding steps are rounded up to.

A small step is padded to the next shape and replayed: one launch instead of a thousand. Steps that
fit none (prefill, trees beside chains) run as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from workers.engine.cuda.layout import Layout, Shape, lay_out
from workers.engine.cuda.staging import to_device
from workers.engine.slices import Slice

MAX_TOKENS = 256
"""Most tokens of a captured step, padding included."""
_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_WIDTHS = (1, 2, 3, 5, 9, 17, 33, 65)
"""A token and the windows 1, 2, 4, 8, ..."""

Run = Callable[[Tensor, Layout], Tensor]
"""The array of a step on the device and its layout in; float32 logits of all T tokens out."""


def bucket_of(shape: Shape) -> Shape | None:
    """The shape whose graph a step of the given exact shape takes; None: it runs as it is."""
    if shape.num_chains and shape.num_trees:
        return None
    batch = _next(_BATCHES, shape.num_chains + shape.num_trees)
    width = _next(_WIDTHS, max(shape.chain_width, shape.tree_width))
    if batch is None or width is None or batch * width > MAX_TOKENS:
        return None
    if shape.num_chains:
        return _chains(batch, width)
    keys = _next(_WIDTHS, max(width, shape.tree_keys))
    return None if keys is None else Shape(0, 0, 0, batch, width, keys)


def chain_buckets(*, max_num_seqs: int) -> list[Shape]:
    """The shapes of chains, largest first: later captures fit into the memory of earlier ones."""
    largest = _next(_BATCHES, max_num_seqs) or _BATCHES[-1]
    shapes = [
        _chains(batch, width)
        for batch in _BATCHES
        for width in _WIDTHS
        if batch <= largest and batch * width <= MAX_TOKENS
    ]
    return sorted(shapes, key=lambda shape: -shape.num_tokens)


def _chains(batch: int, width: int) -> Shape:
    return Shape(batch, batch * width, width)


def _next(sizes: Sequence[int], wanted: int) -> int | None:
    return next((size for size in sizes if size >= wanted), None)


@dataclass(frozen=True, slots=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    array: Tensor
    num_tokens: int


class Graphs:
    """The captured steps of one engine. They share memory, and one buffer of logits."""

    def __init__(
        self,
        run: Run,
        *,
        vocab_size: int,
        table_pages: int,
        scratch_block: int,
        device: torch.device,
    ) -> None:
        self._run = run
        self._sizes = {"table_pages": table_pages, "scratch_block": scratch_block}
        self._device = device
        self._captured: dict[Shape, _Captured] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._logits_TV = torch.empty(MAX_TOKENS, vocab_size, dtype=torch.float32, device=device)

    def replay(self, slices: Sequence[Slice], shape: Shape) -> tuple[Tensor, Layout]:
        """Logits of all T tokens of the shape, good until the next replay, and the layout."""
        layout = lay_out(slices, shape, even=True, **self._sizes)
        captured = self._captured.get(shape) or self.capture(shape)
        captured.array.copy_(to_device(layout.array, self._device))
        captured.graph.replay()
        return self._logits_TV[: captured.num_tokens], layout

    def capture(self, shape: Shape) -> _Captured:
        """Run a step of nothing but padding, twice to warm up and once to be recorded."""
        padding = lay_out([], shape, even=True, **self._sizes)
        array = to_device(padding.array, self._device)
        stream = torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            for _ in range(2):
                self._run(array, padding)
        torch.cuda.current_stream(self._device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads of the process may talk to the device meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            logits_TV = self._run(array, padding)
            self._logits_TV[: shape.num_tokens].copy_(logits_TV)
            del logits_TV
        captured = _Captured(graph, array, shape.num_tokens)
        self._captured[shape] = captured
        return captured
