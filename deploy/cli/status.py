"""`paceline status` and `top`: what is up, and how busy it is, at once or as it changes."""

from __future__ import annotations

import http.client
import json
import ssl
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from deploy.cli.reach import running_server
from deploy.session import ray_head
from deploy.session.cluster import check_listening, lives_of, present_record, workers_of
from deploy.session.record import ClusterRecord, Command, at_work, read_record
from deploy.terminal.lines import fact, narrowed, plain, table_of, whole_table
from deploy.terminal.options import AccessFlags, RunningOption, check_server
from paceline.errors import InvalidRequestError, UnavailableError
from paceline.text import counted
from workers.models.catalog import default_home

if TYPE_CHECKING:
    from paceline.generation import ModelDescription, Stats, WorkerLife, WorkerStats

_PATIENCE_SECONDS = 5.0
_NOTHING_YET: Mapping[Command | None, str] = {
    None: "nothing is up; start a cluster with `paceline up`",
    "up": "a cluster is coming up: wait until its `paceline up` has ended",
    "down": "the cluster is being ended by `paceline down`",
    "apply": "nothing is up; start a cluster with `paceline up`",
}
_HALF_WAY = "the start of a cluster was killed half-way: clean up with `paceline down`"


def status(
    environ: Mapping[str, str],
    *,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
    server: Annotated[
        str | None,
        typer.Option(
            callback=check_server,
            help="HOST:PORT of an inference server, such as that of a job. Default: the one "
            "of `paceline up`.",
        ),
    ] = None,
    access_flags: AccessFlags,
) -> None:
    """Show the cluster of `paceline up`. Exit code 3: nothing is up, or it does not answer."""
    access, ca = access_flags.check(), access_flags.ca
    if server is None and (pool := _pool_of_up(environ)) is not None:
        _show_pool(pool, as_json=as_json)
        return
    http_address: str | None = None
    if server is None:
        address, ray_address, http_address = _of_up(environ)
    else:
        address, ray_address = server, None
        check_listening(server, access)
    from paceline.client import Client

    with Client(address, timeout=_PATIENCE_SECONDS, **access) as client:
        stats, model = client.stats(), client.describe()
    if as_json:
        fields = {
            "address": address,
            "http_address": http_address,
            "http": None if http_address is None else _said_by_gateway(http_address, ca),
            "ray_address": ray_address,
            "model": model.model,
        }
        typer.echo(json.dumps(fields | summary(stats) | asdict(stats), indent=2))
    else:
        show(address, model, stats)
        if http_address is not None:
            said = _said_by_gateway(http_address, ca)
            scheme = "https" if ca else "http"
            plain(Console(highlight=False), f"HTTP at {scheme}://{http_address}/v1: {said}")


def _pool_of_up(environ: Mapping[str, str]) -> ClusterRecord | None:
    """The pool of drafters of `paceline up`; None: it has started none."""
    record = read_record(default_home(environ))
    return record if record is not None and record.address == "" else None


def _show_pool(record: ClusterRecord, *, as_json: bool) -> None:
    """Show the drafters of a pool, and what each party uses of them."""
    workers = workers_of(record)
    if not workers:
        raise UnavailableError(
            f"the pool {record.name!r} on the Ray cluster at {record.ray_address} does not answer; "
            f"logs: {record.logs}; clean up with `paceline down`"
        )
    if as_json:
        fields = {"pool": record.name, "ray_address": record.ray_address}
        typer.echo(json.dumps(fields | {"drafters": [asdict(one) for one in workers]}, indent=2))
        return
    console = Console(highlight=False)
    plain(console, f"the pool {record.name!r} on the Ray cluster at {record.ray_address}")
    drafters = table_of(("drafter", "kind", "address", "pid", "restarts", "parties"))
    parties = table_of(
        ("party", "drafter"), ("sequences", "share", "seconds", "tokens", "taken back")
    )
    for worker in workers:
        drafters.add_row(
            *(worker.name, worker.kind, worker.address or "", str(worker.pid or "")),
            *(str(worker.restarts), str(len(worker.uses))),
        )
        total = sum(one.seconds for one in worker.uses)
        for one in worker.uses:
            share = f"{one.seconds / total:.0%}" if total else "0%"
            parties.add_row(
                *(one.whose or "not named", worker.name, str(one.sequences), share),
                *(f"{one.seconds:.1f}", str(one.tokens), str(one.taken_back)),
            )
    whole_table(console, drafters)
    if parties.row_count:
        whole_table(console, parties)


def _said_by_gateway(address: str, ca: str | None) -> str:
    """What the gateway's `/ready` says, in words. `ca`: as the flag."""
    if ca is None:
        connection = http.client.HTTPConnection(address, timeout=_PATIENCE_SECONDS)
    else:
        context = ssl.create_default_context(cafile=ca)
        connection = http.client.HTTPSConnection(
            address, timeout=_PATIENCE_SECONDS, context=context
        )
    try:
        connection.request("GET", "/ready")
        answer = connection.getresponse()
        if answer.status == 200:
            return "ready"
        return str(json.loads(answer.read())["error"]["message"])
    except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
        return f"no answer ({error})"
    finally:
        connection.close()


def _of_up(environ: Mapping[str, str]) -> tuple[str, str, str | None]:
    """Addresses of the server, of the Ray cluster of `paceline up`, and of its HTTP interface."""
    home = default_home(environ)
    # Ask this first. A command that ends after this has then written its record.
    at_work_now = at_work(home)
    record = present_record(home)
    if record is None or record.address is None:
        raise UnavailableError(
            _NOTHING_YET[at_work_now] if record is None or at_work_now else _HALF_WAY
        )
    if not ray_head.is_listening(record.address):
        lives = "".join(f"; {told_life(life)}" for life in lives_of(record) if life.last_end)
        raise UnavailableError(
            f"the server at {record.address} does not answer{lives}; logs: {record.logs}; if no "
            "worker is restarted, clean up with `paceline down`"
        )
    return record.address, record.ray_address, record.http_address


def summary(stats: Stats) -> dict[str, float | None]:
    """Figures derived from the counters; None: there is nothing to count yet."""
    return {
        "acceptance_length": stats.acceptance_length,
        "accepted_share": stats.accepted / stats.drafted if stats.drafted else None,
        "acceptance": stats.speculation.acceptance,
        "used_share": stats.speculation.used_share,
        "hit_rate": stats.speculation.hit_rate,
    }


def _of_steps(stats: Stats, milliseconds: float) -> str:
    return f"{milliseconds:.2f} ms" if stats.steps else "none"


def show(address: str, model: ModelDescription, stats: Stats) -> None:
    """Print a line and a table on stdout."""
    console = Console(highlight=False)
    figures = summary(stats)
    length = figures["acceptance_length"]
    plain(console, f"{model.model} at {address}, up {stats.uptime_seconds:.0f} s")
    fact(
        console,
        "requests:",
        f"{stats.sequences_running} running, {stats.sequences_waiting} waiting, "
        f"{stats.requests_finished} finished",
    )
    fact(
        console,
        "prompts:",
        f"{stats.prefilled_tokens} tokens computed, {stats.prefix_hit_tokens} were there already; "
        f"{counted(stats.preemptions, 'preemption')}",
    )
    fact(
        console,
        "decoding:",
        f"{stats.committed_tokens} tokens in {stats.steps} steps, acceptance length "
        f"{'none' if length is None else f'{length:.2f}'}, accepted "
        f"{_percent(figures['accepted_share'])}; gap {_of_steps(stats, stats.gap_ms_p50)}, driver "
        f"{_of_steps(stats, stats.driver_ms_p50)} a step",
    )
    fact(console, "drafting:", _speculation_line(stats))
    if stats.speculation.choices:
        fact(console, "auto:", _auto_line(stats))
    whole_table(console, _table_of(stats))
    for worker in stats.workers:
        if worker.trouble:
            fact(console, f"{worker.name}:", worker.trouble)
    for life in stats.lives:
        if life.restarts or life.last_end:
            fact(console, f"{life.name}:", told_life(life).removeprefix(f"{life.name}: "))
    folders = {str(Path(life.log).parent) for life in stats.lives if life.log}
    for folder in sorted(folders):
        fact(console, "logs:", f"{folder}, on each worker's host")


def _table_of(stats: Stats) -> Table:
    """The workers. What went wrong has a column if it did."""
    workers = stats.workers
    wrong = {
        "reconnects": [str(worker.reconnects) for worker in workers],
        "malformed": ["" if one.kind == "target" else str(one.malformed) for one in workers],
        "overruns": [str(worker.overruns) for worker in workers],
    }
    wrong = {title: cells for title, cells in wrong.items() if {*cells} - {"", "0"}}
    table = table_of(
        ("worker", "kind", "address", "pid", "state"), ("busy", "passes", "tokens", *wrong)
    )
    for number, worker in enumerate(workers):
        busy = worker.busy_seconds / stats.uptime_seconds if stats.uptime_seconds else 0.0
        table.add_row(
            *(worker.name, worker.kind, worker.address, str(worker.pid), _state(worker)),
            *(f"{busy:.0%}", str(worker.passes), str(worker.tokens)),
            *(cells[number] for cells in wrong.values()),
        )
    return table


def told_life(life: WorkerLife) -> str:
    """The history of a worker's processes, in words."""
    next_try = life.next_try_seconds
    restarts = f"restarted {counted(life.restarts, 'time')}"
    parts = [f"{life.name}: {restarts}, last because: {life.last_end or 'unknown'}"]
    if next_try is not None:
        parts.append(f"next try in {next_try:.0f} s")
    if life.log:
        parts.append(f"log {life.log}")
    return "; ".join(parts)


def _state(worker: WorkerStats) -> str:
    """The worker's state. A worker without a stream may be lost or only slow to answer."""
    if worker.suspect:
        return "suspect"
    if not worker.connected:
        return f"no answer for {worker.away_seconds:.0f} s"
    return f"connected, {worker.shares} parties use it" if worker.shares > 1 else "connected"


def _speculation_line(stats: Stats) -> str:
    """How drafting went, in words."""
    drafting = stats.speculation
    by_position = " ".join(f"{share:.0%}" for share in drafting.acceptance_at) or "none"
    efficiency = "none" if drafting.efficiency is None else f"{drafting.efficiency:.2f}"
    return (
        f"acceptance by position {by_position}; used {_percent(drafting.used_share)} of "
        f"{drafting.proposed} proposed tokens, wasted {drafting.wasted_steps} of {stats.verdicts} "
        f"verdicts, branches hit {_percent(drafting.hit_rate)}; with work at hand target idle "
        f"{_percent(drafting.target_idle)}, drafters idle {_percent(drafting.drafter_idle)}; "
        f"efficiency {efficiency}"
    )


def _auto_line(stats: Stats) -> str:
    """What policy `auto` chose, and its estimates, in words."""
    drafting = stats.speculation
    total, often_first = _often_first(drafting.choices)
    chosen = ", ".join(f"{name} {count / total:.0%}" for name, count in often_first)
    believed = ", ".join(
        f"{name} {value:.3g}" for name, value in sorted(drafting.estimates.items())
    )
    return f"{chosen} of {total} verdicts; estimates: {believed or 'none'}"


def _often_first(choices: Mapping[str, int]) -> tuple[int, list[tuple[str, int]]]:
    """How many choices there were, and how many of each."""
    return sum(choices.values()), sorted(choices.items(), key=lambda one: (-one[1], one[0]))


def _percent(share: float | None) -> str:
    return "none" if share is None else f"{share:.0%}"


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
        f"{_percent((now.accepted - before.accepted) / drafted if drafted else None)} of drafts",
        f"accepted:  by position {by_position or 'none'}",
        f"idle:      target {_percent(drafting.target_idle)}, drafters "
        f"{_percent(drafting.drafter_idle)} of the time with work, since the start",
    ]
    if drafting.choices:
        total, often_first = _often_first(drafting.choices)
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
    table = table_of(("device", "kind", "state", "busy"), ("passes/s", "tokens/s", "restarts"))
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
