"""CUDA graphs of whole forward passes, one for each shape to which decoding steps are padded.

A small step is padded to the next larger shape and replayed, with one launch instead of a thousand.
Steps that fit no shape (prefill, trees beside chains) run without a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from workers.engine.cuda.step import Layout, Shape, lay_out
from workers.engine.slices import Slice
from workers.verification.staging import to_device

MAX_TOKENS = 320
"""Maximum number of tokens of a captured step, padding included. 8 trees of 32 nodes have 264."""
_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_WIDTHS = (1, 2, 3, 5, 9, 17, 33, 65)
"""Tokens per sequence: one more than the windows 0, 1, 2, 4, 8, ..."""

SMALLEST_TREE = Shape(0, 0, 0, 1, 2, 2)
"""Captured at the start, to find out whether steps with trees can be captured. Other shapes with
trees are captured when they first occur.
"""

Run = Callable[[Tensor, Layout], Tensor]
"""Maps a step's array on the device and its layout to the logits of the shape's rows: first those
that the layout requests, in its order.
"""


def bucket_of(shape: Shape, *, fixed_rows: int = 1) -> Shape | None:
    """The shape to which a step of this exact shape is padded; None: it runs without a graph.

    Chains are padded to a multiple of `fixed_rows` tokens, so that products need no padding.
    """
    if shape.num_chains and shape.num_trees:
        return None
    batch = _next(_BATCHES, shape.num_chains + shape.num_trees)
    width = _next(_WIDTHS, max(shape.chain_width, shape.tree_width))
    if batch is None or width is None or batch * width > MAX_TOKENS:
        return None
    if shape.num_chains:
        return _chains(batch, width, fixed_rows)
    keys = _next(_WIDTHS, max(width, shape.tree_keys))
    return None if keys is None else Shape(0, 0, 0, batch, width, keys)


def chain_buckets(*, max_num_seqs: int, fixed_rows: int = 1) -> list[Shape]:
    """The shapes of chains, the largest first: smaller captures then reuse the memory of larger."""
    largest = _next(_BATCHES, max_num_seqs) or _BATCHES[-1]
    shapes = [
        _chains(batch, width, fixed_rows)
        for batch in _BATCHES
        for width in _WIDTHS
        if batch <= largest and batch * width <= MAX_TOKENS
    ]
    return sorted(shapes, key=lambda shape: -shape.num_tokens)


def _chains(batch: int, width: int, fixed_rows: int) -> Shape:
    filler = -batch * width % fixed_rows
    return Shape(batch + (filler > 0), batch * width + filler, width, filler=filler)


def _next(sizes: Sequence[int], wanted: int) -> int | None:
    return next((size for size in sizes if size >= wanted), None)


class Recorder(Protocol):
    """Records work on a device, so that it can be repeated with one launch."""

    def record(self, work: Callable[[], object]) -> Callable[[], None]:
        """Do the work twice to warm up, then record it. The result repeats it on the same tensors.

        Raises RuntimeError if the work cannot be recorded.
        """


class CudaRecorder:
    """Records CUDA graphs, which share one pool of memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        # One stream for all: cuBLAS keeps some MiB for each stream that it ever ran on.
        self._stream = torch.cuda.Stream(device)

    def record(self, work: Callable[[], object]) -> Callable[[], None]:
        """As Recorder says. What the work allocates stays allocated as long as the result."""
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        # If a capture fails, torch.cuda.graph does not leave the stream; this `with` does.
        with torch.cuda.stream(self._stream):
            for _ in range(2):
                work()
            # thread_local: other threads of the process may use the device during the capture.
            with torch.cuda.graph(
                graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
            ):
                work()
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        replay: Callable[[], None] = graph.replay
        return replay


def recorder_for(device: torch.device) -> Recorder | None:
    """What records on this device, or None if nothing can."""
    return CudaRecorder(device) if device.type == "cuda" else None


@dataclass(frozen=True, slots=True)
class _Captured:
    replay: Callable[[], None]
    array: Tensor


class Graphs:
    """The captured steps of one engine. They share memory, and one buffer of float32 logits.

    The function that runs a step is an argument and is not stored: a stored one would refer to the
    engine. So an engine that is dropped is freed at once, with its memory.

    The graphs of a rank contain its connections to the other ranks. They end with these (`close`).
    """

    def __init__(
        self, recorder: Recorder, *, table_pages: int, scratch_block: int, device: torch.device
    ) -> None:
        self._recorder = recorder
        self._sizes = {"table_pages": table_pages, "scratch_block": scratch_block}
        self._device = device
        self._captured: dict[Shape, _Captured] = {}
        self._logits_TV: Tensor | None = None
        self.is_open = True

    def close(self) -> None:
        """Drop all captured steps. A step that runs on the device still ends."""
        self.is_open = False
        self._captured.clear()

    def lay_out(self, slices: Sequence[Slice], shape: Shape) -> Layout:
        """The layout of a step in `shape`, for `replay`."""
        return lay_out(slices, shape, even=True, **self._sizes)

    def replay(self, run: Run, layout: Layout) -> Tensor:
        """The logits of the layout's rows, valid until the next replay."""
        captured = self._captured.get(layout.shape) or self.capture(run, layout.shape)
        captured.array.copy_(to_device(layout.array, self._device))
        captured.replay()
        assert self._logits_TV is not None
        return self._logits_TV[: len(layout.logit_rows)]

    def capture(self, run: Run, shape: Shape) -> _Captured:
        """Capture a step that is all padding."""
        assert self.is_open
        padding = self.lay_out([], shape)
        array = to_device(padding.array, self._device)

        def work() -> None:
            logits_TV = run(array, padding)
            if self._logits_TV is None:
                size = (MAX_TOKENS, logits_TV.shape[1])
                self._logits_TV = logits_TV.new_empty(size, dtype=torch.float32)
            self._logits_TV[: shape.num_rows].copy_(logits_TV)

        captured = _Captured(self._recorder.record(work), array)
        self._captured[shape] = captured
        return captured
