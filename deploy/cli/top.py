"""`paceline top`: devices, sequences and acceptance of a server, as they change."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from deploy.cli.reach import running_server
from deploy.terminal.lines import narrowed, plain, whole_table
from deploy.terminal.options import (
    AccessFlags,
    RunningOption,
)
from paceline.errors import InvalidRequestError

if TYPE_CHECKING:
    from paceline.generation import Stats

_PATIENCE_SECONDS = 5.0
_BAR = 10
"""Columns of a bar."""
_POSITIONS = 10
"""Positions of a window, and choices of policy `auto`, that have room in a line."""
_CHOICES = 4


def top(
    environ: Mapping[str, str],
    *,
    interval: Annotated[float, typer.Option(help="Seconds between two looks.")] = 1.0,
    once: Annotated[
        bool, typer.Option("--once", help="Show one interval and end. So without a terminal.")
    ] = False,
    server: RunningOption = None,
    access_flags: AccessFlags,
) -> None:
    """Watch devices, sequences and acceptance until Ctrl-C."""
    from paceline.client import Client

    if not 0.1 <= interval <= 3600:
        raise InvalidRequestError("interval", f"expected 0.1 to 3600, got {interval:g}")
    access = access_flags.check()
    address = server or running_server(environ)
    console = Console(highlight=False)
    with Client(address, timeout=_PATIENCE_SECONDS, **access) as client:
        title = f"{client.describe().model} at {address}"
        before = client.stats()
        if once or not sys.stdout.isatty():
            time.sleep(interval)
            now = client.stats()
            for line in lines(title, before, now):
                plain(console, line)
            whole_table(console, devices(before, now))
            return
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                time.sleep(interval)
                now = client.stats()
                if now.uptime_seconds < before.uptime_seconds:  # Another driver.
                    before = now
                    continue
                live.update(screen(console, title, before, now), refresh=True)
                before = now


def screen(console: Console, title: str, before: Stats, now: Stats) -> Group:
    """What a terminal shows. No line breaks: one that has no room is cut off."""
    told = lines(title, before, now)
    shown = (Text(line, no_wrap=True, overflow="ellipsis") for line in told)
    table, _ = narrowed(console, devices(before, now), ("kind", "passes/s", "restarts"))
    return Group(*shown, Text(), table)


def lines(title: str, before: Stats, now: Stats) -> list[str]:
    """What a server did from one look to the next, each line within 80 columns below the title."""
    seconds = max(now.uptime_seconds - before.uptime_seconds, 1e-9)
    tokens = now.committed_tokens - before.committed_tokens
    verdicts, drafted = now.verdicts - before.verdicts, now.drafted - before.drafted
    length = f"{tokens / verdicts:.2f}" if verdicts else "none"
    held = f"{now.kv_blocks_held / now.kv_blocks:.0%}" if now.kv_blocks else "none"
    drafting = now.speculation
    positions = [f"{share:.0%}" for share in drafting.acceptance_at]
    by_position = " ".join(positions[:_POSITIONS]) + " ..." * (len(positions) > _POSITIONS)
    told = [
        f"{title}, up {now.uptime_seconds:.0f} s",
        f"sequences: {now.sequences_running} running, {now.sequences_waiting} waiting, "
        f"{now.requests_finished} finished; KV held {held}",
        f"decoding:  {tokens / seconds:.1f} tokens/s, {length} a step and sequence, accepted "
        f"{_share(now.accepted - before.accepted, drafted)} of drafts",
        f"accepted:  by position {by_position or 'none'}",
        f"idle:      target {_percent(drafting.target_idle)}, drafters "
        f"{_percent(drafting.drafter_idle)} of the time with work, since the start",
    ]
    if drafting.choices:
        total = sum(drafting.choices.values())
        often_first = sorted(drafting.choices.items(), key=lambda choice: (-choice[1], choice[0]))
        chosen = [f"{name} {count / total:.0%}" for name, count in often_first[:_CHOICES]]
        if rest := sum(count for _, count in often_first[_CHOICES:]):
            chosen.append(f"others {rest / total:.0%}")
        told.append(f"auto:      {', '.join(chosen)}")
    return told


def devices(before: Stats, now: Stats) -> Table:
    """What each device did from one look to the next."""
    seconds = max(now.uptime_seconds - before.uptime_seconds, 1e-9)
    earlier = {worker.name: worker for worker in before.workers}
    restarts = {life.name: life.restarts for life in now.lives}
    table = Table(box=None, pad_edge=False)
    for title in ("device", "kind", "state", "busy"):
        table.add_column(title)
    for title in ("passes/s", "tokens/s", "restarts"):
        table.add_column(title, justify="right")
    for worker in now.workers:
        old = earlier.get(worker.name, worker)
        busy = min(1.0, max(0.0, worker.busy_seconds - old.busy_seconds) / seconds)
        state = "up" if worker.connected else f"lost {worker.away_seconds:.0f} s"
        table.add_row(
            *(worker.name, worker.kind, "suspect" if worker.suspect else state),
            Text("█" * round(_BAR * busy), "yellow" if worker.kind == "target" else "green")
            + Text("░" * (_BAR - round(_BAR * busy)), "dim")
            + Text(f" {busy:4.0%}"),
            f"{max(0, worker.passes - old.passes) / seconds:.1f}",
            f"{max(0, worker.tokens - old.tokens) / seconds:.1f}",
            str(restarts.get(worker.name, 0)),
        )
    return table


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.0%}" if whole else "none"


def _percent(share: float | None) -> str:
    return "none" if share is None else f"{share:.0%}"
