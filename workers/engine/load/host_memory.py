"""Checks that a host has enough memory, before the memory is allocated."""

from __future__ import annotations

import re
from pathlib import Path

import psutil

from paceline.errors import ConfigError

_CGROUP = Path("/sys/fs/cgroup")


def check_room(needed: int, what: str, remedy: str) -> None:
    """Raise ConfigError, with the numbers, if the host has fewer than `needed` bytes left."""
    available = available_bytes()
    if needed > available:
        raise ConfigError(
            f"out of memory: {what} {needed} bytes, but this host has {available} bytes left: "
            f"{remedy}"
        )


def available_bytes() -> int:
    """Bytes that may still be allocated, within the host's memory and our container's limit.

    Other processes may allocate memory at the same time.
    """
    of_host: int = psutil.virtual_memory().available
    of_container = _of_container()
    return of_host if of_container is None else min(of_host, of_container)


def _of_container() -> int | None:
    """Bytes left in our container. File caches count as used there, but they can be reclaimed."""
    limit, used = _read(_CGROUP / "memory.max").strip(), _read(_CGROUP / "memory.current").strip()
    if not limit.isdecimal() or not used.isdecimal():
        return None
    files = re.search(r"^inactive_file (\d+)", _read(_CGROUP / "memory.stat"), re.MULTILINE)
    return max(0, int(limit) - int(used) + (int(files[1]) if files else 0))


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except (OSError, ValueError):
        return ""
