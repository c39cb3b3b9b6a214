"""The journal of a batch: the finished answers, so that a killed run can be continued.

After a first line that names the format come records:

    length    4 bytes, little-endian: bytes of the payload, at least 1
    checksum  4 bytes, little-endian: CRC-32 of the payload
    payload   msgpack: a map of facts (whose journal it is), or a list for an answered row:
              [index, failed, tokens, steps, line of the output file]

A record is handed to the operating system in one write as soon as its row is answered, so it
survives SIGKILL. `sync` has it survive a power failure too. What a kill cut off at the end, or what
is damaged, is removed with all that follows it when the journal is opened again.
"""

from __future__ import annotations

import fcntl
import os
import struct
import zlib
from array import array
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import msgpack

from paceline.errors import InvalidRequestError, UnavailableError

_FORMAT = b"paceline batch journal 1\n"
_HEAD = struct.Struct("<II")
_FACTS = {
    "input": "the input file with SHA-256 {}",
    "rows": "an input file of {} rows",
    "seed": "--seed {}",
    "model": "the model {}",
}
"""What a journal says of its run, in words."""

Facts = Mapping[str, str | int]


@dataclass(frozen=True, slots=True)
class RowResult:
    """The end of a row. `line`: of the output file, without its line end."""

    line: bytes
    failed: bool
    tokens: int = 0
    steps: int = 0


class Journal:
    """An open journal, which no other process can open. Made by `open_journal`."""

    def __init__(self, path: Path, handle: int, num_rows: int) -> None:
        self.done = self.failed = 0
        """Rows that are answered, and those of them that failed."""
        self.cut_off = 0
        """Bytes that were removed from the end when it was opened."""
        self._path = path
        self._handle = handle
        self._facts: dict[str, str | int] = {}
        # Where the record of each row begins. 0: the row is not answered.
        self._places = array("Q", bytes(8 * num_rows))
        self._end = 0

    def __contains__(self, index: int) -> bool:
        """Whether a row is answered."""
        return self._places[index] != 0

    def agree(self, facts: Facts) -> None:
        """Write the facts that are new. Raises InvalidRequestError for one that differs."""
        for name, value in facts.items():
            if (known := self._facts.get(name, value)) != value:
                is_of, not_of = (_FACTS[name].format(one) for one in (known, value))
                raise InvalidRequestError(
                    "journal",
                    f"{self._path} belongs to another run: it is of {is_of}, not of {not_of}; "
                    "name another journal, or remove this one to begin anew",
                )
        if new := {name: value for name, value in facts.items() if name not in self._facts}:
            self._append(new)
            self._facts |= new

    def add(self, index: int, result: RowResult) -> None:
        place = self._append([index, result.failed, result.tokens, result.steps, result.line])
        self._count(index, place, failed=result.failed)

    def line(self, index: int) -> bytes:
        """The line of the output file of an answered row."""
        length, checksum = _HEAD.unpack(os.pread(self._handle, _HEAD.size, self._places[index]))
        payload = os.pread(self._handle, length, self._places[index] + _HEAD.size)
        if zlib.crc32(payload) != checksum:
            raise UnavailableError(
                f"{self._path} was damaged during this run (byte {self._places[index]}); run the "
                "same command again: it redoes what is damaged"
            )
        line: bytes = msgpack.unpackb(payload)[-1]
        return line

    def sync(self) -> None:
        """Have all records survive a power failure."""
        try:
            os.fdatasync(self._handle)
        except OSError as error:
            raise self._unwritable(error) from error

    def load(self, facts: Facts) -> None:
        """Read what is there, check whose it is, and remove a damaged end."""
        size = os.fstat(self._handle).st_size
        with os.fdopen(os.dup(self._handle), "rb") as file:
            start = file.read(len(_FORMAT))
            if start != _FORMAT[: len(start)]:
                raise InvalidRequestError(
                    "journal",
                    f"{self._path} is not a journal of this version of Paceline; name another file",
                )
            self._end = len(start)
            if start == _FORMAT:
                self._read(file, size)
        if size > 0:
            self._check_owner(facts)
        self.cut_off = size - self._end
        try:
            os.ftruncate(self._handle, self._end)
        except OSError as error:
            raise self._unwritable(error) from error
        if start != _FORMAT:
            self._write(_FORMAT[len(start) :])
        self.agree(facts)

    def _check_owner(self, facts: Facts) -> None:
        self.agree({name: value for name, value in facts.items() if name in self._facts})

    def _read(self, file: IO[bytes], size: int) -> None:
        """Take all records up to the first that is damaged or incomplete."""
        while len(head := file.read(_HEAD.size)) == _HEAD.size:
            length, checksum = _HEAD.unpack(head)
            left = size - self._end - _HEAD.size
            if not 0 < length <= left or zlib.crc32(payload := file.read(length)) != checksum:
                return
            match msgpack.unpackb(payload):
                case dict() as facts:
                    self._facts |= facts
                case [int(index), failed, _, _, _] if index < len(self._places):
                    self._count(index, self._end, failed=failed)
            self._end += _HEAD.size + length

    def _count(self, index: int, place: int, *, failed: bool) -> None:
        self._places[index] = place
        self.done += 1
        self.failed += failed

    def _append(self, content: object) -> int:
        """Write a record. Returns where it begins."""
        payload = msgpack.packb(content)
        place = self._end
        self._write(_HEAD.pack(len(payload), zlib.crc32(payload)) + payload)
        return place

    def _write(self, data: bytes) -> None:
        try:
            written = 0
            while written < len(data):
                written += os.pwrite(self._handle, data[written:], self._end + written)
        except OSError as error:
            raise self._unwritable(error) from error
        self._end += len(data)

    def _unwritable(self, error: OSError) -> UnavailableError:
        return UnavailableError(
            f"cannot write {self._path}: {error.strerror}; what it has is kept, so run the same "
            "command again once it can be written"
        )


@contextmanager
def open_journal(path: Path, facts: Facts, *, num_rows: int) -> Iterator[Journal]:
    """The journal at `path`, new or with what an earlier run of the same facts left.

    Raises InvalidRequestError if the file cannot be used, is in use, or belongs to another run;
    then it is as it was.
    """
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise _unusable(path, error) from None
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InvalidRequestError(
                "journal", f"{path} is in use by another run; wait for its end, or end it"
            ) from None
        except OSError as error:
            raise _unusable(path, error) from None
        journal = Journal(path, handle, num_rows)
        journal.load(facts)
        yield journal
        journal.sync()
    finally:
        os.close(handle)


def _unusable(path: Path, error: OSError) -> InvalidRequestError:
    return InvalidRequestError(
        "journal", f"cannot write {path}: {error.strerror}; name a file in a folder you can write"
    )
