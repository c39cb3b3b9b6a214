"""Compiles each kernel of noise_kernel.py for an H100, without one; not for the interpreter.

    python -m tests.workers.verification.compile_noise_kernels

The types are those of choose_by_kernels; V has several blocks, and rows that begin at 16 bytes.
"""

from __future__ import annotations

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from workers.verification import noise_kernel

VOCAB = 128_256
CONSTANTS = {"V": VOCAB, "BLOCK": noise_kernel.BLOCK, "PADDED": 64, "INTERPRETED": False}
TYPES = {
    "logits": "*fp32",
    "stride": "i32",
    "log_weights": "*fp32",
    "weights": "*fp64",
    "keys": "*i64",
    "likeliest": "*i64",
    "drawn": "*i64",
    "words": "*i64",
    "words_stride": "i32",
    "positions": "*i64",
    "sample_indices": "*i64",
    "temperatures": "*fp32",
    "greedy": "*i1",
    "top_k": "*i64",
    "top_p": "*fp64",
    "log_min_p": "*fp32",
    "num_below": "*i64",
    "sorted_ids": "*i64",
    "token_ids": "*i32",
    "largest": "*fp32",
    "num_blocks": "i32",
}
ALIGNED = ("logits", "stride", "log_weights", "weights", "keys", "likeliest", "drawn", "sorted_ids")


def compiled_ptx(kernel: triton.JITFunction, num_warps: int) -> str:
    names = kernel.arg_names
    source = ASTSource(
        fn=kernel,
        signature={name: TYPES.get(name, "constexpr") for name in names},
        constexprs={name: CONSTANTS[name] for name in names if name not in TYPES},
        attrs={
            (names.index(name),): [["tt.divisibility", 16]] for name in names if name in ALIGNED
        },
    )
    target = GPUTarget("cuda", 90, 32)
    return str(triton.compile(source, target=target, options={"num_warps": num_warps}).asm["ptx"])


if __name__ == "__main__":
    for name, kernel in vars(noise_kernel).items():
        if name.endswith("_kernel"):
            ptx = compiled_ptx(kernel, num_warps=1 if name == "_finish_kernel" else 4)
            wide = ptx.count("ld.global.v4.b32")
            print(f"{name}: {wide} loads of 16 bytes")  # noqa: T201
