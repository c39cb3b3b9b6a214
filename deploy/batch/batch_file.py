"""OpenAI's batch files: what a row asks, and the row that answers it.

An input row has `custom_id`, `method` ("POST"), `url` and `body`; its answer has `id`, `custom_id`,
`response` and `error`. The answer's bytes depend only on the row, its index, the run's seed and the
model. So it holds no time and no counts of drafting, and its ids are made from index and custom_id.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from cluster.gateway.app import MAX_BODY_BYTES
from cluster.gateway.errors import BodyTooLargeError, HttpError, http_error
from cluster.gateway.requests import (
    MAX_CHOICES,
    Body,
    CompletionRequest,
    body_in,
    chat_request,
    completion_request,
)
from deploy.batch.journal import RowResult
from paceline.errors import InvalidRequestError, PacelineError
from paceline.generation import RequestStats

MAX_ROW_BYTES = MAX_BODY_BYTES
"""Most bytes of a row."""

_SEEDS = 2**64
_READERS: Mapping[str, Callable[[Body], CompletionRequest]] = {
    "/v1/chat/completions": chat_request,
    "/v1/completions": completion_request,
}
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class BatchRow:
    """A row of the input. `index` counts rows from 0, `line` counts lines from 1.

    `asked` is what it asks, or what is wrong with it. `custom_id` is None if it has none.
    """

    index: int
    line: int
    custom_id: str | None
    asked: CompletionRequest | PacelineError

    def id_of(self, kind: str) -> str:
        """An id that no other row of the file has, with this kind as its beginning."""
        of = hashlib.sha256(f"{self.index}:{self.custom_id}".encode())
        return f"{kind}{of.hexdigest()[:32]}"


class BatchFile:
    """An input file, read once to check it. `digest`: its SHA-256 in hexadecimal digits."""

    def __init__(self, path: Path) -> None:
        """Raises InvalidRequestError if the file cannot be read or has no row."""
        if path.exists() and not path.is_file():
            raise InvalidRequestError(
                "input", f"{path} is not a regular file; it is read twice, so name one that is"
            )
        self.path = path
        keys, is_named = array("Q"), bytearray()
        digest = hashlib.sha256()
        for _, line in self._lines(digest):
            custom_id = _custom_id(line)
            is_named.append(custom_id is not None)
            keys.frombytes(hashlib.sha256((custom_id or "").encode()).digest()[:16])
        self.digest = digest.hexdigest()
        self.num_rows = len(is_named)
        if not self.num_rows:
            raise InvalidRequestError(
                "input", f"{path} holds no row; expected a JSON object a line (docs/batch.md)"
            )
        self._first = _first_of_equals(keys, is_named)

    def rows(self, seed: int, done: Callable[[int], bool]) -> Iterator[BatchRow | None]:
        """All rows in order, None in place of those that are `done`.

        Raises InvalidRequestError if the file has changed since it was checked.
        """
        digest = hashlib.sha256()
        index = -1
        for index, (number, line) in enumerate(self._lines(digest)):
            if index >= self.num_rows:
                break
            yield None if done(index) else self._row(index, number, line, seed)
        if index + 1 != self.num_rows or digest.hexdigest() != self.digest:
            raise InvalidRequestError(
                "input",
                f"{self.path} was changed while it was read; restore it, or remove the journal and "
                "run the command again",
            )

    def _row(self, index: int, number: int, line: bytes | None, seed: int) -> BatchRow:
        custom_id = _custom_id(line)
        asked: CompletionRequest | PacelineError
        try:
            if line is None:
                raise BodyTooLargeError(f"expected a row of at most {MAX_ROW_BYTES:,} bytes")
            row = body_in("row", line)
            if custom_id is None:
                raise InvalidRequestError(
                    "custom_id", "expected a string, which no other row of the file has"
                )
            if (first := int(self._first[index])) != index:
                raise InvalidRequestError(
                    "custom_id", f"is that of row {first} too (counted from 0); make them differ"
                )
            asked = _request(row, (seed + MAX_CHOICES * index) % _SEEDS)
        except PacelineError as error:
            asked = error
        return BatchRow(index, number, custom_id, asked)

    def _lines(self, digest: Any) -> Iterator[tuple[int, bytes | None]]:
        """The number and text of each line that is not blank; None if it is too long."""
        try:
            with open(self.path, "rb") as file:
                for number, line in enumerate(_bounded_lines(file, digest), start=1):
                    if number == 1 and line is not None:
                        line = line.removeprefix(_BYTE_ORDER_MARK)
                    if line is None or not line.isspace():
                        yield number, line
        except OSError as error:
            raise InvalidRequestError(
                "input", f"cannot read {self.path}: {error.strerror}; name a batch file"
            ) from None


def _bounded_lines(file: IO[bytes], digest: Any) -> Iterator[bytes | None]:
    """All lines with their ends; None for one that is too long, which is not kept in memory."""
    while line := file.readline(MAX_ROW_BYTES + 1):
        digest.update(line)
        is_whole = len(line) <= MAX_ROW_BYTES or line.endswith(b"\n")
        rest = line
        while not rest.endswith(b"\n") and (rest := file.readline(MAX_ROW_BYTES)):
            is_whole = False
            digest.update(rest)
        yield line if is_whole else None


def _first_of_equals(keys: array[int], is_named: bytearray) -> np.ndarray[Any, Any]:
    """For each row, the first one with an equal key; for one without a name, itself."""
    first = np.arange(len(is_named))
    named = np.flatnonzero(np.frombuffer(is_named, np.uint8))
    pairs = np.frombuffer(keys, np.uint64).reshape(-1, 2)[named]
    order = np.lexsort((pairs[:, 1], pairs[:, 0]))  # Stable: equals stay in the file's order.
    is_new = np.ones(len(order), bool)
    is_new[1:] = (pairs[order[1:]] != pairs[order[:-1]]).any(axis=1)
    begins = np.maximum.accumulate(np.where(is_new, np.arange(len(order)), 0))
    first[named[order]] = named[order[begins]]
    return first


def _custom_id(line: bytes | None) -> str | None:
    """The row's `custom_id`, if it can be read."""
    try:
        custom_id = body_in("row", line or b"").get("custom_id")
    except InvalidRequestError:
        return None
    return custom_id if isinstance(custom_id, str) and custom_id else None


def _request(row: Mapping[str, Any], seed: int) -> CompletionRequest:
    """What a row asks. A body without a seed gets this one."""
    if (method := row.get("method")) != "POST":
        raise InvalidRequestError("method", f'expected "POST", got {_shown(method)}')
    url = row.get("url")
    read = _READERS.get(url) if isinstance(url, str) else None
    if read is None:
        expected = " or ".join(_READERS)
        raise InvalidRequestError("url", f"expected {expected}, got {_shown(url)}")
    body = row.get("body")
    if not isinstance(body, dict):
        raise InvalidRequestError("body", f"expected an object, got {_shown(body)}")
    asked = read(body if body.get("seed") is not None else body | {"seed": seed})
    if asked.stream:
        raise InvalidRequestError("stream", "is not possible in a batch; leave it out")
    return asked


def _shown(value: object) -> str:
    return f"{json.dumps(value):.100}"


# Answers


def answered(row: BatchRow, body: Mapping[str, Any], stats: list[RequestStats]) -> RowResult:
    """The end of a row that was decoded. `body`: as /v1/... would answer."""
    kind = "chatcmpl-" if body["object"] == "chat.completion" else "cmpl-"
    told = {**body, "id": row.id_of(kind), "created": 0}
    return RowResult(
        _line(row, 200, told),
        failed=False,
        tokens=body["usage"]["completion_tokens"],
        steps=sum(one.steps for one in stats),
    )


def refused(row: BatchRow, error: PacelineError) -> tuple[RowResult, HttpError]:
    """The end of a row that failed, and its error as HTTP would tell it."""
    told = http_error(error)
    if told.status == 500:  # Its message has a number of its own each time.
        message = "internal error; see the log of the run"
        told = HttpError(told.status, message, told.type, told.code)
    return RowResult(_line(row, told.status, json.loads(told.body())), failed=True), told


def _line(row: BatchRow, status: int, body: Mapping[str, Any]) -> bytes:
    """A line of the output in ASCII, so that no reader divides it at a line end of Unicode."""
    response = {"status_code": status, "request_id": row.id_of("req_"), "body": body}
    told = {
        "id": row.id_of("batch_req_"),
        "custom_id": row.custom_id,
        "response": response,
        "error": None,
    }
    return json.dumps(told, separators=(",", ":")).encode()
