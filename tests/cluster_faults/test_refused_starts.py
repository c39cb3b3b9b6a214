"""Impossible deployments on a real Ray cluster are refused with the reason, and leave nothing."""

from __future__ import annotations

from pathlib import Path

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


def test_no_room_is_said_at_once(ray_address: str, tmp_path: Path) -> None:
    config = Config(target=TargetConfig(threads=1000), drafters=())
    with pytest.raises(UnavailableError, match="1000 CPUs"), cluster_of(config, tmp_path):
        pass
