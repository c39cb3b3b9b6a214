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

import torch
from torch import Tensor, nn

from workers.engine.modules import join_projections, replace_norms

_log = logging.getLogger(__name__)

FIXED_ROWS = 64
"""The rows of every product are a multiple of this number. It is small enough that a decoding step
stays bound by memory.
"""
_TRIED = (128, 192, 256, 320, 384, 512, 768, 1024, 1536, 2048)
"""Numbers of rows to try besides FIXED_ROWS."""
_MOST_OUTPUTS = 1 << 28
"""Maximum number of outputs of a trial: half a GiB in a 16-bit type."""
_NORM_TOLERANCES = {torch.float32: 1e-5, torch.float16: 0.003, torch.bfloat16: 0.02}
"""The largest differences allowed in replace_norms. torch's norm may omit one rounding, the one
before the product with the weight.
"""


class FixedRowsLinear(nn.Module):
    """A linear layer whose products have one of `sizes` as their number of rows.

    All sizes are multiples of FIXED_ROWS and give a row the same bits (see `trusted_sizes`).
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
    """Sizes, largest first, that add up to `num_rows`. Zero rows give one part of size 0."""
    parts: list[int] = []
    for size in sizes:
        parts += [size] * (num_rows // size)
        num_rows %= size
    assert num_rows == 0, "the rows are a multiple of the smallest size"
    return tuple(parts) or (0,)


def trusted_sizes(weight_MN: Tensor, bias_M: Tensor | None = None) -> tuple[int, ...]:
    """The numbers of rows that give each row the bits of a product of FIXED_ROWS rows.

    A trial uses these weights and random rows. If the device's library sums in another order, at
    least some of the thousands of outputs differ.
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
    """Replace the modules of a model, or of a rank's part of one, on its final device.

    Projections are joined, and each norm becomes one kernel. With `batch_invariant`, products have
    fixed numbers of rows. On a GPU this sets, for the whole process, whether cuBLAS may cut sums
    (_split_sums).
    """
    for module in list(model.modules()):
        join_projections(module)
    linears = [module for module in model.modules() if type(module) is nn.Linear]
    sizes = _try_sizes(linears) if batch_invariant else {}
    if not sizes:
        _split_sums(allowed=True)
    replace_norms(model, _NORM_TOLERANCES)
    if not batch_invariant:
        return
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                fixed = FixedRowsLinear(child, sizes.get(_kind(child), (FIXED_ROWS,)))
                setattr(parent, name, fixed)


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
