"""Workers on a real Ray cluster, killed half-way through a request: the text stays the same."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest

from cluster.config_model import Config, DrafterConfig, ServerConfig, TargetConfig
from paceline import Client
from tests.cluster_faults.killing import (
    PROMPT,
    client_of,
    eventually,
    is_back,
    options_of,
    plain_tokens,
    stream_and_kill,
    worker_of,
)
from tests.tiny import make_tiny_checkpoint

pytestmark = [pytest.mark.ray, pytest.mark.slow]

LONGEST_PAUSE = 0.2


@pytest.fixture(scope="module")
def client(ray_address: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    folder = tmp_path_factory.mktemp("killed")
    target = make_tiny_checkpoint(folder / "target", max_position_embeddings=2048)
    drafter = make_tiny_checkpoint(folder / "drafter", max_position_embeddings=2048)
    config = Config(
        target=TargetConfig(model=str(target), threads=1, kv_memory=64 << 20),
        drafters=(DrafterConfig(model=str(drafter), threads=1),),
        server=ServerConfig(grpc_port=0),
    )
    with client_of(config, folder) as client:
        yield client


def test_a_killed_drafter_costs_nothing_and_comes_back(client: Client) -> None:
    """Other work on the machine makes pauses too, so the shortest of three kills counts."""
    expected = plain_tokens(client)
    pauses: list[float] = []
    while len(pauses) < 3 and min(pauses, default=LONGEST_PAUSE + 1) > LONGEST_PAUSE:
        pid = worker_of(client.stats(), "drafter-0").pid
        token_ids, times = stream_and_kill(client, pid)
        assert tuple(token_ids) == expected
        pauses.append(max(later - earlier for earlier, later in pairwise(times)))

        eventually(partial(is_back, client, "drafter-0", pid))
        before = client.stats().accepted
        assert client.generate(PROMPT, options_of("chain")).token_ids == expected
        assert client.stats().accepted > before
    assert min(pauses) <= LONGEST_PAUSE


def test_a_killed_target_shard_comes_back_and_the_request_goes_on(client: Client) -> None:
    expected = plain_tokens(client)
    pid = worker_of(client.stats(), "shard-0").pid
    token_ids, _ = stream_and_kill(client, pid)
    assert tuple(token_ids) == expected
    assert is_back(client, "shard-0", pid)


def test_a_checkpoint_that_is_not_there_leaves_nothing_behind(
    ray_address: str, tmp_path: Path
) -> None:
    import ray

    from cluster.launch import start_cluster
    from paceline.errors import CheckpointError

    config = Config(
        target=TargetConfig(model=str(tmp_path / "absent"), threads=1),
        drafters=(),
        server=ServerConfig(grpc_port=0),
    )
    before = ray.available_resources()["CPU"]
    with pytest.raises(CheckpointError, match="absent"):
        start_cluster(
            config,
            home=tmp_path,
            progress=lambda line: None,
            detached=False,
            name=None,
        )
    eventually(lambda: ray.available_resources().get("CPU") == before)


def test_no_room_is_said_at_once(ray_address: str, tmp_path: Path) -> None:
    from cluster.launch import start_cluster
    from paceline.errors import UnavailableError

    config = Config(target=TargetConfig(threads=1000), drafters=())
    with pytest.raises(UnavailableError, match="1000 CPUs"):
        start_cluster(config, home=tmp_path, progress=lambda line: None, detached=False, name=None)
