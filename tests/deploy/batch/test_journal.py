"""The journal: wherever it is cut or damaged, what is left is right, and the rest is redone."""

from __future__ import annotations

from pathlib import Path

import pytest

from deploy.batch.journal import Journal, RowResult, open_journal
from paceline.errors import InvalidRequestError

FACTS: dict[str, str | int] = {"input": "abc", "rows": 5, "seed": 0}
LINES = [f'{{"id":"{index}","text":"{"x" * 7 * index}\\u00e9"}}'.encode() for index in range(5)]
ORDER = (1, 0, 4, 2, 3)
"""Rows end in any order."""


def fill(journal: Journal) -> None:
    """Answer all rows that have no answer."""
    for index in ORDER:
        if index not in journal:
            journal.add(index, RowResult(LINES[index], failed=index == 2, tokens=index))


def refill(path: Path) -> tuple[int, int]:
    """Open a journal and complete it. Returns the rows that it had, and the bytes it lost."""
    with open_journal(path, FACTS, num_rows=5) as journal:
        journal.agree({"model": "tiny"})
        had = journal.done
        fill(journal)
        assert [journal.line(index) for index in range(5)] == LINES
        assert (journal.done, journal.failed) == (5, 1)
        return had, journal.cut_off


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    path = tmp_path / "whole"
    assert refill(path) == (0, 0)
    assert refill(path) == (5, 0)
    return path


def ends_of_records(content: bytes) -> list[int]:
    """Where the records end, read by the format's description."""
    place = content.index(b"\n") + 1
    ends = [place]
    while place < len(content):
        place += 8 + int.from_bytes(content[place : place + 4], "little")
        ends.append(place)
    return ends


def test_cut_anywhere_it_keeps_the_whole_records_before(whole: Path, tmp_path: Path) -> None:
    content = whole.read_bytes()
    ends = ends_of_records(content)
    assert len(ends) == 1 + 2 + 5  # the format, two records of facts, five rows
    path = tmp_path / "cut"
    for size in range(len(content) + 1):
        path.write_bytes(content[:size])
        kept = [end for end in ends if end <= size]
        begun = size - kept[-1] if kept else 0  # A part of the first line is completed.
        assert refill(path) == (max(0, len(kept) - 3), begun), size
        assert path.read_bytes() == content, size


def test_damaged_anywhere_it_keeps_what_is_before(whole: Path, tmp_path: Path) -> None:
    content = whole.read_bytes()
    ends = ends_of_records(content)
    path = tmp_path / "damaged"
    for place in range(ends[0], len(content)):
        for flipped in (0x01, 0x80):
            damaged = bytearray(content)
            damaged[place] ^= flipped
            path.write_bytes(damaged)
            intact = [end for end in ends if end <= place]
            had, lost = refill(path)
            assert (had, lost) == (max(0, len(intact) - 3), len(content) - intact[-1]), place
            assert path.read_bytes() == content, place


@pytest.mark.parametrize("name", list(FACTS))
def test_the_journal_of_another_run_is_refused_and_kept(whole: Path, name: str) -> None:
    content = whole.read_bytes() + b"torn"
    whole.write_bytes(content)
    other = FACTS | {name: "def" if name == "input" else 9}
    with (
        pytest.raises(
            InvalidRequestError, match=f"{whole} belongs to another run: .*{other[name]}"
        ),
        open_journal(whole, other, num_rows=9),
    ):
        pass
    assert whole.read_bytes() == content


def test_a_fact_that_is_learned_later_is_checked_too(whole: Path) -> None:
    with (
        open_journal(whole, FACTS, num_rows=5) as journal,
        pytest.raises(InvalidRequestError, match="of the model tiny, not of the model large"),
    ):
        journal.agree({"model": "large"})


@pytest.mark.parametrize("content", [b"{}\n", b"paceline batch journal 2\n", b"x" * 100])
def test_another_file_is_refused_and_kept(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    with (
        pytest.raises(InvalidRequestError, match="is not a journal"),
        open_journal(path, FACTS, num_rows=5),
    ):
        pass
    assert path.read_bytes() == content


def test_two_runs_cannot_share_a_journal(whole: Path) -> None:
    with (
        open_journal(whole, FACTS, num_rows=5),
        pytest.raises(InvalidRequestError, match="is in use by another run"),
        open_journal(whole, FACTS, num_rows=5),
    ):
        pass
    assert refill(whole) == (5, 0)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with (
        pytest.raises(InvalidRequestError, match=r"^journal: cannot write .*/none/j"),
        open_journal(tmp_path / "none" / "j", FACTS, num_rows=5),
    ):
        pass
