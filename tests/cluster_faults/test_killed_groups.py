"""Target groups on a real Ray cluster, one of them killed while it serves."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest

from cluster.config_model import Config, DrafterConfig, ServerConfig, TargetConfig
from paceline import Client
from tests.cluster_faults.killing import (
    client_of,
    eventually,
    is_back,
    plain_tokens,
    stream_and_kill,
    worker_of,
)
from tests.tiny import make_tiny_checkpoint

pytestmark = [pytest.mark.ray, pytest.mark.slow]


@pytest.fixture(scope="module")
def client(ray_address: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    folder = tmp_path_factory.mktemp("groups")
    model = make_tiny_checkpoint(folder / "target", max_position_embeddings=2048)
    config = Config(
        target=TargetConfig(model=str(model), groups=2, threads=1, kv_memory=64 << 20),
        drafters=(DrafterConfig(kind="ngram"),),
        server=ServerConfig(grpc_port=0),
    )
    with client_of(config, folder) as client:
        yield client


@pytest.mark.parametrize(("group", "policy"), [(0, "replicas"), (1, "replicas"), (0, "chain")])
def test_a_killed_group_comes_back_and_the_request_goes_on(
    client: Client, group: int, policy: str
) -> None:
    """With `chain` it is the group that serves the request, which goes on at the other."""
    expected = plain_tokens(client)
    name, other = (f"replica-{one}.shard-0" for one in (group, 1 - group))
    pid, kept = (worker_of(client.stats(), one).pid for one in (name, other))
    token_ids, _ = stream_and_kill(client, pid, policy=policy)
    assert tuple(token_ids) == expected
    assert worker_of(client.stats(), other).pid == kept
    eventually(partial(is_back, client, name, pid))
