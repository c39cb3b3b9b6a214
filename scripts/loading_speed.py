"""Measures how fast a checkpoint's weights are read from the page cache: `python -m
scripts.loading_speed [FOLDER] [--gib 1.5] [--json FILE]`.

Without FOLDER it writes random weights, in the layout of a Llama, to a temporary folder. Each way
to read runs three times, in turns; the fastest counts. "copy" is a plain copy of as many bytes in
memory, by torch with the same number of threads.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file

from workers.engine.load.stored_files import WEIGHTS, read_header
from workers.engine.load.stored_tensors import StoredTensors
from workers.engine.parallel.weight_cuts import Cut, Span

_HIDDEN, _INNER = 2048, 8192
_REPEATS = 3


def write_weights(folder: Path, gib: float) -> None:
    """Write bfloat16 matrices of some GiB."""
    layers = max(1, int(gib * (1 << 30) / (_HIDDEN * _INNER * 3 * 2)))
    generator = torch.Generator().manual_seed(1)
    names = ("gate_proj", "up_proj", "down_proj")
    shapes = ((_INNER, _HIDDEN), (_INNER, _HIDDEN), (_HIDDEN, _INNER))
    tensors = {
        f"model.layers.{layer}.mlp.{name}.weight": torch.empty(shape, dtype=torch.bfloat16).normal_(
            generator=generator
        )
        for layer in range(layers)
        for name, shape in zip(names, shapes, strict=True)
    }
    save_file(tensors, folder / WEIGHTS)


def read_all(folder: Path, dtype: torch.dtype | None, dim: int | None) -> tuple[int, float]:
    """Read every tensor, or half of it along `dim`; return stored bytes and seconds."""
    headers = {path: read_header(path) for path in sorted(folder.glob("*.safetensors"))}
    stored = StoredTensors(folder, device=_device())
    began, count = time.perf_counter(), 0
    for header in headers.values():
        for name, one in header.items():
            cut = None
            if dim is not None and len(one.shape) == 2:
                half = one.shape[dim] // 2
                cut = Cut(dim, half, (Span(0, half, half),))
            tensor = stored.read(name, one.shape, cut, dtype or _DTYPES.get(one.dtype, torch.float))
            count += tensor.numel() * (2 if one.dtype in _DTYPES else 4)
    if _device().type == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    stored.close()
    return count, seconds


_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16}


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def copy(size: int) -> tuple[int, float]:
    """Copy memory that was written before into memory that was not."""
    source = torch.ones(size, dtype=torch.uint8)
    began = time.perf_counter()
    source.clone()
    return size, time.perf_counter() - began


def main() -> None:
    """Print GB/s of each way."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--gib", type=float, default=1.5)
    parser.add_argument("--json", type=Path, help="write GB/s by way to this file")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        folder: Path = asked.folder or Path(made)
        if asked.folder is None:
            write_weights(folder, asked.gib)
        for path in folder.glob("*.safetensors"):
            path.read_bytes()  # into the page cache
        ways: dict[str, Callable[[], tuple[int, float]]] = {
            "as stored": lambda: read_all(folder, None, None),
            "as float32": lambda: read_all(folder, torch.float32, None),
            "half of the rows": lambda: read_all(folder, None, 0),
            "half of the columns": lambda: read_all(folder, None, 1),
            "copy": lambda: copy(1 << 30),
        }
        best = dict.fromkeys(ways, 0.0)
        for _ in range(_REPEATS):
            for name, run in ways.items():
                count, seconds = run()
                best[name] = max(best[name], count / seconds / 1e9)
    print(f"device {_device()}, threads {torch.get_num_threads()}")
    if asked.json is not None:
        asked.json.write_text(json.dumps({"device": str(_device()), "gb_per_second": best}))
    for name, speed in best.items():
        print(f"{name:20} {speed:5.2f} GB/s of the bytes that are kept, as stored")


if __name__ == "__main__":
    main()
