"""Reads a checkpoint's tensors, or parts of them, from its safetensors files.

Most parameters of a model are a stored tensor with the same name. The experts of a mixture are one
parameter, but there is one stored tensor per expert and projection. Quantized weights appear here
as plain ones, under the plain names: they are unpacked as they are read (packed_weights.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from paceline.errors import CheckpointError
from workers.engine.load.packed_weights import PackedWeight, Packing, Scales, find_packed, scaled
from workers.engine.load.stored_files import INDEX, WEIGHTS, Stored, StoredFiles
from workers.engine.load.tensor_files import DTYPES, Rows, TensorReader
from workers.engine.parallel.weight_cuts import Cut, Span

_EXPERT_NAMES = {
    "gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")),
    "down_proj": (("down_proj",), ("w2",)),
}
"""The possible stored names of an expert's projections, by the parameter that has all experts."""
_RENAMED = (".mlp.", ".block_sparse_moe.")
_PLAIN_DTYPES = ("F64", "F32", "F16", "BF16")
"""The dtypes, by safetensors' names, of stored weights that are not quantized."""
FP8_BLOCK = 128
"""Outputs and inputs of a block of float8 weights that devices can multiply by."""
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class _Part:
    """A stored tensor: part of a parameter, or all of it.

    `expert` is its index in the first dimension of the parameter, `start` its first row there.
    """

    name: str
    expert: int | None = None
    start: int = 0


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    """A rank's part of a float8 weight as it is stored, on the device.

    `steps_MN`: float8. `scales`: float32, [M, 1], or [M / 128, N / 128] for blocks of 128 x 128.
    `input_scale`: a number, float32, that scales all activations; None: they get their own scales.
    """

    steps_MN: Tensor
    scales: Tensor
    input_scale: Tensor | None = None


class StoredTensors:
    """The stored tensors of a checkpoint folder."""

    def __init__(
        self, folder: Path, packing: Packing | None = None, device: torch.device = _CPU
    ) -> None:
        """Read the headers only. Raises CheckpointError for absent or broken files.

        `packing`: how quantized weights are stored; None: every tensor is what its name says.
        `device`: where tensors are read to.
        """
        self._folder = folder
        self._device = device
        self._reader = TensorReader(device)
        found = StoredFiles(folder)
        self.files, self._stored, self.summary = found.files, found.stored, found.summary
        self._packed = {} if packing is None else find_packed(self._stored, packing)

    def has(self, name: str) -> bool:
        """Whether there are stored tensors for the parameter: one, or one per expert."""
        return bool(self._parts(name, num_experts=1))

    def items(self) -> Iterable[tuple[str, Stored]]:
        """All stored tensors by their names in the files, those that no parameter uses too."""
        return self._stored.items()

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
            found = self._shape(part.name)
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
            if (packed := self._packed.get(part.name)) is not None:
                packed.check(part.name)
            elif (dtype := self._stored[part.name].dtype) not in _PLAIN_DTYPES:
                raise CheckpointError(
                    f"tensor {part.name} in {where} holds {dtype}, expected one of "
                    f"{', '.join(_PLAIN_DTYPES)}: its config.json names no quantization, or its "
                    "scale is missing; fetch it again, or take the checkpoint from which it was "
                    "made"
                )

    def read(
        self, name: str, shape: tuple[int, ...], cut: Cut | None, dtype: torch.dtype
    ) -> Tensor:
        """A rank's part of the parameter as a copy. `shape`: the whole parameter's shape."""
        make = torch.empty if cut is None or _fills(cut) else torch.zeros
        target: Tensor = make(_local(shape, cut), dtype=dtype, device=self._device)
        copies: list[_Copy] = []
        for part in self._parts(name, num_experts=shape[0]):
            if part.expert is None:
                copies += self._copies(part.name, target, cut)
                continue
            rows = self._shape_of(part.name)[0]
            inner = _cut_of_expert(cut, part.start, rows)
            into = target[part.expert]
            if inner is None:
                into = into[part.start : part.start + rows]
            elif inner.dim == 0:
                first = min((span.at for span in inner.spans), default=0)
                into = into.narrow(0, first, inner.size)
                inner = Cut(0, inner.size, tuple(_moved(span, -first) for span in inner.spans))
            copies += self._copies(part.name, into, inner)
        self._run(copies)
        return target

    def read_fp8(self, name: str, shape: tuple[int, ...], cut: Cut | None) -> Fp8Weight | None:
        """A rank's part of the parameter as it is stored, or None.

        None if it is not float8 or was made for other activations, or if its blocks are not of
        128 x 128, have one scale for all activations, or are cut through.
        """
        packed = self._packed.get(name)
        if packed is None or packed.steps.dtype != "F8_E4M3" or not packed.packing.quantizes_rows:
            return None
        scales = packed.read_scales(self.whole)
        block_cut = cut
        match scales.block:
            case (_, columns) if columns >= packed.shape[1]:  # by output, or one for all
                values = scales.scales.repeat_interleave(scales.block[0], 0)[: shape[0]]
                if cut is not None and cut.dim == 1:
                    block_cut = None
            case (rows, columns) if rows == columns == FP8_BLOCK and packed.input_scale is None:
                values = scales.scales
                block_cut = None if cut is None else _cut_of_blocks(cut, shape)
                if cut is not None and block_cut is None:
                    return None
            case _:
                return None
        # An output that is padding has steps of 0, with any scale but NaN.
        ours = values if block_cut is None else _part_of(values, block_cut)
        steps = torch.zeros(_local(shape, cut), dtype=torch.float8_e4m3fn, device=self._device)
        self._run(self._copies_of(packed.steps, steps, cut))
        input_scale = None
        if packed.input_scale is not None:
            input_scale = self.whole(packed.input_scale).to(torch.float32).reshape(())
        return Fp8Weight(steps, ours.contiguous(), input_scale)

    def close(self) -> None:
        """Close the files and free the buffers. Nothing can be read afterward."""
        self._reader.close()

    def _shape(self, name: str) -> tuple[int, ...] | None:
        if name in self._packed:
            return self._packed[name].shape
        return self._stored[name].shape if name in self._stored else None

    def _shape_of(self, name: str) -> tuple[int, ...]:
        shape = self._shape(name)
        assert shape is not None, "inspect_checkpoint finds absent tensors"
        return shape

    def whole(self, stored: Stored) -> Tensor:
        """All of a stored tensor, in its own dtype."""
        tensor = torch.empty(stored.shape, dtype=DTYPES[stored.dtype], device=self._device)
        self._run(self._copies_of(stored, tensor, None))
        return tensor

    def _copies(self, name: str, target: Tensor, cut: Cut | None) -> list[_Copy]:
        """The reads that fill `target` with a tensor or with the spans of `cut`."""
        packed = self._packed.get(name)
        if packed is None:
            return self._copies_of(self._stored[name], target, cut)
        cut_dim = 0 if cut is None else cut.dim
        spans = _spans(target, cut)
        if cut_dim != packed.stored_dim:  # all stored rows hold some of it
            count = packed.steps.shape[0]
            return [_Copy(Rows(packed.steps, 0, count), target, cut_dim, spans, packed)]
        per = packed.plain_rows
        return [
            _Copy(
                Rows(packed.steps, one.start // per, -(-(one.start + one.count) // per)),
                target,
                cut_dim,
                (one,),
                packed,
            )
            for one in spans
        ]

    def _copies_of(self, stored: Stored, target: Tensor, cut: Cut | None) -> list[_Copy]:
        if not target.dim():
            return [_Copy(Rows(stored, 0, 1), target.view(1), 0, (Span(0, 0, 1),))]
        spans = _spans(target, cut)
        if cut is not None and cut.dim:
            return [_Copy(Rows(stored, 0, stored.shape[0]), target, cut.dim, spans)]
        return [
            _Copy(Rows(stored, one.start, one.start + one.count), target, 0, (one,))
            for one in spans
        ]

    def _run(self, copies: Sequence[_Copy]) -> None:
        streamed = [one for one in copies if not self._read_at_once(one)]
        scales = {
            id(one.packed): one.packed.read_scales(self.whole)
            for one in streamed
            if one.packed is not None
        }
        for index, first, rows in self._reader.stream(one.rows for one in streamed):
            copy = streamed[index]
            if copy.packed is None:
                copy.take(rows, first)
            else:
                copy.take_packed(rows, first, copy.packed, scales[id(copy.packed)])

    def _read_at_once(self, copy: _Copy) -> bool:
        """Read rows straight into the target's memory, if they are stored as they are held."""
        if copy.dim or copy.packed is not None or self._device.type != "cpu":
            return False
        (span,) = copy.spans
        target = copy.target.narrow(0, span.at, span.count)
        if target.dtype != DTYPES[copy.rows.tensor.dtype] or not target.is_contiguous():
            return False
        self._reader.read_into(copy.rows, target)
        return True

    def _parts(self, name: str, *, num_experts: int) -> list[_Part]:
        for candidate in (name, name.replace(*_RENAMED)):
            if self._shape(candidate) is not None or candidate in self.files:
                return [_Part(candidate)]
            experts, _, leaf = candidate.rpartition(".")
            for stored_names in _EXPERT_NAMES.get(leaf, ()):
                if self._shape(f"{experts}.0.{stored_names[0]}.weight") is not None:
                    return self._parts_of_experts(experts, stored_names, num_experts)
        return []

    def _parts_of_experts(
        self, experts: str, stored_names: Sequence[str], num_experts: int
    ) -> list[_Part]:
        rows = self._shape_of(f"{experts}.0.{stored_names[0]}.weight")[0]
        return [
            _Part(f"{experts}.{expert}.{leaf}.weight", expert, index * rows)
            for expert in range(num_experts)
            for index, leaf in enumerate(stored_names)
        ]


@dataclass(frozen=True, slots=True)
class _Copy:
    """Stored rows, and the parts of them that go into `target`: spans of the dimension `dim`."""

    rows: Rows
    target: Tensor
    dim: int
    spans: tuple[Span, ...]
    packed: PackedWeight | None = None

    def take(self, rows: Tensor, first: int) -> None:
        """Copy what belongs into the target of stored rows from `first` on."""
        if self.dim == 0:
            (span,) = self.spans
            self.target.narrow(0, span.at + first - span.start, rows.shape[0]).copy_(rows)
            return
        into = self.target.narrow(0, first, rows.shape[0])
        for span in self.spans:
            into.narrow(self.dim, span.at, span.count).copy_(
                rows.narrow(self.dim, span.start, span.count)
            )

    def take_packed(self, rows: Tensor, first: int, packed: PackedWeight, scales: Scales) -> None:
        """As `take`, for steps that are unpacked and scaled."""
        steps, along = packed.unpacked(rows), packed.stored_dim
        origin = first * packed.plain_rows
        for span in self.spans:
            begin, at = [0, 0], [0, 0]
            begin[along] = origin
            part = steps
            if self.dim == along:
                low = max(span.start, origin)
                high = min(span.start + span.count, origin + steps.shape[along])
                part, begin[along] = steps.narrow(along, low - origin, high - low), low
                at[along] = span.at + low - span.start
            else:
                part = steps.narrow(self.dim, span.start, span.count)
                begin[self.dim], at[self.dim], at[along] = span.start, span.at, origin
            weights = scaled(part, scales, *begin)
            into = self.target.narrow(0, at[0], part.shape[0]).narrow(1, at[1], part.shape[1])
            into.copy_(weights)


def _spans(target: Tensor, cut: Cut | None) -> tuple[Span, ...]:
    return (Span(0, 0, target.shape[0]),) if cut is None else cut.spans


def _parts_of_an_expert(parts: Sequence[_Part]) -> int:
    return sum(part.expert == 0 for part in parts)


def _fills(cut: Cut) -> bool:
    return sum(span.count for span in cut.spans) == cut.size


def _local(shape: tuple[int, ...], cut: Cut | None) -> list[int]:
    local = list(shape)
    if cut is not None:
        local[cut.dim] = cut.size
    return local


def _cut_of_blocks(cut: Cut, shape: tuple[int, ...]) -> Cut | None:
    """The cut of the scales of blocks; None if it does not end between blocks."""

    def blocks(span: Span) -> Span | None:
        ends = (span.at, span.start, span.count)
        is_last = span.start + span.count == shape[cut.dim] and span.at + span.count == cut.size
        if any(end % FP8_BLOCK for end in (ends[:2] if is_last else ends)):
            return None
        return Span(*(-(-end // FP8_BLOCK) for end in ends))

    spans = [moved for span in cut.spans if (moved := blocks(span)) is not None]
    if len(spans) < len(cut.spans):
        return None
    return Cut(cut.dim, -(-cut.size // FP8_BLOCK), tuple(spans))


def _part_of(values: Tensor, cut: Cut) -> Tensor:
    """A rank's part of a tensor in memory; padding is 1."""
    part = values.new_ones(_local(tuple(values.shape), cut))
    for span in cut.spans:
        part.narrow(cut.dim, span.at, span.count).copy_(
            values.narrow(cut.dim, span.start, span.count)
        )
    return part


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
