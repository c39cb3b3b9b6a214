"""Runs programs beside servers of the test's own event loop."""

from __future__ import annotations

import asyncio
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SECONDS = 240.0


async def run_program(*command: str, cwd: Path = ROOT) -> tuple[int, str, str]:
    """The exit code of a command, and what it writes to its two streams. It must end in time."""
    process = await asyncio.create_subprocess_exec(
        *command, cwd=cwd, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        out, error = await asyncio.wait_for(process.communicate(), SECONDS)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode is not None
    return process.returncode, out.decode(), error.decode()
