"""Placement: which worker gets which threads, cores and groups."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.config.model import Config, DrafterConfig, TargetConfig
from cluster.placement.plan import Host, own_drafters, plan_placement
from paceline.errors import UnavailableError

NGRAM = DrafterConfig(kind="ngram", own_process=True)
RECYCLING = DrafterConfig(kind="recycling", own_process=True)
MODEL = DrafterConfig(model="demo-draft")


def config_of(*drafters: DrafterConfig, threads: int | None = None) -> Config:
    target = TargetConfig() if threads is None else TargetConfig(threads=threads)
    return Config(target=target, drafters=drafters)


def threads_of(config: Config, *nodes: Host, enforce: bool = True) -> list[int]:
    plan = plan_placement(config, nodes, enforce=enforce)
    return [worker.threads for worker in plan.workers]


def test_without_a_model_drafter_the_target_has_all_cores() -> None:
    assert threads_of(config_of(), Host("n", 4)) == [4]
    assert threads_of(config_of(NGRAM, RECYCLING), Host("n", 4)) == [4, 1, 1]


def test_a_drafter_in_the_driver_is_no_worker_but_keeps_its_number() -> None:
    config = config_of(DrafterConfig(kind="ngram", count=2), MODEL, RECYCLING)
    names = [worker.name for worker in plan_placement(config, [Host("n", 4)]).workers]
    assert names == ["shard-0", "drafter-2", "drafter-3"]
    assert {name: one.kind for name, one in own_drafters(config).items()} == {
        "drafter-0": "ngram",
        "drafter-1": "ngram",
    }


def test_model_drafters_share_the_cores_with_the_target() -> None:
    assert threads_of(config_of(MODEL), Host("n", 2)) == [1, 1]
    assert threads_of(config_of(MODEL), Host("n", 5)) == [3, 2]
    assert threads_of(config_of(MODEL, MODEL), Host("n", 8)) == [4, 2, 2]


def test_given_threads_are_kept() -> None:
    drafter = DrafterConfig(model="demo-draft", threads=3)
    assert threads_of(config_of(drafter, threads=2), Host("n", 8)) == [2, 3]
    assert threads_of(config_of(drafter), Host("n", 8)) == [5, 3]


def test_what_is_left_of_given_threads_is_shared() -> None:
    given = DrafterConfig(model="demo-draft", threads=4)
    assert threads_of(config_of(MODEL, threads=6), Host("n", 9)) == [6, 3]
    assert threads_of(config_of(given, MODEL), Host("n", 10)) == [3, 4, 3]


@pytest.mark.parametrize("threads", [None, 1, 2, 64])
@pytest.mark.parametrize(
    "drafters",
    [
        (),
        (MODEL,),
        (MODEL, MODEL, NGRAM),
        (MODEL, DrafterConfig(model="demo-draft", threads=4)),
    ],
    ids=len,
)
def test_a_node_with_what_the_workers_ask_for_has_room(
    drafters: tuple[DrafterConfig, ...], threads: int | None
) -> None:
    """Our own Ray head always promises at least as much, however few cores there are."""
    config = config_of(*drafters, threads=threads)
    for num_cores in (1, 2, 3, 8):
        asked = plan_placement(config, [Host("n", num_cores)], enforce=False)
        node = Host("n", max(num_cores, asked.reserved_cpus))
        assert plan_placement(config, [node]).workers == asked.workers


def test_on_two_nodes_the_drafters_do_not_cost_the_target_its_cores() -> None:
    assert threads_of(config_of(MODEL), Host("a", 8), Host("b", 4)) == [8, 4]


def test_the_driver_and_ngrams_sit_beside_the_target_and_model_drafters_apart() -> None:
    plan = plan_placement(config_of(RECYCLING, MODEL, MODEL), [Host("n", 6)])
    assert [worker.name for worker in plan.workers] == [
        "shard-0",
        "drafter-0",
        "drafter-1",
        "drafter-2",
    ]
    assert [(worker.group, worker.bundle) for worker in plan.workers] == [
        (0, 0),
        (0, 0),
        (1, 0),
        (1, 1),
    ]
    assert [group.bundles for group in plan.groups] == [
        ({"CPU": 2.0},),
        ({"CPU": 2.0}, {"CPU": 2.0}),
    ]
    assert plan.reserved_cpus == 6


def test_each_model_worker_gets_a_gpu_where_there_are_enough() -> None:
    both = plan_placement(config_of(MODEL, NGRAM), [Host("n", 4, gpus=2)])
    assert [worker.reserved_gpus for worker in both.workers] == [1, 1, 0]
    one = plan_placement(config_of(MODEL, NGRAM), [Host("n", 4, gpus=1)])
    assert [worker.reserved_gpus for worker in one.workers] == [1, 0, 0]
    none = plan_placement(config_of(MODEL, NGRAM), [Host("n", 4)])
    assert [worker.reserved_gpus for worker in none.workers] == [0, 0, 0]


def test_cores_are_shared_out_without_overlap() -> None:
    plan = plan_placement(config_of(MODEL, NGRAM), [Host("n", 4)], cores=(2, 3, 6, 7))
    assert [worker.cores for worker in plan.workers] == [(2, 3), (6, 7), None]


def test_too_few_cores_pin_nobody() -> None:
    plan = plan_placement(config_of(MODEL, MODEL), [Host("n", 2)], cores=(0, 1), enforce=False)
    assert [worker.cores for worker in plan.workers] == [None, None, None]
    assert plan.reserved_cpus == 3


@pytest.mark.parametrize("nodes", [[Host("n", 3)], [Host("a", 2), Host("b", 1)], []])
def test_no_room_says_what_is_needed_and_what_is_there(nodes: list[Host]) -> None:
    config = config_of(DrafterConfig(model="demo-draft", threads=2), threads=2)
    with pytest.raises(UnavailableError, match=r"shard-0 2 CPUs, drafter-0 2 CPUs; free are"):
        plan_placement(config, nodes)


def shards_of(degree: int, *drafters: DrafterConfig, **target: Any) -> Config:
    return Config(target=TargetConfig(tensor_parallel=degree, **target), drafters=drafters)


def test_each_shard_has_a_bundle_and_the_driver_sits_beside_the_first() -> None:
    plan = plan_placement(shards_of(3, NGRAM, MODEL), [Host("n", 8)])
    assert [(one.name, one.rank, one.degree) for one in plan.workers[:3]] == [
        ("shard-0", 0, 3),
        ("shard-1", 1, 3),
        ("shard-2", 2, 3),
    ]
    bundles = [(one.group, one.bundle) for one in plan.workers]
    assert bundles == [(0, 0), (0, 1), (0, 2), (0, 0), (1, 0)]
    assert [one.threads for one in plan.workers] == [2, 2, 2, 1, 2]
    assert plan.groups[0].bundles == ({"CPU": 2.0},) * 3
    assert plan.groups[0].strategy == "STRICT_PACK"


def test_shards_that_no_node_holds_together_lie_on_several() -> None:
    nodes = [Host("a", 4), Host("b", 4)]
    plan = plan_placement(shards_of(2, threads=4), nodes)
    assert plan.groups[0].strategy == "PACK"
    with pytest.raises(UnavailableError, match=r"shard-2 4 CPUs; free are a: 4 CPUs"):
        plan_placement(shards_of(3, threads=4), nodes)


def test_each_shard_gets_a_gpu_before_a_drafter_does() -> None:
    plan = plan_placement(shards_of(4, MODEL), [Host("n", 16, gpus=4)])
    assert [worker.reserved_gpus for worker in plan.workers] == [1, 1, 1, 1, 0]
    spread = plan_placement(shards_of(4), [Host("a", 8, gpus=2), Host("b", 8, gpus=2)])
    assert spread.groups[0].strategy == "PACK"
    on_cpus = plan_placement(shards_of(2, resources="cpu"), [Host("n", 4, gpus=1)])
    assert [worker.reserved_gpus for worker in on_cpus.workers] == [0, 0]


def test_each_target_group_has_a_placement_group_of_its_own() -> None:
    nodes = [Host("a", 4, gpus=2), Host("b", 4, gpus=2)]
    plan = plan_placement(shards_of(2, MODEL, groups=2), nodes, enforce=False)
    assert [(one.name, one.rank, one.group, one.bundle) for one in plan.workers] == [
        ("replica-0.shard-0", 0, 0, 0),
        ("replica-0.shard-1", 1, 0, 1),
        ("replica-1.shard-0", 0, 1, 0),
        ("replica-1.shard-1", 1, 1, 1),
        ("drafter-0", 0, 2, 0),
    ]
    assert [worker.reserved_gpus for worker in plan.workers] == [1, 1, 1, 1, 0]
    assert [group.strategy for group in plan.groups] == ["STRICT_PACK", "STRICT_PACK", "SPREAD"]
    assert [one.threads for one in plan.workers[:4]] == [2] * 4, "a group a node"


@pytest.mark.parametrize(
    ("config", "node", "numbers"),
    [
        (
            shards_of(2, groups=3, resources="gpu"),
            Host("n", 16, gpus=4),
            "6 shards of the target must have 6 GPUs, but only 4 .*groups is 3 and .* 2: 6 shards",
        ),
        (
            shards_of(1, groups=3),
            Host("n", 2),
            "3 shards, a CPU core .* lower groups or tensor_parallel",
        ),
        (shards_of(4), Host("n", 16, gpus=2), "must have 4 GPUs, but only 2 are .* is 4"),
        (shards_of(1, resources="gpu"), Host("n", 16), "must have 1 GPU, but only 0 are .* is 1"),
        (
            shards_of(3),
            Host("n", 2),
            "is 3, a CPU core or more each, but 2 cores are free on 1 node:",
        ),
    ],
)
def test_more_shards_than_devices_are_refused(config: Config, node: Host, numbers: str) -> None:
    with pytest.raises(UnavailableError, match=numbers):
        plan_placement(config, [node])
