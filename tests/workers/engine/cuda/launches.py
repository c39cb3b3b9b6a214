"""Launches of the engine's kernels as its models make them, for compiling.py; nothing runs."""

from __future__ import annotations

from itertools import product

import torch
from torch import Tensor

from workers.engine.cuda.attention_kernel import attend_pages
from workers.engine.cuda.float8_kernels import round_rows
from workers.engine.cuda.kv_cache import FLOAT8, CudaKvCache
from workers.engine.cuda.layer_kernels import (
    HeadNorms,
    add_and_norm,
    gate,
    rotate_and_store,
)
from workers.engine.cuda.linears import Rounding
from workers.engine.cuda.tree_kernel import attend_paths


def new(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """A tensor without memory, whose address Triton takes for a multiple of 16 bytes."""
    return torch.empty(shape, dtype=dtype, device="meta")


def launch_layers() -> None:
    """Launch the layer kernels of an 8 B Llama in bfloat16."""
    _launch_layers(torch.bfloat16, 4096, 32, 8, 128)


def launch_layers_of_other_models() -> None:
    """Launch the kernels with other types and sizes. Some sizes are not powers of two."""
    _launch_layers(torch.float32, 4096, 32, 8, 128)
    _launch_layers(torch.float16, 904, 14, 2, 80)
    _launch_layers(torch.bfloat16, 16384, 128, 8, 128)


def _launch_layers(dtype: torch.dtype, size: int, queries: int, keys: int, head: int) -> None:
    rows, weight_D = new(64, size, dtype=dtype), new(head, dtype=dtype)
    for delta in (None, rows):
        add_and_norm(rows, delta, new(size, dtype=dtype), 1e-5)
    for norms in (None, HeadNorms(weight_D, weight_D, 1e-6, 1e-6)):
        rotate_and_store(
            new(64, queries + 2 * keys, head, dtype=dtype),
            new(64, head, dtype=dtype),
            new(64, head, dtype=dtype),
            new(64, dtype=torch.int64),
            new(512, keys, head, dtype=dtype),
            new(512, keys, head, dtype=dtype),
            norms,
        )
    gate(new(64, 7 * size, dtype=dtype))


def launch_attention() -> None:
    """Launch steps of few rows, a prefill and trees of an 8 B Llama, with several sizes."""
    _launch_attention(queries=32, keys=8, head_size=128)


def launch_attention_of_other_models() -> None:
    """Groups of 8, as in a rank of a 70 B Llama, and small heads."""
    _launch_attention(queries=16, keys=2, head_size=128)
    _launch_attention(queries=32, keys=4, head_size=64)


def launch_float8() -> None:
    """Float8 KV with scales of an 8 B Llama, and three ways to round the rows of its products."""
    _launch_attention(queries=32, keys=8, head_size=128, kv_dtype=FLOAT8)
    heads, factors = new(64, 48, 128), new(64, 128)
    keys, values = (new(512, 8, 128, dtype=FLOAT8) for _ in range(2))
    scales = new(2, 8, dtype=torch.float32)
    slots = new(64, dtype=torch.int64)
    rotate_and_store(heads, factors, factors, slots, keys, values, scales_2H=scales)
    for rounding in (Rounding(), Rounding(None, new(dtype=torch.float32)), Rounding(128)):
        round_rows(new(64, 14336), rounding)
        gate(new(64, 2 * 14336), rounding)
        for size in (4096, 8192):
            rows, weight = new(64, size), new(size)
            for how in (None, rounding):
                add_and_norm(rows, rows, weight, 1e-5, how)


def _launch_attention(
    *, queries: int, keys: int, head_size: int, kv_dtype: torch.dtype = torch.bfloat16
) -> None:
    layer = CudaKvCache(
        num_layers=2,
        num_heads=keys,
        head_size=head_size,
        num_blocks=40,
        dtype=kv_dtype,
        device=torch.device("meta"),
        scales_L2H=new(2, 2, keys, dtype=torch.float32) if kv_dtype == FLOAT8 else None,
    ).layers[0]
    input_scales = [None] if kv_dtype != FLOAT8 else [None, new(dtype=torch.float32)]
    steps = ((64, 2), (65, 17), (1, 1), (2048, 1), (4096, 600))
    for (num_tokens, num_sequences), input_scale in product(steps, input_scales):
        attend_pages(
            new(num_tokens, queries, head_size),
            layer,
            new(num_sequences + 1, dtype=torch.int32),
            new(num_sequences, dtype=torch.int32),
            new(num_sequences, 33, dtype=torch.int32),
            0.1,
            causal=num_tokens != 65,
            input_scale=input_scale,
        )
    trees = ((1, 1, 1), (2, 34, 20), (65, 4096, 128))
    for (num_trees, num_tokens, num_slots), input_scale in product(trees, input_scales):
        attend_paths(
            new(num_tokens, queries, head_size),
            layer,
            new(num_trees + 1, dtype=torch.int32),
            new(num_trees, dtype=torch.int32),
            new(num_trees, 33, dtype=torch.int32),
            new(num_tokens, num_slots, dtype=torch.int32),
            new(num_tokens, dtype=torch.int32),
            0.1,
            input_scale=input_scale,
        )
