"""Files and folders that take the place of older ones at once, whole or not at all."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replaced(path: Path, *, mode: int = 0o666) -> Iterator[Path]:
    """An empty file beside `path`, to write to. It is renamed to `path` when the block ends well.

    An error in the block removes it and leaves `path` as it was. Several threads and processes may
    replace a file at once. `mode` is less the umask, as for `os.open`. Raises OSError.
    """
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    os.close(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode))
    try:
        yield beside
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


@contextmanager
def replaced_folder(path: Path) -> Iterator[Path]:
    """An empty folder beside `path`, to fill. It is renamed to `path` when the block ends well.

    An older `path` is removed then; who has its files open keeps them. Only one process at a time
    may replace a folder: what one that was killed left behind is removed, and an older `path` that
    it had moved away comes back. Raises OSError.
    """
    beside, old = path.with_name(f".{path.name}.new"), path.with_name(f".{path.name}.old")
    if old.exists() and not path.exists():
        old.rename(path)
    for left in (beside, old):
        shutil.rmtree(left, ignore_errors=True)
    beside.mkdir(parents=True)
    try:
        yield beside
        if path.exists():
            path.rename(old)
        beside.rename(path)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
