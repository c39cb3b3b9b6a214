"""A checkpoint's safetensors files: which there are, their headers, and what tells two apart.

Without torch, which takes seconds to import: drivers look at a checkpoint, and compute nothing.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import CheckpointError
from paceline.text import one_line

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
ITEM_BYTES: Mapping[str, int] = {
    **{"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1},
    **{"I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1},
}
"""The bytes of a number of each dtype that can be read, by safetensors' names."""
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_LARGEST_HEADER = 100 << 20
_SAMPLES, _SAMPLE_BYTES = 64, 4096
"""The number and size of the pieces of each file that ranks compare. The files of two trainings of
one model have equal names, shapes and sizes, but differ nearly everywhere.
"""


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor of a file. `start`: the place of its first byte in the file."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    start: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one index of the first dimension. A scalar counts as one row."""
        return math.prod(self.shape[1:]) * ITEM_BYTES[self.dtype]


class StoredFiles:
    """The stored tensors of a checkpoint folder, by their headers."""

    def __init__(self, folder: Path) -> None:
        """Raises CheckpointError for absent or broken files.

        If several files have a tensor, the one from the file that the index names is used.
        """
        self.stored: dict[str, Stored] = {}
        self.files = _find_files(folder)
        """The file of each tensor, those that the index names and no file has included."""
        for path in sorted(set(self.files.values())):
            for name, stored in _header_of(path).items():
                if self.files.setdefault(name, path) == path:
                    self.stored[name] = stored

    def summary(self) -> str:
        """Names and shapes of the tensors, and sizes and samples of their files."""
        tensors = [f"{name} {stored.shape}" for name, stored in sorted(self.stored.items())]
        files = [_sample(path) for path in sorted(set(self.files.values()))]
        return "\n".join([*tensors, *files])


def read_header(path: Path) -> dict[str, Stored]:
    """The tensors of a file, by name. Raises CheckpointError if the file is broken."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if not 0 < length <= min(size - 8, _LARGEST_HEADER):
                raise ValueError(f"its header would have {length} bytes, the file has {size}")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        begin = 8 + length
        return {name: _stored(path, entry, begin, size) for name, entry in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise CheckpointError(
            f"{path} is not a whole safetensors file ({one_line(error)}): fetch it again"
        ) from error


def _stored(path: Path, entry: Mapping[str, Any], begin: int, size: int) -> Stored:
    shape = tuple(int(count) for count in entry["shape"])
    start, end = (begin + int(offset) for offset in entry["data_offsets"])
    dtype = str(entry["dtype"])
    if not begin <= start <= end <= size or min(shape, default=0) < 0:
        raise ValueError(f"a tensor would end at byte {end}, the file has {size}")
    if dtype in ITEM_BYTES and end - start != math.prod(shape) * ITEM_BYTES[dtype]:
        raise ValueError(f"a tensor of {dtype} {shape} would have {end - start} bytes")
    return Stored(path, dtype, shape, start)


def _find_files(folder: Path) -> dict[str, Path]:
    """The file of each stored tensor, by the tensor's name. Raises CheckpointError."""
    if (folder / INDEX).is_file():
        try:
            content = json.loads((folder / INDEX).read_text(encoding="utf-8"))
            weight_map = content["weight_map"]
            return {str(name): folder / str(file) for name, file in weight_map.items()}
        except (ValueError, OSError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"{folder / INDEX} has no weight_map: fetch the checkpoint again"
            ) from error
    path = folder / WEIGHTS
    if not path.is_file():
        pickles = sorted(found.name for glob in _PICKLES for found in folder.glob(glob))
        if pickles:
            raise CheckpointError(
                f"{folder} has its weights only in pickle files ({', '.join(pickles)}), which can "
                "run code when read: convert them to safetensors"
            )
        raise CheckpointError(f"{folder} has no weights: expected {WEIGHTS} or {INDEX}")
    return dict.fromkeys(read_header(path), path)


def _header_of(path: Path) -> dict[str, Stored]:
    if not path.is_file():
        raise CheckpointError(f"{path} is missing, though {INDEX} names it: fetch it again")
    return read_header(path)


def _sample(path: Path) -> str:
    """A file's name and size, and a hash of pieces from its beginning to its end."""
    digest, size = hashlib.sha256(), path.stat().st_size
    with path.open("rb") as file:
        for number in range(_SAMPLES):
            file.seek(max(0, size - _SAMPLE_BYTES) * number // (_SAMPLES - 1))
            digest.update(file.read(_SAMPLE_BYTES))
    return f"{path.name} {size} {digest.hexdigest()}"
