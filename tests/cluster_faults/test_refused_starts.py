"""Impossible deployments on a real Ray cluster are refused with the reason, and leave nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cluster.config.model import Config, TargetConfig
from paceline.errors import CheckpointError, ConfigError, PacelineError, UnavailableError
from tests.cluster_faults.killing import cluster_of, config_of, eventually
from tests.tiny import make_tiny_checkpoint

pytestmark = [pytest.mark.ray, pytest.mark.long]


def test_a_deployment_that_cannot_be_leaves_nothing_behind(
    ray_address: str, tmp_path: Path
) -> None:
    """More shards than heads; more KV than any machine's memory; more shards than cores; no
    checkpoint.
    """
    model = make_tiny_checkpoint(
        tmp_path / "target", num_attention_heads=2, num_key_value_heads=1, head_dim=8
    )
    before = _places()
    refused: list[tuple[Config, type[PacelineError], str]] = [
        (
            config_of(model, tensor_parallel=3),
            ConfigError,
            "tensor_parallel is 3, but the model has 2 attention heads",
        ),
        (
            config_of(model, tensor_parallel=2, kv_memory=1 << 50),
            ConfigError,
            "and its KV together take 1125899906",
        ),
        (
            config_of(model, tensor_parallel=100),
            UnavailableError,
            "target.tensor_parallel is 100",
        ),
        (config_of(tmp_path / "absent"), CheckpointError, "absent"),
    ]
    no_keys = config_of(model).server.model_copy(update={"api_keys": str(tmp_path / "no-keys")})
    refused.append(
        (config_of(model).model_copy(update={"server": no_keys}), ConfigError, "no-keys")
    )
    for config, error, words in refused:
        with pytest.raises(error, match=words), cluster_of(config, tmp_path):
            pass
        eventually(lambda: _places() <= before)


def _places() -> set[str]:
    """Ids of the placement groups, which hold all that a deployment takes of a cluster.

    Free CPUs would not do: those of the deployment before this test may come back only now.
    """
    from ray.util import placement_group_table

    return {
        group for group, entry in placement_group_table().items() if entry["state"] != "REMOVED"
    }


def test_a_name_that_another_one_gets_first_leaves_nothing_behind(
    ray_address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one starts between the look for the name and the start."""
    import ray

    from cluster.placement import launch
    from cluster.placement.ledger import NAMESPACE

    class Other:
        """Has the name."""

    others: list[Any] = []

    def other_starts(deployment: str) -> None:
        options = {"name": deployment, "namespace": NAMESPACE, "num_cpus": 0}
        others.append(ray.remote(Other).options(**options).remote())

    monkeypatch.setattr(launch, "_free_name", other_starts)
    before = _places()
    model = make_tiny_checkpoint(tmp_path / "target")
    try:
        with pytest.raises(UnavailableError, match="is on this Ray cluster already"):
            launch.start_cluster(
                config_of(model),
                home=tmp_path,
                progress=lambda line: None,
                detached=False,
                name="two",
            )
        eventually(lambda: _places() <= before)
    finally:
        ray.kill(others[0])


@pytest.mark.parametrize("broken", ["wait", "get_placement_group"])
async def test_a_place_is_free_again_if_ray_fails_while_it_is_made(
    ray_address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    """So are those of the groups that were to join with it."""
    from ray.exceptions import RaySystemError
    from ray.util.placement_group import PlacementGroup

    from cluster.placement import workforce
    from cluster.placement.ledger import WorkerSetup
    from cluster.placement.plan import plan_placement

    config = Config(target=TargetConfig(threads=1), drafters=())
    placement = plan_placement(config, workforce.free_nodes())
    setup = WorkerSetup(config, tmp_path, host=None)
    before = _places()
    force = workforce.Workforce(setup, placement, deployment=tmp_path.name, run=tmp_path.name)
    holder = PlacementGroup if broken == "wait" else workforce
    works, calls = getattr(holder, broken), []

    def failing(*arguments: object) -> object:
        calls.append(arguments)
        if len(calls) > 1:
            raise RaySystemError("the head does not answer")
        return works(*arguments)

    monkeypatch.setattr(holder, broken, failing)
    try:
        with pytest.raises(RaySystemError):
            await force.enlist_groups([1, 2])
        assert len(calls) == 2
        assert not force._places
        assert [one.name for one in force.workers] == ["shard-0"]
        eventually(lambda: _places() <= before)
    finally:
        force.release()


def test_no_room_is_said_at_once(ray_address: str, tmp_path: Path) -> None:
    config = Config(target=TargetConfig(threads=1000), drafters=())
    with pytest.raises(UnavailableError, match="1000 CPUs"), cluster_of(config, tmp_path):
        pass
