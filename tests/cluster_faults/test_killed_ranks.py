"""Shards of a tensor-parallel target on a real Ray cluster, killed half-way through a request."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from cluster.config_model import Config, DrafterConfig, ServerConfig, TargetConfig
from paceline import Client
from tests.cluster_faults.killing import (
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


@pytest.fixture(scope="module")
def client(ray_address: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    folder = tmp_path_factory.mktemp("ranks")
    model = make_tiny_checkpoint(folder / "target", max_position_embeddings=2048)
    with client_of(config_of(model), folder) as client:
        yield client


def config_of(model: Path, *, tensor_parallel: int = 2, kv_memory: int = 64 << 20) -> Config:
    return Config(
        target=TargetConfig(
            model=str(model), tensor_parallel=tensor_parallel, threads=1, kv_memory=kv_memory
        ),
        drafters=(DrafterConfig(kind="ngram"),),
        server=ServerConfig(grpc_port=0),
    )


@pytest.mark.parametrize("rank", [1, 0])
def test_a_killed_rank_comes_back_and_the_request_goes_on(client: Client, rank: int) -> None:
    expected = plain_tokens(client)
    pids = [worker_of(client.stats(), f"shard-{one}").pid for one in range(2)]
    token_ids, _ = stream_and_kill(client, pids[rank])
    assert tuple(token_ids) == expected
    eventually(partial(is_back, client, f"shard-{rank}", pids[rank]))
    # The other one was not started again: the group met anew.
    assert worker_of(client.stats(), f"shard-{1 - rank}").pid == pids[1 - rank]
    assert client.generate("The fox", options_of("chain")).token_ids


def test_shards_that_cannot_be_leave_nothing_behind(ray_address: str, tmp_path: Path) -> None:
    """More shards than heads; KV that no machine holds; more shards than cores."""
    import ray

    from paceline.errors import ConfigError, PacelineError, UnavailableError

    model = make_tiny_checkpoint(tmp_path / "target")
    before = ray.available_resources()["CPU"]
    refused: dict[str, tuple[Config, type[PacelineError], str]] = {
        "heads": (
            config_of(model, tensor_parallel=7),
            ConfigError,
            "tensor_parallel is 7, but the model has 6 attention heads",
        ),
        "memory": (
            config_of(model, kv_memory=1 << 50),
            ConfigError,
            "target.kv_memory asks for 11258999068",
        ),
        "cores": (
            config_of(model, tensor_parallel=100),
            UnavailableError,
            "target.tensor_parallel is 100",
        ),
    }
    for config, error, words in refused.values():
        with pytest.raises(error, match=words), client_of(config, tmp_path):
            pass
        eventually(lambda: ray.available_resources().get("CPU") == before)
