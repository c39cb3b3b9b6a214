"""What workers are told to load."""

from __future__ import annotations

from pathlib import Path

from cluster.placement.actors import drafter_options, shard_options
from cluster.placement.plan import Host, plan_placement
from tests.cluster.config.test_config import config_of
from workers.models.catalog import ModelFiles

TEXT = """
[target]
max_num_seqs = 96
kv_memory = 4194304
hung_after = 40
kernels = true
[[drafters]]
kind = "ngram"
own_process = true
[[drafters]]
prefix_cache = false
"""


def test_workers_get_what_the_configuration_says(tmp_path: Path) -> None:
    config, files = config_of(tmp_path, TEXT), ModelFiles(tmp_path, "int8")
    shard, ngram, model = plan_placement(config, [Host("here", 4)]).workers
    target = shard_options(config, shard, files)
    assert (target.folder, target.weights, target.kv_memory_bytes) == (tmp_path, "int8", 4194304)
    assert target.deadlines.collective < 40, "a rank waits less long than it may seem to hang"
    drafter = drafter_options(config, model, files)
    assert (drafter.folder, drafter.weights, drafter.kv_memory_bytes) == (tmp_path, "int8", 4194304)
    assert not drafter.prefix_cache
    assert target.kernels
    assert drafter.kernels
    tables = drafter_options(config, ngram, None)
    assert (tables.kind, tables.folder) == ("ngram", None)
    assert tables.max_sequences == drafter.max_sequences == 96, "as many as the target decodes"
