"""Nodes of a Ray cluster on two hosts are lost during a request.

The head has the controller and no CPUs. Shards and drafter are behind a cable, on nodes of one CPU
each. All tests lose nodes of one deployment, and leave it complete, on other nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from deploy.bench.two_hosts import Host
from paceline import Chunk, Client, Retries, WorkerStats
from paceline.errors import PacelineError
from tests.cluster.two_hosts import HERE, SecondHost
from tests.cluster_faults.killing import KILL_AT, PROMPT, eventually, options_of, plain_tokens
from tests.cluster_faults.ray_nodes import Job, RayNodes
from tests.tiny import make_tiny_checkpoint

pytestmark = [pytest.mark.ray, pytest.mark.long]

HUNG_AFTER = 10.0


class Deployment:
    """A deployment with exactly one node for each worker that needs one."""

    def __init__(self, nodes: RayNodes, job: Job, unused: Iterator[Host]) -> None:
        self.nodes = nodes
        self.job = job
        self._unused = unused
        self.follow()
        self.plain = plain_tokens(self.client)

    def follow(self) -> None:
        """Connect to the next address at which the job says that it serves."""
        self.address = self.job.next_address()
        self.client = Client(self.address, retries=Retries(0))

    def add_node(self) -> str:
        """Add a node. Returns its address."""
        host = next(self._unused)
        self.nodes.add(host, num_cpus=1)
        return host.address

    def worker(self, name: str) -> WorkerStats:
        return next(one for one in self.client.stats().workers if one.name == name)

    def host_of(self, name: str) -> str:
        return self.worker(name).address.rpartition(":")[0]

    def stream_and_lose(self, node: str, *, then: Callable[[], object] | None = None) -> list[int]:
        """Lose a node during a request, then call `then`. Returns the request's token ids."""
        token_ids: list[int] = []
        lost = False
        for event in self.client.stream(PROMPT, options_of("chain")):
            if isinstance(event, Chunk):
                token_ids += event.token_ids
            if not lost and len(token_ids) >= KILL_AT:
                self.nodes.lose(node)
                lost = True
                if then is not None:
                    then()
        assert lost
        return token_ids

    def check_text(self) -> None:
        """Check that all workers are there, and that the text is that of plain decoding."""
        eventually(lambda: all(worker.connected for worker in self.client.stats().workers))
        completion = self.client.generate(PROMPT, options_of("chain"))
        assert completion.token_ids == self.plain
        assert completion.stats.accepted > 0


@pytest.fixture(scope="module")
def deployment(
    second_host: SecondHost, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Deployment]:
    folder = tmp_path_factory.mktemp("lost-nodes")
    model = make_tiny_checkpoint(folder / "model", max_position_embeddings=2048)
    config = folder / "paceline.toml"
    config.write_text(f"""
        [target]
        model = "{model}"
        tensor_parallel = 2
        threads = 1
        kv_memory = "64MiB"
        hung_after = {HUNG_AFTER}
        [[drafters]]
        model = "{model}"
        threads = 1
        [server]
        host = "0.0.0.0"
        grpc_port = 0
        http = false
    """)
    unused = iter(second_host.hosts)
    with RayNodes(HERE, num_cpus=0) as nodes:
        nodes.add(*(next(unused) for _ in range(3)), num_cpus=1)
        with Job(nodes, config) as job:
            yield Deployment(nodes, job, unused)


@pytest.mark.release
def test_a_lost_drafter_is_placed_on_a_node_that_comes(deployment: Deployment) -> None:
    """Requests go on without it, because at first no node has room for it."""
    lost = deployment.host_of("drafter-0")
    assert tuple(deployment.stream_and_lose(lost)) == deployment.plain
    eventually(lambda: not deployment.worker("drafter-0").connected)
    added = deployment.add_node()
    deployment.check_text()
    assert deployment.host_of("drafter-0") == added


@pytest.mark.release
def test_a_lost_shard_is_placed_on_a_node_that_joins(deployment: Deployment) -> None:
    lost, kept = (deployment.host_of(name) for name in ("shard-1", "shard-0"))
    assert lost != kept
    added = []
    token_ids = deployment.stream_and_lose(lost, then=lambda: added.append(deployment.add_node()))
    assert tuple(token_ids) == deployment.plain
    assert [deployment.host_of(name) for name in ("shard-1", "shard-0")] == [*added, kept]
    deployment.check_text()


@pytest.mark.release
def test_requests_for_which_no_node_is_left_say_what_has_no_place(deployment: Deployment) -> None:
    with pytest.raises(PacelineError, match="was not back within") as caught:
        deployment.stream_and_lose(deployment.host_of("shard-1"))
    assert "shard-1 has no place: its group needs 1 CPUs" in str(caught.value)
    deployment.add_node()
    deployment.check_text()


def test_a_lost_driver_is_started_on_a_node_that_joins(deployment: Deployment) -> None:
    """The driver is lost with shard 0. Requests fail, other workers stay, the job says where it
    serves.
    """
    before = {worker.name: worker for worker in deployment.client.stats().workers}
    old_host, _, port = deployment.address.rpartition(":")
    assert deployment.host_of("shard-0") == old_host
    with pytest.raises(PacelineError):
        deployment.stream_and_lose(old_host)
    added = deployment.add_node()
    deployment.follow()
    assert deployment.address == f"{added}:{port}"
    deployment.check_text()
    assert deployment.host_of("shard-0") == added
    after = {worker.name: worker for worker in deployment.client.stats().workers}
    for name in ("shard-1", "drafter-0"):
        assert after[name].pid == before[name].pid
        assert after[name].address == before[name].address
