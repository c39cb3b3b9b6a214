"""CUDA graphs of whole forward passes, captured for a number of shapes before any request.

A step is padded to the smallest captured shape that holds it and replayed, with one launch instead
of a thousand. A shape bounds the tokens and the slices, not the tokens of each slice. So one shape
serves steps of decoding, windows and prefill together. A step that no captured shape holds runs
without a graph. Nothing is captured while requests are served.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from workers.engine.cuda.step import Layout, Shape, exact_shape, lay_out
from workers.engine.slices import Slice
from workers.verification.staging import to_device

_CHAIN_TOKENS = (1, 9, 17, 64, 128, 192, 256, 320, 640, 1024)
"""Tokens of chains. One token, and a window of 8 or 16, is what a single sequence feeds."""
_BESIDE_TREES = (64, 320, 1024)
"""Tokens of chains in steps that also have trees."""
_TREE_TOKENS = (64, 128, 320, 640)
"""Tokens of trees. 8 trees of 32 nodes have 264."""
_BATCHES = (1, 4, 16, 64, 256)
"""Numbers of chains. Few chains leave room for more programs that share the keys of one."""
_FEW_TOKENS = 320
"""Up to this number of tokens, shapes of several batches are captured."""
_PATH_SLOTS = 128
"""One block of keys, and a path of 64 nodes."""
_LEAST_ROWS = 320
_WINDOW_ROWS = 9

Run = Callable[[Tensor, Layout], Tensor]
"""Maps a step's array on the device and its layout to the logits of the shape's rows: first those
that the layout requests, in its order.
"""


def shapes_to_capture(
    *, max_num_seqs: int, max_step_tokens: int, fixed_rows: int = 1
) -> list[Shape]:
    """The shapes to capture for steps of up to these sizes, in the order of capture.

    The largest is the first, because captures share memory. Then the others follow from the
    smallest on, so that memory that does not suffice for all suffices for the steps of decoding.
    Tokens are padded to a multiple of `fixed_rows`, so that products need no padding.
    """

    def rounded(count: int) -> int:
        return -(-count // fixed_rows) * fixed_rows

    whole = rounded(max_step_tokens)
    largest = next((size for size in _BATCHES if size >= max_num_seqs), _BATCHES[-1])
    most_rows = rounded(max(_LEAST_ROWS, largest * _WINDOW_ROWS))
    shapes: list[Shape] = []

    def add(tokens: int, batch: int, tree_tokens: int) -> None:
        chain_tokens = rounded(tokens)
        num_trees = min(tree_tokens // 4, largest) + 1 if tree_tokens else 0
        shape = Shape(
            num_chains=batch + 1 if tokens else 0,
            chain_tokens=chain_tokens,
            num_trees=num_trees,
            tree_tokens=tree_tokens,
            path_slots=_PATH_SLOTS if tree_tokens else 0,
            num_rows=min(tokens + tree_tokens, most_rows),
            filler=chain_tokens - tokens,
        )
        if tokens >= 0 and shape.num_tokens <= whole and shape not in shapes:
            shapes.append(shape)

    for tokens in (*_CHAIN_TOKENS, whole):
        batches = _BATCHES if tokens <= _FEW_TOKENS else (largest,)
        for batch in batches:
            if batch <= min(tokens, largest) and (batch > 1 or tokens < _BESIDE_TREES[0]):
                add(tokens, batch, 0)
    for tree_tokens in _TREE_TOKENS:
        for tokens in (0, *_BESIDE_TREES, whole - tree_tokens):
            add(tokens, largest, tree_tokens)
    shapes.sort(key=_cost)
    return [shapes[-1], *shapes[:-1]]


def _cost(shape: Shape) -> tuple[int, int, int]:
    return (shape.num_tokens, shape.num_used, shape.num_chains + shape.num_trees)


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
    """

    def __init__(
        self, recorder: Recorder, *, table_pages: int, scratch_block: int, device: torch.device
    ) -> None:
        self._recorder = recorder
        self._sizes = {"table_pages": table_pages, "scratch_block": scratch_block}
        self._device = device
        self._captured: dict[Shape, _Captured] = {}
        self._by_cost: list[Shape] = []
        self._logits_TV: Tensor | None = None

    def lay_out(self, slices: Sequence[Slice]) -> Layout | None:
        """The layout of a step in the smallest captured shape that holds it; None if none does."""
        exact = exact_shape(slices)
        shape = next((one for one in self._by_cost if one.holds(exact)), None)
        return None if shape is None else lay_out(slices, shape, **self._sizes)

    def replay(self, layout: Layout) -> Tensor:
        """The logits of the layout's rows, valid until the next replay."""
        captured = self._captured[layout.shape]
        captured.array.copy_(to_device(layout.array, self._device))
        captured.replay()
        assert self._logits_TV is not None
        return self._logits_TV[: len(layout.logit_rows)]

    def capture(self, run: Run, shape: Shape) -> None:
        """Capture a step that is all padding. The first shape must have the most rows."""
        padding = lay_out([], shape, **self._sizes)
        array = to_device(padding.array, self._device)

        def work() -> None:
            logits_TV = run(array, padding)
            if self._logits_TV is None:
                self._logits_TV = torch.empty_like(logits_TV, dtype=torch.float32)
            self._logits_TV[: shape.num_rows].copy_(logits_TV)

        self._captured[shape] = _Captured(self._recorder.record(work), array)
        self._by_cost = sorted(self._captured, key=_cost)
