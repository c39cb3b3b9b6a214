"""Measure a latency profile on the GPU of this host: `python scripts/measure_profile.py 8b FILE`.

The shapes are those of scripts/gpu_check/engine.py. With FILE
workers/emulated/profiles/8b-h100.toml the derived profile of an H100 is replaced.

A time covers the work of a worker between a step's arrival and its answer: lay out the step, run
it, choose tokens at temperature 1, copy them to the host. Weights are random, since times do not
depend on them. FILE becomes a profile like those in `workers/emulated/profiles/`, and says that it
was measured.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from paceline.errors import ConfigError
from paceline.sampling import SamplingParams, SequenceSpec
from scripts.gpu_check.engine import SHAPES, GpuTask, device_name, gpu_for, make_engine
from workers.engine.cuda.engine import CudaEngine, CudaOptions
from workers.engine.kv_blocks import blocks_for
from workers.engine.slices import Slice
from workers.process.kernels import use_kernels
from workers.verification.device_choice import Row, choose_tokens
from workers.verification.staging import to_host

CONTEXT = 1024
BATCHES = (1, 8, 64, 256)
TOKENS = (1, 16, 64, 256, 1024, 4096)
_FEW_BATCHES, _FEW_TOKENS, _FEW_BYTES = (1, 2), (1, 16), 64 << 20
"""Those of a dry run on a CPU, and its KV memory."""
WIDEST_VERIFIED = 33
"""Maximum tokens of a sequence for which each gets a row. More are a prompt, which gets one row."""


def pass_ms(engine: CudaEngine, batch: int, tokens: int, rounds: int) -> float:
    """Median milliseconds of a pass over `batch` sequences that feeds `tokens` tokens in all."""
    width = max(tokens // batch, 1)
    pages = blocks_for(CONTEXT + width, engine.block_size)
    rows_each = width if width <= WIDEST_VERIFIED else 1
    slices = [
        Slice(range(i * pages, (i + 1) * pages), CONTEXT, [7] * width, rows_each)
        for i in range(batch)
    ]
    spec = SequenceSpec(SamplingParams(temperature=1.0), seed=7, prompt_length=CONTEXT)
    prefix = [7] * (CONTEXT + width - rows_each + 1)
    rows = [Row(spec, prefix, (7,) * depth) for _ in range(batch) for depth in range(rows_each)]
    seconds = []
    for _ in range(rounds + 3):
        begin = time.perf_counter()
        to_host(*choose_tokens(engine.step(slices), rows))
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds[3:]) * 1000


def profile_text(
    shape: str,
    batches: Sequence[int],
    tokens: Sequence[int],
    table: Sequence[Sequence[float]],
    device: str,
    commit: str,
) -> str:
    """A profile file."""
    role, about = SHAPES[shape].role, SHAPES[shape].about
    invariant = "batch_invariant, " if role == "target" else ""
    rows = "\n".join(f"    [{', '.join(f'{ms:.2f}' for ms in row)}]," for row in table)
    return f'''# Measured: see `source`.
role = "{role}"
about = "{about}, on one {device}"
gpus = 1
hosts = 1
source = """
Measured by scripts/measure_profile.py at commit {commit} on one {device}, \\
torch {torch.__version__}: Paceline's engine with random weights, {invariant}\\
{CONTEXT:,} tokens of context a sequence; a pass with the choice of its tokens at \\
temperature 1, as the worker's host sees it; median of repeats. A worker's gRPC is not in it."""

# Milliseconds of a forward pass: a row a batch (sequences), a column a number of tokens fed.
[pass_ms]
batch = {list(batches)}
tokens = {list(tokens)}
table = [
{rows}
]
'''


def main() -> None:
    """Measure and write the file."""
    parser = argparse.ArgumentParser(prog="python scripts/measure_profile.py")
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("file", type=Path)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--commit", default="", help="what to name where there is no git")
    parser.add_argument("--cpu", action="store_true", help="a dry run, with shape tiny")
    given = parser.parse_args()
    config, device, dtype = SHAPES[given.shape].config, torch.device("cpu"), torch.float32
    batches, tokens = _FEW_BATCHES, _FEW_TOKENS
    if not given.cpu:
        try:
            device = gpu_for("measuring a profile")
        except ConfigError as error:
            sys.exit(f"error: {error}")
        use_kernels("auto")
        batches, tokens, dtype = BATCHES, TOKENS, torch.bfloat16
    options = CudaOptions(
        kv_memory_bytes=_FEW_BYTES if given.cpu else None,
        max_model_len=CONTEXT + max(tokens),
        batch_invariant=SHAPES[given.shape].role == "target",  # as drafters load their models
        max_num_seqs=max(batches),
        max_step_tokens=max(tokens),
    )
    with torch.inference_mode():
        engine = make_engine(GpuTask(device, config, dtype), options)
        table = [[pass_ms(engine, b, t, given.rounds) for t in tokens] for b in batches]
    commit = given.commit or _commit()
    text = profile_text(given.shape, batches, tokens, table, device_name(device), commit)
    given.file.write_text(text, encoding="utf-8")
    print(text)


def _commit() -> str:
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return found.stdout.strip() or "unknown"


if __name__ == "__main__":
    main()
