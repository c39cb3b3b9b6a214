"""Memory in figures: what a copy moves, what a step must read, what a process holds."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from workers.engine.kv_sizes import kv_sizes_of
from workers.engine.linears import activation_dtype
from workers.engine.weight_form import BITS_OF_A_WEIGHT, WeightForm

COPY_BYTES = 256 * 1024 * 1024
_COPY_ROUNDS = 7


def copy_bandwidth(threads: int, *, num_bytes: int = COPY_BYTES) -> float:
    """Bytes a second that a plain copy reads and writes, both counted; the best of a few."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        source = torch.ones(num_bytes // 4, dtype=torch.float32)
        target = torch.zeros_like(source)
        seconds = []
        for _ in range(_COPY_ROUNDS):
            start = time.perf_counter()
            target.copy_(source)
            seconds.append(time.perf_counter() - start)
    finally:
        torch.set_num_threads(before)
    return 2 * num_bytes / min(seconds)


@dataclass(frozen=True, slots=True)
class ModelBytes:
    """`weights`: of the whole model. `read_a_step`: of the linears, which every step multiplies.

    `kv_a_token`: keys and values of one position in all layers.
    """

    weights: int
    read_a_step: int
    kv_a_token: int
    vocab_size: int

    def of_step(self, contexts: Sequence[int]) -> int:
        """What a step over sequences of these lengths reads at least."""
        return self.read_a_step + self.kv_a_token * sum(contexts)


def model_bytes(folder: Path, weights: WeightForm) -> ModelBytes:
    """Sizes of a checkpoint, its weights in a form; KV has 16 bits unless activations have 32."""
    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    each = BITS_OF_A_WEIGHT[weights] / 8
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    in_linears = sum(linear.weight.numel() for linear in linears)
    kv = kv_sizes_of(config)
    return ModelBytes(
        weights=int(sum(one.numel() for one in model.parameters()) * each),
        read_a_step=int(in_linears * each),
        kv_a_token=2
        * kv["num_layers"]
        * kv["num_heads"]
        * kv["head_size"]
        * activation_dtype(weights).itemsize,
        vocab_size=config.vocab_size,
    )


def peak_memory(pid: int) -> int:
    """The most bytes that a process has had resident so far."""
    return _status_bytes(Path(f"/proc/{pid}/status").read_text(encoding="utf-8"))


def runtime_memory() -> int:
    """What a shard's process holds before it loads anything: Python, torch and transformers."""
    program = "import workers.target_shard; print(open('/proc/self/status').read())"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    return _status_bytes(done.stdout)


def _status_bytes(status: str) -> int:
    for line in status.splitlines():
        name, _, value = line.partition(":")
        if name == "VmHWM":
            return int(value.split()[0]) * 1024
    raise AssertionError("/proc/PID/status names no VmHWM")
