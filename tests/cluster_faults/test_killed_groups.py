"""Target groups on a real Ray cluster: one of them, or all, are killed while they serve."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest

from paceline import Client
from tests.cluster_faults.killing import (
    client_of,
    config_of,
    eventually,
    is_back,
    plain_tokens,
    stream_and_kill,
    worker_of,
)
from tests.tiny import make_tiny_checkpoint

pytestmark = [pytest.mark.ray, pytest.mark.release]


@pytest.fixture(scope="module")
def client(ray_address: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    folder = tmp_path_factory.mktemp("groups")
    model = make_tiny_checkpoint(folder / "target", max_position_embeddings=2048)
    with client_of(config_of(model, groups=2), folder) as client:
        yield client


@pytest.fixture(scope="module")
def expected(client: Client) -> tuple[int, ...]:
    return plain_tokens(client)


@pytest.mark.parametrize(
    ("killed", "policy"),
    [((0,), "replicas"), ((1,), "replicas"), ((0,), "chain"), ((0, 1), "chain")],
)
def test_a_killed_group_comes_back_and_the_request_goes_on(
    client: Client, expected: tuple[int, ...], killed: tuple[int, ...], policy: str
) -> None:
    """With `chain`, group 0 serves the request. It goes on at the other group, or waits for one."""
    names = ["shard-0", "replica-1.shard-0"]
    pids = [worker_of(client.stats(), name).pid for name in names]
    token_ids, _ = stream_and_kill(client, *(pids[group] for group in killed), policy=policy)
    assert tuple(token_ids) == expected
    for group in killed:
        eventually(partial(is_back, client, names[group], pids[group]))
    for group in {0, 1}.difference(killed):
        assert worker_of(client.stats(), names[group]).pid == pids[group]
