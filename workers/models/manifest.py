"""The list of a fetched checkpoint's files with their checksums, kept beside them.

Hashing half a gigabyte takes a second. A file therefore counts as unchanged while its size and
modification time are those in the manifest; otherwise its bytes are hashed.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

NAME = "paceline-manifest.json"
# Raise this when a fetch writes other files than before: older folders are then fetched again.
_FORMAT = 1


@dataclass(frozen=True, slots=True)
class _File:
    size: int
    sha256: str
    mtime_ns: int


def sha256_of(path: Path) -> str:
    """Hex SHA-256 of a file's bytes."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def write(folder: Path, *, sha256: str) -> None:
    """Write the manifest of `folder`: all its files, and `sha256`, the checksum of their source."""
    files = {
        path.name: asdict(_File(path.stat().st_size, sha256_of(path), path.stat().st_mtime_ns))
        for path in sorted(folder.iterdir())
        if path.name != NAME
    }
    text = json.dumps({"format": _FORMAT, "source_sha256": sha256, "files": files}, indent=1)
    (folder / NAME).write_text(text + "\n")


def is_intact(folder: Path, *, sha256: str, thorough: bool = False) -> bool:
    """Whether `folder` holds what its manifest lists, made from the source with checksum `sha256`.

    `thorough` hashes every file, even those that look unchanged.
    """
    try:
        manifest = json.loads((folder / NAME).read_text())
        if manifest["format"] != _FORMAT or manifest["source_sha256"] != sha256:
            return False
        files = {name: _File(**noted) for name, noted in manifest["files"].items()}
        return bool(files) and all(
            _is_unchanged(folder / name, noted, thorough) for name, noted in files.items()
        )
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return False


def _is_unchanged(path: Path, noted: _File, thorough: bool) -> bool:
    status = path.stat()
    if status.st_size != noted.size:
        return False
    if status.st_mtime_ns == noted.mtime_ns and not thorough:
        return True
    return sha256_of(path) == noted.sha256
