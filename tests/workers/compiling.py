"""Kernels compiled for an H100 without a GPU.

The interpreter, with which tests run kernels on a CPU, forgives what the compiler refuses. So a
process without it calls a function that launches kernels. Each launch compiles for the types and
alignments of its arguments, and runs nothing. Tensors may be on the meta device.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Variant:
    """A compiled kernel, as counts of instructions in its PTX.

    `wide_loads`: loads of 16 bytes a thread. `products`: products on tensor cores. `fused`: float32
    products and sums to which the compiler gave one rounding (logarithms use such too, but with
    `ftz`). `spills`: whether registers are kept in memory. `row_sum`: the type and the distribution
    over threads of what the kernel first adds up along one dimension in float32, which determine
    the order of that sum; "" if there is nothing.
    """

    wide_loads: int
    products: int
    fused: int
    spills: bool
    row_sum: str


def compile_launches(launch: Callable[[], None], cache: Path) -> dict[str, list[Variant]]:
    """The variants of every kernel that `launch`, a function of a module, launches, by name.

    `cache`: an empty folder for Triton. Takes some seconds.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", __name__, launch.__module__, launch.__name__],
        env=environment | {"TRITON_CACHE_DIR": str(cache)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    return {name: [Variant(**one) for one in variants] for name, variants in found.items()}


def _main(module: str, function: str) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.runtime.jit import JITFunction

    class NoDevice:
        """Answers what Triton asks a driver before it compiles."""

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int) -> int:
            return device

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", 90, 32)

    compiled: dict[str, dict[int, Any]] = defaultdict(dict)

    def compile_only(kernel: Any, grid: tuple[int, ...]) -> Callable[..., None]:
        def call(*args: object, **options: object) -> None:
            made = kernel.warmup(*args, grid=grid, **options)
            compiled[kernel.__name__][id(made)] = made

        return call

    triton.runtime.driver.set_active(NoDevice())
    JITFunction.__getitem__ = compile_only
    getattr(importlib.import_module(module), function)()
    found = {
        name: [asdict(_read(one.asm["ptx"], one.asm["ttgir"])) for one in variants.values()]
        for name, variants in compiled.items()
    }
    sys.stdout.write(json.dumps(found))


def _read(ptx: str, ttgir: str) -> Variant:
    layouts = dict(re.findall(r"^(#\w+) = (.*)$", ttgir, re.MULTILINE))
    sums = re.findall(
        r'"tt\.reduce".*\n.*\n.*arith\.addf.*\n.*\n *\}\) : \((tensor<\d+xf32), (#\w+)>', ttgir
    )
    return Variant(
        wide_loads=len(re.findall(r"ld\.global\.(?:\w+\.)*v4\.b32", ptx)),
        products=ptx.count("wgmma.mma_async"),
        fused=ptx.count("fma.rn.f32"),
        spills=".local" in ptx,
        row_sum=f"{sums[0][0]} {layouts[sums[0][1]]}" if sums else "",
    )


if __name__ == "__main__":
    _main(*sys.argv[1:])
