"""What loading leaves behind in a worker's process."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

from tests.tiny import make_tiny_checkpoint
from workers.engine.loading import load_engine


async def test_the_thread_that_loaded_is_gone(tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(tmp_path)
    before = set(threading.enumerate())
    names: set[str] = set()

    async def watch() -> None:
        while True:
            names.update(thread.name for thread in set(threading.enumerate()) - before)
            await asyncio.sleep(0.001)

    watching = asyncio.create_task(watch())
    await load_engine(folder, weights="float32", threads=1, kv_memory_bytes=1 << 20)
    watching.cancel()
    assert any(name.startswith("load") for name in names)  # it loaded beside the event loop
    assert not [t for t in threading.enumerate() if t.name.startswith("load")]
