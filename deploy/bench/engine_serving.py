"""Part "serving" of `bench engine`: seeded requests through our driver, and through transformers.

Every batch has requests of its own. We serve as many at a time as the batch has, one taking the
place of another; transformers' static batching takes that many and waits for the longest.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from cluster.config_model import Config
from deploy.bench.decode import CORES
from deploy.bench.deployments import running_side_by_side
from deploy.bench.engine_load import Request, batches_of, seeded_requests
from deploy.bench.engine_peer import PeerProcess
from deploy.bench.engine_rows import BATCHES, EngineRow, EngineTask, own_name, peer_dtype
from deploy.measure import busy_shares
from paceline.client import AsyncClient, Client
from paceline.generation import Stats
from paceline.options import GenerateOptions

PART = "serving"
_WARM_UP = Request((5, 6, 7, 8), 4)


@dataclass(frozen=True, slots=True)
class ServingAmount:
    """Requests of each batch, and how long transformers' continuous batching may take in all."""

    requests: Mapping[int, int]
    continuous_seconds: float


FULL = ServingAmount({1: 4, 4: 12, 16: 32}, 20.0)
QUICK = ServingAmount({1: 1, 16: 16}, 10.0)
_REPORTS = 4
"""How often it is told how far the requests of a row are."""


@dataclass(frozen=True, slots=True)
class Served:
    """What came of all requests of a batch: output tokens by request, and the time for all."""

    token_ids: Sequence[Sequence[int]]
    seconds: float
    steps: int
    details: Mapping[str, object]

    @property
    def tokens(self) -> int:
        """Output tokens of all requests."""
        return sum(map(len, self.token_ids))


def measure_serving(task: EngineTask) -> Iterator[EngineRow]:
    """Our rows at every thread count and transformers', batch by batch in turns."""
    amount = QUICK if task.quick else FULL
    files = task.target_files()
    log = task.log_folder / "transformers.log"
    with (
        running_side_by_side(deployments(task.config), home=task.home, tell=task.tell) as clients,
        PeerProcess(files.folder, dtype=peer_dtype(files.weights), threads=CORES, log=log) as peer,
    ):
        vocab_size = next(iter(clients.values())).describe().vocab_size
        threads = _best_threads(peer, vocab_size)
        for batch in task.batches_of(amount.requests):
            requests = seeded_requests(amount.requests[batch], vocab_size=vocab_size, seed=batch)
            for name, client in clients.items():
                progress = _Progress(task.tell, f"{name}, batch {batch}", len(requests))
                asyncio.run(serve(client.address, [_WARM_UP], batch=1, tenant="warm-up"))
                served = measure_own(client, requests, batch, progress.more)
                row = _own_row(name, files.weights, batch, served)
                progress.end(row)
                yield row
            progress = _Progress(task.tell, f"transformers, batch {batch}", len(requests))
            row = _static_row(peer, requests, batch, threads, progress.more)
            progress.end(row)
            yield row
            if batch == max(BATCHES):
                task.tell("serving: transformers' continuous batching")
                limit = amount.continuous_seconds
                yield _continuous_row(peer, requests, batch, threads, limit)


class _Progress:
    """Says how far a row is, and in the end what it gave."""

    def __init__(self, tell: Callable[[str], None], name: str, requests: int) -> None:
        self._tell = tell
        self._name = name
        self._requests = requests
        self._done = 0
        tell(f"serving: {name}, {requests} requests")

    def more(self, requests: int) -> None:
        """So many more are done."""
        before, self._done = self._done, self._done + requests
        if self._done * _REPORTS // self._requests > before * _REPORTS // self._requests:
            self._tell(f"serving: {self._name}, {self._done} of {self._requests} requests")

    def end(self, row: EngineRow) -> None:
        """All are done."""
        self._tell(f"serving: {self._name}, {row.tokens_per_second:.1f} tokens/s")


def deployments(config: Config) -> dict[str, Config]:
    """Plain targets without drafters, by the names of their rows, on any free ports."""
    server = config.server.model_copy(update={"http_port": 0, "grpc_port": 0})

    def plain(threads: int) -> Config:
        target = config.target.model_copy(update={"threads": threads, "tensor_parallel": 1})
        return config.model_copy(update={"target": target, "drafters": (), "server": server})

    return {own_name(window=0, degree=1, threads=threads): plain(threads) for threads in (CORES, 1)}


def measure_own(
    client: Client,
    requests: Sequence[Request],
    batch: int,
    on_done: Callable[[int], None] = lambda _: None,
) -> Served:
    """All requests through the server, `batch` at a time, with its counters around them.

    `on_done` is told of each request that is done.
    """
    before = client.stats()
    start = time.perf_counter()
    token_ids = asyncio.run(
        serve(client.address, requests, batch=batch, tenant=f"batch {batch}", on_done=on_done)
    )
    seconds = time.perf_counter() - start
    after = client.stats()
    return Served(token_ids, seconds, after.steps - before.steps, _counters(before, after))


async def serve(
    address: str,
    requests: Sequence[Request],
    *,
    batch: int,
    tenant: str,
    on_done: Callable[[int], None] = lambda _: None,
) -> list[tuple[int, ...]]:
    """Greedy plain decoding of every request, `batch` at a time; tokens in the requests' order."""
    places = asyncio.Semaphore(batch)

    async def one(client: AsyncClient, number: int, request: Request) -> tuple[int, ...]:
        options = GenerateOptions(
            temperature=0.0,
            max_tokens=request.output_tokens,
            ignore_eos=True,
            policy="off",
            # Nothing that a request left behind may help another.
            tenant=f"{tenant} {number}",
        )
        async with places:
            completion = await client.generate(list(request.prompt_token_ids), options)
        on_done(1)
        return completion.token_ids

    async with AsyncClient(address) as client:
        return list(
            await asyncio.gather(
                *(one(client, number, request) for number, request in enumerate(requests))
            )
        )


def _counters(before: Stats, after: Stats) -> Mapping[str, object]:
    busy = busy_shares(before, after)
    return {"busy": busy, "gap_ms_p50": after.gap_ms_p50}


def _own_row(name: str, dtype: str, batch: int, served: Served) -> EngineRow:
    threads = CORES if name == own_name(window=0, degree=1, threads=CORES) else 1
    return _row(name, "paceline", batch, dtype, threads, served)


def _row(name: str, engine: str, batch: int, dtype: str, threads: int, served: Served) -> EngineRow:
    return EngineRow(
        part=PART,
        name=name,
        engine=engine,
        batch=batch,
        window=0,
        degree=1,
        dtype=dtype,
        threads=threads,
        step_ms=served.seconds / served.steps * 1000,
        tokens_per_second=served.tokens / served.seconds,
        details={
            "requests": len(served.token_ids),
            "tokens": served.tokens,
            "seconds": served.seconds,
            "steps": served.steps,
            **served.details,
        },
    )


def _best_threads(peer: PeerProcess, vocab_size: int) -> int:
    """The thread count with which transformers generates fastest; the first answer warms up."""
    prompt = seeded_requests(1, vocab_size=vocab_size, seed=0)[0].prompt_token_ids

    def seconds(threads: int) -> float:
        return peer.static([prompt], max_tokens=8, threads=threads).seconds

    seconds(CORES)
    return min(range(CORES, 0, -1), key=lambda threads: min(seconds(threads) for _ in range(2)))


def _static_row(
    peer: PeerProcess,
    requests: Sequence[Request],
    batch: int,
    threads: int,
    on_done: Callable[[int], None],
) -> EngineRow:
    """Wanted tokens alone count; what a batch makes beyond a request's length is its loss."""
    token_ids: list[Sequence[int]] = []
    seconds, steps = 0.0, 0
    for group in batches_of(requests, batch):
        longest = max(request.output_tokens for request in group)
        answer = peer.static(
            [request.prompt_token_ids for request in group], max_tokens=longest, threads=threads
        )
        seconds += answer.seconds
        steps += longest
        token_ids += [
            ids[: request.output_tokens]
            for ids, request in zip(answer.token_ids, group, strict=True)
        ]
        on_done(len(group))
    served = Served(token_ids, seconds, steps, {})
    return _row("hf", "transformers", batch, peer.dtype, threads, served)


def _continuous_row(
    peer: PeerProcess, requests: Sequence[Request], batch: int, threads: int, limit: float
) -> EngineRow:
    """Tokens made until all are done or the time is over; a row without figures says why."""
    answer = peer.continuous(requests, batch=batch, threads=threads, limit_seconds=limit)
    return EngineRow(
        part=PART,
        name="hf-continuous",
        engine="transformers-continuous",
        batch=batch,
        window=0,
        degree=1,
        dtype=peer.dtype,
        threads=threads,
        tokens_per_second=None if answer.error else answer.tokens / answer.seconds,
        details={
            "requests": len(requests),
            "finished": answer.finished,
            "tokens": answer.tokens,
            "seconds": answer.seconds,
            "error": answer.error,
        },
    )
