"""Parts "serving", "prefix" and "delay" of `bench engine`: requests through a running server.

- "serving": seeded requests through our driver, and through transformers. Every batch size has its
  own requests. Our driver runs a batch of requests at a time, and starts the next request when one
  ends. transformers' static batching starts a batch and waits for its longest request.
- "prefix": prompts that begin alike, with the prefix cache and without. All requests are sent at
  once. The time until each of them has its first token is measured.
- "delay": how much a long prompt delays the tokens of other sequences. Sequences decode plainly;
  then a prompt of 1,500 tokens arrives. Once it is done, the sequences decode without a prompt for
  at least as many tokens as beside it, and then the next prompt arrives. A delay is counted in
  steps: the time between two tokens of a sequence beside a prefill, over the median time without
  one, minus the one step that a token takes anyway. The longest delay is reported together with
  the longest one without a prefill, because a busy host delays any step now and then.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from cluster.config.model import Config
from deploy.bench.engine import (
    BATCHES,
    CACHE,
    OFF,
    EngineRow,
    EngineTask,
    measures,
    own_name,
    peer_dtype,
    random_tokens,
)
from deploy.bench.harness import CORES
from deploy.bench.processes import on_free_ports, running_side_by_side
from deploy.bench.transformers_peer import TransformersProcess
from deploy.rows.measure import busy_shares
from paceline.client import AsyncClient, Client
from paceline.generation import Chunk, ModelDescription, Stats
from paceline.options import GenerateOptions

PROMPT_TOKENS = (20, 600)
OUTPUT_TOKENS = (16, 256)
SHARED_TOKENS = 800
OWN_TOKENS = 24
PREFIX_PROMPTS, QUICK_PREFIX_PROMPTS = 100, 8
_TEXT_PROMPTS, _TEXT_TOKENS = 4, 16
"""The number of prompts whose texts are compared, and the number of tokens of each text."""
LONG_PROMPT_TOKENS = 1500
LONG_PROMPTS, QUICK_LONG_PROMPTS = 3, 1
_OWN_PROMPT = 20
_BEFORE, _QUICK_BEFORE = 24, 8
"""Tokens that every sequence has before the first prompt. The times of the first half do not
count."""


def plain_target(config: Config, **target: object) -> Config:
    """The configuration with one shard and without drafters. `target`: changes to the target."""
    changed = config.target.model_copy(update={"tensor_parallel": 1, **target})
    return on_free_ports(config, target=changed, drafters=())


# Part "serving"


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt, and the number of output tokens.

    Every engine ignores end tokens, so that the request sets the length, and not the model.
    """

    prompt_token_ids: tuple[int, ...]
    output_tokens: int


def seeded_requests(
    count: int,
    *,
    vocab_size: int,
    seed: int,
    prompt_tokens: tuple[int, int] = PROMPT_TOKENS,
    output_tokens: tuple[int, int] = OUTPUT_TOKENS,
) -> list[Request]:
    """Requests of uniform lengths, bounds included. The same arguments give the same requests."""
    generator = random.Random(seed)
    requests = []
    for number in range(count):
        length = generator.randint(*prompt_tokens)
        tokens = random_tokens(length, vocab_size=vocab_size, seed=seed * 100_000 + number)
        requests.append(Request(tuple(tokens), generator.randint(*output_tokens)))
    return requests


def batches_of(requests: Sequence[Request], size: int) -> list[Sequence[Request]]:
    """The requests in order, `size` at a time."""
    return [requests[start : start + size] for start in range(0, len(requests), size)]


_WARM_UP = Request((5, 6, 7, 8), 4)


REQUESTS: Mapping[int, int] = {1: 4, 4: 12, 16: 32}
QUICK_REQUESTS: Mapping[int, int] = {1: 1, 16: 16}
"""Number of requests by batch size, also of `REQUESTS`."""
_REPORTS = 4
"""Number of progress reports of a row."""


@dataclass(frozen=True, slots=True)
class Served:
    """The result of serving: output tokens of each request, and the time for all."""

    token_ids: Sequence[Sequence[int]]
    seconds: float
    steps: int
    details: Mapping[str, object]

    @property
    def tokens(self) -> int:
        """Output tokens of all requests."""
        return sum(map(len, self.token_ids))


@measures("serving")
def measure_serving(task: EngineTask) -> Iterator[EngineRow]:
    """Our rows at every thread count and transformers', batch by batch in turns."""
    counts = QUICK_REQUESTS if task.quick else REQUESTS
    files = task.target_files()
    dtype = peer_dtype(files.weights)
    log = task.log_folder / "transformers.log"
    with (
        running_side_by_side(
            serving_deployments(task.config), home=task.home, tell=task.tell
        ) as clients,
        TransformersProcess(files.folder, dtype=dtype, threads=CORES, log=log) as peer,
    ):
        vocab_size = next(iter(clients.values())).describe().vocab_size
        threads = _best_threads(peer, vocab_size)
        for batch in task.batches_of(counts):
            requests = seeded_requests(counts[batch], vocab_size=vocab_size, seed=batch)
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


class _Progress:
    """Reports how far a row is, and its result at the end."""

    def __init__(self, tell: Callable[[str], None], name: str, requests: int) -> None:
        self._tell = tell
        self._name = name
        self._requests = requests
        self._done = 0
        tell(f"serving: {name}, {requests} requests")

    def more(self, requests: int) -> None:
        """Report that `requests` more requests are done."""
        before, self._done = self._done, self._done + requests
        if self._done * _REPORTS // self._requests > before * _REPORTS // self._requests:
            self._tell(f"serving: {self._name}, {self._done} of {self._requests} requests")

    def end(self, row: EngineRow) -> None:
        """Report the finished row."""
        self._tell(f"serving: {self._name}, {row.tokens_per_second:.1f} tokens/s")


def serving_deployments(config: Config) -> dict[str, Config]:
    """Plain targets, by the names of their rows."""
    return {
        own_name(window=0, degree=1, threads=threads): plain_target(config, threads=threads)
        for threads in (CORES, 1)
    }


def measure_own(
    client: Client,
    requests: Sequence[Request],
    batch: int,
    on_done: Callable[[int], None] = lambda _: None,
) -> Served:
    """Send all requests to the server, `batch` at a time. Read its counters before and after.

    `on_done` is called for requests that are done, with their number.
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
    """Decode every request plainly and greedily, `batch` at a time. Tokens by request, in order."""
    places = asyncio.Semaphore(batch)

    async def one(client: AsyncClient, number: int, request: Request) -> tuple[int, ...]:
        options = GenerateOptions(
            temperature=0.0,
            max_tokens=request.output_tokens,
            ignore_eos=True,
            policy="off",
            # A tenant of its own, so that no request profits from what another left in the cache.
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
    return _serving_row(name, "paceline", batch, dtype, threads, served)


def _serving_row(
    name: str, engine: str, batch: int, dtype: str, threads: int, served: Served
) -> EngineRow:
    return EngineRow(
        part="serving",
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


def _best_threads(peer: TransformersProcess, vocab_size: int) -> int:
    """The thread count with which transformers generates fastest. The first answer warms up."""
    prompt = seeded_requests(1, vocab_size=vocab_size, seed=0)[0].prompt_token_ids

    def seconds(threads: int) -> float:
        return peer.generate([prompt], max_tokens=8, threads=threads, ignore_eos=True).seconds

    seconds(CORES)
    return min(range(CORES, 0, -1), key=lambda threads: min(seconds(threads) for _ in range(2)))


def _static_row(
    peer: TransformersProcess,
    requests: Sequence[Request],
    batch: int,
    threads: int,
    on_done: Callable[[int], None],
) -> EngineRow:
    """The row of static batching. Tokens beyond those that a request asked for do not count."""
    token_ids: list[Sequence[int]] = []
    seconds, steps = 0.0, 0
    for group in batches_of(requests, batch):
        longest = max(request.output_tokens for request in group)
        answer = peer.generate(
            [request.prompt_token_ids for request in group],
            max_tokens=longest,
            threads=threads,
            ignore_eos=True,
        )
        seconds += answer.seconds
        steps += longest
        token_ids += [
            ids[: request.output_tokens]
            for ids, request in zip(answer.token_ids, group, strict=True)
        ]
        on_done(len(group))
    served = Served(token_ids, seconds, steps, {})
    return _serving_row("hf", "transformers", batch, peer.dtype, threads, served)


# Part "prefix"


@dataclass(frozen=True, slots=True)
class Prefilled:
    """The first token of each prompt, the time for all of them, and longer texts of a few."""

    first_tokens: Sequence[Sequence[int]]
    texts: Sequence[Sequence[int]]
    seconds: float
    prefilled_tokens: int
    hit_tokens: int
    steps: int


@measures("prefix")
def measure_prefix(task: EngineTask) -> list[EngineRow]:
    """Two rows, `off` without the cache; `speedup` is the ratio of their times."""
    files = task.target_files()
    count = QUICK_PREFIX_PROMPTS if task.quick else PREFIX_PROMPTS
    with running_side_by_side(
        prefix_deployments(task.config), home=task.home, tell=task.tell
    ) as clients:
        description = clients[OFF].describe()
        # A short context, such as a tiny checkpoint's, holds fewer shared tokens.
        longest = description.max_model_len - OWN_TOKENS - _TEXT_TOKENS
        prompts = prompts_that_begin_alike(
            count, min(SHARED_TOKENS, longest), vocab_size=description.vocab_size
        )
        measured = {}
        for name, client in clients.items():
            task.tell(f"prefix: {name}, {count} prompts")
            measured[name] = _prefill_all(client, prompts, vocab_size=description.vocab_size)
    off = measured[OFF]
    return [
        EngineRow(
            part="prefix",
            name=name,
            engine="paceline",
            batch=count,
            window=0,
            degree=1,
            dtype=files.weights,
            threads=CORES,
            step_ms=1000 * one.seconds / one.steps,
            speedup=off.seconds / one.seconds,
            details={
                "seconds": one.seconds,
                "prompt_tokens": sum(map(len, prompts)),
                "prefill_tokens_per_second": sum(map(len, prompts)) / one.seconds,
                "prefilled_tokens": one.prefilled_tokens,
                "prefix_hit_tokens": one.hit_tokens,
                "same_text": (one.first_tokens, one.texts) == (off.first_tokens, off.texts),
            },
        )
        for name, one in measured.items()
    ]


def prefix_deployments(config: Config) -> dict[str, Config]:
    """Plain targets, by the names of their rows."""
    return {
        OFF: plain_target(config, threads=CORES, prefix_cache=False),
        CACHE: plain_target(config, threads=CORES, prefix_cache=True),
    }


def prompts_that_begin_alike(count: int, shared: int, *, vocab_size: int) -> list[list[int]]:
    """Prompts of random tokens. The same arguments give the same prompts."""
    begin = random_tokens(shared, vocab_size=vocab_size, seed=1)
    return [
        begin + random_tokens(OWN_TOKENS, vocab_size=vocab_size, seed=2 + number)
        for number in range(count)
    ]


def _prefill_all(client: Client, prompts: Sequence[Sequence[int]], *, vocab_size: int) -> Prefilled:
    warm_up = random_tokens(SHARED_TOKENS // 4, vocab_size=vocab_size, seed=0)
    asyncio.run(_ask_all(client.address, [warm_up], max_tokens=4))
    before = client.stats()
    start = time.perf_counter()
    first_tokens = asyncio.run(_ask_all(client.address, prompts, max_tokens=1))
    seconds = time.perf_counter() - start
    after = client.stats()
    few = prompts[:_TEXT_PROMPTS]
    return Prefilled(
        first_tokens=first_tokens,
        texts=asyncio.run(_ask_all(client.address, few, max_tokens=_TEXT_TOKENS)),
        seconds=seconds,
        prefilled_tokens=after.prefilled_tokens - before.prefilled_tokens,
        hit_tokens=after.prefix_hit_tokens - before.prefix_hit_tokens,
        steps=after.steps - before.steps,
    )


async def _ask_all(
    address: str, prompts: Sequence[Sequence[int]], *, max_tokens: int
) -> list[tuple[int, ...]]:
    options = GenerateOptions(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, policy="off")
    async with AsyncClient(address) as client:
        answers = await asyncio.gather(
            *(client.generate(list(prompt), options) for prompt in prompts)
        )
    return [answer.token_ids for answer in answers]


# Part "delay"


@measures("delay")
def measure_delay(task: EngineTask) -> Iterator[EngineRow]:
    """A row for each number of decoding sequences."""
    config = plain_target(task.config, threads=CORES, max_num_seqs=max(BATCHES) + 1)
    with running_side_by_side({OFF: config}, home=task.home, tell=task.tell) as clients:
        client = clients[OFF]
        description = client.describe()
        for batch in task.batches_of(BATCHES):
            task.tell(f"delay: batch {batch}")
            delay = asyncio.run(_Delay(description, batch, quick=task.quick).run(client.address))
            yield _delay_row(task, batch, delay)


def delay_in_steps(usual: Sequence[float], beside: Sequence[float]) -> float:
    """The longest of the times `beside`, as a multiple of the median `usual` time, minus 1."""
    return max(beside) / statistics.median(usual) - 1


def all_but_a_twentieth(times: Sequence[float]) -> Sequence[float]:
    """The times without the longest twentieth, since a busy host delays a step now and then."""
    return sorted(times)[: max(1, len(times) * 19 // 20)]


class _Delay:
    """One measurement: decoding sequences, the times of their tokens, and the times of prompts."""

    def __init__(self, description: ModelDescription, batch: int, *, quick: bool) -> None:
        self._vocab_size = description.vocab_size
        self._batch = batch
        self._prompts = QUICK_LONG_PROMPTS if quick else LONG_PROMPTS
        self._before = _QUICK_BEFORE if quick else _BEFORE
        longest = description.max_model_len
        self.prompt_tokens = min(LONG_PROMPT_TOKENS, longest - 1)
        self._max_tokens = min(1000, longest - _OWN_PROMPT)
        self._times: list[list[float]] = [[] for _ in range(batch)]
        self._awaited = self._before
        self._there = asyncio.Event()
        self._error: BaseException | None = None
        self.usual: list[float] = []
        """Seconds between two tokens of a sequence while no prompt was prefilled."""
        self.beside: list[list[float]] = []
        """For each prompt: the same seconds while it was prefilled."""
        self.prefill_seconds: list[float] = []

    async def run(self, address: str) -> _Delay:
        spans = []
        async with AsyncClient(address) as client:
            tasks = [asyncio.create_task(self._decode(client, n)) for n in range(self._batch)]
            for task in tasks:
                task.add_done_callback(self._ended)
            await self._until(self._before)
            for number in range(self._prompts):
                first = min(map(len, self._times))
                # A new prompt each time, else the prefix cache would hold it.
                tokens = random_tokens(
                    self.prompt_tokens,
                    vocab_size=self._vocab_size,
                    seed=1000 * (1 + number) + self._batch,
                )
                began = time.perf_counter()
                await client.generate(tokens, _options(1))
                spans.append((began, time.perf_counter()))
                now = min(map(len, self._times))
                await self._until(now + max(now - first, self._before))
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        self._sort_times(spans)
        return self

    def _sort_times(self, spans: Sequence[tuple[float, float]]) -> None:
        """Divide the times between two tokens into those beside a prompt and the others."""
        self.prefill_seconds = [ended - began for began, ended in spans]
        self.beside = [[] for _ in spans]
        for times in self._times:
            for earlier, later in pairwise(times[self._before // 2 :]):
                for beside, (began, ended) in zip(self.beside, spans, strict=True):
                    if began < later and earlier < ended:
                        beside.append(later - earlier)
                        break
                else:
                    self.usual.append(later - earlier)

    async def _until(self, tokens: int) -> None:
        """Wait until every sequence has `tokens` tokens, or one has reached its maximum."""
        self._awaited = tokens
        self._there.clear()
        self._look()
        await self._there.wait()
        if self._error is not None:
            raise self._error

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Stop waiting for a sequence that failed."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._error = error
            self._there.set()

    def _look(self) -> None:
        if min(map(len, self._times)) >= min(self._awaited, self._max_tokens):
            self._there.set()

    async def _decode(self, client: AsyncClient, number: int) -> None:
        prompt = random_tokens(_OWN_PROMPT, vocab_size=self._vocab_size, seed=1 + number)
        async for event in client.stream(prompt, _options(self._max_tokens)):
            if isinstance(event, Chunk):
                self._times[number].append(time.perf_counter())
                self._look()


def _options(max_tokens: int) -> GenerateOptions:
    return GenerateOptions(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, policy="off")


def _delay_row(task: EngineTask, batch: int, delay: _Delay) -> EngineRow:
    usual, by_prompt = delay.usual, delay.beside
    beside = [seconds for times in by_prompt for seconds in times]
    return EngineRow(
        part="delay",
        name=OFF,
        engine="paceline",
        batch=batch,
        window=0,
        degree=1,
        dtype=task.target_files().weights,
        threads=CORES,
        step_ms=statistics.median(usual) * 1000,
        details={
            "prompt_tokens": delay.prompt_tokens,
            "prefill_tokens_per_second": delay.prompt_tokens
            / statistics.median(delay.prefill_seconds),
            "steps_beside": len(beside) // batch,
            "steps_without": len(usual) // batch,
            "median_ms_beside": statistics.median(beside) * 1000,
            "delay_steps": delay_in_steps(usual, beside),
            "delay_steps_by_prompt": [delay_in_steps(usual, times) for times in by_prompt],
            "delay_steps_p95": delay_in_steps(usual, all_but_a_twentieth(beside)),
            # The delay that the host alone causes, without a prompt.
            "delay_steps_without": delay_in_steps(usual, usual),
            "delay_steps_without_p95": delay_in_steps(usual, all_but_a_twentieth(usual)),
        },
    )
