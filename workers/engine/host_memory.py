"""Whether a host has the memory that is about to be taken, asked before it is."""

from __future__ import annotations

import re
from pathlib import Path

import psutil

from paceline.errors import ConfigError

_CGROUP = Path("/sys/fs/cgroup")


def check_room(needed: int, what: str, remedy: str) -> None:
    """Raise ConfigError with the numbers where the host has fewer than `needed` bytes left."""
    available = available_bytes()
    if needed > available:
        raise ConfigError(
            f"out of memory: {what} {needed} bytes, but this host has {available} bytes left: "
            f"{remedy}"
        )


def available_bytes() -> int:
    """Memory that may still be taken, by the host and by the limit of our container.

    Other processes may take of it at the same time.
    """
    of_host: int = psutil.virtual_memory().available
    of_container = _of_container()
    return of_host if of_container is None else min(of_host, of_container)


def _of_container() -> int | None:
    """Files that were read count as used there, but give way."""
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
