"""A tiny checkpoint, and a target shard that serves it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.tiny import make_tiny_checkpoint
from workers.process.server import RunningServer
from workers.target.shard import TargetShardOptions, serve_target_shard


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
async def shard(checkpoint: Path) -> AsyncIterator[RunningServer]:
    options = TargetShardOptions(checkpoint, threads=1, kv_memory_bytes=4 * 1024 * 1024)
    server = await serve_target_shard(options, host="127.0.0.1")
    yield server
    await server.stop()
