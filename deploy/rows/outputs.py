"""Output files that appear whole or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import IO

from paceline.errors import InvalidRequestError
from workers.process.atomic_files import replaced


class RowSink:
    """Takes rows one after the other."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file

    def write(self, row: Mapping[str, object]) -> None:
        """Append a row."""
        self.write_line(json.dumps(row, ensure_ascii=False))

    def write_line(self, line: str) -> None:
        """Append a row that is JSON already."""
        self._file.write(line + "\n")


@contextmanager
def whole_file(path: Path, *, flag: str = "output") -> Iterator[RowSink]:
    """Write rows to a temporary file beside `path`. It is renamed when the block ends well.

    A symlink is kept: the file that it names is replaced. An error, Ctrl-C or SIGTERM in the block
    leaves no new file behind, and an older `path` unchanged. Raises InvalidRequestError before the
    block if `path` cannot be written.
    """
    target = _regular_target(path, flag)
    with ExitStack() as stack:
        with _told(target, flag):
            beside = stack.enter_context(replaced(target))
        with open(beside, "w", encoding="utf-8") as file:
            yield RowSink(file)
            file.flush()
            os.fsync(file.fileno())


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
    target = _regular_target(path, flag)
    with _told(target, flag), NamedTemporaryFile(dir=target.parent, prefix=f".{target.name}."):
        pass


@contextmanager
def _told(path: Path, flag: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InvalidRequestError(
            flag, f"cannot write {path}: {error.strerror}; name a file in a folder you can write"
        ) from error


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
