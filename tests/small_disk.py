"""A small file system that fills up soon."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk_at(folder: Path, *, kibibytes: int) -> Iterator[Path]:
    """Mount a file system with `kibibytes` of room. Skips if that is not allowed."""
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={kibibytes}k", "tmpfs", str(folder)],
        capture_output=True,
    )
    if mounted.returncode:
        pytest.skip(f"needs root and mount: {mounted.stderr.decode()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)
