"""`paceline bench faults`: each fault of a deployment, with 20 requests in flight.

A row injects one fault while 20 requests stream at temperature 1, and compares every answer, token
by token, with that of an undisturbed run. The pause of a stream is the longest time between two of
its chunks at the caller, from the fault on. It is to stay below the row's bar.

The deployment is that of `paceline up` on emulated devices: their passes take the time of large
models and no processor time, so the pauses are those of the recovery. Their text depends on every
token and position that they read, so a lost or repeated token changes it. Drafters are on another
host: a network namespace at the end of a virtual cable, which can be cut. That needs root; without
it, all is on one host, and the rows of hosts and links are left out.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from rich.console import Console

from deploy.bench.fault_deployment import BACK_SECONDS, Deployed, Front, deployed
from deploy.bench.harness import (
    Asked,
    Document,
    Row,
    Suite,
    http_events,
    register,
    table,
)
from paceline.client import AsyncClient
from paceline.errors import PacelineError, UnavailableError
from paceline.generation import Chunk
from paceline.options import GenerateOptions

STREAMS = 20
FAULT_AT = 100
"""Tokens that every stream has when the fault happens."""
LINK_SECONDS, HOST_SECONDS = 2.5, 15.0
"""How long the cable is cut: Ray does not notice the first, and gives the host up in the second."""
NOISE_SECONDS = 0.05
"""Where no pause is allowed: what the longest pause may exceed that of the undisturbed run by."""
STEADY_SECONDS = 4.0
"""How long all has to stay back (BACK_SECONDS)."""
HTTP_PAUSE_SECONDS = 0.2
"""After how long a caller over HTTP asks again."""
_LOOK_SECONDS = 0.02
_WORD = re.compile(r"w([0-9]+) ")
GRPC, FRONT, HTTP = "gRPC", "gRPC through a gateway", "HTTP"
WRONG = ("lost", "repeated", "changed")
COLUMNS = (
    ("fault", "fault", ""),
    ("callers by", "way", ""),
    ("wrong", "wrong", ""),
    ("pause", "longest_pause_seconds", ".2f"),
    ("median", "median_pause_seconds", ".2f"),
    ("bar", "bar_seconds", ".2f"),
    ("met", "met", ""),
    ("back", "back_seconds", ".2f"),
)
LEGEND = """
wrong: answers with tokens lost, repeated, changed. pause: seconds, the longest
of all streams; median: of the streams' longest. back: seconds until all workers
are in use again.
"""


# Streams


@dataclass(slots=True)
class Stream:
    """What one caller got: token ids, and when each chunk came."""

    token_ids: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    error: str = ""
    broken: int = 0

    def pause_after(self, fault_at: float) -> float:
        """The longest time between two chunks, the later of which came after the fault."""
        pairs = zip(self.times, self.times[1:], strict=False)
        return max((late - early for early, late in pairs if late > fault_at), default=0.0)


def wrong_of(streams: Sequence[Stream], expected: Sequence[Sequence[int]]) -> dict[str, int]:
    """How many answers differ from the undisturbed ones, by kind.

    lost: tokens are missing. repeated: there are too many. changed: other tokens.
    """
    found = dict.fromkeys(WRONG, 0)
    for stream, wanted in zip(streams, expected, strict=True):
        if stream.token_ids == list(wanted):
            continue
        if stream.error or len(stream.token_ids) < len(wanted):
            found["lost"] += 1
        elif len(stream.token_ids) > len(wanted):
            found["repeated"] += 1
        else:
            found["changed"] += 1
    return found


def options_of(number: int, tokens: int) -> GenerateOptions:
    """The options of a stream: sampled at temperature 1, each with a seed of its own."""
    return GenerateOptions(
        temperature=1.0,
        seed=1000 + number,
        max_tokens=tokens,
        ignore_eos=True,
        policy="chain",
        window=8,
    )


def prompt_of(number: int) -> list[int]:
    """The prompt of a stream, in token ids of the stand-in."""
    return [100 + number, *range(200, 232)]


async def read_stream(client: AsyncClient, number: int, tokens: int, stream: Stream) -> None:
    """Read one answer into `stream`, whose `error` says why it ended early."""
    try:
        async for event in client.stream(prompt_of(number), options_of(number, tokens)):
            if isinstance(event, Chunk) and event.token_ids:
                stream.times.append(time.monotonic())
                stream.token_ids += event.token_ids
    except PacelineError as error:
        stream.error = f"{type(error).__name__}: {error}"


async def read_http(address: str, number: int, tokens: int, stream: Stream) -> None:
    """Read one answer over HTTP. One that breaks off is asked for again, from its beginning.

    HTTP has no way to resume an answer. `stream.broken` counts the answers that broke off.
    """
    options = options_of(number, tokens)
    body = {
        "prompt": prompt_of(number),
        "stream": True,
        **{name: getattr(options, name) for name in ("temperature", "seed", "max_tokens")},
        "ignore_eos": True,
    }
    give_up = time.monotonic() + BACK_SECONDS
    while time.monotonic() < give_up:
        stream.token_ids.clear()
        with contextlib.suppress(OSError, UnavailableError):
            if await _read_http_once(address, body, stream):
                return
        stream.broken += bool(stream.token_ids)
        await asyncio.sleep(HTTP_PAUSE_SECONDS)
    stream.error = "it was not answered in time"


async def _read_http_once(address: str, body: Mapping[str, object], stream: Stream) -> bool:
    async with contextlib.aclosing(http_events(address, "/v1/completions", body)) as lines:
        async for line in lines:
            if line.startswith(b"data: [DONE]"):
                return True
            if line.startswith(b'data: {"error"'):
                return False  # The gateway says that it cannot go on.
            # The words of the stand-in are its token ids.
            text: str = json.loads(line.removeprefix(b"data: "))["choices"][0]["text"]
            if found := _WORD.findall(text):
                stream.times.append(time.monotonic())
                stream.token_ids += map(int, found)
    return False


# Faults


@dataclass(frozen=True, slots=True)
class Fault:
    """A row: what breaks, and how long it may be felt.

    `bar`: seconds that the longest pause may last, the start of `worker` not counted; 0: no pause;
    None: no bar. `back_bar`: seconds until it is in use again after it is mended. `actor`: the
    process to kill. `cut_seconds`: how long the cable between the hosts is cut. `worker`: the log
    that tells how long its start takes. `way`: how callers reach the driver: its own gRPC, FRONT
    (`paceline gateway`, which is killed, and which its supervisor starts again) or HTTP (the
    deployment's own gateway). `loses_head`: the node of Ray's head is lost, for good.
    """

    name: str
    bar: float | None = None
    back_bar: float | None = None
    actor: str | None = None
    cut_seconds: float | None = None
    worker: str | None = None
    way: str = GRPC
    loses_head: bool = False

    @property
    def part(self) -> str:
        """The name of the row for --part: the party that is lost."""
        return self.name.removeprefix("drafter's ").removeprefix("Ray's ").split()[0].lower()

    @property
    def needs_hosts(self) -> bool:
        return self.cut_seconds is not None or self.loses_head

    @property
    def comes_back(self) -> bool:
        """Whether something is lost that the deployment brings back."""
        return (self.actor or self.cut_seconds) is not None


FAULTS = (
    Fault("none"),
    Fault("drafter killed", 0.2, actor="DrafterActor"),
    Fault("shard killed", 5.0, actor="ShardActor", worker="shard-0"),
    Fault("driver killed", 5.0, actor="DriverActor", worker="driver"),
    Fault("gateway killed", 3.0, way=FRONT),
    Fault("gateway killed", actor="GatewayActor", way=HTTP),
    Fault("controller killed", 0.0, actor="Controller"),
    Fault("drafter's link cut", 2.0, cut_seconds=LINK_SECONDS),
    Fault("drafter's host cut", 2.0, back_bar=15.0, cut_seconds=HOST_SECONDS),
    Fault("Ray's head lost", loses_head=True),
)
"""In the order in which they run. The last one leaves nothing that a next one could use."""


async def _inject(deployment: Deployed, fault: Fault) -> None:
    if fault.actor is not None:
        deployment.process(fault.actor).kill()
    if fault.loses_head:
        await asyncio.to_thread(deployment.lose_head)
    if fault.cut_seconds is not None:
        assert deployment.cable is not None
        deployment.cable.cut()
        try:
            await asyncio.sleep(fault.cut_seconds)
        finally:
            deployment.cable.mend()


# Measuring

Ask = Callable[..., Coroutine[None, None, None]]
"""Reads the answer to a request, by its number, into a `stream`."""
Inject = Callable[[], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a fault: what callers got, when the fault was, and when all was back.

    `back_seconds`: from the end of the fault; None: it was not back in time, or was not awaited.
    """

    streams: Sequence[Stream]
    fault_at: float
    back_seconds: float | None

    @property
    def pauses(self) -> list[float]:
        return [one.pause_after(self.fault_at) for one in self.streams]


async def run_fault(deployment: Deployed, fault: Fault, tokens: int, folder: Path) -> Run:
    streams = [Stream() for _ in range(STREAMS)]
    async with _way(deployment, fault, tokens, folder) as (ask, inject):
        asking = [asyncio.create_task(ask(at, stream=one)) for at, one in enumerate(streams)]
        try:
            while any(len(one.token_ids) < FAULT_AT for one in streams):
                await asyncio.sleep(_LOOK_SECONDS)
                if ended := [one.error for one in streams if one.error]:
                    raise UnavailableError(f"a request failed before the fault: {ended[0]}")
            pid = deployment.process(fault.actor).pid if fault.actor else None
            fault_at = time.monotonic()
            await inject()
            back = await _until_back(deployment, fault, pid)
            await asyncio.gather(*asking)
        finally:
            for one in asking:
                one.cancel()
            await asyncio.gather(*asking, return_exceptions=True)
    return Run(streams, fault_at, back)


@asynccontextmanager
async def _way(
    deployment: Deployed, fault: Fault, tokens: int, folder: Path
) -> AsyncIterator[tuple[Ask, Inject]]:
    """How a request is asked on the fault's way, and how the fault is injected."""
    inject: Inject = partial(_inject, deployment, fault)
    if fault.way == HTTP:
        yield partial(read_http, deployment.http_address, tokens=tokens), inject
        return
    async with contextlib.AsyncExitStack() as stack:
        address = deployment.address
        if fault.way == FRONT:
            front = Front(address, folder)
            stack.push_async_callback(asyncio.to_thread, front.stop)
            await asyncio.to_thread(front.wait)
            address, inject = front.address, partial(asyncio.to_thread, front.kill)
        client = await stack.enter_async_context(AsyncClient(address))

        yield partial(read_stream, client, tokens=tokens), inject


async def _until_back(deployment: Deployed, fault: Fault, pid: int | None) -> float | None:
    """Seconds until the driver has all its workers, and what was killed another process.

    They must stay for STEADY_SECONDS: the workers of a host that Ray has given up are in use again
    when its link is mended, and end when it learns that.
    """
    if not fault.comes_back:
        return None
    began = time.monotonic()
    since: float | None = None
    async with AsyncClient(deployment.address) as client:
        while (now := time.monotonic()) < began + BACK_SECONDS:
            if not (_is_another(deployment, fault, pid) and await _is_whole(client)):
                since = None
            elif since is None:
                since = now
            elif now - since > STEADY_SECONDS:
                return since - began
            await asyncio.sleep(_LOOK_SECONDS)
    return None


def _is_another(deployment: Deployed, fault: Fault, pid: int | None) -> bool:
    try:
        return fault.actor is None or deployment.process(fault.actor).pid != pid
    except UnavailableError:
        return False


async def _is_whole(client: AsyncClient) -> bool:
    try:
        stats = await client.stats()
    except PacelineError:
        return False
    return all(worker.connected for worker in stats.workers)


# The suite


def row_of(
    fault: Fault, runs: Sequence[Run], expected: Sequence[Sequence[int]], start: float, quiet: float
) -> Row:
    """The figures of a row. `start`: seconds of the worker's start. `quiet`: the longest pause
    without a fault.
    """
    bar = None if fault.bar is None else fault.bar + start
    if fault.bar == 0:
        bar = quiet + NOISE_SECONDS
    streams = [stream for one in runs for stream in one.streams]
    longest = [max(one.pauses) for one in runs]
    backs = [one.back_seconds for one in runs if one.back_seconds is not None]
    back = max(backs) if len(backs) == len(runs) else None
    is_met = bar is None or max(longest) <= bar
    if fault.back_bar is not None:
        is_met = is_met and back is not None and back <= fault.back_bar
    return {
        "fault": fault.name,
        "way": fault.way,
        "streams": STREAMS * len(runs),
        **wrong_of(streams, [*expected] * len(runs)),
        "broken": sum(stream.broken for stream in streams),
        "longest_pause_seconds": max(longest),
        "longest_pauses_seconds": longest,
        "median_pause_seconds": statistics.median(statistics.median(one.pauses) for one in runs),
        "start_seconds": start if fault.worker else None,
        "bar_seconds": bar,
        "is_back": back is not None or not fault.comes_back,
        "back_seconds": back if fault.comes_back else None,
        "back_bar_seconds": fault.back_bar,
        "met": None if bar is None else is_met,
        "errors": sorted({stream.error for stream in streams if stream.error}),
    }


def run_faults(asked: Asked) -> Document:
    tokens = asked.max_tokens
    rows: list[Row] = []
    with deployed(asked.home, asked.folder, asked.tell) as deployment:
        document: Document = {
            "emulated": True,
            "streams": STREAMS,
            "tokens": tokens,
            "hosts": 1 if deployment.cable is None else 2,
            "rows": rows,
        }
        quiet = asyncio.run(run_fault(deployment, FAULTS[0], tokens, asked.folder))
        expected = [one.token_ids for one in quiet.streams]
        for fault in FAULTS:
            if asked.part and fault.part not in asked.part:
                continue
            if fault.needs_hosts and deployment.cable is None:
                continue
            runs, start = [], 0.0
            for number in range(1 if fault.loses_head else asked.repeats):
                asked.tell(f"{fault.name} ({fault.way}), {number + 1} of {asked.repeats}")
                with deployment.kept():
                    runs.append(asyncio.run(run_fault(deployment, fault, tokens, asked.folder)))
                if fault.worker is not None:
                    start = max(start, deployment.start_seconds(fault.worker))
            rows.append(row_of(fault, runs, expected, start, max(quiet.pauses)))
            if fault.name == "none":
                quiet = max(runs, key=lambda run: max(run.pauses))
            document["failed"] = failures(rows)
            asked.save(document)
    return document


def failures(rows: Sequence[Row]) -> list[str]:
    """What must not happen: answers that differ, and workers that did not come back."""
    found = []
    for row in rows:
        wrong = [f"{row[kind]} {kind}" for kind in WRONG if row[kind]]
        wrong += ["not back in time"] * (not row["is_back"])
        if wrong:
            found.append(f"{row['fault']} ({row['way']}): {', '.join(wrong)}")
    return found


def show_faults(console: Console, document: Document) -> None:
    rows = [
        {**row, "wrong": "/".join(str(row[kind]) for kind in WRONG)} for row in document["rows"]
    ]
    console.print(table(COLUMNS, rows, left=2))
    console.print(LEGEND, highlight=False)
    if document["hosts"] == 1:
        console.print("one host: the rows of links and hosts need root and network namespaces")


PARTS = tuple(dict.fromkeys(fault.part for fault in FAULTS))

register(
    Suite(
        name="faults",
        about="each fault with 20 requests in flight: what callers get, and how long they wait",
        run=run_faults,
        show=show_faults,
        amounts={"max_tokens": (1500, 600), "repeats": (3, 1)},
        parts=PARTS,
    )
)
