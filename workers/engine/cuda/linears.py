"""The linears of a GPU engine: they make a row's bits independent of other rows.

cuBLAS chooses its kernel by the number of rows, and kernels may sum in different orders. Some cut
the sum over the inputs into parts and then add the parts (split-K). Here cuBLAS must not do that,
and no product has fewer than 64 rows. A product has more rows only if a trial with that number gave
each row the bits of a product of 64 rows. Any other number of rows is divided into such numbers.

Shapes: T rows, N input features, M output features.
"""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor, nn
from typing_extensions import TypeIs

from workers.engine.cuda.kv_cache import FLOAT8, LARGEST_FLOAT8, rounded
from workers.engine.load.stored_tensors import FP8_BLOCK, Fp8Weight
from workers.engine.modules import join_projections, replace_norms
from workers.process.kernels import can_run_kernels

_log = logging.getLogger(__name__)

FIXED_ROWS = 64
"""The rows of every product are a multiple of this number. It is small enough that a decoding step
stays bound by memory.
"""
SMALLEST_SCALE = 1e-12
"""A row of zeros has this scale."""
_TRIED = (128, 192, 256, 320, 384, 512, 768, 1024, 1536, 2048)
"""Numbers of rows to try besides FIXED_ROWS."""
_MOST_OUTPUTS = 1 << 28
"""Maximum number of outputs of a trial: half a GiB in a 16-bit type."""
_NORM_TOLERANCES = {torch.float32: 1e-5, torch.float16: 0.003, torch.bfloat16: 0.02}
"""The largest differences allowed in replace_norms. torch's norm may omit one rounding, the one
before the product with the weight.
"""


@dataclass(frozen=True, slots=True)
class Rounding:
    """How the rows of a product become float8.

    `block`: adjacent features that share a scale; None: all of a row. `input_scale`: the scale of
    all rows (a number, float32), then without a block; None: scales are computed.
    """

    block: int | None = None
    input_scale: Tensor | None = None


class RoundedRows(NamedTuple):
    """Rows in float8, and their scales: [T, 1], or [T, N / block] with T adjacent in memory."""

    steps_TN: Tensor
    scales: Tensor

    def tiles(self, sizes: Sequence[int]) -> list[RoundedRows]:
        """These rows in parts of such sizes. If they have more rows, the last ones are 0."""
        missing = sum(sizes) - self.steps_TN.shape[0]
        if len(sizes) == 1 and not missing:
            return [self]
        # torch pads no float8, but bytes.
        bytes_TN = nn.functional.pad(self.steps_TN.view(torch.uint8), (0, 0, 0, missing))
        scales = nn.functional.pad(self.scales, (0, 0, 0, missing), value=1.0)
        parts = zip(bytes_TN.split(list(sizes)), scales.split(list(sizes)), strict=True)
        return [RoundedRows(a.view(FLOAT8), b.t().contiguous().t()) for a, b in parts]


class Fp8Linear(nn.Module):
    """A linear layer with float8 weights; results are `dtype`.

    Scales of weights are by output, or by blocks of 128 x 128. Activations then have a scale for
    each row, or for each 128 inputs of a row, unless the checkpoint gives one for all
    (`input_scale`, float32).
    """

    weight: Tensor
    scales: Tensor
    input_scale: Tensor | None
    round_rows: Callable[[Tensor, Rounding], RoundedRows]
    """`to_fp8`, or a kernel in its place."""

    def __init__(self, weight: Fp8Weight, bias: Tensor | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.steps_MN.shape
        self.register_buffer("weight", weight.steps_MN, persistent=False)
        self._is_blocked = weight.scales.shape[1] > 1 or weight.scales.shape[0] < self.out_features
        scales = _padded(weight.scales) if self._is_blocked else weight.scales
        self.register_buffer("scales", scales, persistent=False)
        self.register_buffer("input_scale", weight.input_scale, persistent=False)
        self.bias = bias
        self.dtype = dtype
        self.round_rows = to_fp8

    @staticmethod
    def rounded(linear: nn.Linear) -> Fp8Linear:
        """A layer with the weights of this one rounded to float8, each output by its own scale."""
        weight = Fp8Weight(*to_fp8(linear.weight, Rounding()))
        return Fp8Linear(weight, linear.bias, linear.weight.dtype)

    @property
    def rounding(self) -> Rounding:
        """How its rows become float8."""
        return Rounding(FP8_BLOCK if self._is_blocked else None, self.input_scale)

    def forward(self, rows_TN: Tensor | RoundedRows) -> Tensor:
        """The product, of shape [..., M]."""
        if isinstance(rows_TN, RoundedRows):
            rounded, shape = rows_TN, rows_TN.steps_TN.shape[:-1]
        else:
            shape = rows_TN.shape[:-1]
            rounded = self.round_rows(rows_TN.reshape(-1, self.in_features), self.rounding)
        result: Tensor = torch._scaled_mm(
            rounded.steps_TN,
            self.weight.t(),
            scale_a=rounded.scales,
            scale_b=self.scales.t(),
            out_dtype=self.dtype,
        )
        if self.bias is not None:
            result = result + self.bias
        return result.reshape(*shape, self.out_features)

    def joined(self, others: list[nn.Module]) -> nn.Module | None:
        """One layer for the outputs of this one and then `others`; None if they do not fit."""
        parts = [self, *(one for one in others if isinstance(one, Fp8Linear))]
        ends = [part.out_features % FP8_BLOCK for part in parts[:-1]]
        if (
            len(parts) <= len(others)
            or len({part._is_blocked for part in parts}) > 1
            or len({part.bias is None for part in parts}) > 1
            or (self._is_blocked and any(ends))
            or len({None if (s := part.input_scale) is None else float(s) for part in parts}) > 1
        ):
            return None
        steps_MN = torch.cat([part.weight.view(torch.uint8) for part in parts])
        weight = Fp8Weight(
            steps_MN.view(self.weight.dtype),
            torch.cat([part.scales for part in parts]),
            self.input_scale,
        )
        biases = [part.bias for part in parts if part.bias is not None]
        return Fp8Linear(weight, torch.cat(biases) if biases else None, self.dtype)


def to_fp8(rows_TN: Tensor, rounding: Rounding) -> RoundedRows:
    """Rows [T, N] in float8."""
    block, input_scale = rounding.block, rounding.input_scale
    parts_TGS = rows_TN.to(torch.float32).unflatten(1, (-1, block or rows_TN.shape[1]))
    if input_scale is not None:
        scales_TG = input_scale.expand(rows_TN.shape[0], 1).contiguous()
    else:
        # A GPU would compute a division by a number in this way, a CPU would not.
        scales_TG = parts_TGS.abs().amax(dim=2) * (1 / LARGEST_FLOAT8)
        scales_TG = scales_TG.clamp_min(SMALLEST_SCALE)
    steps_TGS = rounded(parts_TGS / scales_TG[:, :, None], FLOAT8)
    if block is not None:
        scales_TG = scales_TG.t().contiguous().t()
    return RoundedRows(steps_TGS.flatten(1), scales_TG)


def rounding_of(linear: nn.Module | None) -> Rounding | None:
    """How the rows of this product become float8; None: they do not."""
    source = linear.source if isinstance(linear, FixedRowsLinear) else linear
    return source.rounding if isinstance(source, Fp8Linear) else None


def _padded(scales: Tensor) -> Tensor:
    """The scales of blocks, each row of them at a multiple of 16 bytes, as cuBLAS demands."""
    rows, columns = scales.shape
    return scales.new_zeros(rows, -(-columns // 4) * 4)[:, :columns].copy_(scales)


def can_multiply(weight: Fp8Weight, dtype: torch.dtype) -> bool:
    """Whether the weight's device multiplies by it, with results in `dtype`. Logs if not."""
    layer = Fp8Linear(weight, None, dtype)
    try:
        rows = torch.zeros(FIXED_ROWS, layer.in_features, dtype=dtype, device=weight.scales.device)
        layer(rows)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        _log.warning(
            "a float8 weight %s with scales %s is held as %s: %s",
            tuple(weight.steps_MN.shape),
            tuple(weight.scales.shape),
            dtype,
            str(error).partition("\n")[0],
        )
        return False
    return True


class FixedRowsLinear(nn.Module):
    """A linear layer whose products have one of `sizes` as their number of rows.

    All sizes are multiples of FIXED_ROWS and give a row the same bits (see `trusted_sizes`).
    """

    def __init__(
        self, source: nn.Linear | Fp8Linear, sizes: tuple[int, ...] = (FIXED_ROWS,)
    ) -> None:
        super().__init__()
        assert FIXED_ROWS in sizes, sizes
        self.in_features = source.in_features
        self.out_features = source.out_features
        self.source = source
        self.sizes = tuple(sorted(sizes, reverse=True))

    def forward(self, rows_TN: Tensor | RoundedRows) -> Tensor:
        """The product, of shape [..., M]."""
        shape = (rows_TN.steps_TN if isinstance(rows_TN, RoundedRows) else rows_TN).shape[:-1]
        num_rows = prod(shape)
        missing = -num_rows % FIXED_ROWS
        sizes = _cut(num_rows + missing, self.sizes)
        tiles: Sequence[Tensor] | Sequence[RoundedRows]
        if isinstance(rows_TN, RoundedRows):
            tiles = rows_TN.tiles(sizes)
        else:
            flat_TN = rows_TN.reshape(-1, self.in_features)
            if missing:
                flat_TN = nn.functional.pad(flat_TN, (0, 0, 0, missing))
            tiles = flat_TN.split(sizes)
        multiply: Callable[..., Tensor] = self.source.forward
        parts = [multiply(tile) for tile in tiles]
        joined = parts[0] if len(parts) == 1 else torch.cat(parts)
        return joined[:num_rows].reshape(*shape, self.out_features)


@functools.lru_cache(maxsize=4096)
def _cut(num_rows: int, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Sizes, largest first, that add up to `num_rows`. Zero rows give one part of size 0."""
    parts: list[int] = []
    for size in sizes:
        parts += [size] * (num_rows // size)
        num_rows %= size
    assert num_rows == 0, "the rows are a multiple of the smallest size"
    return tuple(parts) or (0,)


def trusted_sizes(linear: nn.Linear | Fp8Linear) -> tuple[int, ...]:
    """The numbers of rows that give each row the bits of a product of FIXED_ROWS rows.

    A trial uses this layer's weights and random rows. If the device's library sums in another
    order, at least some of the thousands of outputs differ.
    """
    sizes = [FIXED_ROWS]
    multiply: Callable[[Tensor], Tensor] = linear
    device = linear.weight.device
    dtype = linear.weight.dtype if isinstance(linear, nn.Linear) else linear.dtype
    rows_TN = torch.randn(
        (_TRIED[-1], linear.in_features),
        generator=torch.Generator(device).manual_seed(5),
        dtype=dtype,
        device=device,
    )
    for size in _TRIED:
        if size * linear.out_features > _MOST_OUTPUTS:
            break
        whole_TM = multiply(rows_TN[:size])
        pieces = zip(whole_TM.split(FIXED_ROWS), rows_TN[:size].split(FIXED_ROWS), strict=True)
        if all(torch.equal(a, multiply(b)) for a, b in pieces):
            sizes.append(size)
    return tuple(sizes)


def adapt_model(model: nn.Module, *, batch_invariant: bool) -> None:
    """Replace the modules of a model, or of a rank's part of one, on its final device.

    Projections are joined, and each norm becomes one kernel. Where our kernels run, one of them
    rounds the rows of a float8 product. With `batch_invariant`, products have fixed numbers of
    rows. On a GPU this sets, for the whole process, whether cuBLAS may cut sums (_split_sums).
    """
    for module in list(model.modules()):
        join_projections(module)
    linears = [module for module in model.modules() if _is_linear(module)]
    for linear in linears:
        if isinstance(linear, Fp8Linear) and can_run_kernels(linear.weight.device):
            from workers.engine.cuda.float8_kernels import round_rows  # needs Triton

            linear.round_rows = round_rows
    sizes = _try_sizes(linears) if batch_invariant else {}
    if not sizes:
        _split_sums(allowed=True)
    replace_norms(model, _NORM_TOLERANCES)
    if not batch_invariant:
        return
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if _is_linear(child) and not isinstance(parent, FixedRowsLinear):
                fixed = FixedRowsLinear(child, sizes.get(_kind(child), (FIXED_ROWS,)))
                setattr(parent, name, fixed)


def _is_linear(module: nn.Module) -> TypeIs[nn.Linear | Fp8Linear]:
    return type(module) in (nn.Linear, Fp8Linear)


def _kind(linear: nn.Linear | Fp8Linear) -> tuple[object, ...]:
    """A key that is equal for linears whose products the library computes in the same way."""
    scales = None if isinstance(linear, nn.Linear) else linear.scales.shape
    return (linear.weight.shape, linear.weight.dtype, scales, linear.bias is None)


def _try_sizes(linears: list[nn.Linear | Fp8Linear]) -> dict[tuple[object, ...], tuple[int, ...]]:
    """The trusted sizes of each kind of linear. Empty on a CPU, where only tests run this."""
    sizes: dict[tuple[object, ...], tuple[int, ...]] = {}
    if not linears or linears[0].weight.device.type != "cuda":
        return sizes
    _split_sums(allowed=False)
    try:
        for linear in linears:
            if _kind(linear) not in sizes:
                sizes[_kind(linear)] = trusted_sizes(linear)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:  # cuBLAS refuses products that it can compute only with cut sums
        _log.warning("products are cut to %d rows: %s", FIXED_ROWS, error)
        return {}
    return sizes


def _split_sums(*, allowed: bool) -> None:
    """Set whether cuBLAS may cut the sum over the inputs. Only cuBLASLt obeys `allowed=False`."""
    if not torch.cuda.is_available():
        return
    with warnings.catch_warnings():  # torch warns that the choice of a library is experimental
        warnings.simplefilter("ignore", UserWarning)
        torch.backends.cuda.preferred_blas_library("default" if allowed else "cublaslt")
    matmul = torch.backends.cuda.matmul
    matmul.allow_bf16_reduced_precision_reduction = (allowed, allowed)
    matmul.allow_fp16_reduced_precision_reduction = (allowed, allowed)
