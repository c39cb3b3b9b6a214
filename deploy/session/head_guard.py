"""Ends a Ray head once the process that started it is gone, even if that was killed.

python -m deploy.session.head_guard HEAD_AS_JSON    with a pipe from that process as standard input
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from deploy.session.ray_head import RayHead, stop_head

_KEEP = b"keep"


class Guard:
    """A process that ends a head with this process, however this one ends, unless `keep`."""

    def __init__(self, head: RayHead) -> None:
        """`head` may be a plan, since the guard starts before the head does."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "deploy.session.head_guard", json.dumps(asdict(head))],
            cwd=Path(__file__).resolve().parents[2],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C must not reach the guard.
        )

    def keep(self) -> None:
        """Let the head outlive this process."""
        self._process.communicate(_KEEP)

    def close(self) -> None:
        """End the guard, and what is left of a head that is not kept."""
        self._process.communicate()


@contextmanager
def guarded(head: RayHead) -> Iterator[None]:
    """End `head` with the block, or with this process, however that ends."""
    guard = Guard(head)
    try:
        yield
    finally:
        stop_head(head)
        guard.close()


def main() -> None:
    """Wait for the end of standard input, then end the head."""
    head = RayHead(**json.loads(sys.argv[1]))
    if sys.stdin.buffer.read() != _KEEP:
        stop_head(head)


if __name__ == "__main__":
    main()
