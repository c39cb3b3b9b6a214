"""Steps of the GPU engine (scripts/gpu_check/engine.py): its rows, on a CPU in place of a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig

from paceline.errors import ConfigError
from scripts.gpu_check.engine import GpuTask, gpu_for, measure_gpu, ratios
from workers.engine.options import KvDtype

_SPEED, _SHARE = "prefill_tokens_per_second", "prefill_share_of_products"
_RATE = "product_operations_per_second"


def tiny_task(device: str, dtype: torch.dtype) -> GpuTask:
    config = LlamaConfig(
        vocab_size=300,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
    )
    return GpuTask(
        torch.device(device),
        config,
        dtype,
        contexts=(40, 300),
        rounds=2,
        copy_bytes=1 << 16,
        product_size=64,
        batches=(1, 2, 50),
        windows=(0, 8),
        prefill=32,
        kv_memory_bytes=4 << 20,
    )


@pytest.mark.parametrize(
    ("device", "dtype"),
    [
        ("cpu", torch.float32),
        pytest.param("cuda", torch.bfloat16, marks=pytest.mark.gpu),
    ],
)
def test_a_row_for_each_batch_and_window(device: str, dtype: torch.dtype) -> None:
    told: list[str] = []
    rows = list(measure_gpu(tiny_task(device, dtype), told.append))
    parts = [f"gpu, context {context}" for context in (40, 300)]
    assert [(row.part, row.batch, row.window) for row in rows] == [
        (part, batch, window) for part in parts for batch in (1, 2) for window in (0, 8)
    ]
    for row in rows:
        assert row.step_ms > 0
        assert row.bandwidth_share > 0
        with_verdicts = row.details["step_with_verdicts_ms"]
        assert isinstance(with_verdicts, float)
        assert with_verdicts >= row.step_ms
        assert row.details["same_text_in_windows"] is True
    assert "gpu: context 300: the KV of 50 sequences does not fit, left out" in told
    assert {name for name, _, _ in ratios(rows)} == {
        f"{part}: {what}"
        for part in parts
        for what in (
            "share of bandwidth",
            "prefill, share of products",
            "1 x verify 8 / off, at most",
        )
    }


@pytest.mark.parametrize(
    ("kv_dtype", "kv_itemsize", "float8_weights"),
    [("auto", 4, False), ("fp8", 1, False), ("auto", 4, True)],
)
def test_what_a_step_must_read_is_weights_and_kv(
    kv_dtype: KvDtype, kv_itemsize: int, float8_weights: bool
) -> None:
    """Twice the copy's bytes in the same time is twice the share."""
    task = replace(
        tiny_task("cpu", torch.float32),
        batches=(2,),
        kv_dtype=kv_dtype,
        float8_weights=float8_weights,
    )
    row = next(iter(measure_gpu(task, lambda _: None)))
    assert ("fp8 KV" in row.part) == (kv_dtype == "fp8")
    assert ("float8 weights" in row.part) == float8_weights
    # Linears: two layers of queries, keys and values, output, gate, up, down; and the LM head.
    linears = 2 * (64 * 64 + 2 * 64 * 32 + 64 * 64 + 3 * 64 * 96) + 300 * 64
    kv = 2 * 2 * 2 * 16 * 2 * (40 + 32)
    bandwidth = row.details["copy_bytes_per_second"]
    assert isinstance(bandwidth, float)
    weights = 4 * linears - 3 * float8_weights * (linears - 300 * 64)
    expected = (weights + kv_itemsize * kv) / bandwidth / (row.step_ms / 1000)
    assert row.bandwidth_share == pytest.approx(expected)
    # A prompt of 32: all linears but the head, and scores and values of half its pairs of tokens.
    operations = 2 * (linears - 300 * 64) * 32 + 2 * 4 * 16 * 4 * 32 * 32 / 2
    details = {name: float(str(row.details[name])) for name in (_SPEED, _SHARE, _RATE)}
    seconds = 32 / details[_SPEED]
    assert details[_SHARE] == pytest.approx(operations / seconds / details[_RATE])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so() -> None:
    with pytest.raises(ConfigError, match="sees none"):
        gpu_for("a step")
