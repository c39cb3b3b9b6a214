"""What all suites of `paceline bench` share: how they register, measure in turns, and report."""

from __future__ import annotations

import asyncio
import json
import math
import os
import pkgutil
import platform
import statistics
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from importlib import import_module
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any, Protocol, TypeVar

from rich.console import Console
from rich.table import Table

import deploy.bench
from cluster.config.model import Config
from deploy.rows.inputs import BadRow, InputRow, read_rows
from deploy.rows.measure import Sample, acceptance_length, measure, median_busy
from paceline.client import Client
from paceline.errors import InvalidRequestError, UnavailableError
from paceline.generation import GenerateInput
from paceline.options import GenerateOptions

CORES = 2
"""Cores that suites on real devices assume: the threads of a target that has all cores."""

T = TypeVar("T")
Row = dict[str, Any]
"""A row, as `--json` writes it and a table shows it. A figure that does not apply is None."""
Document = dict[str, Any]
"""What `--json` writes besides the names of suite and machine: `emulated`, `rows` and more."""


# Suites


@dataclass(frozen=True, slots=True)
class Asked:
    """What the command line asks of a suite, whose defaults are filled in.

    `folder`: for logs, removed after the run. `tell` reports progress. `save` writes a document,
    finished or not, if the user asked for one. `part` and `batch`: None: all that is usual.
    """

    config: Config
    home: Path
    folder: Path
    inputs: Sequence[Path]
    tell: Callable[[str], None]
    save: Callable[[Document], None]
    quick: bool = False
    part: Sequence[str] | None = None
    batch: Sequence[int] | None = None
    limit: int = 1
    max_tokens: int = 1
    repeats: int = 1
    gap_steps: int = 1
    calibrate: bool = False


@dataclass(frozen=True, slots=True)
class Suite:
    """One suite. `run` measures; `show` prints what it returns.

    `amounts`: the flags that it takes, each with its default and that with --quick. `parts` and
    `batches` are the values that --part and --batch may have.
    """

    name: str
    about: str
    run: Callable[[Asked], Document]
    show: Callable[[Console, Document], None]
    amounts: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    parts: Collection[str] = ()
    batches: Collection[int] = ()

    @property
    def flags(self) -> set[str]:
        """The fields of Asked with a default that it reads."""
        others = {"quick": (True,), "part": self.parts, "batch": self.batches}
        return {*self.amounts, *(name for name, values in others.items() if values)}


_suites: dict[str, Suite] = {}


def register(suite: Suite) -> None:
    _suites[suite.name] = suite


def suites() -> Mapping[str, Suite]:
    """All suites by name: those whose files are in this folder."""
    for module in pkgutil.iter_modules(deploy.bench.__path__):
        import_module(f"deploy.bench.{module.name}")
    return dict(sorted(_suites.items()))


# What is decoded


def read_inputs(path: Path, limit: int) -> list[InputRow]:
    """The first rows of a file. Raises InvalidRequestError."""
    found: list[InputRow] = []
    for row in read_rows(path, limit=limit):
        if isinstance(row, BadRow):
            raise InvalidRequestError("input", row.message)
        found.append(row)
    return found


def encode_prompt(client: Client, given: GenerateInput) -> tuple[int, ...]:
    """The prompt's token ids. Every row gets these, so that no row's time includes tokenizing."""
    one_token = GenerateOptions(max_tokens=1, temperature=0.0, policy="off")
    return client.generate(given, one_token).prompt_token_ids


def batches_of(items: Sequence[T], size: int) -> list[Sequence[T]]:
    return [items[start : start + size] for start in range(0, len(items), size)]


# Measuring in turns

Prompts = Sequence[Sequence[int]]


class Contender(Protocol):
    """A row of a suite: it decodes a prompt greedily and says how long it took."""

    @property
    def name(self) -> str:
        """The row's name."""

    @property
    def setting(self) -> str:
        """How it runs, for people."""

    def decode(self, prompt_token_ids: Sequence[int], max_tokens: int) -> Sample:
        """Continue a prompt greedily, up to the end token or `max_tokens`."""


@dataclass(frozen=True, slots=True)
class Ours:
    """A server of ours, asked with `options`. `kind`: of the drafter, for people.

    `predictions`: the options `prediction` by prompt. `times_sent` counts each prompt. A prompt
    that is sent again belongs to another tenant, so that neither a cached prefix nor a drafter's
    rows help it. No peer remembers a prompt either.
    """

    name: str
    client: Client
    options: GenerateOptions
    kind: str = "model"
    predictions: Mapping[tuple[int, ...], str | None] = field(default_factory=dict)
    times_sent: Counter[tuple[int, ...]] = field(default_factory=Counter)

    @property
    def setting(self) -> str:
        """Policy, drafter and window, as a user would set them."""
        if self.options.policy == "off":
            return "plain decoding"
        window = "" if self.options.window is None else f", window {self.options.window}"
        return f"policy {self.options.policy}, a drafter of kind {self.kind}{window}"

    def decode(self, prompt_token_ids: Sequence[int], max_tokens: int) -> Sample:
        """Send the request through the client library, as any caller would."""
        prompt = tuple(prompt_token_ids)
        self.times_sent[prompt] += 1
        options = replace(
            self.options,
            temperature=0.0,
            max_tokens=max_tokens,
            prediction=self.predictions.get(prompt),
            tenant=f"{self.name} {self.times_sent[prompt]}",
        )
        return measure(self.client, list(prompt), options)


@dataclass(frozen=True, slots=True)
class Measured:
    """One contender's samples: `samples[prompt][repeat]`."""

    contender: Contender
    samples: Sequence[Sequence[Sample]]

    @property
    def tokens(self) -> int:
        return sum(len(repeats[0].token_ids) for repeats in self.samples)

    @property
    def seconds(self) -> float:
        """Time for all prompts, each its median over the repeats."""
        return sum(
            statistics.median(sample.seconds for sample in repeats) for repeats in self.samples
        )

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def spread(self) -> float:
        """(slowest - fastest round over all prompts) / the median round."""
        rounds: list[float] = [
            sum(sample.seconds for sample in one) for one in zip(*self.samples, strict=True)
        ]
        return (max(rounds) - min(rounds)) / statistics.median(rounds)

    @property
    def acceptance_length(self) -> float | None:
        """Committed tokens over steps; None for peers."""
        return acceptance_length(sample for repeats in self.samples for sample in repeats)

    @property
    def busy(self) -> Mapping[str, float]:
        return median_busy([sample for repeats in self.samples for sample in repeats])

    def same_text(self, other: Measured) -> bool:
        """Whether every repeat of every prompt gave the tokens that `other` gave first."""
        return all(
            sample.token_ids == theirs[0].token_ids
            for ours, theirs in zip(self.samples, other.samples, strict=True)
            for sample in ours
        )


def measure_in_turns(
    contenders: Sequence[Contender],
    prompts: Prompts,
    *,
    max_tokens: int,
    repeats: int,
    on_sample: Callable[[str, float], None] = lambda name, seconds: None,
    has_time: Callable[[float], bool] = lambda seconds: True,
) -> list[Measured]:
    """Have every contender decode every prompt `repeats` times.

    All contenders decode a prompt before the next prompt begins, and each time another contender
    is the first. Each warms up before, which does not count. `on_sample` hears a contender's name
    and seconds.

    `has_time` says whether work that takes this number of seconds may begin. Once it says no, the
    measurement ends. Then the complete rounds count; if there is none, the prompts that all
    contenders have decoded; if there is none either, only the contenders that have decoded the
    first prompt. The first contender always decodes it.
    """
    ready: list[Contender] = []
    for contender in contenders:
        if not ready or has_time(0.0):
            contender.decode(prompts[0], min(max_tokens, 8))
            ready.append(contender)
    samples: dict[str, list[list[Sample]]] = {one.name: [[] for _ in prompts] for one in ready}

    def take_turns() -> int:
        """The number of turns in which all contenders decoded a prompt."""
        num_turns, seconds = 0, 0.0
        for repeat, number in product(range(repeats), range(len(prompts))):
            # A round counts if it is complete; of the first one each prompt does.
            needed = len(prompts) - number if repeat else 1
            if num_turns and not has_time(seconds * needed):
                break
            seconds = 0.0
            first = (repeat + number) % len(ready)
            for contender in [*ready[first:], *ready[:first]]:
                if (num_turns or seconds) and not has_time(0.0):
                    return num_turns
                sample = contender.decode(prompts[number], max_tokens)
                samples[contender.name][number].append(sample)
                seconds += sample.seconds
                on_sample(contender.name, sample.seconds)
            num_turns += 1
        return num_turns

    num_turns = take_turns()
    rounds = num_turns // len(prompts)
    num_prompts = len(prompts) if rounds else max(1, num_turns)
    return [
        Measured(one, [some[: max(1, rounds)] for some in samples[one.name][:num_prompts]])
        for one in ready
        if samples[one.name][0]
    ]


C = TypeVar("C", bound=Contender)
PROBE_TOKENS = 8
"""Tokens of the first probes; each round doubles them."""


def find_fastest(
    contenders: Iterable[C],
    prompts: Prompts,
    *,
    max_tokens: int,
    seconds: float,
    clock: Callable[[], float],
    on_probe: Callable[[str], None] = lambda name: None,
) -> C:
    """The fastest contender, by short probes in a bounded time (successive halving).

    In each round, every contender decodes a few tokens of one prompt. The faster half goes on to
    the next round, with another prompt and twice the number of tokens, until one contender is left
    or the time is up (Karnin et al. 2013, "Almost optimal exploration in multi-armed bandits").

    The first round only warms up: it drops no contender. No probe begins after `seconds` of
    `clock`, so only the last probe can exceed them. A round that is cut short does not count: the
    fastest of the last complete round is taken. If no round after the warm-up is complete, the
    fastest of those probed after the warm-up is taken; if none was, the first contender.
    """
    until = clock() + seconds
    left = list(contenders)
    tokens = PROBE_TOKENS
    number = 0
    while len(left) > 1:
        costs: list[tuple[float, int]] = []
        for place, contender in enumerate(left):
            if clock() >= until:
                return left[min(costs)[1]] if number == 1 and costs else left[0]
            on_probe(contender.name)
            sample = contender.decode(prompts[number % len(prompts)], min(tokens, max_tokens))
            costs.append((sample.seconds / max(1, len(sample.token_ids)), place))
        if number > 0:
            left = [left[place] for _, place in sorted(costs)[: math.ceil(len(left) / 2)]]
            tokens *= 2
        number += 1
    return left[0]


_TOLD_SECONDS = 3.0
"""A shorter time would be told as 0.0 minutes."""


class TimeLeft:
    """How long a measurement in turns still takes, by each row's mean time for a prompt."""

    def __init__(self, names: Iterable[str], *, rounds: int) -> None:
        """`rounds`: samples of each row."""
        self._left = dict.fromkeys(names, rounds)
        self._seconds: dict[str, list[float]] = {}

    def after(self, name: str, seconds: float, *, most: float = math.inf) -> str:
        """Note a sample of a row; returns what is done and left, for people.

        `most`: seconds after which the measurement ends in any case.
        """
        self._left[name] -= 1
        self._seconds.setdefault(name, []).append(seconds)
        means = {one: statistics.fmean(known) for one, known in self._seconds.items()}
        of_others = statistics.fmean(means.values())
        left = sum(count * means.get(one, of_others) for one, count in self._left.items())
        done = sum(map(len, self._seconds.values()))
        return f"{done} of {done + sum(self._left.values())}{told_left(min(left, most))}"


def told_left(seconds: float, bound: str = "") -> str:
    """How long something still takes, for the end of a message; "" if that is next to nothing."""
    return f", {bound}{seconds / 60:.1f} min left" if seconds >= _TOLD_SECONDS else ""


# HTTP


async def http_events(address: str, path: str, body: Mapping[str, object]) -> AsyncGenerator[bytes]:
    """The events of an answer that streams over a connection of its own, a line each.

    `address`: "host:port". The last event is [DONE], if the server sends it: transformers' does
    not. Plain sockets, so that little of a client's time is in the figures. Raises
    UnavailableError, and OSError.
    """
    host, _, port = address.rpartition(":")
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(head.encode() + content)
        status = await reader.readline()
        if b" 200 " not in status:
            raise UnavailableError(f"the server answered {status!r} {await reader.read(500)!r}")
        while line := await reader.readline():
            if line.startswith(b"data: "):
                yield line
            if line.startswith(b"data: [DONE]"):
                return
    finally:
        writer.close()


# Spread

TokensAndSteps = tuple[int, int]
"""Output tokens of a prompt, and the steps that they took."""


def length_of(by_prompt: Sequence[TokensAndSteps]) -> float:
    return sum(tokens for tokens, _ in by_prompt) / sum(steps for _, steps in by_prompt)


def length_ratio(
    pairs: Sequence[tuple[TokensAndSteps, TokensAndSteps]],
) -> float:
    return length_of([one for one, _ in pairs]) / length_of([other for _, other in pairs])


def jackknife_error(samples: Sequence[T], figure: Callable[[Sequence[T]], float]) -> float | None:
    """The jackknife's standard error of a figure over prompts (Tukey 1958).

    None for a single prompt, which has no spread.
    """
    count = len(samples)
    if count < 2:
        return None
    without = [figure([*samples[:at], *samples[at + 1 :]]) for at in range(count)]
    mean = sum(without) / count
    return math.sqrt((count - 1) / count * sum((one - mean) ** 2 for one in without))


# Reports


def describe_machine() -> Mapping[str, object]:
    """Day, processor, usable cores, instruction set and the versions that set the speed."""
    import torch

    return {
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "instruction_set": torch.backends.cpu.get_cpu_capability(),
        "load_average": os.getloadavg()[0],
        "python": platform.python_version(),
        "torch": version("torch"),
        "transformers": version("transformers"),
        "ray": version("ray"),
    }


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.processor() or platform.machine()


@dataclass(frozen=True, slots=True)
class Goal:
    """A ratio that should be at least `aim`. `error`: its standard error over prompts, if known."""

    name: str
    ratio: float
    aim: float
    error: float | None = None


def ratios(goals: Iterable[Goal]) -> dict[str, float]:
    return {goal.name: goal.ratio for goal in goals}


def print_goals(console: Console, goals: Iterable[Goal]) -> None:
    for goal in goals:
        error = "" if goal.error is None else f" +- {goal.error:.2f}"
        console.print(f"{goal.name} = {goal.ratio:.2f}{error} (aim {goal.aim:g})", highlight=False)


Column = tuple[str, str, str]
"""Of a table: the heading, the field of a row, and the format of a figure."""


def figure(value: object, form: str = ".2f") -> str:
    """A value as text: a number by the format, yes or no, "" for None, and what a mapping has."""
    if isinstance(value, Mapping):
        return " ".join(figure(one, form) for one in value.values() if one is not None)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        return format(value, form)
    return "" if value is None else str(value)


def table(columns: Sequence[Column], rows: Iterable[Row], *, left: int = 1) -> Table:
    """A table without lines. The first `left` columns are texts, the others figures."""
    made = Table(box=None, pad_edge=False)
    for number, (heading, _, _) in enumerate(columns):
        made.add_column(heading, justify="left" if number < left else "right", no_wrap=True)
    for row in rows:
        made.add_row(*(figure(row.get(name), form) for _, name, form in columns))
    return made
