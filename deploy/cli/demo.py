"""`paceline demo`: fetches the models, starts a local cluster, answers, and shows the gain."""

from __future__ import annotations

import asyncio
import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count, cycle
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from deploy.cli.reach import reach_cluster, teller
from deploy.rows.measure import Sample, acceptance_length, measure, median_busy
from deploy.terminal.lines import plain, table_of, whole_table
from deploy.terminal.options import ConfigOption, ServerOption, check_at_least_one
from deploy.terminal.token_printer import MAX_WIDTH, STYLES, TokenPrinter
from paceline.chat import Message
from paceline.client import Client
from paceline.errors import InvalidRequestError
from paceline.generation import Chunk
from paceline.options import GenerateOptions
from paceline.text import counted
from workers.drafting.kind import DRAFTERS
from workers.emulated.latency_profiles import EMULATED
from workers.models.catalog import default_home

if TYPE_CHECKING:
    from cluster.config.model import Config
    from deploy.bench.lookahead import EmulatedGain


QUESTION = "Why is the sky blue? Explain it to a curious child."
RULE = "coupled"
"""The rule that promises the tokens of plain decoding. The demo shows that they are the same."""
KINDS_AT_HAND = ("ngram", "suffix")
"""Kinds without a model that the probe tries too."""
PROBE_TOKENS, PROBES = 20, 2
"""Tokens of a probe, and probes of each way. The first also warms it up."""
TRACED_TOKENS = 32
"""Tokens of the request of which the picture is."""
REPEATS = 3
PAYS = 1.02
"""The least gain in the probe for which the race is run. Below it, luck decides the race."""
WINDOW = 4
SHOWN_STEPS = 7
"""Steps of the target in the picture."""
NEXT = (
    ("paceline up", "serve it; then `paceline chat`, or the console at http://127.0.0.1:8000/"),
    ("paceline bench lookahead --quick", "all policies on the emulated 70B, 2 minutes"),
    ("paceline plan --help", "simulate your GPUs before you rent them"),
)


@dataclass(frozen=True, slots=True)
class Way:
    """A way to decode. `kind`: of its drafter; None: plain decoding."""

    policy: str
    kind: str | None = None

    @property
    def name(self) -> str:
        """What it is called in the table."""
        return "plain decoding" if self.kind is None else f"{self.policy} with {self.kind}"

    def options(self, max_tokens: int, tenant: str) -> GenerateOptions:
        """A request. `tenant`: a new one, so that no drafter has seen the answer before."""
        plain_options = GenerateOptions(
            policy=self.policy, rule=RULE, seed=0, max_tokens=max_tokens, tenant=tenant
        )
        if self.kind is None:
            return plain_options
        return replace(plain_options, drafter=self.kind, window=WINDOW)


PLAIN = Way("off")
OVERLAPPING = "chain"
"""The policy under which a drafter drafts while the target computes."""


def ways(kinds: Sequence[str]) -> list[Way]:
    """Plain decoding, and the ways to use each kind of drafter that there is.

    A drafter with a model may draft while the target computes, or in turns with it if they would
    be in each other's way. One without is done at once, so `lockstep` loses no time.
    """
    found = [PLAIN]
    for kind in dict.fromkeys(kinds):
        if DRAFTERS.get(kind, field="drafter").default_model is not None:
            found.append(Way(OVERLAPPING, kind))
        found.append(Way("lockstep", kind))
    return found


class Demo:
    """Requests to one server, with the same question."""

    def __init__(self, client: Client, question: str, max_tokens: int) -> None:
        self._client = client
        self._chat = [Message("user", question)]
        self._max_tokens = max_tokens
        self._tenants = (f"demo-{os.getpid()}-{number}" for number in count())

    def measure(self, way: Way, max_tokens: int) -> Sample:
        """One answer, measured."""
        return measure(self._client, self._chat, way.options(max_tokens, next(self._tenants)))

    def probe(self) -> dict[Way, float]:
        """Tokens/s of each way in a few tokens, the best of PROBES."""
        kinds = [one.kind for one in self._client.describe_topology().drafters]
        found = dict.fromkeys(ways(kinds), 0.0)
        for _ in range(PROBES):
            for way, speed in found.items():
                probed = self.measure(way, min(PROBE_TOKENS, self._max_tokens))
                found[way] = max(speed, probed.tokens_per_second)
        return found

    def answer(self, console: Console, way: Way) -> None:
        """Stream the answer onto the console."""
        console.print(Text(f"Q: {self._chat[0].content}", "bold"), soft_wrap=True)
        printer = TokenPrinter(console)
        options = way.options(self._max_tokens, next(self._tenants))
        for event in self._client.stream(self._chat, options):
            if isinstance(event, Chunk):
                printer.add(event)
        printer.close()
        if console.is_terminal:
            legend = Text.assemble(
                "\n",
                ("drafted and accepted", STYLES["draft"]),
                "   ",
                ("the target's own", STYLES["target"]),
            )
            console.print(legend)

    def race(self, drafting: Way) -> dict[Way, list[Sample]]:
        """Plain decoding and another way, in turns."""
        samples: dict[Way, list[Sample]] = {PLAIN: [], drafting: []}
        for _ in range(REPEATS):
            for way, taken in samples.items():
                taken.append(self.measure(way, self._max_tokens))
        return samples

    async def rounds(self, address: str, way: Way) -> list[dict[str, Any]]:
        """The rounds of an answer, as TraceService tells them."""
        from deploy.cli.trace import tracing

        async with tracing(address) as file:
            await asyncio.to_thread(self.measure, way, min(TRACED_TOKENS, self._max_tokens))
        return file.rounds


# What is shown


def speeds_of(samples: Mapping[Way, Sequence[Sample]]) -> dict[Way, float]:
    """The median tokens/s of each way."""
    return {
        way: statistics.median(sample.tokens_per_second for sample in taken)
        for way, taken in samples.items()
    }


def comparison_table(samples: Mapping[Way, Sequence[Sample]]) -> Table:
    """Speed, acceptance length and busy devices of each way, in at most 80 columns.

    A device that was never busy is left out: a drafter that another way uses, or none.
    """
    busy = {way: median_busy(taken) for way, taken in samples.items()}
    shares = [share for shares in busy.values() for share in shares.items()]
    devices = list(dict.fromkeys(device for device, share in shares if share >= 0.005))
    speeds = speeds_of(samples)
    busy_columns = (f"{name} busy" for name in devices)
    table = table_of(("",), ("tokens/s", "ratio", "tokens/step", *busy_columns))
    for way, taken in samples.items():
        length = acceptance_length(taken)
        table.add_row(
            way.name,
            f"{speeds[way]:.1f}",
            f"{speeds[way] / speeds[PLAIN]:.2f}",
            "" if length is None else f"{length:.2f}",
            *(f"{busy[way].get(device, 0.0):.0%}" for device in devices),
        )
    return table


def nothing_pays(speeds: Mapping[Way, float]) -> str:
    """What was tried, in words, where plain decoding is the fastest."""
    tried = ", ".join(
        f"{way.name} {speed / speeds[PLAIN]:.2f}" for way, speed in speeds.items() if way != PLAIN
    )
    return (
        f"No drafter pays for this question here: plain decoding makes {speeds[PLAIN]:.1f} "
        f"tokens/s, of which {tried or 'there is nothing else to compare'}. Target and drafter "
        "share this host's cores and memory; they gain where each has a device of its own."
    )


def cores_and_load() -> str:
    """The host's cores and its load in the last minute, in words."""
    cores = len(os.sched_getaffinity(0))
    return f"This host has {counted(cores, 'core')}; its load was {os.getloadavg()[0]:.1f}."


def where_measured(model: str) -> str:
    """Where the figures were measured, in words. `model`: its name at the server."""
    if model.startswith(EMULATED):
        return f"EMULATED devices ({model.removeprefix(EMULATED)})"
    return "this machine's processor"


def picture(rounds: Sequence[Mapping[str, Any]], *, width: int = MAX_WIDTH) -> Iterator[Text]:
    """A few steps of a trace: the target, a drafter, and their overlap."""
    steps = [
        Span(
            one["end"] - one["seconds"],
            one["end"],
            f"+{sum(window['committed'] for window in one['windows'])}",
        )
        for one in rounds
        if "step" in one and any(window["committed"] for window in one["windows"])
    ]
    passes = [Span(one["end"] - one["seconds"], one["end"]) for one in rounds if "pass" in one]
    # Not the middle, where a request of the emulated pair ends: its drafter has nothing to do then.
    first = max(1, len(steps) // 4 - SHOWN_STEPS // 2)
    shown = steps[first : first + SHOWN_STEPS]
    if not shown or not passes:
        return
    begin, end = shown[0].begin, shown[-1].end
    yield from drawn(
        {"target": steps[1:], "drafter": passes},
        {"target": STYLES["target"], "drafter": STYLES["draft"]},
        begin=begin,
        end=end,
        width=width,
    )
    within = [Span(max(one.begin, begin), min(one.end, end)) for one in passes]
    share = seconds_together(shown, within) / (end - begin)
    yield Text(
        f"{1000 * (end - begin):.0f} ms of it. Below the target: tokens that a step gave. Both "
        f"computed at once {share:.0%} of the time.",
        overflow="fold",
    )


def gained(gain: EmulatedGain) -> str:
    """The gain of the emulated pair, in words."""
    return (
        f"EMULATED: the same scheduler, a 70B on {gain.target_gpus} GPUs with a drafter on one "
        f"more: {gain.times:.1f} times plain decoding ({gain.plain:.0f} -> {gain.drafted:.0f} "
        f"tokens/s, one request, policy {gain.policy}, acceptance {gain.acceptance:g}). Real "
        "processes and messages; their devices wait as long as profiles of H100s say."
        + ("" if gain.same_text else " The texts are DIFFERENT (a defect).")
    )


def _config_to_start(config_path: Path | None, environ: Mapping[str, str]) -> Config:
    """The configuration; without a file, the local demo with further drafters, unless it runs."""
    from cluster.config.load import load_config
    from cluster.config.model import DrafterConfig
    from deploy.session.cluster import running_address

    config = load_config(config_path, environ)
    if config_path is not None or running_address(config, default_home(environ)) is not None:
        return config
    more = tuple(DrafterConfig(kind=kind) for kind in KINDS_AT_HAND)
    return config.model_copy(update={"drafters": (*config.drafters, *more)})


def demo(
    environ: Mapping[str, str],
    prompt: Annotated[str, typer.Option(help="The question to answer.")] = QUESTION,
    max_tokens: Annotated[int, typer.Option(help="Maximum tokens of the answer.")] = 96,
    emulated: Annotated[
        bool, typer.Option(help="Also run a 70B and its drafter on emulated GPUs, 20 s.")
    ] = True,
    config_path: ConfigOption = None,
    server: ServerOption = None,
) -> None:
    """Fetch the demo models, start a local cluster, answer a question and measure."""
    if not prompt:
        raise InvalidRequestError("prompt", "is empty; ask a question")
    check_at_least_one("max-tokens", max_tokens)
    config = _config_to_start(config_path, environ)
    # One event loop for all: what gRPC has left to do in an earlier one would fail there.
    with asyncio.Runner() as loop:
        is_right = _run(loop, config, environ, prompt, max_tokens, server=server, emulated=emulated)
    raise typer.Exit(0 if is_right else 1)


def _run(
    loop: asyncio.Runner,
    config: Config,
    environ: Mapping[str, str],
    prompt: str,
    max_tokens: int,
    *,
    server: str | None,
    emulated: bool,
) -> bool:
    """Answer, race, and show the emulated pair. Returns whether all texts were the same."""
    console = Console(highlight=False)
    errors = Console(stderr=True)
    samples: dict[Way, list[Sample]] = {}
    rounds: list[dict[str, Any]] = []
    with (
        reach_cluster(config, environ, console=errors, server=server) as address,
        Client(address) as client,
    ):
        asked = Demo(client, prompt, max_tokens)
        model = client.describe().model
        with errors.status("which drafter pays here? trying each for a moment"):
            speeds = asked.probe()
        tried = ", ".join(f"{way.name} {speed:.1f}" for way, speed in speeds.items())
        drafting = max(speeds.keys() - {PLAIN}, key=speeds.__getitem__, default=PLAIN)
        asked.answer(console, drafting)
        if drafting != PLAIN and speeds[drafting] >= PAYS * speeds[PLAIN]:
            with errors.status(f"plain decoding against {drafting.name}, in turns"):
                samples = asked.race(drafting)
            speeds |= speeds_of(samples)
            if drafting.policy == OVERLAPPING:
                rounds = loop.run(asked.rounds(address, drafting))
    console.print()
    here = where_measured(model)
    same = {sample.token_ids for taken in samples.values() for sample in taken}
    pays = speeds[drafting] > speeds[PLAIN] and len(samples) > 1
    if pays or len(same) > 1:
        console.print(f"Tried for a moment, tokens/s: {tried}", width=MAX_WIDTH)
        whole_table(console, comparison_table(samples))
        gave = "the same tokens" if len(same) == 1 else "DIFFERENT tokens (a defect)"
        console.print(
            f"\nBoth gave {gave}. "
            f"Medians of {REPEATS} runs in turns, prompt included, on {here}. Shares are of time "
            "spent in forward passes.",
            width=MAX_WIDTH,
        )
    else:
        is_here = server is None and not model.startswith(EMULATED)
        told = f"{nothing_pays(speeds)} {cores_and_load() if is_here else ''}"
        console.print(told.rstrip(), width=MAX_WIDTH)
    lines = list(picture(rounds)) if pays else []
    title = f"Both at once, on {here}:"
    is_right = len(same) <= 1
    if emulated:
        gain, emulated_rounds = loop.run(_emulated(errors))
        is_right &= gain.same_text
        console.print()
        console.print(gained(gain), width=MAX_WIDTH)
        if not lines:
            title, lines = "Both at once (EMULATED):", list(picture(emulated_rounds))
    if lines:
        console.print()
        plain(console, title)
    for line in lines:
        console.print(line, width=MAX_WIDTH)
    console.print("\nNext:")
    for command, what in NEXT:
        plain(console, f"  {command}\n      {what}")
    return is_right


async def _emulated(errors: Console) -> tuple[EmulatedGain, list[dict[str, Any]]]:
    """Run the emulated pair: what drafting gives it, and its rounds."""
    from deploy.bench.lookahead import emulated_gain
    from deploy.cli.trace import TraceFile

    file = TraceFile()
    with teller(errors) as tell:
        gain = await emulated_gain(tell=tell, on_round=file.add)
    return gain, file.rounds


IDLE = "·"
_SHADES = "█▓"
"""Spans that follow each other have these in turns, so that their bounds are seen."""


@dataclass(frozen=True, slots=True)
class Span:
    """A pass of a device, in seconds of any one clock. `mark`: what to write below its end."""

    begin: float
    end: float
    mark: str = ""


def drawn(
    lanes: Mapping[str, Sequence[Span]],
    styles: Mapping[str, str],
    *,
    begin: float,
    end: float,
    width: int,
) -> list[Text]:
    """A line for each lane from `begin` to `end`, and one below it if its spans have marks.

    A column shows the span that its middle lies in. `styles` has rich's style of each lane.
    """
    indent = max(map(len, lanes)) + 2
    columns = width - indent
    per_column = (end - begin) / columns
    lines = []
    for name, spans in lanes.items():
        cells, marks = [IDLE] * columns, [" "] * (columns + indent)
        for span, shade in zip(spans, cycle(_SHADES), strict=False):
            first = max(0, round((span.begin - begin) / per_column))
            last = min(columns, round((span.end - begin) / per_column))
            cells[first:last] = shade * max(0, last - first)
            if last > 0 and first < columns:
                at = max(0, last - len(span.mark))
                marks[at : at + len(span.mark)] = span.mark
        lines.append(Text(name.ljust(indent)) + Text("".join(cells[:columns]), styles[name]))
        if any(span.mark for span in spans):
            lines.append(Text(" " * indent + "".join(marks).rstrip()))
    return lines


def seconds_together(one: Sequence[Span], other: Sequence[Span]) -> float:
    """How long a span of one lane and a span of another last at once."""
    return sum(
        max(0.0, min(first.end, second.end) - max(first.begin, second.begin))
        for first in one
        for second in other
    )
