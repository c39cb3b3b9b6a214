"""How quantized weights are stored, and how they become plain numbers: (step - zero) x scale.

A layout says which tensors a linear has in the files, and in which order small steps lie in 32-bit
words. Below, every layout comes to the same few values (`Scales`), so that one function computes
the weights of any rows and columns, exactly: a product in float32, which is then rounded once.

    layout   steps                              scales              zeros
    plain    weight [M, N], float8 or int8      weight_scale(_inv)  weight_zero_point, not packed
    packed   weight_packed [M, N / k]           weight_scale        weight_zero_point [M / k, G]
    awq      qweight [N, M / k], interleaved    scales [G, M]       qzeros [G, M / k], interleaved
    gptq     qweight [N / k, M]                 scales [G, M]       qzeros [G, M / k]

Shapes: N input features, M output features, G groups of inputs, k steps in a 32-bit word.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from paceline.errors import CheckpointError
from workers.engine.load.stored_files import Stored

Layout = Literal["plain", "packed", "awq", "gptq"]
_WORD = 32
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""The place, counted from the lowest bits of a word, of each of eight consecutive outputs."""
_SCALE_DTYPES = ("F32", "F16", "BF16")
_PLAIN_STEPS = ("F8_E4M3", "I8")
_TRANSPOSED = ("awq", "gptq")


@dataclass(frozen=True, slots=True)
class Packing:
    """What config.json says about the stored weights.

    `bits` of a step. `block`: the outputs and inputs that share a scale, where the shapes of the
    tensors do not say it; None: all. `zero_offset` is added to a stored zero point (GPTQ stores it
    less one). `quantizes_rows`: whether the checkpoint was made for float8 activations.
    `has_zeros`: whether each weight has zero points; `reorders`: whether it has the group of each
    input.
    """

    layout: Layout
    bits: int = 8
    block: tuple[int | None, int | None] = (None, None)
    zero_offset: int = 0
    quantizes_rows: bool = False
    has_zeros: bool = False
    reorders: bool = False

    @property
    def steps_in_word(self) -> int:
        """Steps that one stored number holds."""
        return 1 if self.layout == "plain" else _WORD // self.bits


@dataclass(frozen=True, slots=True)
class Scales:
    """Scales [rows, groups] in float32, zeros of the same shape or None, and what shares them.

    `block` outputs share a row, and `block` inputs a group, unless `groups_N` gives the group of
    each input.
    """

    scales: Tensor
    zeros: Tensor | None
    block: tuple[int, int]
    groups_N: Tensor | None = None


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A linear's stored tensors. `shape`: that of the plain weight, (M, N).

    `input_scale`: a number that scales all activations.
    """

    packing: Packing
    shape: tuple[int, int]
    steps: Stored
    scale: Stored
    zero: Stored | None = None
    group_index: Stored | None = None
    input_scale: Stored | None = None

    @property
    def stored_dim(self) -> int:
        """The dimension of the plain weight along which stored rows lie."""
        return 1 if self.packing.layout in _TRANSPOSED else 0

    @property
    def plain_rows(self) -> int:
        """The indices of that dimension that one stored row has."""
        return self.packing.steps_in_word if self.packing.layout == "gptq" else 1

    def check(self, name: str) -> None:
        """Raise CheckpointError if the tensors do not fit the weight `name`, or one is missing."""
        found, (outputs, inputs) = self.scale.shape, self.shape
        if self.packing.layout in _TRANSPOSED:
            found = found[::-1]
        rows, groups = found if len(found) == 2 else (math.prod(found), 1)
        block = self.packing.block
        expected_rows = {1, outputs} if block[0] is None else {-(-outputs // block[0])}
        expected_groups = 1 if block[1] is None else -(-inputs // block[1])
        if rows not in expected_rows or groups != expected_groups:
            raise CheckpointError(
                f"the scales of tensor {name} in {self.scale.path} have shape {self.scale.shape}, "
                f"but config.json asks for {' or '.join(map(str, sorted(expected_rows)))} x "
                f"{expected_groups}: fetch it again"
            )
        if self.scale.dtype not in _SCALE_DTYPES:
            raise CheckpointError(
                f"the scales of tensor {name} in {self.scale.path} are {self.scale.dtype}, "
                f"expected one of {', '.join(_SCALE_DTYPES)}"
            )
        given = self.input_scale
        if given is not None and (math.prod(given.shape) != 1 or given.dtype not in _SCALE_DTYPES):
            raise CheckpointError(
                f"the input_scale of tensor {name} in {given.path} is {given.dtype} of shape "
                f"{given.shape}, expected one number as {', '.join(_SCALE_DTYPES)}"
            )
        dtypes = _PLAIN_STEPS if self.packing.layout == "plain" else ("I32",)
        if self.steps.dtype not in dtypes:
            raise CheckpointError(
                f"the quantized values of tensor {name} in {self.steps.path} are "
                f"{self.steps.dtype}, expected {' or '.join(dtypes)}"
            )
        words = -(-rows // self.packing.steps_in_word)
        shape: tuple[int, ...] = {
            "plain": self.scale.shape,
            "packed": (words, groups),
        }.get(self.packing.layout, (groups, words))
        self._check_other("zero points", name, self.zero, shape, self.packing.has_zeros)
        self._check_other("group index", name, self.group_index, (inputs,), self.packing.reorders)

    def _check_other(
        self, what: str, name: str, found: Stored | None, shape: tuple[int, ...], is_needed: bool
    ) -> None:
        if is_needed if found is None else found.shape != shape:
            has = f"no {what}" if found is None else f"{what} of shape {found.shape}"
            raise CheckpointError(
                f"tensor {name} in {self.steps.path} has {has}, expected shape {shape}: fetch it "
                "again"
            )

    def read_scales(self, read: Callable[[Stored], Tensor]) -> Scales:
        """The scales of the whole weight. `read` reads a whole tensor."""
        packing, (outputs, inputs) = self.packing, self.shape
        scales = read(self.scale).to(torch.float32)
        zeros = None if self.zero is None else read(self.zero)
        if packing.layout in _TRANSPOSED:
            scales = scales.t()
            if zeros is not None:
                zeros = unpack(zeros, packing.bits, awq=packing.layout == "awq").t()[:outputs]
                zeros = (zeros + packing.zero_offset) & ((1 << packing.bits) - 1)
        else:
            scales = scales.reshape(*(scales.shape if scales.dim() == 2 else (-1, 1)))
            if zeros is not None and packing.layout == "packed":
                zeros = unpack(zeros.t(), packing.bits).t()[: scales.shape[0]]
            elif zeros is not None:
                zeros = zeros.reshape(scales.shape)
            elif packing.layout == "packed":  # steps are stored from 0 on
                zeros = torch.full_like(scales, 1 << (packing.bits - 1))
        groups_N = None if self.group_index is None else read(self.group_index).long()
        if groups_N is not None and bool((groups_N < 0).any()):
            groups_N = None  # compressed-tensors writes -1 where the order is not changed
        block = (packing.block[0] or outputs // scales.shape[0], packing.block[1] or inputs)
        return Scales(scales, None if zeros is None else zeros.float(), block, groups_N)

    def unpacked(self, stored: Tensor) -> Tensor:
        """Steps of stored rows, as part of the plain weight: [outputs, inputs], not yet scaled."""
        packing, (outputs, inputs) = self.packing, self.shape
        match packing.layout:
            case "plain":
                return stored
            case "packed":
                return unpack(stored, packing.bits)[:, :inputs]
            case "awq":
                return unpack(stored, packing.bits, awq=True).t()[:outputs]
            case "gptq":
                return unpack(stored.t(), packing.bits)


def unpack(words: Tensor, bits: int, *, awq: bool = False) -> Tensor:
    """The steps in 32-bit words, along the last dimension: [..., W] to [..., W x 32 / bits]."""
    places: list[int] = list(_AWQ_ORDER) if awq else list(range(_WORD // bits))
    shifts = torch.tensor([bits * place for place in places], dtype=words.dtype)
    steps = (words.unsqueeze(-1) >> shifts.to(words.device)) & ((1 << bits) - 1)
    return steps.flatten(-2)


def scaled(steps: Tensor, scales: Scales, first_output: int, first_input: int) -> Tensor:
    """The weights in float32 for steps [rows, columns] at this place of the whole weight."""
    rows, columns = steps.shape
    device, groups_N = steps.device, scales.groups_N
    outputs = torch.arange(first_output, first_output + rows, device=device)
    if groups_N is None:
        groups = torch.arange(first_input, first_input + columns, device=device) // scales.block[1]
    else:
        groups = groups_N[first_input : first_input + columns]

    def spread(values: Tensor) -> Tensor:
        ours = values.index_select(0, outputs // scales.block[0])
        return ours if values.shape[1] == 1 else ours.index_select(1, groups)

    weights = steps.to(torch.float32)
    if scales.zeros is not None:
        weights = weights - spread(scales.zeros)
    return weights * spread(scales.scales)


def find_packed(stored: Mapping[str, Stored], packing: Packing) -> dict[str, PackedWeight]:
    """The packed weights among stored tensors, by the names of the plain ones."""
    found: dict[str, PackedWeight] = {}
    for name, steps in stored.items():
        module, _, leaf = name.rpartition(".")
        layout = packing.layout
        expected = {"plain": "weight", "packed": "weight_packed"}.get(layout, "qweight")
        # Linears that were not quantized have a plain weight without a scale.
        of_plain = ("weight_scale", "weight_scale_inv")
        scale_names = ("scales",) if layout in _TRANSPOSED else of_plain
        scale = next((s for n in scale_names if (s := stored.get(f"{module}.{n}"))), None)
        if leaf != expected or scale is None or len(steps.shape) != 2:
            continue
        zero = "qzeros" if layout in _TRANSPOSED else "weight_zero_point"
        index = "g_idx" if layout in _TRANSPOSED else "weight_g_idx"
        first, second = steps.shape
        per_word = packing.steps_in_word
        shape = {
            "plain": (first, second),
            "packed": (first, second * per_word),
            "awq": (second * per_word, first),
            "gptq": (second, first * per_word),
        }[layout]
        found[f"{module}.weight"] = PackedWeight(
            packing,
            shape,
            steps,
            scale,
            zero=stored.get(f"{module}.{zero}"),
            group_index=stored.get(f"{module}.{index}"),
            input_scale=stored.get(f"{module}.input_scale") if packing.quantizes_rows else None,
        )
    return found
