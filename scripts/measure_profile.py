"""Measure a latency profile on the GPU of this host: `python scripts/measure_profile.py 8b FILE`.

A time covers the work of a worker between a step's arrival and its answer: lay out the step, run
it, choose tokens at temperature 1, copy them to the host. Weights are random, since times do not
depend on them. FILE becomes a profile like those in `workers/emulated/profiles/`, and says that it
was measured.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import typer
from transformers import LlamaConfig, Qwen2Config

from deploy.bench.engine_gpu import GpuTask, gpu_for, llama_8b_config, make_engine
from paceline.errors import ConfigError
from paceline.sampling import SamplingParams, SequenceSpec
from workers.engine.cuda.engine import CudaEngine, CudaOptions
from workers.engine.kv_blocks import blocks_for
from workers.engine.slices import Slice
from workers.verification.device_choice import Row, choose_tokens
from workers.verification.staging import to_host

CONTEXT = 1024
BATCHES = (1, 8, 64, 256)
TOKENS = (1, 16, 64, 256, 1024, 4096)
WIDEST_VERIFIED = 33
"""Maximum tokens of a sequence for which each gets a row. More are a prompt, which gets one row."""
SHAPES = {
    "8b": (
        "target",
        "Llama-3-8B shapes",
        llama_8b_config(8192),
    ),
    "1b": (
        "drafter",
        "Llama-3.2-1B shapes",
        LlamaConfig(
            vocab_size=128_256,
            hidden_size=2048,
            intermediate_size=8192,
            num_hidden_layers=16,
            num_attention_heads=32,
            num_key_value_heads=8,
            head_dim=64,
            max_position_embeddings=8192,
            tie_word_embeddings=True,
        ),
    ),
    "0.5b": (
        "drafter",
        "Qwen2.5-0.5B shapes",
        Qwen2Config(
            vocab_size=151_936,
            hidden_size=896,
            intermediate_size=4864,
            num_hidden_layers=24,
            num_attention_heads=14,
            num_key_value_heads=2,
            max_position_embeddings=8192,
            tie_word_embeddings=True,
        ),
    ),
}


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


def profile_text(shape: str, table: Sequence[Sequence[float]], device: str, commit: str) -> str:
    """A profile file."""
    role, about, _ = SHAPES[shape]
    rows = "\n".join(f"    [{', '.join(f'{ms:.2f}' for ms in row)}]," for row in table)
    return f'''# Measured: see `source`.
role = "{role}"
about = "{about}, bfloat16, on one {device}"
gpus = 1
hosts = 1
source = """
Measured by scripts/measure_profile.py at commit {commit} on one {device}, \\
torch {torch.__version__}: Paceline's engine with random weights, batch_invariant, \\
{CONTEXT:,} tokens of context a sequence; a pass with the choice of its tokens at \\
temperature 1, as the worker's host sees it; median of repeats. A worker's gRPC is not in it."""

# Milliseconds of a forward pass: a row a batch (sequences), a column a number of tokens fed.
[pass_ms]
batch = {list(BATCHES)}
tokens = {list(TOKENS)}
table = [
{rows}
]
'''


def main(shape: str, file: Path, rounds: int = 15, commit: str = "") -> None:
    """SHAPE is 8b, 1b or 0.5b; FILE is written. COMMIT: what to name where there is no git."""
    if shape not in SHAPES:
        raise typer.BadParameter(f"SHAPE: expected one of {', '.join(SHAPES)}, got {shape!r}")
    _, _, config = SHAPES[shape]
    try:
        device = gpu_for("measuring a profile")
    except ConfigError as error:
        sys.exit(f"error: {error}")
    task = GpuTask(device, config, torch.bfloat16, CONTEXT, rounds, copy_bytes=1 << 28)
    options = CudaOptions(max_num_seqs=max(BATCHES), max_step_tokens=max(TOKENS))
    with torch.inference_mode():
        engine = make_engine(task, options)
        table = [[pass_ms(engine, b, t, rounds) for t in TOKENS] for b in BATCHES]
    commit = commit or _commit()
    file.write_text(profile_text(shape, table, torch.cuda.get_device_name(), commit))
    typer.echo(file.read_text())


def _commit() -> str:
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return found.stdout.strip() or "unknown"


if __name__ == "__main__":
    typer.run(main)
