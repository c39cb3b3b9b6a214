"""A small model that drafts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiny import make_tiny_checkpoint
from tests.workers.drafting import long_prompts
from tests.workers.drafting.mirror import (
    BLOCK_BYTES,
    MAX_LEN,
    VOCAB_SIZE,
    FreshDrafter,
)
from workers.engine.cpu.engine import CpuEngine


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(
        tmp_path_factory.mktemp("tiny"), vocab_size=VOCAB_SIZE, max_position_embeddings=MAX_LEN
    )


@pytest.fixture(scope="module")
def engine(checkpoint: Path) -> CpuEngine:
    # Four blocks for two sequences of up to two and their trees: the pool is full at times.
    return CpuEngine(checkpoint, threads=1, kv_memory_bytes=4 * BLOCK_BYTES)


@pytest.fixture(scope="module")
def fresh(checkpoint: Path) -> FreshDrafter:
    return FreshDrafter(CpuEngine(checkpoint, threads=1, kv_memory_bytes=2 * BLOCK_BYTES))


@pytest.fixture(scope="module")
def long_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(
        tmp_path_factory.mktemp("long"),
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=long_prompts.MAX_LEN,
    )


@pytest.fixture(scope="module")
def long_engine(long_folder: Path) -> CpuEngine:
    # Three sequences of four blocks and their trees: idle blocks must go at times.
    return CpuEngine(long_folder, threads=1, kv_memory_bytes=15 * BLOCK_BYTES)
