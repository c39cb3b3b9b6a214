"""Input files: what a row may be, and the error for a malformed one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deploy.rows.inputs import DEFAULT_INPUT, BadRow, InputRow, read_rows
from paceline.chat import Message
from paceline.errors import InvalidRequestError


def rows_of(tmp_path: Path, content: str | bytes) -> list[InputRow | BadRow]:
    path = tmp_path / "in.jsonl"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return read_rows(path)


def test_each_kind_of_row(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": parts}]
    lines = [
        {"id": "a", "prompt": "Once", "task_id": "ignored"},
        {"id": 7, "question": "Why?"},
        {"messages": chat},
        {"turns": ["First", "Second"]},
    ]
    path = tmp_path / "in.jsonl"
    assert rows_of(tmp_path, "\n".join(json.dumps(line) for line in lines)) == [
        InputRow(path, 0, 1, "a", "prompt", "Once"),
        InputRow(path, 1, 2, 7, "question", (Message("user", "Why?"),)),
        InputRow(
            path, 2, 3, None, "messages", (Message("system", "Be brief."), Message("user", "Hi"))
        ),
        InputRow(path, 3, 4, None, "turns", (Message("user", "First"),)),
    ]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        (b"{", "is not JSON"),
        (b"\xff", "is not UTF-8"),
        (b"[1]", "expected a JSON object, got a list"),
        (b'{"text": "x"}', "expected one of prompt, question, messages, turns; it has text"),
        (b"{}", "it has none"),
        (b'{"prompt": "x", "question": "y"}', "it has prompt and question"),
        (b'{"prompt": ""}', "prompt: is empty"),
        (b'{"prompt": 3}', "prompt: expected a text, got a number"),
        (b'{"prompt": null}', "prompt: expected a text, got null"),
        (b'{"prompt": "\\ud800"}', "half a surrogate pair"),
        (b'{"turns": []}', "turns: is empty; expected a list of at least one of texts"),
        (b'{"turns": {}}', "turns: expected a list of texts, got an object"),
        (b'{"turns": [3]}', "turns[0]: expected a text"),
        (b'{"messages": "hi"}', "messages: expected a list of messages, got a text"),
        (
            b'{"messages": ["hi"]}',
            "messages[0]: expected an object with role and content, got a text",
        ),
        (b'{"messages": [{"content": "x"}]}', "messages[0].role: is missing"),
        (
            b'{"messages": [{"role": "user", "content": ["x"]}]}',
            "messages[0].content: expected content parts of type 'text', got str",
        ),
        (
            b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}',
            "messages[0].content: expected content parts of type 'text', got one of type 'image",
        ),
        (
            b'{"messages": [{"role": "user", "content": []}]}',
            "messages[0].content: expected a content of text or of text parts, got an empty list",
        ),
        (
            b'{"messages": [{"role": "robot", "content": "x"}]}',
            'messages[0].role: expected system or user or assistant, got "robot"',
        ),
        (b'{"messages": [{"role": "user"}]}', "messages[0].content: is missing"),
        (b'{"id": [1], "prompt": "x"}', "id: expected a text or a whole number"),
        (b'{"id": true, "prompt": "x"}', "id: expected a text or a whole number"),
        (b"[" * 100_000, "is not JSON"),
        (b'{"prompt": ' + b"1" * 5000 + b"}", "is not JSON"),
    ],
)
def test_a_malformed_row_is_named_by_line_and_the_others_stand(
    tmp_path: Path, line: bytes, complaint: str
) -> None:
    good = b'{"prompt": "x"}'
    before, bad, after = rows_of(tmp_path, b"\n".join([good, b"", line, good, b""]))
    assert isinstance(before, InputRow)
    assert after == InputRow(tmp_path / "in.jsonl", 2, 4, None, "prompt", "x")
    assert isinstance(bad, BadRow)
    assert (bad.index, bad.line) == (1, 3)
    assert bad.message.startswith(f"{tmp_path / 'in.jsonl'}:3: ")
    assert complaint in bad.message
    assert "\n" not in bad.message


def test_a_malformed_row_keeps_its_id(tmp_path: Path) -> None:
    [bad] = rows_of(tmp_path, '{"id": "a", "prompt": ""}')
    assert bad.id == "a"


def test_line_breaks_of_other_systems_and_a_byte_order_mark(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, '\ufeff{"prompt": "a\u2028b"}\r\n\r\n{"prompt": "c"}\r\n')
    assert [(row.line, row.input) for row in rows if isinstance(row, InputRow)] == [
        (1, "a\u2028b"),
        (3, "c"),
    ]


def test_limit_takes_the_first_rows(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text('{"prompt": "a"}\nbroken\n{"prompt": "b"}\n')
    assert [row.index for row in read_rows(path, limit=2)] == [0, 1]


@pytest.mark.parametrize("content", [b"", b"\n \n"])
def test_a_file_without_rows_is_refused(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(InvalidRequestError, match="holds no row"):
        rows_of(tmp_path, content)


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match=r"cannot read .*absent.jsonl: No such file"):
        read_rows(tmp_path / "absent.jsonl")
    with pytest.raises(InvalidRequestError, match="Is a directory"):
        read_rows(tmp_path)


def test_the_default_prompts_are_varied_and_well_formed() -> None:
    rows = read_rows(DEFAULT_INPUT)
    good = [row for row in rows if isinstance(row, InputRow)]
    assert good == rows
    assert len(good) >= 40
    assert len({row.id for row in good}) == len(good)
    assert {row.kind for row in good} == {"prompt", "question", "messages", "turns"}
    raw = [json.loads(line) for line in DEFAULT_INPUT.read_text().splitlines()]
    assert {row["category"] for row in raw} >= {"chat", "code", "math", "summary", "language"}
