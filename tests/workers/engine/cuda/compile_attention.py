"""Compile the attention kernels for an H100, without one: a line for each.

Its name, its products on tensor cores and its contracted products and sums. To be
run without TRITON_INTERPRET.
"""

from __future__ import annotations

import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from workers.engine.cuda import attention_kernel

H100 = GPUTarget("cuda", 90, 32)
TYPES = {
    **dict.fromkeys(("query", "keys", "values", "output"), "*bf16"),
    **dict.fromkeys(("lse", "unit_outputs", "unit_sums"), "*fp32"),
    **dict.fromkeys(("ends", "used", "table"), "*i32"),
    "scaling": "fp32",
}
ALIGNED = ("query", "keys", "values", "output", "unit_outputs")
STRIDES = ("query_stride", "page_stride", "key_stride", "head_stride")


def compile_kernel(kernel: Any, head_size: int, num_warps: int, **constants: Any) -> str:
    constants |= {"NUM_QUERY_HEADS": 32, "HEAD_SIZE": head_size, "BLOCK_D": head_size}
    names = kernel.arg_names
    signature = {
        name: "constexpr" if name in constants else TYPES.get(name, "i32") for name in names
    }
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(names)
        if name in (*ALIGNED, *STRIDES)
    }
    compiled = triton.compile(
        ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned),
        target=H100,
        options={"num_warps": num_warps, "num_stages": 3, "enable_fp_fusion": False},
    )
    ptx = compiled.asm["ptx"]
    return f"{kernel.__name__} {ptx.count('wgmma.mma_async')} {ptx.count('fma.rn.f32')}"


def main() -> None:
    for folds in (False, True):
        line = compile_kernel(attention_kernel._attend, 128, 4, GROUP=4, TILE_HEADS=4, FOLDS=folds)
        sys.stdout.write(line + "\n")
    sys.stdout.write(compile_kernel(attention_kernel._fold_stored, 128, 1) + "\n")


if __name__ == "__main__":
    main()
