"""Kill or stop a worker of a Ray cluster during a request."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster.config.model import Config, DrafterConfig, ServerConfig, TargetConfig
from paceline import Chunk, Client, GenerateOptions, Stats, WorkerStats

if TYPE_CHECKING:
    from cluster.placement.launch import ClusterHandle

PROMPT = "The quick brown fox"
NUM_TOKENS = 300
KILL_AT = 100
RESTART_SECONDS = 240.0
"""Several processes that start on a busy machine take long to import torch."""


def config_of(model: Path, *, drafter: Path | None = None, **target: Any) -> Config:
    """A small deployment. Without a drafter's checkpoint, its drafter looks up n-grams."""
    drafting = (
        DrafterConfig(kind="ngram", own_process=True)
        if drafter is None
        else DrafterConfig(model=str(drafter), threads=1)
    )
    return Config(
        target=TargetConfig.model_validate(
            {"model": str(model), "threads": 1, "kv_memory": 64 << 20} | target
        ),
        drafters=(drafting,),
        server=ServerConfig(grpc_port=0, http=False),
    )


@contextmanager
def cluster_of(config: Config, home: Path) -> Iterator[ClusterHandle]:
    """A cluster that ends with the block."""
    from cluster.placement.launch import start_cluster

    cluster = start_cluster(
        config, home=home, progress=lambda line: None, detached=False, name=None
    )
    try:
        yield cluster
    finally:
        cluster.stop()


@contextmanager
def client_of(config: Config, home: Path) -> Iterator[Client]:
    """A client of such a cluster."""
    with cluster_of(config, home) as cluster, Client(cluster.address) as client:
        yield client


def worker_of(stats: Stats, name: str) -> WorkerStats:
    return next(worker for worker in stats.workers if worker.name == name)


def options_of(policy: str) -> GenerateOptions:
    return GenerateOptions(
        policy=policy, temperature=1.0, seed=7, max_tokens=NUM_TOKENS, ignore_eos=True
    )


def plain_tokens(client: Client) -> tuple[int, ...]:
    return client.generate(PROMPT, options_of("off")).token_ids


def stream_and_kill(
    client: Client, *pids: int, by: signal.Signals = signal.SIGKILL, policy: str = "chain"
) -> tuple[list[int], list[float]]:
    """Kill the workers `pids` during a request. Returns its token ids, and when each chunk came.

    `by`: the signal. With SIGSTOP the processes hang.
    """
    token_ids: list[int] = []
    times: list[float] = []
    killed = False
    for event in client.stream(PROMPT, options_of(policy)):
        if not isinstance(event, Chunk):
            continue
        times.append(time.monotonic())
        token_ids += event.token_ids
        if not killed and len(token_ids) >= KILL_AT:
            for pid in pids:
                os.kill(pid, by)
            killed = True
    assert killed
    return token_ids, times


def eventually(condition: Callable[[], bool]) -> None:
    give_up = time.monotonic() + RESTART_SECONDS
    while not condition():
        assert time.monotonic() < give_up, "it did not come back"
        time.sleep(0.1)


def is_back(client: Client, name: str, killed_pid: int) -> bool:
    worker = worker_of(client.stats(), name)
    return worker.connected and worker.pid != killed_pid
