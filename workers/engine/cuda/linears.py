"""What a GPU engine puts in the place of linears and norms, so that a row's bits are its own.

cuBLAS takes another kernel for another number of rows, and its kernels may sum in another order:
some cut the sum over the inputs into parts and add these (split-K). Here cuBLAS is told not to, no
product has fewer than 64 rows, and a number of rows is used only after a trial has shown that it
gives each row the bits which it has in a product of 64; else the rows are cut to numbers that do.

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
"""Rows of every product are a multiple of this: few enough that a decoding step stays bound by
memory."""
_TRIED = (128, 192, 256, 320, 384, 512, 768, 1024, 1536, 2048)
"""Numbers of rows that a trial is made with. Steps' rows are cut to these and FIXED_ROWS."""
_MOST_OUTPUTS = 1 << 28
"""Outputs of a trial at most: half a GiB of a 16-bit type."""
_NORM_TOLERANCE = {torch.float32: 1e-5, torch.float16: 0.003, torch.bfloat16: 0.02}
"""Of the largest value: a rounding more or less, before the weight is multiplied."""


class FixedRowsLinear(nn.Module):
    """A linear layer that multiplies only such numbers of rows at once as `sizes` says.

    All of these, multiples of FIXED_ROWS, give a row the same bits: see `trusted_sizes`.
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
    """Rows cut into `sizes`, which are sorted, the largest first; none are one part of none."""
    parts: list[int] = []
    for size in sizes:
        parts += [size] * (num_rows // size)
        num_rows %= size
    assert num_rows == 0, "the rows are a multiple of the smallest size"
    return tuple(parts) or (0,)


def trusted_sizes(weight_MN: Tensor, bias_M: Tensor | None = None) -> tuple[int, ...]:
    """Numbers of rows whose product with these weights has the bits of products of FIXED_ROWS.

    Tried out, on random rows: what the device's library sums in another order differs in some of
    the thousands of outputs.
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
    """Join projections, and make norms one kernel; with `batch_invariant` fix products' rows too.

    The model may be a rank's part, and is where it is going to run. On a GPU this chooses, for the
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
    """Equal for linears whose products the device's library computes in one way."""
    return (linear.weight.shape, linear.weight.dtype, linear.bias is None)


def _try_sizes(linears: list[nn.Linear]) -> dict[tuple[object, ...], tuple[int, ...]]:
    """The trusted sizes of each kind of linear. On a CPU, where only tests run: none."""
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
    except RuntimeError as error:  # cuBLAS refuses products that it can only compute split
        _log.warning("products are cut to %d rows: %s", FIXED_ROWS, error)
        return {}
    return sizes


def _split_sums(*, allowed: bool) -> None:
    """Whether cuBLAS may cut the sum over the inputs into parts. cuBLASLt alone heeds a no."""
    if not torch.cuda.is_available():
        return
    with warnings.catch_warnings():  # The choice of a library is experimental, it says.
        warnings.simplefilter("ignore", UserWarning)
        torch.backends.cuda.preferred_blas_library("default" if allowed else "cublaslt")
    matmul = torch.backends.cuda.matmul
    matmul.allow_bf16_reduced_precision_reduction = (allowed, allowed)
    matmul.allow_fp16_reduced_precision_reduction = (allowed, allowed)


def _native_norm(module: nn.Module) -> NativeNorm | None:
    """torch's own norm where it computes what an RMS norm of a model computes, else None."""
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
