"""Reads rows of the tensors of safetensors files, with several threads.

Files are opened once and read, not mapped: pages that were read would count as memory of this
process. Threads only read; all arithmetic stays in the caller's thread. On a GPU they read into
pinned buffers, from which the device copies while the next rows are read.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.errors import CheckpointError
from workers.engine.load.stored_files import Stored

DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
}
"""The dtypes that can be read, by safetensors' names."""
_CHUNK = 4 << 20
"""Bytes that a thread reads at once, unless a row has more."""
_MOST_THREADS = 8


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows `first` to `end` - 1 of a tensor, which is seen as at least one-dimensional."""

    tensor: Stored
    first: int
    end: int


class TensorReader:
    """Reads rows of tensors for one device. Use from one thread."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._files: dict[Path, int] = {}
        self._num_threads = min(_MOST_THREADS, len(os.sched_getaffinity(0)))
        self._pool: ThreadPoolExecutor | None = None
        self._free: deque[_Buffer] = deque(_Buffer(device) for _ in range(self._num_threads + 2))

    def close(self) -> None:
        """Close all files and free the buffers. Nothing can be read afterward."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None
        while self._files:
            os.close(self._files.popitem()[1])
        self._free.clear()

    def read_into(self, rows: Rows, target: Tensor) -> None:
        """Read rows into a contiguous tensor on the CPU that has their dtype and number."""
        view = _bytes_of(target.view(-1).view(torch.uint8))
        start = rows.tensor.start + rows.first * rows.tensor.row_bytes
        step = max(_CHUNK, -(-len(view) // (4 * self._num_threads)))
        waiting = [
            self._submit(rows.tensor.path, start + at, view[at : at + step])
            for at in range(0, len(view), step)
        ]
        for future in waiting:
            future.result()

    def stream(self, wanted: Iterable[Rows]) -> Iterator[tuple[int, int, Tensor]]:
        """Yield all wanted rows in order, some at a time, on the device and in their own dtype.

        Yields the index in `wanted`, the first row, and the rows [count, ...]. On a CPU the rows
        are gone when the next ones are asked for.
        """
        pieces = ((index, piece) for index, rows in enumerate(wanted) for piece in _pieces_of(rows))
        ahead: deque[tuple[int, Rows, _Buffer, Future[None]]] = deque()
        while True:
            while self._free and (next_piece := next(pieces, None)) is not None:
                index, piece = next_piece
                buffer = self._free.popleft()
                start = piece.tensor.start + piece.first * piece.tensor.row_bytes
                view = buffer.view((piece.end - piece.first) * piece.tensor.row_bytes)
                ahead.append((index, piece, buffer, self._submit(piece.tensor.path, start, view)))
            if not ahead:
                return
            index, piece, buffer, future = ahead.popleft()
            try:
                future.result()
                yield index, piece.first, buffer.tensor(piece)
            finally:
                self._free.append(buffer)

    def _submit(self, path: Path, start: int, view: memoryview) -> Future[None]:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._num_threads, thread_name_prefix="read")
        if path not in self._files:
            self._files[path] = os.open(path, os.O_RDONLY)
        return self._pool.submit(_read, path, self._files[path], start, view)


class _Buffer:
    """Memory for rows on their way to the device, pinned for a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._copied: torch.cuda.Event | None = None

    def view(self, size: int) -> memoryview:
        """`size` bytes to write to, once the device has copied what was in them."""
        if self._copied is not None:
            self._copied.synchronize()
        if size > self._memory.numel():
            on_gpu = self._device.type == "cuda"
            self._memory = torch.empty(max(size, _CHUNK), dtype=torch.uint8, pin_memory=on_gpu)
        return _bytes_of(self._memory)[:size]

    def tensor(self, piece: Rows) -> Tensor:
        """The rows that were read, on the device."""
        stored, count = piece.tensor, piece.end - piece.first
        rows = self._memory[: count * stored.row_bytes].view(DTYPES[stored.dtype])
        rows = rows.view(count, *stored.shape[1:])
        if self._device.type != "cuda":
            return rows
        rows = rows.to(self._device, non_blocking=True)
        self._copied = torch.cuda.Event()
        self._copied.record(torch.cuda.current_stream(self._device))
        return rows


def _bytes_of(memory: Tensor) -> memoryview:
    array: Any = memory.numpy()
    return memoryview(array)


def _pieces_of(rows: Rows) -> Iterator[Rows]:
    count = max(1, _CHUNK // max(1, rows.tensor.row_bytes))
    for first in range(rows.first, rows.end, count):
        yield Rows(rows.tensor, first, min(first + count, rows.end))


def _read(path: Path, file: int, start: int, view: memoryview) -> None:
    done = 0
    while done < len(view):
        count = os.preadv(file, [view[done:]], start + done)
        if not count:
            raise CheckpointError(f"{path} ended while it was read: fetch it again")
        done += count
