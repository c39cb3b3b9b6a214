"""Batch files: which rows are good, what is wrong with the others, and seeds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cluster.gateway.requests import CompletionRequest
from deploy.batch import batch_file
from deploy.batch.batch_file import BatchFile, BatchRow, refused
from paceline.errors import InternalError, InvalidRequestError, PacelineError


def asking(custom_id: object, **body: Any) -> dict[str, Any]:
    """A row that asks for the continuation of a text."""
    given = {"prompt": "hello"} | body
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": given}


def written(path: Path, *rows: object) -> Path:
    """A file with these rows; a text is a line as it is."""
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(lines) + "\n")
    return path


def read(path: Path, seed: int = 0) -> list[BatchRow]:
    rows = list(BatchFile(path).rows(seed, lambda index: False))
    return [row for row in rows if row is not None]


def error_of(row: BatchRow) -> PacelineError:
    assert not isinstance(row.asked, CompletionRequest)
    return row.asked


def wrong(row: BatchRow) -> str:
    return str(error_of(row))


def seed_of(row: BatchRow) -> int | None:
    assert isinstance(row.asked, CompletionRequest), row.asked
    [seed] = {prompt.options.seed for prompt in row.asked.prompts}
    return seed


def test_seeds_are_the_bodys_or_differ_in_all_rows(tmp_path: Path) -> None:
    path = written(
        tmp_path / "in", asking("a", n=2), asking("b", seed=7), asking("c", n=128, seed=None)
    )
    assert [seed_of(row) for row in read(path, seed=1000)] == [1000, 7, 1000 + 2 * 128]
    assert [seed_of(row) for row in read(path, seed=2**64 - 1)][::2] == [2**64 - 1, 255]


def test_a_custom_id_that_comes_again_is_refused_and_the_first_one_is_not(tmp_path: Path) -> None:
    names = ["a", "b", "é", "a", "", None, 5, "a", "b", "e\u0301"]
    rows = read(written(tmp_path / "in", *map(asking, names)))
    told = {row.index: wrong(row) for row in rows if not isinstance(row.asked, CompletionRequest)}
    assert {index: text.partition(" (")[0] for index, text in told.items()} == {
        3: "custom_id: is that of row 0 too",
        **dict.fromkeys(
            (4, 5, 6), "custom_id: expected a string, which no other row of the file has"
        ),
        7: "custom_id: is that of row 0 too",
        8: "custom_id: is that of row 1 too",
    }
    ids = {row.id_of("") for row in rows}
    assert len(ids) == len(rows)  # of rows without a custom_id too


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ("{oops", "row: expected JSON in UTF-8"),
        ("[]", "row: expected a JSON object"),
        ('{"custom_id": "\\ud800"}', "row: expected JSON in UTF-8"),
        (asking("a") | {"method": "GET"}, 'method: expected "POST", got "GET"'),
        (asking("a") | {"url": "/v1/embeddings"}, "url: expected /v1/chat/completions or"),
        (asking("a") | {"url": ["/v1/completions"]}, "url: expected"),
        (asking("a") | {"body": "x"}, 'body: expected an object, got "x"'),
        (asking("a") | {"url": "/v1/chat/completions"}, "messages: expected a list of messages"),
        (asking("a", temperature=-1), "temperature: expected"),
        (asking("a", stream=True), "stream: is not possible in a batch"),
        (asking("a", tools=[{}]), "tools: "),
    ],
)
def test_a_bad_row_says_what_is_wrong(tmp_path: Path, row: object, expected: str) -> None:
    first, second, third = read(written(tmp_path / "in", asking("0"), row, asking("2")))
    assert isinstance(first.asked, CompletionRequest)
    assert isinstance(third.asked, CompletionRequest)
    assert wrong(second).startswith(expected)
    result, told = refused(second, error_of(second))
    line = json.loads(result.line)
    assert line["response"]["status_code"] == told.status == 400
    assert line["response"]["body"]["error"]["message"].startswith(expected)


def test_blank_lines_a_byte_order_mark_and_the_last_line_without_an_end(tmp_path: Path) -> None:
    path = tmp_path / "in"
    rows = [json.dumps(asking(name), ensure_ascii=False) for name in ("é", "\u2028")]
    path.write_bytes("\ufeff{}\r\n \n\n{}".format(*rows).encode())
    assert [(row.index, row.line, row.custom_id) for row in read(path)] == [
        (0, 1, "é"),
        (1, 4, "\u2028"),
    ]


def test_a_row_that_is_too_long_fails_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    longest = json.dumps(asking("b", prompt="x" * 300))
    monkeypatch.setattr(batch_file, "MAX_ROW_BYTES", len(longest))
    too_long = json.dumps(asking("c", prompt="x" * 301))
    endless = json.dumps(asking("d", prompt="x" * 2000))
    path = written(tmp_path / "in", asking("a"), longest, too_long, endless, asking("e"))
    rows = read(path)
    assert [isinstance(row.asked, CompletionRequest) for row in rows] == [
        *(True, True, False, False, True)
    ]
    result, told = refused(rows[2], error_of(rows[2]))
    assert (told.status, told.code) == (413, "request_too_large")
    assert json.loads(result.line)["custom_id"] is None
    # The digest is of all that is there, so it tells the ends of long rows.
    first = BatchFile(path).digest
    written(path, asking("a"), longest, too_long, endless[:-3] + '_"}}', asking("e"))
    assert BatchFile(path).digest != first


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.replace("hello", "HELLO", 1),
        lambda text: text + text.replace('"a"', '"c"'),
        lambda text: text.partition("\n")[0],
    ],
)
def test_a_file_that_changes_while_it_is_read_is_noticed(tmp_path: Path, change: Any) -> None:
    path = written(tmp_path / "in", asking("a"), asking("b"))
    file = BatchFile(path)
    path.write_text(change(path.read_text()))
    with pytest.raises(InvalidRequestError, match="was changed while it was read"):
        list(file.rows(0, lambda index: False))


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_a_file_without_a_row_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "in"
    path.write_text(content)
    with pytest.raises(InvalidRequestError, match="holds no row"):
        BatchFile(path)


def test_an_internal_error_is_told_with_the_same_bytes_each_time(tmp_path: Path) -> None:
    [row] = read(written(tmp_path / "in", asking("a")))
    lines = {refused(row, InternalError("at 0x7f"))[0].line for _ in range(2)}
    assert len(lines) == 1
    assert json.loads(lines.pop())["response"]["status_code"] == 500
