"""Runs a worker as a plain process, without Ray: for tests and for diagnosing faults.

    python -m workers.target.shard FOLDER --port 9001
    python -m workers.drafting.drafter FOLDER --port 9002
    python -m workers.drafting.drafter --kind recycling --port 9003

It prints its address once it serves, and ends on SIGTERM or SIGINT. It ends by itself, with status
70, if its device is broken (workers/target/faults.py) or its drafting keeps failing.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import typer

from paceline.errors import PacelineError, outward
from workers.process.server import RunningServer

ChoiceT = TypeVar("ChoiceT", bound=str)
Servers = RunningServer | Sequence[RunningServer]


def run_standalone(serve: Callable[[], Awaitable[Servers]]) -> None:
    """Serve until a signal comes or a worker reports that it is broken.

    A PacelineError is printed as one line and determines the exit code.
    """
    try:
        asyncio.run(_serve(serve))
    except PacelineError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(outward(error).exit_code) from error


async def _serve(serve: Callable[[], Awaitable[Servers]]) -> None:
    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    served = await serve()
    servers = [served] if isinstance(served, RunningServer) else served
    for server in servers:
        typer.echo(server.address)
    watches = [asyncio.create_task(server.exit_when_broken()) for server in servers]
    await ended.wait()
    for watch in watches:
        watch.cancel()
    for server in servers:
        await server.stop()


def parse_cores(text: str | None) -> tuple[int, ...] | None:
    """Core numbers from text such as "0,2"; None if `text` is None."""
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise typer.BadParameter(f"expected core numbers like 0,2, got {text}") from error


def parse_labels(texts: Sequence[str]) -> dict[str, str]:
    """Labels from texts such as "zone=a"."""
    found = {}
    for text in texts:
        key, sign, value = text.partition("=")
        if not (key and sign and value):
            raise typer.BadParameter(f"expected a label like zone=a, got {text}")
        found[key] = value
    return found


def parse_choice(flag: str, text: str, choices: Sequence[ChoiceT]) -> ChoiceT:
    for choice in choices:
        if text == choice:
            return choice
    known = ", ".join(map(str, choices))
    raise typer.BadParameter(f"--{flag}: expected one of {known}, got {text}")
