"""On a real Ray cluster: workers that end again and again, and ports that others take meanwhile."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from cluster.placement.lives import MOVE_AFTER
from paceline import Chunk, Client, WorkerLife
from paceline.errors import PacelineError
from tests.cluster.two_hosts import HERE, SecondHost
from tests.cluster_faults.killing import (
    KILL_AT,
    PROMPT,
    RESTART_SECONDS,
    config_of,
    eventually,
    is_back,
    options_of,
    plain_tokens,
    worker_of,
)
from tests.cluster_faults.ray_nodes import Job, RayNodes
from tests.tiny import make_tiny_checkpoint

if TYPE_CHECKING:
    from cluster.placement.launch import ClusterHandle

pytestmark = [pytest.mark.ray, pytest.mark.long]


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("restarts") / "logs"


@pytest.fixture(scope="module")
def cluster(ray_address: str, logs: Path) -> Iterator[ClusterHandle]:
    from cluster.placement.launch import start_cluster

    model = make_tiny_checkpoint(logs.parent / "model", max_position_embeddings=2048)
    config = config_of(model)
    cluster = start_cluster(
        config, home=logs.parent, logs=logs, progress=lambda line: None, detached=False, name=None
    )
    try:
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture(scope="module")
def client(cluster: ClusterHandle) -> Iterator[Client]:
    with Client(cluster.address) as client:
        yield client


def life_of(lives: tuple[WorkerLife, ...] | list[WorkerLife], name: str) -> WorkerLife:
    return next(life for life in lives if life.name == name)


def stream_through(client: Client, fault: Callable[[], object]) -> tuple[int, ...]:
    """Run a request that is admitted before a fault. Returns its token ids."""
    token_ids: list[int] = []
    waiting = iter([fault])
    for event in client.stream(PROMPT, options_of("chain")):
        if isinstance(event, Chunk):
            token_ids += event.token_ids
        if len(token_ids) >= KILL_AT:
            for happens in waiting:
                happens()
    return tuple(token_ids)


def taken(address: str) -> socket.socket:
    """Listen at an address as soon as it is free."""
    host, _, port = address.rpartition(":")
    give_up = time.monotonic() + RESTART_SECONDS
    while True:
        with contextlib.suppress(OSError):
            return socket.create_server((host, int(port)))
        assert time.monotonic() < give_up
        time.sleep(0.001)


def test_a_shard_whose_port_is_taken_comes_back_at_another(client: Client) -> None:
    plain = plain_tokens(client)
    shard = worker_of(client.stats(), "shard-0")
    others: list[socket.socket] = []

    def kill_and_take() -> None:
        os.kill(shard.pid, signal.SIGKILL)
        others.append(taken(shard.address))

    try:
        assert stream_through(client, kill_and_take) == plain
        # The shard may have sent all tokens before it ended, if this process read them late.
        eventually(partial(is_back, client, "shard-0", shard.pid))
        assert worker_of(client.stats(), "shard-0").address != shard.address
    finally:
        for other in others:
            other.close()


@pytest.mark.release
def test_a_shard_that_ends_again_and_again_is_waited_for_longer_and_told(
    client: Client, logs: Path
) -> None:
    plain = plain_tokens(client)
    before = life_of(client.stats().lives, "shard-0").restarts
    waits: list[float] = []
    ended = threading.Event()

    def look() -> None:
        while not ended.wait(0.02):
            with contextlib.suppress(PacelineError):
                left = life_of(client.stats().lives, "shard-0").next_try_seconds
                waits.append(left or 0.0)

    looking = threading.Thread(target=look)
    looking.start()
    try:
        for _ in range(3):
            pid = worker_of(client.stats(), "shard-0").pid
            assert stream_through(client, partial(os.kill, pid, signal.SIGKILL)) == plain
            eventually(partial(is_back, client, "shard-0", pid))
    finally:
        ended.set()
        looking.join()
    eventually(lambda: life_of(client.stats().lives, "shard-0").restarts == before + 3)
    life = life_of(client.stats().lives, "shard-0")
    assert "died" in life.last_end
    assert 0.5 < max(waits) <= 2.0  # at the fourth end in this file's cluster
    # Each process has written to one log, which outlives it.
    assert Path(life.log) == logs / "shard-0.log"
    assert Path(life.log).read_text().count("started, pid") == life.restarts + 1
    assert "shard-0: next try in 2 s" in (logs / "controller.log").read_text()


def test_a_driver_whose_port_is_taken_waits_for_it_and_says_so(
    cluster: ClusterHandle, client: Client
) -> None:
    """Callers know only that address."""
    plain = plain_tokens(client)
    driver = next(one for one in cluster.workers() if one.kind == "driver")
    assert driver.pid is not None
    os.kill(driver.pid, signal.SIGKILL)
    with taken(cluster.address):
        eventually(
            lambda: f"listen on {cluster.address}" in life_of(cluster.lives(), "driver").last_end
        )
    eventually(lambda: _serves(client))
    assert plain_tokens(client) == plain
    after = next(one for one in cluster.workers() if one.kind == "driver")
    assert after.address == driver.address
    eventually(lambda: life_of(client.stats().lives, "driver").restarts >= 1)


def _serves(client: Client) -> bool:
    try:
        return all(worker.connected for worker in client.stats().workers)
    except PacelineError:
        return False


@pytest.mark.release
def test_a_shard_that_fails_on_one_node_again_and_again_goes_to_another(
    second_host: SecondHost, tmp_path: Path
) -> None:
    """As with a broken device, every process that starts on that node ends."""
    model = make_tiny_checkpoint(tmp_path / "model", max_position_embeddings=2048)
    config = tmp_path / "paceline.toml"
    config.write_text(f"""
        [target]
        model = "{model}"
        threads = 1
        kv_memory = "64MiB"
        [[drafters]]
        kind = "ngram"
        own_process = true
        [server]
        host = "0.0.0.0"
        grpc_port = 0
        http = false
    """)
    with RayNodes(HERE, num_cpus=0) as nodes:
        nodes.add(*second_host.hosts[:2], num_cpus=1)
        with Job(nodes, config) as job, Client(job.next_address()) as client:
            plain = plain_tokens(client)
            broken = host_of_shard(client)
            for _ in range(MOVE_AFTER):
                address = worker_of(client.stats(), "shard-0").address
                assert host_of_shard(client) == broken
                assert stream_through(client, lambda: kill_shards(nodes, broken)) == plain
                eventually(partial(has_moved, client, address))
            assert host_of_shard(client) != broken
            assert plain_tokens(client) == plain


def has_moved(client: Client, address: str) -> bool:
    now = worker_of(client.stats(), "shard-0")
    return now.connected and now.address != address


def host_of_shard(client: Client) -> str:
    return worker_of(client.stats(), "shard-0").address.rpartition(":")[0]


def kill_shards(nodes: RayNodes, address: str) -> None:
    """Kill the shards' processes of a node. They have other pids in its own namespace."""
    shards = [
        process
        for process in psutil.Process(nodes._nodes[address].pid).children(recursive=True)
        if "ShardActor" in " ".join(process.cmdline())
    ]
    assert shards
    for shard in shards:
        shard.kill()
