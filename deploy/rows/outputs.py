"""Output files that appear whole or not at all."""

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
    """Takes rows one after the other."""

    def write(self, row: Mapping[str, object]) -> None:
        """Append a row."""

    def write_line(self, line: str) -> None:
        """Append a row that is JSON already."""


class _JsonLines:
    def __init__(self, handle: int) -> None:
        self._file = os.fdopen(handle, "w", encoding="utf-8")

    def write(self, row: Mapping[str, object]) -> None:
        self.write_line(json.dumps(row, ensure_ascii=False))

    def write_line(self, line: str) -> None:
        self._file.write(line + "\n")

    def close(self) -> None:
        self._file.close()

    def sync(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())


@contextmanager
def whole_file(path: Path, *, flag: str = "output") -> Iterator[RowSink]:
    """Write rows to a temporary file beside `path`. It is renamed when the block ends well.

    A symlink is kept: the file that it names is replaced. An error, Ctrl-C or SIGTERM in the block
    leaves no new file behind, and an older `path` unchanged. Raises InvalidRequestError before the
    block if `path` cannot be written.
    """
    target = _regular_target(path, flag)
    handle, name = _open_beside(target, flag)
    sink = _JsonLines(handle)
    try:
        yield sink
        sink.sync()
        os.chmod(name, 0o666 & ~_umask())
        os.replace(name, target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    finally:
        sink.close()


def write_json(path: Path, value: Mapping[str, object]) -> None:
    """Write one JSON document, whole or not at all. Raises InvalidRequestError."""
    with whole_file(path, flag="json") as sink:
        sink.write(value)


def write_text(path: Path, text: str, *, flag: str) -> None:
    """Write a text, whole or not at all. Raises InvalidRequestError."""
    with whole_file(path, flag=flag) as sink:
        sink.write_line(text.removesuffix("\n"))


def check_writable(flag: str, path: Path) -> None:
    """Raise InvalidRequestError naming `flag` unless `whole_file` could write `path`."""
    handle, name = _open_beside(_regular_target(path, flag), flag)
    os.close(handle)
    Path(name).unlink()


def _regular_target(path: Path, flag: str) -> Path:
    """The regular file, existing or new, that `path` names once symlinks are followed."""
    if os.path.isdir(path):  # Unlike Path.is_dir, False if a folder on the way is not readable.
        raise InvalidRequestError(flag, f"{path} is a folder; name a file in it")
    target = os.path.realpath(path)
    there = os.path.exists(target)
    # The link of an open pipe in /proc names a file that does not exist. A loop names itself.
    leads_astray = os.path.exists(path) != there or os.path.islink(target)
    if leads_astray or (there and not os.path.isfile(target)):
        raise InvalidRequestError(
            flag,
            f"{path} is not a regular file and would be replaced; name a new or a regular file",
        )
    return Path(target)


def _open_beside(path: Path, flag: str) -> tuple[int, str]:
    try:
        return tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
    except OSError as error:
        raise InvalidRequestError(
            flag, f"cannot write {path}: {error.strerror}; name a file in a folder you can write"
        ) from error


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
