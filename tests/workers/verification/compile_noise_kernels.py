"""Compiles for an H100, without one, what choose_by_kernels would launch; not for the interpreter.

    python -m tests.workers.verification.compile_noise_kernels

A line for each kernel: its name, how many variants of it numbers of rows and samplings lead to, and
the loads of 16 bytes of the last.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from paceline.sampling import SamplingParams, SequenceSpec
from workers.row_params import Row, pack_rows
from workers.verification.kernel_choice import choose_by_kernels

VOCAB = 128_256
CPU = torch.device("cpu")


class NoDevice:
    """What Triton asks of a driver before it compiles."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return device

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


def main() -> None:
    compiled: dict[str, dict[int, Any]] = defaultdict(dict)

    def compile_only(kernel: Any, grid: tuple[int, ...]) -> Callable[..., None]:
        def call(*args: object, **options: object) -> None:
            made = kernel.warmup(*args, grid=grid, **options)
            compiled[kernel.__name__][id(made)] = made

        return call

    triton.runtime.driver.set_active(NoDevice())
    JITFunction.__getitem__ = compile_only
    samplings = (SamplingParams(temperature=0.0), SamplingParams(), SamplingParams(top_p=0.9))
    for count in (1, 2, 3, 16):
        for sampling in samplings:
            rows = [Row(SequenceSpec(sampling, 1, 1), [1])] * count
            params = pack_rows(rows, vocab_size=VOCAB, device=CPU)
            choose_by_kernels(torch.zeros(count, VOCAB), params)
    for name, variants in compiled.items():
        ptx = list(variants.values())[-1].asm["ptx"]
        print(name, len(variants), ptx.count("ld.global.v4.b32"))  # noqa: T201


if __name__ == "__main__":
    main()
