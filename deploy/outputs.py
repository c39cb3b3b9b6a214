"""Output files: JSON lines that appear whole or not at all."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from paceline.errors import InvalidRequestError


class RowSink(Protocol):
    """Takes one row after the other."""

    def write(self, row: Mapping[str, object]) -> None:
        """Append a row."""


class _JsonLines:
    def __init__(self, handle: int) -> None:
        self._file = os.fdopen(handle, "w", encoding="utf-8")

    def write(self, row: Mapping[str, object]) -> None:
        self._file.write(json.dumps(row, ensure_ascii=False) + "\n")

    def close(self) -> None:
        self._file.close()

    def sync(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())


@contextmanager
def whole_file(path: Path, *, flag: str = "output") -> Iterator[RowSink]:
    """Write rows into a temporary file beside `path`, renamed to it when the block ends well.

    An error or Ctrl-C inside the block leaves neither file behind, and an older `path` as it was.
    Raises InvalidRequestError before the block when `path` cannot be written.
    """
    if path.is_dir():
        raise InvalidRequestError("output", f"{path} is a folder; name a file in it")
    try:
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
    except OSError as error:
        raise InvalidRequestError(
            "output",
            f"cannot write {path}: {error.strerror}; name a file in a folder you can write",
        ) from error
    sink = _JsonLines(handle)
    try:
        yield sink
        sink.sync()
        os.chmod(name, 0o666 & ~_umask())
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    finally:
        sink.close()


def write_json(path: Path, value: Mapping[str, object]) -> None:
    """Write one JSON document, whole or not at all. Raises InvalidRequestError."""
    with whole_file(path, flag="json") as sink:
        sink.write(value)


def check_writable(flag: str, path: Path) -> None:
    """Raise InvalidRequestError naming `flag` unless a file can be made beside `path`."""
    handle, name = _open_beside(path, flag)
    os.close(handle)
    Path(name).unlink()


def _open_beside(path: Path, flag: str) -> tuple[int, str]:
    if path.is_dir():
        raise InvalidRequestError(flag, f"{path} is a folder; name a file in it")
    try:
        return tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
    except OSError as error:
        raise InvalidRequestError(
            flag, f"cannot write {path}: {error.strerror}; name a file in a folder you can write"
        ) from None


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
