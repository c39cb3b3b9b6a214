"""Measures one request: its tokens, its time, and how busy each worker was meanwhile."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.generation import GenerateInput, Stats
from paceline.options import GenerateOptions

if TYPE_CHECKING:
    from paceline.client import Client


@dataclass(frozen=True, slots=True)
class Sample:
    """The result of one request. `seconds`: the caller's time, prefill included.

    `busy`: each worker's share of that time in forward passes. Peers have no steps.
    """

    token_ids: tuple[int, ...]
    seconds: float
    steps: int | None = None
    busy: Mapping[str, float] | None = None

    @property
    def tokens_per_second(self) -> float:
        """Output tokens over the caller's time."""
        return len(self.token_ids) / self.seconds


def measure(client: Client, generate_input: GenerateInput, options: GenerateOptions) -> Sample:
    """Decode one request, and read the server's counters before and after it."""
    before = client.stats()
    start = time.perf_counter()
    completion = client.generate(generate_input, options)
    seconds = time.perf_counter() - start
    after = client.stats()
    return Sample(
        token_ids=completion.token_ids,
        seconds=seconds,
        steps=completion.stats.steps,
        busy=busy_shares(before, after),
    )


def busy_shares(before: Stats, after: Stats) -> dict[str, float]:
    """Share of the time between two readings that each worker spent in forward passes."""
    elapsed = after.uptime_seconds - before.uptime_seconds
    earlier = {worker.name: worker.busy_seconds for worker in before.workers}
    return {
        worker.name: min(1.0, (worker.busy_seconds - earlier.get(worker.name, 0.0)) / elapsed)
        for worker in after.workers
    }


def acceptance_length(samples: Iterable[Sample]) -> float | None:
    """Committed tokens over steps, of all samples together; None: there were no steps."""
    tokens = steps = 0
    for sample in samples:
        tokens += len(sample.token_ids)
        steps += sample.steps or 0
    return tokens / steps if steps else None


def median_busy(samples: Sequence[Sample]) -> dict[str, float]:
    """The median busy share of each worker."""
    names = dict.fromkeys(name for sample in samples for name in sample.busy or {})
    return {
        name: statistics.median((sample.busy or {}).get(name, 0.0) for sample in samples)
        for name in names
    }
