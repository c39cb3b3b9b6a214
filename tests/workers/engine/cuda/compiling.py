"""Compiles the kernels between a layer's products for an H100, where there is no GPU.

Run as a program, since Triton's interpreter, which tests of kernels use, compiles nothing. The
launchers are called as the engine calls them, with tensors that have no memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from workers.engine.cuda import layer_kernels
from workers.engine.cuda.layer_kernels import HeadNorms

H100 = GPUTarget("cuda", 90, 32)
KERNELS = ("_add_and_norm", "_rotate_and_store", "_gate")
_TYPES = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.int64: "*i64",
}


class Compiled:
    """In the place of a kernel: a launch compiles it, and its PTX is kept."""

    def __init__(self, kernel: Any, texts: list[str]) -> None:
        self._kernel = kernel
        self._texts = texts

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*given: Any, **named: Any) -> None:
            names = self._kernel.arg_names
            constants = {name: value for name, value in named.items() if name in names}
            options = {name: value for name, value in named.items() if name not in names}
            types = {name: _type(value) for name, value in zip(names, given, strict=False)}
            # As Triton finds them where they are allocated: at multiples of 16 bytes.
            aligned = {
                (place,): [["tt.divisibility", 16]]
                for place, name in enumerate(names)
                if types.get(name, "").startswith("*")
            }
            signature = {name: types.get(name, "constexpr") for name in names}
            source = ASTSource(self._kernel, signature, constants, aligned)
            self._texts.append(triton.compile(source, target=H100, options=options).asm["ptx"])

        return launch


def _type(value: Any) -> str:
    return _TYPES[value.dtype] if isinstance(value, Tensor) else "fp32"


def launch_all(dtype: torch.dtype, size: int, queries: int, keys: int, head: int) -> None:
    """What layers of such a model launch."""

    def new(*shape: int, of: torch.dtype = dtype) -> Tensor:
        return torch.empty(shape, dtype=of, device="meta")

    rows, norms = new(64, size), HeadNorms(new(head), new(head), 1e-6, 1e-6)
    for delta in (None, rows):
        layer_kernels.add_and_norm(rows, delta, new(size), 1e-5)
    for one in (None, norms):
        layer_kernels.rotate_and_store(
            new(64, queries + 2 * keys, head),
            new(64, head),
            new(64, head),
            new(64, of=torch.int64),
            new(512, keys, head),
            new(512, keys, head),
            one,
        )
    layer_kernels.gate(new(64, 7 * size))


def main() -> None:
    """Compile for several models; raises where a kernel does not compile or has loads too small."""
    texts: list[str] = []
    for name in KERNELS:
        setattr(layer_kernels, name, Compiled(getattr(layer_kernels, name), texts))
    launch_all(torch.bfloat16, 4096, 32, 8, 128)
    for text in texts:
        assert ".global.v4.b32" in text, "16 bytes a load"
        assert ".local" not in text, "registers are enough"
    assert len(texts) == 5
    launch_all(torch.float32, 4096, 32, 8, 128)
    launch_all(torch.float16, 904, 14, 2, 80)
    launch_all(torch.bfloat16, 16384, 128, 8, 128)
    assert len(texts) == 20


if __name__ == "__main__":
    main()
