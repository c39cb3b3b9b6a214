"""Ends a Ray head when the process that started it is gone, killed outright included.

python -m deploy.head_guard HEAD_AS_JSON    with a pipe from that process as standard input
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from deploy.ray_head import RayHead, stop_head


@contextmanager
def guarded(head: RayHead) -> Iterator[None]:
    """End `head` with the block, or with this process, however it ends."""
    with subprocess.Popen(
        [sys.executable, "-m", "deploy.head_guard", json.dumps(asdict(head))],
        cwd=Path(__file__).resolve().parents[1],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is for us; the guard sees only that we are gone.
    ):
        try:
            yield
        finally:
            stop_head(head)


def main() -> None:
    """Wait for the end of standard input."""
    head = RayHead(**json.loads(sys.argv[1]))
    sys.stdin.buffer.read()
    stop_head(head)


if __name__ == "__main__":
    main()
