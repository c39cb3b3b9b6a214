"""The progress of a fetch: stages and bytes in a terminal, elsewhere a line for a long stage."""

from __future__ import annotations

import io

from rich.console import Console

from deploy.terminal.fetch_progress import show_fetch
from workers.models.fetch import FetchProgress


def shown(*, terminal: bool) -> str:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=terminal, width=80)
    with show_fetch(console, "demo") as progress:
        for now in (
            FetchProgress("checking"),
            FetchProgress("downloading"),
            FetchProgress("downloading", 46_000_000, 92_000_000),
            FetchProgress("converting"),
        ):
            progress(now)
    return screen.getvalue()


def test_a_terminal_sees_the_stage() -> None:
    assert "demo: converting" in shown(terminal=True)


def test_each_long_stage_is_one_plain_line_where_there_is_no_terminal() -> None:
    assert shown(terminal=False) == "demo: downloading\ndemo: converting\n"
