"""`paceline bench engine`: the target engine alone, compared with transformers in the same run.

Its parts register themselves: "steps" is in engine_steps.py, "serving" is here: seeded requests
through our driver, and through transformers. Every batch size has its own requests. Our driver runs
a batch of requests at a time, and starts the next request when one ends. transformers' static
batching starts a batch and waits for its longest request.

A row is named by part, batch and name. `engine` is "paceline", "transformers" or "openvino".
`degree` is the number of shards, `threads` the threads of each. `tokens_per_second` counts output
tokens; a step with a window counts as if no candidate was accepted. `bandwidth_share` is the bytes
that a step must read over the bytes that a copy moves in the same time. `speedup` is the ratio to
the row `off` of the same part and batch.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console

from cluster.config.model import Config
from deploy.bench.harness import (
    CORES,
    Asked,
    Document,
    Goal,
    Row,
    Suite,
    batches_of,
    print_goals,
    ratios,
    register,
    table,
)
from deploy.bench.processes import deployment, running_side_by_side
from deploy.bench.transformers_peer import TransformersProcess
from deploy.rows.measure import busy_shares
from paceline.client import AsyncClient, Client
from paceline.options import GenerateOptions
from workers.engine.options import WeightForm, form_on_cpu
from workers.models.catalog import ModelFiles, resolve_model

PROMPT_TOKENS = (20, 600)
OUTPUT_TOKENS = (16, 256)
OFF = "off"
BATCHES = (1, 4, 16)
WINDOWS = (0, 4, 8)

GOALS = ((1, 2.0), (16, 3.0))
"""A batch, and the ratio of tokens/s of plain decoding to transformers' that it should reach."""
COLUMNS = (
    ("batch", "batch", "d"),
    ("threads", "threads", "d"),
    ("step", "step_ms", ".1f"),
    ("share", "bandwidth_share", ".0%"),
    ("tok/s", "tokens_per_second", ".1f"),
    ("/off", "speedup", ".2f"),
    ("prefill", "prefill_tokens_per_second", ".0f"),
    ("memory", "memory_ratio", ".2f"),
)
LEGEND = """
step: ms, as the sender of the step sees it. share: of the memory bandwidth
that a plain copy reaches. prefill: tokens/s of one prompt. memory: a shard's
peak over its share of weights and its KV. Every sequence has its full length.
"""

_LOWEST_ID = 3
"""Token ids below this are often special tokens."""

_log = logging.getLogger(__name__)


def wanted_batches(asked: Asked, all_batches: Iterable[int]) -> list[int]:
    return [one for one in all_batches if not asked.batch or one in asked.batch]


def target_files(asked: Asked) -> ModelFiles:
    """The target's checkpoint, and the form of its weights on a CPU by target.dtype."""
    target = asked.config.target
    files = resolve_model(target.model, home=asked.home)
    return replace(files, weights=form_on_cpu(target.dtype, files.weights))


def peer_dtype(form: WeightForm) -> str:
    """The dtype in which transformers computes: bfloat16 if our weights have it, else float32."""
    return "bfloat16" if form == "bfloat16" else "float32"


def with_speedups(rows: Sequence[Row]) -> list[Row]:
    """The rows with `speedup` set where there is a row `off` to compare with."""
    plain = {
        (row["part"], row["batch"]): row["tokens_per_second"] for row in rows if row["name"] == OFF
    }

    def speedup(row: Row) -> float | None:
        off = plain.get((row["part"], row["batch"]))
        return None if off is None else row["tokens_per_second"] / off

    return [{**row, "speedup": speedup(row)} for row in rows]


def own_name(*, window: int = 0, degree: int = 1, threads: int) -> str:
    """The name of a row of ours. "off" is plain decoding by one shard on all cores."""
    parts = [f"verify {window}" if window else OFF]
    if degree > 1:
        parts.append(f"degree {degree}")
    if degree * threads < CORES:
        parts.append(f"{threads} thread" + ("s" if threads > 1 else ""))
    return ", ".join(parts)


def random_tokens(count: int, *, vocab_size: int, seed: int) -> list[int]:
    """`count` token ids. The same arguments give the same ids."""
    generator = random.Random(seed)
    return [generator.randrange(_LOWEST_ID, vocab_size) for _ in range(count)]


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


_WARM_UP = Request((5, 6, 7, 8), 4)
THREADS = (CORES, 1)
"""Of our target, a row each."""
REQUESTS: Mapping[int, int] = {1: 4, 4: 12, 16: 32}
QUICK_REQUESTS: Mapping[int, int] = {1: 1, 16: 16}
"""Number of requests by batch size, also of `REQUESTS`."""


@dataclass(frozen=True, slots=True)
class Served:
    """The result of serving: output tokens of each request, and the time for all."""

    token_ids: Sequence[Sequence[int]]
    seconds: float
    steps: int
    details: Mapping[str, Any]

    @property
    def tokens(self) -> int:
        return sum(map(len, self.token_ids))


def measure_serving(asked: Asked) -> Iterator[Row]:
    """Our rows at every thread count and transformers', batch by batch in turns."""
    counts = QUICK_REQUESTS if asked.quick else REQUESTS
    files = target_files(asked)
    dtype = peer_dtype(files.weights)
    configs = serving_deployments(asked.config)
    log = asked.folder / "transformers.log"
    with (
        running_side_by_side(configs, home=asked.home, tell=asked.tell) as clients,
        TransformersProcess(files.folder, dtype=dtype, threads=CORES, log=log) as peer,
    ):
        vocab_size = next(iter(clients.values())).describe().vocab_size
        best_threads = _best_threads(peer, vocab_size)
        for batch in wanted_batches(asked, counts):
            requests = seeded_requests(counts[batch], vocab_size=vocab_size, seed=batch)
            for threads, (name, client) in zip(THREADS, clients.items(), strict=True):
                asked.tell(f"serving: {name}, batch {batch}, {len(requests)} requests")
                asyncio.run(serve(client.address, [_WARM_UP], batch=1, tenant="warm-up"))
                served = measure_own(client, requests, batch)
                yield _row(name, "paceline", batch, files.weights, threads, served)
            asked.tell(f"serving: transformers, batch {batch}, {len(requests)} requests")
            served = _serve_static(peer, requests, batch, best_threads)
            yield _row("hf", "transformers", batch, dtype, best_threads, served)


def serving_deployments(config: Config) -> dict[str, Config]:
    """By name of a row: one shard without drafters, at every thread count."""
    target = config.target.model_copy(update={"tensor_parallel": 1})
    plain = config.model_copy(update={"target": target})
    return {own_name(threads=threads): deployment(plain, threads, ()) for threads in THREADS}


def measure_own(client: Client, requests: Sequence[Request], batch: int) -> Served:
    """Send all requests to the server, `batch` at a time. Read its counters before and after."""
    before = client.stats()
    start = time.perf_counter()
    token_ids = asyncio.run(serve(client.address, requests, batch=batch, tenant=f"batch {batch}"))
    seconds = time.perf_counter() - start
    after = client.stats()
    counters = {"busy": busy_shares(before, after), "gap_ms_p50": after.gap_ms_p50}
    return Served(token_ids, seconds, after.steps - before.steps, counters)


async def serve(
    address: str, requests: Sequence[Request], *, batch: int, tenant: str
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
        return completion.token_ids

    async with AsyncClient(address) as client:
        return list(
            await asyncio.gather(
                *(one(client, number, request) for number, request in enumerate(requests))
            )
        )


def _row(name: str, engine: str, batch: int, dtype: str, threads: int, served: Served) -> Row:
    return {
        "part": "serving",
        "name": name,
        "engine": engine,
        "batch": batch,
        "window": 0,
        "degree": 1,
        "dtype": dtype,
        "threads": threads,
        "step_ms": served.seconds / served.steps * 1000,
        "bandwidth_share": None,
        "tokens_per_second": served.tokens / served.seconds,
        "speedup": None,
        "requests": len(served.token_ids),
        "tokens": served.tokens,
        "seconds": served.seconds,
        "steps": served.steps,
        **served.details,
    }


def _best_threads(peer: TransformersProcess, vocab_size: int) -> int:
    """The thread count with which transformers generates fastest. The first answer warms up."""
    prompt = seeded_requests(1, vocab_size=vocab_size, seed=0)[0].prompt_token_ids

    def seconds(threads: int) -> float:
        return peer.generate([prompt], max_tokens=8, threads=threads, ignore_eos=True).seconds

    seconds(CORES)
    return min(range(CORES, 0, -1), key=lambda threads: min(seconds(threads) for _ in range(2)))


def _serve_static(
    peer: TransformersProcess, requests: Sequence[Request], batch: int, threads: int
) -> Served:
    """Static batching. Tokens beyond those that a request asked for do not count."""
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
    return Served(token_ids, seconds, steps, {})


# The suite

PARTS: dict[str, Callable[[Asked], Iterable[Row]]] = {"serving": measure_serving}
"""Functions that yield each row once it is measured."""


def run_engine(asked: Asked) -> Document:
    """Measure the named parts in the order of PARTS. Missing models are fetched.

    If a part fails, its finished rows stay, and the run goes on with the next part. Raises what
    target_files raises.
    """
    target_files(asked)
    rows: list[Row] = []
    failed: dict[str, str] = {}
    for name in [one for one in PARTS if one in (asked.part or PARTS)]:
        try:
            for row in PARTS[name](asked):
                rows = with_speedups([*rows, row])
                asked.save(engine_document(rows, failed))
        except Exception as error:  # It must not lose the results of other parts, which take hours.
            _log.exception("part %s of bench engine failed", name)
            failed[name] = f"{type(error).__name__}: {error}"
            asked.save(engine_document(rows, failed))
    return engine_document(rows, failed)


def engine_document(rows: list[Row], failed: Mapping[str, str]) -> Document:
    """`failed`: why each failed part failed."""
    return {
        "emulated": False,
        "rows": rows,
        "ratios": ratios(goals(rows)),
        "failed": dict(failed),
    }


def goals(rows: Sequence[Row]) -> Iterator[Goal]:
    for batch, aim in GOALS:
        speeds = {
            row["name"]: row["tokens_per_second"]
            for row in rows
            if (row["part"], row["batch"]) == ("serving", batch)
        }
        for name in speeds:
            if name.startswith(OFF) and "hf" in speeds:
                yield Goal(f"batch {batch}: {name} / hf", speeds[name] / speeds["hf"], aim)


def show_engine(console: Console, document: Document) -> None:
    """Print a table for each part that was measured, then the ratios; at most 80 columns."""
    rows = document["rows"]
    for part in dict.fromkeys(row["part"] for row in rows):
        of_part = [row for row in rows if row["part"] == part]
        console.print(table(((part, "name", ""), *COLUMNS), of_part))
        console.print()
    console.print(LEGEND, highlight=False)
    print_goals(console, goals(rows))
    for name, why in document["failed"].items():
        Console(stderr=True).print(f"part {name} failed: {why}", highlight=False, markup=False)


register(
    Suite(
        "engine",
        "steps (5 minutes) and serving (10), beside transformers. A part that fails costs its own "
        "rows alone",
        run_engine,
        show_engine,
        parts=PARTS.keys(),
        batches=BATCHES,
    )
)
