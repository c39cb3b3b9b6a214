"""A whole tiny system in a process of its own: `python -m tests.deploy.serve_tiny FOLDER`.

Makes tiny checkpoints in FOLDER, prints the server's address as one line, and serves until its
standard input ends.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from tests.cluster.system import make_checkpoints, running_system


async def serve(folder: Path) -> None:
    checkpoints = make_checkpoints(folder)
    drafters = {"drafter-0": checkpoints.drafter}
    async with running_system(checkpoints, drafters=drafters) as system:
        sys.stdout.write(system.server.address + "\n")
        sys.stdout.flush()
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1])))
