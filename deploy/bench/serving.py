"""`paceline bench serving`: what the gateway adds, how much it carries, and transformers' server.

- "overhead": one request at a time, over HTTP and over the driver's own gRPC in turns. The target
  is emulated, so every token takes the same time; the differences are what gateway and client add.
- "streams": 200 streams at once, on an emulated target.
- "peers": the demo model behind our gateway and behind `transformers serve`, in turns.

The deployment is that of `paceline up`: Ray places the workers, and the gateway is a process of its
own. The client of HTTP is plain sockets, so that little of its time is in the figures.
"""

from __future__ import annotations

import asyncio
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from cluster.config.model import Config, TargetConfig
from deploy.bench.harness import Asked, Document, Row, Suite, http_events, read_inputs, register
from deploy.session.cluster import check_models, join_ray, own_cores
from deploy.session.ray_head import free_ports, is_listening
from paceline.chat import Message
from paceline.client import AsyncClient
from paceline.errors import UnavailableError
from paceline.generation import Chunk, GenerateInput, chat_of
from workers.models.catalog import resolve_model
from workers.process.logs import new_run

PROFILE = "70b-4xh100"
"""The emulated target of the first two parts: 18 ms a token, 26 ms for 200 sequences."""
STREAMS = 200
STREAM_TOKENS, QUICK_STREAM_TOKENS = 200, 20
ROUNDS, QUICK_ROUNDS = 30, 3
ROUND_TOKENS = 64
CONCURRENCY = (1, 4, 16)
PEER_TOKENS = 64
_START_SECONDS = 120.0

AIMS: Mapping[str, tuple[str, float]] = {
    "overhead: first token, ms added": ("at most", 5.0),
    "overhead: a token, ms added": ("at most", 1.0),
    "streams: tokens/s": ("at least", 2500.0),
    "streams: slowest over median": ("at least", 0.5),
}

_USAGE = re.compile(rb'"completion_tokens": ?([0-9]+)')


@dataclass(frozen=True, slots=True)
class Timed:
    """One answer: the times of its first and last token since the request, and its tokens."""

    first: float
    last: float
    tokens: int

    @property
    def per_token(self) -> float:
        return (self.last - self.first) / max(1, self.tokens - 1)


# Two ways to ask


async def ask_http(address: str, body: Mapping[str, object], path: str) -> Timed:
    """Stream an answer over a connection of its own. Raises UnavailableError."""
    asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
    began = time.perf_counter()
    first = last = 0.0
    texts = tokens = 0
    async for line in http_events(address, path, asked):
        # Not parsed: a client's JSON is not the gateway's time.
        if _has_text(line):
            last = time.perf_counter() - began
            first = first or last
            texts += 1
        elif found := _USAGE.search(line):
            tokens = int(found[1])
    if not texts:
        raise UnavailableError("the server sent no text")
    return Timed(first, last, tokens or texts)


def _has_text(line: bytes) -> bool:
    """Whether an event has text of the answer, in a chat or a completion."""
    for mark in (b'"content":', b'"text":'):
        _, found, rest = line.partition(mark)
        if found:
            return not rest.lstrip().startswith((b'""', b"null"))
    return False


async def ask_grpc(client: AsyncClient, given: GenerateInput, **options: Any) -> Timed:
    began = time.perf_counter()
    first = last = 0.0
    tokens = 0
    async for event in client.stream(given, **options):
        if isinstance(event, Chunk):
            tokens += len(event.token_ids)
            if event.text:
                last = time.perf_counter() - began
                first = first or last
    return Timed(first, last, tokens)


async def at_once(asks: Sequence[Callable[[], Awaitable[Timed]]], count: int) -> list[Timed]:
    """The answers of all, with `count` of them open at any time."""
    waiting = iter(asks)

    async def run() -> list[Timed]:
        return [await ask() for ask in waiting]

    return [one for some in await asyncio.gather(*(run() for _ in range(count))) for one in some]


# What is measured


@dataclass(frozen=True, slots=True)
class Running:
    """A deployment: addresses of its HTTP and gRPC, and the gateway's process."""

    http_address: str
    grpc_address: str
    gateway: psutil.Process


@contextmanager
def deployed(config: Config, asked: Asked) -> Iterator[Running]:
    """The deployment of `paceline up` while the block runs, on free ports."""
    changed = {"http": True, "http_port": 0, "grpc_port": 0, "max_waiting": 2 * STREAMS}
    config = config.model_copy(update={"server": config.server.model_copy(update=changed)})
    check_models(config, home=asked.home)
    with join_ray(config, progress=asked.tell) as head:
        from cluster.placement.launch import start_cluster

        handle = start_cluster(
            config,
            home=asked.home,
            logs=new_run(asked.home),
            progress=asked.tell,
            detached=False,
            name=None,
            cores=own_cores() if head else None,
        )
        try:
            assert handle.http_address is not None
            pids = {one.kind: one.pid for one in handle.workers()}
            yield Running(handle.http_address, handle.address, psutil.Process(pids["gateway"]))
        finally:
            handle.stop()


def emulated(asked: Asked) -> Config:
    target = TargetConfig(emulated=PROFILE, max_num_seqs=STREAMS)
    return asked.config.model_copy(update={"target": target, "drafters": ()})


def _completion(number: int, tokens: int) -> dict[str, object]:
    return {
        "prompt": f"Request {number}: the sea is",
        "max_tokens": tokens,
        "ignore_eos": True,
        "temperature": 0,
    }


def measure_overhead(asked: Asked) -> Iterator[Row]:
    rounds = QUICK_ROUNDS if asked.quick else ROUNDS
    with deployed(emulated(asked), asked) as running:
        asked.tell(f"overhead: {rounds} rounds")
        times = asyncio.run(_in_turns(running, rounds))
    for name, some in times.items():
        yield {
            "part": "overhead",
            "name": name,
            "requests": len(some),
            "first_ms": 1000 * statistics.median(one.first for one in some),
            "token_ms": 1000 * statistics.median(one.per_token for one in some),
        }


async def _in_turns(running: Running, rounds: int) -> dict[str, list[Timed]]:
    times: dict[str, list[Timed]] = {"grpc": [], "http": []}
    async with AsyncClient(running.grpc_address) as client:
        for number in range(-1, rounds):
            body = _completion(number, ROUND_TOKENS)
            options = {key: value for key, value in body.items() if key != "prompt"}
            asks: list[tuple[str, Awaitable[Timed]]] = [
                ("grpc", ask_grpc(client, str(body["prompt"]), **options)),
                ("http", ask_http(running.http_address, body, "/v1/completions")),
            ]
            for name, ask in asks[:: 1 if number % 2 else -1]:
                one = await ask
                if number >= 0:  # The first round warms up.
                    times[name].append(one)
    return times


def measure_streams(asked: Asked) -> Iterator[Row]:
    tokens = QUICK_STREAM_TOKENS if asked.quick else STREAM_TOKENS
    with deployed(emulated(asked), asked) as running:
        asked.tell(f"streams: {STREAMS} of {tokens} tokens")
        asks = [
            partial(ask_http, running.http_address, _completion(n, tokens), "/v1/completions")
            for n in range(STREAMS)
        ]
        asyncio.run(at_once(asks[:8], 8))
        began, processor = time.perf_counter(), running.gateway.cpu_times()
        times = asyncio.run(at_once(asks, STREAMS))
        seconds = time.perf_counter() - began
        after = running.gateway.cpu_times()
    speeds = sorted(one.tokens / one.last for one in times)
    spent = after.user + after.system - processor.user - processor.system
    total = sum(one.tokens for one in times)
    yield {
        "part": "streams",
        "name": "http",
        "streams": STREAMS,
        "tokens": total,
        "tokens_per_second": total / seconds,
        "slowest_over_median": speeds[0] / statistics.median(speeds),
        "first_ms": 1000 * statistics.median(one.first for one in times),
        "gateway_ms_per_token": 1000 * spent / total,
    }


def measure_peers(asked: Asked) -> Iterator[Row]:
    """The demo model behind both servers. One decodes while the other is idle."""
    chats = [_chat(row.input) for row in read_inputs(asked.inputs[0], max(CONCURRENCY))]
    folder = resolve_model(asked.config.target.model, home=asked.home).folder
    tokens = 8 if asked.quick else PEER_TOKENS
    with (
        deployed(asked.config, asked) as running,
        transformers_server(folder, asked.folder / "transformers.log", asked.tell) as address,
    ):
        servers = {
            "paceline": (running.http_address, {}),
            "transformers serve": (address, {"model": str(folder)}),
        }
        for count in CONCURRENCY[: 1 if asked.quick else None]:
            for name, (at, more) in servers.items():
                bodies = [
                    {"messages": chat, "max_tokens": tokens, "temperature": 0, **more}
                    for chat in chats[: max(count, 4)]
                ]
                asks = [partial(ask_http, at, body, "/v1/chat/completions") for body in bodies]
                asyncio.run(at_once(asks[:1], 1))
                began = time.perf_counter()
                times = asyncio.run(at_once(asks, count))
                seconds = time.perf_counter() - began
                asked.tell(f"peers: {name}, {count} at once")
                yield {
                    "part": "peers",
                    "name": name,
                    "concurrency": count,
                    "requests": len(times),
                    "first_ms": 1000 * statistics.median(one.first for one in times),
                    "tokens_per_second": sum(one.tokens for one in times) / seconds,
                }


def _chat(given: GenerateInput) -> list[dict[str, str]]:
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    chat = chat_of(given)
    messages = () if chat is None else chat.messages
    return [{"role": m.role, "content": m.content} for m in messages if isinstance(m, Message)]


@contextmanager
def transformers_server(folder: Path, log: Path, tell: Callable[[str], None]) -> Iterator[str]:
    """`transformers serve` with a checkpoint in float32 on the CPU. Yields its address."""
    command = shutil.which("transformers", path=str(Path(sys.executable).parent))
    if command is None:
        raise UnavailableError("the command `transformers` is not beside this Python")
    (port,) = free_ports(1)
    address = f"127.0.0.1:{port}"
    arguments = [command, "serve", str(folder), "--device", "cpu", "--dtype", "float32"]
    with (
        log.open("wb") as said,
        subprocess.Popen([*arguments, "--port", str(port)], stdout=said, stderr=said) as process,
    ):
        try:
            tell("transformers serve: starting")
            give_up = time.monotonic() + _START_SECONDS
            while not is_listening(address):
                if process.poll() is not None or time.monotonic() > give_up:
                    end = log.read_text(errors="replace").strip()[-400:]
                    raise UnavailableError(f"transformers serve did not start: {end}")
                time.sleep(0.2)
            yield address
        finally:
            process.kill()


PARTS: Mapping[str, Callable[[Asked], Iterator[Row]]] = {
    "overhead": measure_overhead,
    "streams": measure_streams,
    "peers": measure_peers,
}


def figures(rows: Sequence[Row]) -> dict[str, float]:
    found: dict[str, float] = {}
    by_name: dict[tuple[object, object], Any] = {(row["part"], row["name"]): row for row in rows}
    grpc, http = by_name.get(("overhead", "grpc")), by_name.get(("overhead", "http"))
    if grpc and http:
        found["overhead: first token, ms added"] = http["first_ms"] - grpc["first_ms"]
        found["overhead: a token, ms added"] = http["token_ms"] - grpc["token_ms"]
    if streams := by_name.get(("streams", "http")):
        found["streams: tokens/s"] = streams["tokens_per_second"]
        found["streams: slowest over median"] = streams["slowest_over_median"]
    return found


def run_serving(asked: Asked) -> Document:
    rows: list[Row] = []
    document: Document = {"emulated": "overhead and streams, not peers", "rows": rows}
    for name in asked.part or PARTS:
        for row in PARTS[name](asked):
            rows.append(row)
            document["figures"] = figures(rows)
            asked.save(document)
    return document


def show_serving(console: Console, document: Document) -> None:
    shown = Table(box=None, pad_edge=False)
    for heading in ("part", "row", "figures"):
        shown.add_column(heading, overflow="fold")
    for row in document["rows"]:
        told = ", ".join(
            f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
            for name, value in row.items()
            if name not in ("part", "name")
        )
        shown.add_row(row["part"], row["name"], told)
    console.print(shown)
    for name, value in document["figures"].items():
        way, aim = AIMS[name]
        console.print(f"{name}: {value:.3f} (aim: {way} {aim:g})", highlight=False)


register(
    Suite(
        name="serving",
        about="what gateway and client add, 200 streams, and `transformers serve`",
        run=run_serving,
        show=show_serving,
        parts=tuple(PARTS),
    )
)
