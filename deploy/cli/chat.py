"""`paceline chat`: a chat in the terminal that shows which tokens were drafted."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from contextlib import closing
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from deploy.cli.reach import running_server
from deploy.terminal.lines import plain
from deploy.terminal.options import AccessFlags, RunningOption, TemperatureOption
from deploy.terminal.token_printer import TokenPrinter
from paceline.chat import Message
from paceline.errors import PacelineError
from paceline.generation import Chunk, Finished, RequestStats
from paceline.options import GenerateOptions, check_options
from paceline.text import counted

if TYPE_CHECKING:
    from paceline.client import Client

_REFRESHES = 8
"""Times a second that the line below an answer changes."""


def chat(
    environ: Mapping[str, str],
    *,
    system: Annotated[str | None, typer.Option(help="What the model is told first.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Maximum tokens of an answer.")] = 512,
    temperature: TemperatureOption = None,
    seed: Annotated[int | None, typer.Option(help="Default: another one each time.")] = None,
    policy: Annotated[str | None, typer.Option(help="Default: the server's.")] = None,
    server: RunningOption = None,
    access_flags: AccessFlags,
) -> None:
    """Chat in the terminal. Drafted tokens are in color, the acceptance is below each answer.

    Ctrl-C stops an answer. /clear forgets the chat; /exit or the end of the input ends it.
    """
    from paceline.client import Client

    options = GenerateOptions(
        max_tokens=max_tokens, temperature=temperature, seed=seed, policy=policy
    )
    check_options(options)
    access = access_flags.check()
    address = server or running_server(environ)
    console = Console(highlight=False)
    with Client(address, **access) as client:
        plain(console, f"{client.describe().model} at {address}; /clear, /exit")
        _talk(client, console, options, [Message("system", system)] if system else [])


def _talk(client: Client, console: Console, options: GenerateOptions, first: list[Message]) -> None:
    """Answer each line of the input, until it ends."""
    chat = list(first)
    while True:
        try:
            line = (console.input("[bold]> [/]") if sys.stdin.isatty() else input()).strip()
        except EOFError:
            return
        if line == "/exit":
            return
        if line == "/clear":
            chat = list(first)
        elif line:
            chat.append(Message("user", line))
            try:
                chat.append(Message("assistant", _answer(client, console, chat, options)))
            except PacelineError as error:  # The next line may be answered.
                chat.pop()
                plain(console, f"error: {error}")


def _answer(client: Client, console: Console, chat: list[Message], options: GenerateOptions) -> str:
    """Show the answer to a chat as it comes, and return it, or what came until Ctrl-C."""
    texts: list[str] = []
    stats: RequestStats | None = None
    shown = _Shown(console)
    with shown.live:
        try:
            with closing(client.stream(chat, options)) as events:
                for event in events:
                    if isinstance(event, Chunk):
                        texts.append(event.text)
                        shown.add(event)
                    elif isinstance(event, Finished):
                        stats = event.stats
        except KeyboardInterrupt:
            pass
        finally:
            shown.close()
    plain(console, shown.figures() if stats is None else told(stats, shown.num_tokens))
    return "".join(texts)


class _Shown:
    """An answer: whole lines are printed; the last line and figures below it still change."""

    def __init__(self, console: Console) -> None:
        self._line = Text()
        self._printer = TokenPrinter(console, self._take)
        self._is_whole = False
        self._began: float | None = None
        self._num_first = 0
        self.num_tokens = 0
        self._num_drafted = 0
        self.live = Live(
            console=console,
            get_renderable=self._present,
            refresh_per_second=_REFRESHES,
            transient=True,
        )

    def add(self, chunk: Chunk) -> None:
        if self._began is None:
            self._began, self._num_first = time.perf_counter(), len(chunk.token_ids)
        self.num_tokens += len(chunk.token_ids)
        self._num_drafted += chunk.origins.count("draft")
        self._printer.add(chunk)

    def close(self) -> None:
        self._printer.close()
        self._is_whole = True

    def _present(self) -> Group:
        return Group() if self._is_whole else Group(self._line, Text(self.figures(), "dim"))

    def figures(self) -> str:
        drafted = self._num_drafted / self.num_tokens if self.num_tokens else 0.0
        seconds = time.perf_counter() - self._began if self._began is not None else 0.0
        rate = (self.num_tokens - self._num_first) / seconds if seconds else 0.0
        return f"{counted(self.num_tokens, 'token')}, {drafted:.0%} drafted, {rate:.1f} tokens/s"

    def _take(self, part: Text) -> None:
        if part.plain == "\n":
            line, self._line = self._line, Text()
            self.live.refresh()  # It would show the line a second time below itself.
            self.live.console.print(line, soft_wrap=True)
        else:
            self._line.append_text(part)


def told(stats: RequestStats, num_tokens: int) -> str:
    """The line below an answer."""
    accepted = f"{stats.accepted / stats.drafted:.0%}" if stats.drafted else "none"
    return (
        f"{counted(num_tokens, 'token')} in {stats.seconds:.2f} s, first after "
        f"{1000 * stats.ttft_seconds:.0f} ms; {stats.acceptance_length:.2f} tokens a step, "
        f"accepted {accepted} of {stats.drafted} drafted"
    )
