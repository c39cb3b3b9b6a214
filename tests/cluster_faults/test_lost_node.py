"""Nodes of a Ray cluster that are lost half-way through a request, on two hosts.

The head has no CPU to give; shards and drafters are on nodes of their own behind a cable.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from paceline import Chunk, Client, GenerateOptions, WorkerStats
from paceline.errors import PacelineError
from tests.cluster.two_hosts import HERE, CannotMakeHostsError, SecondHost
from tests.cluster_faults.killing import eventually
from tests.cluster_faults.ray_nodes import RayNodes, environment
from tests.tiny import make_tiny_checkpoint

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]

PROMPT = "The quick brown fox"
LOSE_AT = 300


def options_of(policy: str) -> GenerateOptions:
    return GenerateOptions(policy=policy, temperature=1.0, seed=7, max_tokens=1500, ignore_eos=True)


@pytest.fixture(scope="module")
def there() -> Iterator[SecondHost]:
    try:
        with SecondHost() as second:
            yield second
    except CannotMakeHostsError as error:
        pytest.skip(f"needs root and `ip netns`: {error}")


@contextmanager
def served(nodes: RayNodes, folder: Path, config: str) -> Iterator[str]:
    """A deployment on these nodes, as a Ray job's process has it; the address that it says."""
    path = folder / "paceline.toml"
    path.write_text(config)
    command = [sys.executable, "-m", "deploy.serve_job", "--config", str(path)]
    job = subprocess.Popen(
        command,
        env=environment() | {"RAY_ADDRESS": nodes.address},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        assert job.stdout is not None
        lines: list[str] = []
        for line in job.stdout:
            lines.append(line)
            if line.startswith("serving: gRPC at "):
                break
        else:
            raise AssertionError("".join(lines) + nodes.logs())
        yield lines[-1].split()[-1]
    finally:
        job.terminate()
        job.communicate(timeout=60)


def host_of(worker: WorkerStats) -> str:
    return worker.address.rpartition(":")[0]


def worker_of(client: Client, name: str) -> WorkerStats:
    return next(worker for worker in client.stats().workers if worker.name == name)


def stream_and_lose(
    client: Client, nodes: RayNodes, node: str, *, then: object = None
) -> list[int]:
    """Token ids of a request in the midst of which a node is lost; `then` is called after it."""
    token_ids: list[int] = []
    lost = False
    for event in client.stream(PROMPT, options_of("chain")):
        if isinstance(event, Chunk):
            token_ids += event.token_ids
        if not lost and len(token_ids) >= LOSE_AT:
            nodes.lose(node)
            lost = True
            if callable(then):
                then()
    assert lost
    return token_ids


def test_a_lost_drafter_is_placed_on_a_node_that_comes(tmp_path: Path, there: SecondHost) -> None:
    """Requests go on without it; no node has room for it at first."""
    first, second, third, *_ = there.hosts
    model = make_tiny_checkpoint(tmp_path / "model", max_position_embeddings=2048)
    config = f"""
        [target]
        model = "{model}"
        threads = 2
        kv_memory = "64MiB"
        [[drafters]]
        model = "{model}"
        threads = 1
        [server]
        host = "0.0.0.0"
        grpc_port = 0
    """
    with RayNodes(HERE, num_cpus=0) as nodes:
        nodes.add(first, num_cpus=2)
        nodes.add(second, num_cpus=1)
        with served(nodes, tmp_path, config) as address:
            port = address.rpartition(":")[2]
            with Client(f"{first.address}:{port}") as client:
                plain = client.generate(PROMPT, options_of("off")).token_ids
                assert host_of(worker_of(client, "drafter-0")) == second.address
                token_ids = stream_and_lose(client, nodes, second.address)
                assert tuple(token_ids) == plain
                assert not worker_of(client, "drafter-0").connected
                nodes.add(third, num_cpus=1)
                eventually(lambda: worker_of(client, "drafter-0").connected)
                assert host_of(worker_of(client, "drafter-0")) == third.address
                again = client.generate(PROMPT, options_of("chain"))
                assert again.token_ids == plain
                assert again.stats.accepted > 0


def test_lost_shards(tmp_path: Path, there: SecondHost) -> None:
    """A shard's node, while another joins; then while none has room."""
    model = make_tiny_checkpoint(tmp_path / "model", max_position_embeddings=2048)
    config = f"""
        [target]
        model = "{model}"
        tensor_parallel = 2
        threads = 1
        kv_memory = "64MiB"
        [[drafters]]
        kind = "ngram"
        [server]
        host = "0.0.0.0"
        grpc_port = 0
    """
    spare = list(there.hosts)
    with RayNodes(HERE, num_cpus=0) as nodes:
        for host in spare[:2]:
            nodes.add(host, num_cpus=1)
        with served(nodes, tmp_path, config) as address:
            port = address.rpartition(":")[2]
            # All these hosts share interfaces, so that the driver is reached at any of them.
            with Client(f"{spare[0].address}:{port}") as client:
                plain = client.generate(PROMPT, options_of("off")).token_ids
                beside = host_of(worker_of(client, "shard-0"))
                shard = host_of(worker_of(client, "shard-1"))
                assert shard != beside

                def replace() -> None:
                    nodes.add(spare[2], num_cpus=1)

                assert tuple(stream_and_lose(client, nodes, shard, then=replace)) == plain
                assert host_of(worker_of(client, "shard-1")) == spare[2].address

                with pytest.raises(PacelineError, match="was not back within") as caught:
                    stream_and_lose(client, nodes, spare[2].address)
                assert "shard-1 has no place: its group needs 1 CPUs" in str(caught.value)
                nodes.add(spare[3], num_cpus=1)
                eventually(lambda: worker_of(client, "shard-1").connected)
                assert client.generate(PROMPT, options_of("chain")).token_ids == plain
