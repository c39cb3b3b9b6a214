"""Progress without a terminal: few lines, none lost for long."""

from __future__ import annotations

import io

from rich.console import Console

from deploy.rows.batch import LineProgress, row_progress
from deploy.terminal.lines import plain
from paceline.text import counted


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def lines_of(total: int, seconds_a_row: float) -> list[str]:
    said: list[str] = []
    clock = Clock()
    progress = LineProgress(said.append, clock)
    with progress.counting("generating", total) as advance:
        for _ in range(total):
            clock.now += seconds_a_row
            advance()
    return said


def test_quick_rows_are_told_every_ten_seconds() -> None:
    assert lines_of(40, 1.0) == [
        f"generating: {done} of 40 rows, {done} s" for done in (10, 20, 30, 40)
    ]


def test_many_rows_are_told_by_the_tenth() -> None:
    assert lines_of(300, 1.0)[:2] == [
        "generating: 30 of 300 rows, 30 s",
        "generating: 60 of 300 rows, 60 s",
    ]


def test_slow_rows_are_told_once_a_minute() -> None:
    assert lines_of(1000, 15.0)[:2] == [
        "generating: 4 of 1000 rows, 60 s",
        "generating: 8 of 1000 rows, 120 s",
    ]


def test_what_is_over_at_once_is_not_told() -> None:
    assert lines_of(20, 0.1) == []


def test_one_count_after_the_other_shares_the_pause() -> None:
    said: list[str] = []
    clock = Clock()
    progress = LineProgress(said.append, clock)
    for name in ("off", "chain", "lockstep"):
        with progress.counting(name, 2) as advance:
            for _ in range(2):
                clock.now += 3
                advance()
    assert said == ["chain: 2 of 2 rows, 12 s"]


def test_a_terminal_has_bars_and_a_quiet_console_nothing() -> None:
    shown = {}
    for name, quiet in (("loud", False), ("quiet", True)):
        stream = io.StringIO()
        console = Console(file=stream, force_terminal=True, quiet=quiet)
        with row_progress(console) as progress, progress.counting("off x1", 2) as advance:
            advance()
        shown[name] = stream.getvalue()
    assert "off x1" in shown["loud"]
    assert "/2" in shown["loud"]
    assert shown["quiet"] == ""


def test_a_number_and_its_noun() -> None:
    assert [counted(number, "row") for number in (0, 1, 2)] == ["0 rows", "1 row", "2 rows"]


def test_a_line_is_printed_as_it_is() -> None:
    printed = io.StringIO()
    line = "error: [red]rows.jsonl:100: is not JSON"
    plain(Console(file=printed), line)
    assert printed.getvalue() == line + "\n"
