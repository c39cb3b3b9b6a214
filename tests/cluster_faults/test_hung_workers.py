"""Workers on a real Ray cluster that hang half-way through a request: ended, and started again."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from cluster.config_model import Config, DrafterConfig, ServerConfig, TargetConfig
from paceline import Client
from paceline.errors import PacelineError
from tests.cluster_faults.killing import (
    PROMPT,
    cluster_of,
    eventually,
    is_back,
    options_of,
    plain_tokens,
    stream_and_kill,
    worker_of,
)
from tests.tiny import make_tiny_checkpoint

if TYPE_CHECKING:
    from cluster.launch import ClusterHandle

pytestmark = [pytest.mark.ray, pytest.mark.slow]

HUNG_AFTER = 4.0


@pytest.fixture(scope="module")
def cluster(ray_address: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterHandle]:
    folder = tmp_path_factory.mktemp("hung")
    model = make_tiny_checkpoint(folder / "target", max_position_embeddings=2048)
    config = Config(
        target=TargetConfig(
            model=str(model),
            tensor_parallel=2,
            threads=1,
            kv_memory=64 << 20,
            hung_after=HUNG_AFTER,
        ),
        drafters=(DrafterConfig(kind="ngram"),),
        server=ServerConfig(grpc_port=0),
    )
    with cluster_of(config, folder) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def client(cluster: ClusterHandle) -> Iterator[Client]:
    with Client(cluster.address) as client:
        yield client


@pytest.mark.parametrize("name", ["shard-1", "shard-0", "drafter-0"])
def test_a_worker_that_hangs_is_ended_and_started_again(client: Client, name: str) -> None:
    expected = plain_tokens(client)
    eventually(lambda: all(worker.connected for worker in client.stats().workers))
    pids = {worker.name: worker.pid for worker in client.stats().workers}
    token_ids, _ = stream_and_kill(client, pids[name], by=signal.SIGSTOP)
    assert tuple(token_ids) == expected
    eventually(partial(is_back, client, name, pids[name]))
    eventually(lambda: not Path(f"/proc/{pids[name]}").exists())
    # The others were not: one that waits for a hung one is no hung one.
    for other in pids.keys() - {name}:
        assert worker_of(client.stats(), other).pid == pids[other]
    assert client.generate("The fox", options_of("chain")).token_ids


@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGSTOP])
def test_a_driver_that_dies_or_hangs_is_started_again_where_it_was(
    cluster: ClusterHandle, client: Client, by: signal.Signals
) -> None:
    """Its requests fail, for nobody else knows them; the workers stay."""
    expected = plain_tokens(client)
    before = {worker.name: worker for worker in cluster.workers()}
    pid = before["driver"].pid
    assert pid is not None
    with pytest.raises(PacelineError):
        stream_and_kill(client, pid, by=by)
    eventually(lambda: serves(client))
    assert client.generate(PROMPT, options_of("chain")).token_ids == expected
    after = {worker.name: worker for worker in cluster.workers()}
    assert after["driver"].address == before["driver"].address
    assert after["driver"].restarts == before["driver"].restarts + 1
    for name in before.keys() - {"driver"}:
        assert after[name].pid == before[name].pid


def serves(client: Client) -> bool:
    try:
        client.stats()
    except PacelineError:
        return False
    return True


def test_silence_is_hanging_only_where_nobody_hears_of_the_worker(ray_address: str) -> None:
    """A long step keeps a worker silent, while the driver waits for it and is content."""
    import ray

    from cluster.lives import QUESTIONS, longest_silence, until_lost

    class Worker:
        async def ping(self) -> None:
            pass

        async def wait(self) -> None:
            await asyncio.Event().wait()

        async def step(self, seconds: float) -> None:
            time.sleep(seconds)

    worker: Any = ray.remote(Worker).options(num_cpus=0, max_concurrency=10).remote()
    ray.get(worker.ping.remote())
    heard = True
    asked = 0

    async def is_heard() -> bool:
        nonlocal asked
        asked += 1
        return heard

    async def watch() -> None:
        nonlocal heard
        watching = asyncio.create_task(until_lost(worker, hung_after=1.0, is_heard=is_heard))
        worker.step.remote(3.0)
        await asyncio.sleep(2.5)
        assert asked
        assert not watching.done()
        await worker.ping.remote()  # The step has ended: all is forgiven.
        heard, asked_before = False, asked
        await asyncio.sleep(1.5)
        assert (watching.done(), asked) == (False, asked_before)
        worker.step.remote(10.0)
        why = await asyncio.wait_for(watching, longest_silence(1.0) + 2.0)
        assert why == "it has not answered for 1 s and is taken for hung"

    try:
        asyncio.run(watch())
        assert asked > QUESTIONS
    finally:
        ray.kill(worker)
