"""The linears and norms of a GPU engine, which make a row's bits independent of other rows.

cuBLAS chooses its kernel by the number of rows, and kernels may sum in different orders: some cut
the sum over the inputs into parts and add these (split-K). Here cuBLAS is told not to, and no
product has fewer than 64 rows. A number of rows is used only after a trial has shown that it gives
each row the same bits as a product of 64 rows; other numbers are cut into such numbers.

Shapes: T rows, N input features, M output features.
"""

from __future__ import annotations

import functools
import logging
import warnings

import torch
from torch import Tensor, nn

from workers.engine.fusing import NativeNorm, join_projections

_log = logging.getLogger(__name__)

FIXED_ROWS = 64
"""The rows of every product are a multiple of this number. It is small enough that a decoding step
stays bound by memory.
"""
_TRIED = (128, 192, 256, 320, 384, 512, 768, 1024, 1536, 2048)
"""Numbers of rows to try. The rows of a step are cut into these and FIXED_ROWS."""
_MOST_OUTPUTS = 1 << 28
"""Maximum number of outputs of a trial: half a GiB in a 16-bit type."""
_NORM_TOLERANCE = {torch.float32: 1e-5, torch.float16: 0.003, torch.bfloat16: 0.02}
"""Tolerance relative to the largest value: one rounding before the weight is multiplied."""


class FixedRowsLinear(nn.Module):
    """A linear layer that multiplies only numbers of rows in `sizes` at once.

    All sizes are multiples of FIXED_ROWS, and give a row the same bits: see `trusted_sizes`.
    """

    def __init__(self, source: nn.Linear, sizes: tuple[int, ...] = (FIXED_ROWS,)) -> None:
        super().__init__()
        assert FIXED_ROWS in sizes, sizes
        self.in_features = source.in_features
        self.out_features = source.out_features
        self.weight = source.weight
        self.bias = source.bias
        self.sizes = tuple(sorted(sizes, reverse=True))

    def forward(self, rows_TN: Tensor) -> Tensor:
        """The product, of shape [..., M]."""
        flat_TN = rows_TN.reshape(-1, self.in_features)
        num_rows = flat_TN.shape[0]
        missing = -num_rows % FIXED_ROWS
        if missing:
            flat_TN = nn.functional.pad(flat_TN, (0, 0, 0, missing))
        parts = [
            nn.functional.linear(tile, self.weight, self.bias)
            for tile in flat_TN.split(_cut(num_rows + missing, self.sizes))
        ]
        joined = parts[0] if len(parts) == 1 else torch.cat(parts)
        return joined[:num_rows].reshape(*rows_TN.shape[:-1], self.out_features)


@functools.lru_cache(maxsize=4096)
def _cut(num_rows: int, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """The rows cut into `sizes`, in descending order. Zero rows give one part of size 0."""
    parts: list[int] = []
    for size in sizes:
        parts += [size] * (num_rows // size)
        num_rows %= size
    assert num_rows == 0, "the rows are a multiple of the smallest size"
    return tuple(parts) or (0,)


def trusted_sizes(weight_MN: Tensor, bias_M: Tensor | None = None) -> tuple[int, ...]:
    """The numbers of rows whose product with these weights has the bits of FIXED_ROWS products.

    They are tried on random rows: if the device's library sums in another order, some of the
    thousands of outputs differ.
    """
    sizes = [FIXED_ROWS]
    generator = torch.Generator(weight_MN.device).manual_seed(5)
    rows_TN = torch.randn(
        (_TRIED[-1], weight_MN.shape[1]),
        generator=generator,
        dtype=weight_MN.dtype,
        device=weight_MN.device,
    )
    for size in _TRIED:
        if size * weight_MN.shape[0] > _MOST_OUTPUTS:
            break
        whole_TM = nn.functional.linear(rows_TN[:size], weight_MN, bias_M)
        pieces = zip(whole_TM.split(FIXED_ROWS), rows_TN[:size].split(FIXED_ROWS), strict=True)
        if all(torch.equal(a, nn.functional.linear(b, weight_MN, bias_M)) for a, b in pieces):
            sizes.append(size)
    return tuple(sizes)


def adapt_model(model: nn.Module, *, batch_invariant: bool) -> None:
    """Join projections and make each norm one kernel; with `batch_invariant` fix products' rows
    too.

    The model may be a rank's part, and must be on its final device. On a GPU this sets, for the
    whole process, how cuBLAS may sum.
    """
    for module in list(model.modules()):
        join_projections(module)
    linears = [module for module in model.modules() if type(module) is nn.Linear]
    sizes = _try_sizes(linears) if batch_invariant else {}
    if not sizes:
        _split_sums(allowed=True)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if batch_invariant and type(child) is nn.Linear:
                fixed = FixedRowsLinear(child, sizes.get(_kind(child), (FIXED_ROWS,)))
                setattr(parent, name, fixed)
            elif (norm := _native_norm(child)) is not None:
                setattr(parent, name, norm)


def _kind(linear: nn.Linear) -> tuple[object, ...]:
    """A key that is equal for linears whose products the library computes in the same way."""
    return (linear.weight.shape, linear.weight.dtype, linear.bias is None)


def _try_sizes(linears: list[nn.Linear]) -> dict[tuple[object, ...], tuple[int, ...]]:
    """The trusted sizes of each kind of linear. Empty on a CPU, where only tests run this."""
    sizes: dict[tuple[object, ...], tuple[int, ...]] = {}
    if not linears or linears[0].weight.device.type != "cuda":
        return sizes
    _split_sums(allowed=False)
    try:
        for linear in linears:
            if _kind(linear) not in sizes:
                sizes[_kind(linear)] = trusted_sizes(linear.weight, linear.bias)
    except torch.OutOfMemoryError:
        raise
    # cuBLAS refuses products that it can only compute with split sums
    except RuntimeError as error:
        _log.warning("products are cut to %d rows: %s", FIXED_ROWS, error)
        return {}
    return sizes


def _split_sums(*, allowed: bool) -> None:
    """Set whether cuBLAS may cut the sum over the inputs. Only cuBLASLt obeys a prohibition."""
    if not torch.cuda.is_available():
        return
    with warnings.catch_warnings():  # torch warns that the choice of a library is experimental
        warnings.simplefilter("ignore", UserWarning)
        torch.backends.cuda.preferred_blas_library("default" if allowed else "cublaslt")
    matmul = torch.backends.cuda.matmul
    matmul.allow_bf16_reduced_precision_reduction = (allowed, allowed)
    matmul.allow_fp16_reduced_precision_reduction = (allowed, allowed)


def _native_norm(module: nn.Module) -> NativeNorm | None:
    """torch's own norm if it computes what a model's RMS norm computes, else None."""
    weight = getattr(module, "weight", None)
    epsilon = getattr(module, "variance_epsilon", None)
    if not isinstance(weight, Tensor) or not isinstance(epsilon, float):
        return None
    native = NativeNorm(weight, epsilon)
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(4, *weight.shape, generator=generator).to(weight)
    expected = module(rows)
    bound = _NORM_TOLERANCE[weight.dtype] * float(expected.abs().max())
    return native if float((native(rows) - expected).abs().max()) <= bound else None
