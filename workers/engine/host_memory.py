"""Checks that a host has enough memory, before the memory is allocated."""

from __future__ import annotations

import re
from pathlib import Path

from paceline.errors import ConfigError

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


def check_room(needed: int, what: str, remedy: str) -> None:
    """Raise ConfigError, with the numbers, if the host has fewer than `needed` bytes left."""
    available = available_bytes()
    if available is not None and needed > available:
        raise ConfigError(
            f"out of memory: {what} {needed} bytes, but this host has {available} bytes left: "
            f"{remedy}"
        )


def available_bytes() -> int | None:
    """Bytes that may still be allocated, within the host's memory and our container's limit.

    None if the system does not say. Other processes may allocate memory at the same time.
    """
    found = [one for one in (_of_host(), _of_container()) if one is not None]
    return min(found, default=None)


def _of_host() -> int | None:
    kibibytes = _field(_read(_MEMINFO), "MemAvailable")
    return None if kibibytes is None else 1024 * kibibytes


def _of_container() -> int | None:
    """Bytes left in our container. File caches count as used there, but they can be reclaimed."""
    limit, used = _read(_CGROUP / "memory.max").strip(), _read(_CGROUP / "memory.current").strip()
    if not limit.isdecimal() or not used.isdecimal():
        return None
    files = _field(_read(_CGROUP / "memory.stat"), "inactive_file") or 0
    return max(0, int(limit) - int(used) + files)


def _field(text: str, name: str) -> int | None:
    match = re.search(rf"^{name}:?\s+(\d+)", text, re.MULTILINE)
    return None if match is None else int(match[1])


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except (OSError, ValueError):
        return ""
