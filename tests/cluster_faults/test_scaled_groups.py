"""On a real Ray cluster: target groups join and leave a deployment that serves."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from paceline import Client
from paceline.errors import ConfigError, UnavailableError
from tests.cluster_faults.killing import PROMPT, cluster_of, config_of, eventually, options_of
from tests.release import at_release
from tests.tiny import make_tiny_checkpoint

if TYPE_CHECKING:
    from cluster.config.model import Config
    from cluster.placement.launch import ClusterHandle

pytestmark = [pytest.mark.ray, pytest.mark.long]

SEEDS = range(6)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    folder = tmp_path_factory.mktemp("scaled")
    return config_of(make_tiny_checkpoint(folder / "model", max_position_embeddings=2048))


@pytest.fixture(scope="module")
def cluster(
    ray_address: str, config: Config, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ClusterHandle]:
    with cluster_of(config, tmp_path_factory.mktemp("home")) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def client(cluster: ClusterHandle) -> Iterator[Client]:
    with Client(cluster.address) as client:
        yield client


def with_groups(config: Config, groups: int) -> Config:
    target = config.target.model_copy(update={"groups": groups})
    return config.model_copy(update={"target": target})


def num_places() -> int:
    """Placement groups that Ray has."""
    from ray.util.placement_group import placement_group_table

    return sum(one["state"] != "REMOVED" for one in placement_group_table().values())


def wait_for_places(count: int) -> None:
    eventually(lambda: num_places() == count)


def shards_of(client: Client) -> list[str]:
    groups = client.describe_topology().target_groups
    return [shard.name for group in groups for shard in group if shard.connected]


def answers_of(client: Client, policy: str) -> list[tuple[int, ...]]:
    """The token ids of several requests that run at the same time."""
    asked = [replace(options_of(policy), seed=seed) for seed in SEEDS]
    with ThreadPoolExecutor(len(asked)) as threads:
        answers = threads.map(lambda one: client.generate(PROMPT, one).token_ids, asked)
        return list(answers)


@pytest.mark.parametrize("numbers", [(2, 1), *at_release([[2, 1, 3, 1]])])
def test_groups_join_and_leave_under_streams(
    cluster: ClusterHandle, client: Client, config: Config, numbers: Sequence[int]
) -> None:
    """From one to these numbers in turn: no request is dropped, no text changes."""
    plain, places = answers_of(client, "off"), num_places()
    for groups in numbers:
        with ThreadPoolExecutor(1) as thread:
            changing = thread.submit(cluster.apply, with_groups(config, groups))
            while not changing.done():
                assert answers_of(client, "chain") == plain
        assert [one for one in changing.result() if one.startswith("target group")]
        assert answers_of(client, "chain") == plain
        names = ["shard-0", *(f"replica-{one}.shard-0" for one in range(1, groups))]
        assert shards_of(client) == names
        assert {one.name for one in cluster.workers()} == {*names, "drafter-0", "driver"}
        wait_for_places(places + groups - 1)


def test_what_has_no_room_changes_nothing(
    cluster: ClusterHandle, client: Client, config: Config
) -> None:
    before, places = cluster.workers(), num_places()
    with pytest.raises(UnavailableError) as refused:
        cluster.apply(with_groups(config, 40))
    said = str(refused.value)
    assert "no room for replica-" in said
    assert "lacks 1 CPUs" in said
    assert "free are" in said
    assert (cluster.workers(), num_places()) == (before, places)
    with pytest.raises(ConfigError, match=r"target\.groups: 1 -> 0: a pool"):
        cluster.apply(with_groups(config, 0))
    assert cluster.apply(config) == []


@pytest.mark.release
def test_a_controller_that_dies_half_way_leaves_the_groups_that_there_were(
    cluster: ClusterHandle, client: Client, config: Config
) -> None:
    """It dies while a group loads: what it had begun ends. The change can be made anew."""
    import ray

    from cluster.placement.ledger import NAMESPACE

    plain, places, before = answers_of(client, "off"), num_places(), cluster.workers()
    controller = ray.get_actor(cluster.name, namespace=NAMESPACE)
    controller.apply.remote(with_groups(config, 2))  # ClusterHandle would ask again.
    eventually(lambda: len(cluster.workers()) > len(before))
    os.kill(cluster.controller_pid() or 0, signal.SIGKILL)
    eventually(lambda: cluster.workers() == before)
    wait_for_places(places)
    assert answers_of(client, "chain") == plain
    for groups in (2, 1):
        said = cluster.apply(with_groups(config, groups))
        assert f"target.groups: {3 - groups} -> {groups}" in said
        assert answers_of(client, "chain") == plain
