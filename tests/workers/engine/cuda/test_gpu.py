"""What only a GPU can show: the kernel, the graphs, the memory, the invariance of its products."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from paceline.errors import ConfigError
from tests.tiny import make_tiny_checkpoint
from tests.workers.engine.cuda.engines import make_engine
from tests.workers.engine.trees import random_tree
from workers.engine.cpu.engine import CpuEngine
from workers.engine.cuda.engine import CudaEngine
from workers.engine.open import open_engine
from workers.engine.slices import Slice

pytestmark = pytest.mark.gpu

VOCAB, LENGTH = 384, 300
TOKEN_IDS = torch.randint(VOCAB, (LENGTH,), generator=torch.Generator().manual_seed(1)).tolist()
TIE = 0.02
"""A share of the largest logit. Another token within it may win in bfloat16."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("gpu"), architecture="qwen3")


@pytest.fixture(scope="module")
def engine(folder: Path) -> CudaEngine:
    return make_engine(folder, "cuda", dtype=torch.bfloat16)


def in_windows(engine: CudaEngine, widths: Sequence[int]) -> torch.Tensor:
    engine.step([Slice([1, 2], 0, TOKEN_IDS[:200], 0)])
    rows, start = [], 200
    for width in widths:
        rows.append(engine.step([Slice([1, 2], start, TOKEN_IDS[start : start + width], width)]))
        start += width
    return torch.cat(rows)


def test_rows_do_not_depend_on_the_window(engine: CudaEngine) -> None:
    assert engine.batch_invariant
    expected = engine.step([Slice([5, 3], 0, TOKEN_IDS, LENGTH)])[200:]
    for widths in ([1] * 100, [9] * 11, [2, 3, 5, 17, 33], [65, 35]):
        count = sum(widths)
        assert torch.equal(in_windows(engine, widths), expected[:count])


def test_a_captured_step_gives_the_bits_of_the_same_step_run_as_it_is(
    folder: Path, engine: CudaEngine
) -> None:
    eager = make_engine(folder, "cuda", dtype=torch.bfloat16, graphs=False)
    assert engine._graphs is not None
    assert eager._graphs is None
    tree = random_tree(1, prefix_length=250, num_nodes=8, vocab_size=VOCAB)
    rows = []
    for one in (engine, eager):
        one.step([Slice([1, 2], 0, TOKEN_IDS[:260], 0), Slice([3, 4], 0, tree.prefix, 0)])
        chains = one.step([Slice([1, 2], 260, TOKEN_IDS[260:267], 7), Slice([6], 0, [5], 1)])
        nodes = one.step([tree.piece([3, 4], 249, 8, 9)])
        rows.append(torch.cat([chains, nodes]))
    assert torch.equal(rows[0], rows[1])


def test_memory_for_kv_has_a_bound(folder: Path) -> None:
    """Without a size, an engine takes what is free, but not more than that for `kv_tokens`."""
    bounded = open_engine(
        folder, weights="float32", threads=1, kv_memory_bytes=None, kv_tokens=1000, device="cuda"
    )
    assert bounded.num_blocks == 4


def test_a_dropped_engine_gives_its_memory_back(folder: Path) -> None:
    """It does so at once, without waiting for Python's garbage collector."""
    gc.collect()
    gc.disable()
    try:
        before = torch.cuda.memory_allocated()
        dropped = make_engine(folder, "cuda", dtype=torch.bfloat16, kv_memory_bytes=1 << 30)
        dropped.step([Slice([0], 0, TOKEN_IDS[:5], 5)])
        assert torch.cuda.memory_allocated() > before + (1 << 29)
        del dropped
        assert torch.cuda.memory_allocated() < before + (1 << 29)
    finally:
        gc.enable()


def test_automatic_kv_leaves_room(folder: Path) -> None:
    engine = make_engine(folder, "cuda", dtype=torch.bfloat16, kv_memory_bytes=None)
    free, total = torch.cuda.mem_get_info()
    assert 0.05 * total < free < 0.5 * total
    engine.step([Slice([0, engine.num_blocks - 1], 0, TOKEN_IDS, LENGTH)])


def test_more_kv_than_there_is_memory_is_refused(folder: Path) -> None:
    _, total = torch.cuda.mem_get_info()
    with pytest.raises(ConfigError, match="does not fit"):
        make_engine(folder, "cuda", kv_memory_bytes=total)


def test_text_is_that_of_the_cpu_but_for_ties(folder: Path, engine: CudaEngine) -> None:
    """The GPU decodes in bfloat16. The CPU's float32 logits judge each token."""
    cpu = CpuEngine(folder, weights="float32", threads=1, kv_memory_bytes=1 << 20)
    token_ids, stored = list(TOKEN_IDS[:40]), 0
    for _ in range(100):
        row = engine.step([Slice([0], stored, token_ids[stored:], 1)])
        judge_V = cpu.step([Slice([0, 1], stored, token_ids[stored:], 1)])[0]
        stored = len(token_ids)
        token_ids.append(int(row[0].argmax()))
        margin = judge_V.max() - judge_V[token_ids[-1]]
        assert margin <= TIE * judge_V.abs().max()


def test_the_factory_takes_the_gpu_where_there_is_one(folder: Path) -> None:
    engine = open_engine(folder, weights="float32", threads=1, kv_memory_bytes=4 << 20)
    assert isinstance(engine, CudaEngine)
    assert engine.forward_seconds >= 0.0
