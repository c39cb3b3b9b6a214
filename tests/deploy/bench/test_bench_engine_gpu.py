"""`paceline bench engine --device cuda`: its rows, on a CPU in place of a GPU, and its refusal."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig

from deploy.bench.engine import goals
from deploy.bench.engine_gpu import GpuTask, llama_8b, measure_gpu
from paceline.errors import ConfigError


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
        context=40,
        rounds=2,
        copy_bytes=1 << 16,
        batches=(1, 2),
        windows=(0, 8),
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
    rows = measure_gpu(tiny_task(device, dtype), told.append)
    parts = ("gpu", "gpu, not invariant")
    assert [(row.part, row.batch, row.window) for row in rows] == [
        (part, batch, window) for part in parts for batch in (1, 2) for window in (0, 8)
    ]
    for row in rows:
        assert row.step_ms is not None
        assert row.step_ms > 0
        assert row.bandwidth_share is not None
        assert row.bandwidth_share > 0
        assert row.tokens_per_second is not None
        assert row.details["step_with_verdicts_ms"] >= row.step_ms  # type: ignore[operator]
        # In float32 there are no ties, so no window of a text is refused, invariant or not.
        if dtype == torch.float32 or row.part == "gpu":
            assert row.details["same_text_in_windows"] is True
    assert told
    named = {goal.name: goal for goal in goals(rows)}
    assert set(named) == {
        f"{part}: {what}"
        for part in parts
        for what in ("share of bandwidth", "step of verify 8 / off, at most")
    }


def test_what_a_step_must_read_is_weights_and_kv() -> None:
    """Twice the copy's bytes in the same time is twice the share."""
    row = measure_gpu(replace(tiny_task("cpu", torch.float32), batches=(2,)), lambda _: None)[0]
    # Linears: two layers of queries, keys and values, output, gate, up, down; and the LM head.
    linears = 2 * (64 * 64 + 2 * 64 * 32 + 64 * 64 + 3 * 64 * 96) + 300 * 64
    kv = 2 * 2 * 2 * 16 * 2 * (40 + 32)
    bandwidth = row.details["copy_bytes_per_second"]
    assert isinstance(bandwidth, float)
    assert row.step_ms is not None
    expected = 4 * (linears + kv) / bandwidth / (row.step_ms / 1000)
    assert row.bandwidth_share == pytest.approx(expected)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so() -> None:
    with pytest.raises(ConfigError, match="sees none"):
        llama_8b(quick=True)
