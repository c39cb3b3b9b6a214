"""Whether a host has the memory that is about to be taken, asked before it is."""

from __future__ import annotations

import re
from pathlib import Path

from paceline.errors import ConfigError

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


def check_room(needed: int, what: str, remedy: str) -> None:
    """Raise ConfigError with the numbers where the host has fewer than `needed` bytes left."""
    available = available_bytes()
    if available is not None and needed > available:
        raise ConfigError(
            f"out of memory: {what} {needed} bytes, but this host has {available} bytes left: "
            f"{remedy}"
        )


def available_bytes() -> int | None:
    """Memory that may still be taken, by the host and by the limit of our container.

    None where the system does not tell. Other processes may take of it at the same time.
    """
    found = [one for one in (_of_host(), _of_container()) if one is not None]
    return min(found, default=None)


def _of_host() -> int | None:
    kibibytes = _field(_read(_MEMINFO), "MemAvailable")
    return None if kibibytes is None else 1024 * kibibytes


def _of_container() -> int | None:
    """Files that were read count as used there, but give way."""
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
