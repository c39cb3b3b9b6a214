"""The list of a fetched checkpoint's files with their checksums, kept beside them.

Reading half a gigabyte to check it takes a second, so a file counts as unchanged while its size
and its time of change are those that were noted; otherwise its bytes are hashed.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

NAME = "paceline-manifest.json"
# Raised when a fetch writes other files than before: older folders are fetched anew.
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
    """Note all files of `folder`, and the checksum of the source that they were made from."""
    files = {
        path.name: asdict(_File(path.stat().st_size, sha256_of(path), path.stat().st_mtime_ns))
        for path in sorted(folder.iterdir())
        if path.name != NAME
    }
    text = json.dumps({"format": _FORMAT, "source_sha256": sha256, "files": files}, indent=1)
    (folder / NAME).write_text(text + "\n")


def is_intact(folder: Path, *, sha256: str, thorough: bool = False) -> bool:
    """Whether `folder` holds what its manifest lists, made from the source of that checksum.

    `thorough` hashes every file, also those that look unchanged.
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
