"""Reads a checkpoint's tensors, or parts of them, from its safetensors files.

Files are mapped into memory, and only the needed parts are read. Most parameters of a model are a
stored tensor with the same name. The experts of a mixture are one parameter, but there is one
stored tensor per expert and projection.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from paceline.errors import CheckpointError, ConfigError
from paceline.text import one_line
from workers.engine.parallel.cuts import Cut, Span

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_MAPPED_BYTES = 16 * 1024 * 1024
"""Number of bytes read after which a file is mapped anew, since the pages that were read count as
memory of this process.
"""
_EXPERT_NAMES = {
    "gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")),
    "down_proj": (("down_proj",), ("w2",)),
}
"""The possible stored names of an expert's projections, by the parameter that has all experts."""
_RENAMED = (".mlp.", ".block_sparse_moe.")
_PLAIN_DTYPES = ("F64", "F32", "F16", "BF16")
"""The dtypes, by safetensors' names, of stored weights that are not quantized."""
_SAMPLES, _SAMPLE_BYTES = 64, 4096
"""The number and size of the pieces of each file that ranks compare. The files of two trainings of
one model have equal names, shapes and sizes, but differ nearly everywhere.
"""


@dataclass(frozen=True, slots=True)
class _Stored:
    """A stored tensor: part of a parameter, or all of it.

    `expert` is its index in the first dimension of the parameter, `start` its first row there.
    """

    name: str
    expert: int | None = None
    start: int = 0


class StoredTensors:
    """The stored tensors of a checkpoint folder."""

    def __init__(self, folder: Path, loaded: Mapping[str, Tensor] | None = None) -> None:
        """Read the headers only. Raises CheckpointError for absent or broken files.

        If several files have a tensor, the one from the file that the index names is used.
        `loaded`: tensors in memory, in place of those in the files (quantization.py).
        """
        self._folder = folder
        self._loaded = loaded
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._dtypes: dict[str, str] = {}
        self._open_path: Path | None = None
        self._open_file: Any = None
        self._mapped_bytes = 0
        if loaded is not None:
            self.files = dict.fromkeys(loaded, folder)
            self._shapes = {name: tuple(tensor.shape) for name, tensor in loaded.items()}
            return
        self.files = _find_files(folder)
        for path in sorted(set(self.files.values())):
            for name, (shape, dtype) in _read_header(path).items():
                if self.files.setdefault(name, path) == path:
                    self._shapes[name], self._dtypes[name] = shape, dtype

    def has(self, name: str) -> bool:
        """Whether there are stored tensors for the parameter: one, or one per expert."""
        return bool(self._parts(name, num_experts=1))

    def summary(self) -> str:
        """Names and shapes of the tensors, and sizes and samples of their files."""
        tensors = [f"{name} {shape}" for name, shape in sorted(self._shapes.items())]
        files = [_sample(path) for path in sorted(set(self.files.values()))]
        return "\n".join([*tensors, *files])

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """Raise CheckpointError if the parameter is missing or has another shape."""
        parts = self._parts(name, num_experts=shape[0])
        if not parts:
            where = self._folder / (INDEX if (self._folder / INDEX).is_file() else WEIGHTS)
            raise CheckpointError(
                f"tensor {name} {shape} is missing in {where}: the checkpoint is "
                "incomplete or of another architecture than its config.json says"
            )
        for part in parts:
            expected = shape
            if part.expert is not None:
                expected = (shape[1] // _parts_of_an_expert(parts), shape[2])
            found = self._shapes.get(part.name)
            where = self.files.get(part.name, self._folder)
            if found is None:
                named = f", the file that {INDEX} names for it" if part.name in self.files else ""
                raise CheckpointError(
                    f"tensor {part.name} {expected} is missing in {where}{named}: fetch it again"
                )
            if found != expected:
                raise CheckpointError(
                    f"tensor {part.name} in {where} has shape {found}, but config.json asks for "
                    f"{expected}"
                )
            if (dtype := self._dtypes[part.name]) not in _PLAIN_DTYPES:
                raise CheckpointError(
                    f"tensor {part.name} in {where} holds {dtype}, expected one of "
                    f"{', '.join(_PLAIN_DTYPES)}: its config.json names no quantization; fetch "
                    "it again, or take the checkpoint from which it was made"
                )

    def read(
        self, name: str, shape: tuple[int, ...], cut: Cut | None, dtype: torch.dtype
    ) -> Tensor:
        """A rank's part of the parameter as a copy. `shape`: the whole parameter's shape."""
        local = list(shape)
        if cut is not None:
            local[cut.dim] = cut.size
        make = torch.empty if cut is None or _fills(cut) else torch.zeros
        target: Tensor = make(local, dtype=dtype)
        for part in self._parts(name, num_experts=shape[0]):
            if part.expert is None:
                self._copy(part.name, target, cut)
                continue
            rows = self._shapes[part.name][0]
            inner = _cut_of_expert(cut, part.start, rows)
            into = target[part.expert]
            if inner is None:
                into = into[part.start : part.start + rows]
            elif inner.dim == 0:
                first = min((span.at for span in inner.spans), default=0)
                into = into.narrow(0, first, inner.size)
                inner = Cut(0, inner.size, tuple(_moved(span, -first) for span in inner.spans))
            self._copy(part.name, into, inner)
        return target

    def close(self) -> None:
        """Free the memory that is mapped or held. Nothing can be read afterward."""
        self._loaded = None if self._loaded is None else {}
        self._unmap()

    def _unmap(self) -> None:
        self._open_path = self._open_file = None
        self._mapped_bytes = 0

    def _copy(self, name: str, target: Tensor, cut: Cut | None) -> None:
        """Copy a stored tensor, or the spans of `cut`, to `target`."""
        spans: Sequence[Span] = [Span(0, 0, target.shape[0])] if cut is None else cut.spans
        dim = 0 if cut is None else cut.dim
        for span in spans:
            stored = self._slice(self.files[name], name)
            index = [slice(None)] * dim + [slice(span.start, span.start + span.count)]
            piece: Tensor = stored[tuple(index)] if target.dim() else stored[:]
            target.narrow(dim, span.at, span.count).copy_(piece)
            # A read of some columns of a matrix maps all of its pages.
            numel = piece.numel() if dim == 0 else math.prod(self._shapes[name])
            self._mapped_bytes += numel * piece.element_size()

    def _slice(self, path: Path, name: str) -> Any:
        if self._loaded is not None:
            return self._loaded[name]
        if path != self._open_path or self._mapped_bytes > _MAPPED_BYTES:
            self._unmap()
            self._open_file = _open(path)
            self._open_path = path
        return self._open_file.get_slice(name)

    def _parts(self, name: str, *, num_experts: int) -> list[_Stored]:
        for candidate in (name, name.replace(*_RENAMED)):
            if candidate in self._shapes or candidate in self.files:
                return [_Stored(candidate)]
            experts, _, leaf = candidate.rpartition(".")
            for stored_names in _EXPERT_NAMES.get(leaf, ()):
                if f"{experts}.0.{stored_names[0]}.weight" in self._shapes:
                    return self._parts_of_experts(experts, stored_names, num_experts)
        return []

    def _parts_of_experts(
        self, experts: str, stored_names: Sequence[str], num_experts: int
    ) -> list[_Stored]:
        rows = self._shapes[f"{experts}.0.{stored_names[0]}.weight"][0]
        return [
            _Stored(f"{experts}.{expert}.{leaf}.weight", expert, index * rows)
            for expert in range(num_experts)
            for index, leaf in enumerate(stored_names)
        ]


def _parts_of_an_expert(parts: Sequence[_Stored]) -> int:
    return sum(part.expert == 0 for part in parts)


def _fills(cut: Cut) -> bool:
    return sum(span.count for span in cut.spans) == cut.size


def _cut_of_expert(cut: Cut | None, start: int, rows: int) -> Cut | None:
    """The part of `cut`, a cut of all experts' weights [experts, rows, columns], in one matrix.

    The stored matrix has the indices `start` to `start` + `rows` - 1 of the second dimension.
    """
    if cut is None:
        return None
    if cut.dim == 2:
        return Cut(1, cut.size, cut.spans)
    own = [span for span in cut.spans if start <= span.start < start + rows]
    assert all(span.start + span.count <= start + rows for span in own), (
        "a span lies in one expert's projection"
    )
    moved = tuple(Span(span.at, span.start - start, span.count) for span in own)
    return Cut(0, sum(span.count for span in own), moved)


def _moved(span: Span, by: int) -> Span:
    return Span(span.at + by, span.start, span.count)


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
    return dict.fromkeys(_read_header(path), path)


def _read_header(path: Path) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and dtype of each tensor of a file."""
    file = _open(path)
    slices = ((name, file.get_slice(name)) for name in file.keys())  # noqa: SIM118
    return {name: (tuple(one.get_shape()), one.get_dtype()) for name, one in slices}


def _sample(path: Path) -> str:
    """A file's name and size, and a hash of pieces from its beginning to its end."""
    digest, size = hashlib.sha256(), path.stat().st_size
    with path.open("rb") as file:
        for number in range(_SAMPLES):
            file.seek(max(0, size - _SAMPLE_BYTES) * number // (_SAMPLES - 1))
            digest.update(file.read(_SAMPLE_BYTES))
    return f"{path.name} {size} {digest.hexdigest()}"


def _open(path: Path) -> Any:
    if not path.is_file():
        raise CheckpointError(f"{path} is missing, though {INDEX} names it: fetch it again")
    opener: Callable[..., Any] = safe_open
    try:
        return opener(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path} is not a whole safetensors file ({one_line(error)}): fetch it again"
        ) from error
    except RuntimeError as error:
        raise ConfigError(
            f"{path} cannot be mapped into memory ({one_line(error)}): save the checkpoint in "
            "several files, each smaller than this host's memory"
        ) from error
