"""Placement: which worker gets which threads, cores and groups."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.config.fields import GPU_LABEL
from cluster.config.model import Config, DrafterConfig, TargetConfig
from cluster.placement.plan import Host, Placement, own_drafters, plan_more_groups, plan_placement
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


def test_a_head_without_cpus_is_not_counted() -> None:
    assert threads_of(config_of(MODEL), Host("head", 0), Host("n", 4)) == [2, 2]


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
    config = config_of(DrafterConfig(model="demo-draft", threads=2), NGRAM, threads=2)
    plan = plan_placement(config, [Host("n", 4)], cores=(2, 3, 6, 7))
    assert [worker.cores for worker in plan.workers] == [(2, 3), (6, 7), None]


def test_workers_with_automatic_threads_may_use_the_cores_of_all_of_them() -> None:
    given = DrafterConfig(model="demo-draft", threads=1)
    plan = plan_placement(config_of(MODEL, given, NGRAM), [Host("n", 5)], cores=range(5))
    assert [worker.threads for worker in plan.workers] == [2, 2, 1, 1]
    shared = (0, 1, 2, 3)
    assert [worker.cores for worker in plan.workers] == [shared, shared, (4,), None]


def test_ranks_keep_their_cores() -> None:
    config = Config(target=TargetConfig(tensor_parallel=2), drafters=())
    plan = plan_placement(config, [Host("n", 4)], cores=range(4))
    assert [worker.cores for worker in plan.workers] == [(0, 1), (2, 3)]


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


def parts_of(plan: Placement) -> list[list[str]]:
    """Names of the workers of each placement group that Ray keeps on one node."""
    return [
        [worker.name for worker in plan.workers if worker.group == number and worker.reserved_cpus]
        for number, group in enumerate(plan.groups)
        if group.strategy == "STRICT_PACK"
    ]


def test_shards_that_no_node_holds_together_lie_on_several() -> None:
    nodes = [Host("a", 4), Host("b", 4)]
    plan = plan_placement(shards_of(2, threads=4), nodes)
    assert parts_of(plan) == [["shard-0"], ["shard-1"]]
    with pytest.raises(UnavailableError, match=r"room for shard-2 .* a lacks 4 CPUs; b lacks 4"):
        plan_placement(shards_of(3, threads=4, resources="cpu"), nodes)


@pytest.mark.parametrize(
    ("rooms", "sizes", "on"),
    [
        ([8], [8], "a"),
        ([16, 8, 12], [8], "b"),
        ([4, 4, 4], [4, 4], "ab"),
        ([1, 6, 7, 4], [4, 4], "db"),
        ([2, 6, 3], [6, 2], "ba"),
        ([7, 1, 1], [7, 1], "ab"),
        ([3, 3, 3], [3, 3, 2], "abc"),
        ([2, 2, 1, 2, 2], [2, 2, 2, 2], "abde"),
    ],
)
def test_a_group_takes_a_whole_node_or_the_fewest_with_ranks_in_a_row(
    rooms: list[int], sizes: list[int], on: str
) -> None:
    """Equal parts where possible, and nodes with no more room than they need."""
    nodes = [
        Host(name, 64, gpus=gpus, node_id=name) for name, gpus in zip("abcde", rooms, strict=False)
    ]
    plan = plan_placement(shards_of(8, threads=1), nodes)
    names = iter(f"shard-{rank}" for rank in range(8))
    assert parts_of(plan) == [[next(names) for _ in range(size)] for size in sizes]
    assert "".join(group.node_id or "?" for group in plan.groups) == on
    assert [worker.bundle for worker in plan.workers] == [
        bundle for size in sizes for bundle in range(size)
    ]


H100, L40S = ({GPU_LABEL: kind} for kind in ("H100", "L40S"))


def test_a_70b_target_on_two_hosts_and_drafters_on_cheaper_cards() -> None:
    drafter = DrafterConfig(model="demo-draft", count=2, gpu="L40S", labels={"zone": "x"})
    nodes = [
        Host("cheap", 16, gpus=2, labels=L40S | {"zone": "x"}, node_id="c"),
        Host("far", 16, gpus=4, labels=L40S | {"zone": "y"}, node_id="f"),
        Host("one", 32, gpus=4, labels=H100, node_id="1"),
        Host("two", 32, gpus=4, labels=H100, node_id="2"),
    ]
    plan = plan_placement(shards_of(8, drafter, gpu="H100"), nodes)
    assert parts_of(plan) == [
        [f"shard-{rank}" for rank in four] for four in (range(4), range(4, 8))
    ]
    assert [group.node_id for group in plan.groups] == ["1", "2", None]
    assert [group.selectors for group in plan.groups] == [
        (H100,) * 4,
        (H100,) * 4,
        (L40S | {"zone": "x"},) * 2,
    ]
    assert [worker.reserved_gpus for worker in plan.workers] == [1] * 10
    assert [worker.threads for worker in plan.workers] == [8] * 8 + [8] * 2


def test_groups_and_drafters_that_have_gpus_share_the_cores_of_their_nodes() -> None:
    nodes = [Host(name, 48, gpus=5, node_id=name) for name in "ab"]
    drafter = DrafterConfig(model="demo-draft", count=2)
    plan = plan_placement(shards_of(4, drafter, groups=2, resources="gpu"), nodes)
    assert [group.node_id for group in plan.groups] == ["a", "b", None]
    assert {worker.threads for worker in plan.workers} == {9}


GPUS = [Host("a", 8, gpus=4, labels=H100), Host("b", 8, gpus=2, labels=L40S | {"zone": "x"})]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (shards_of(4, gpu="A100"), "4 GPUs of kind A100, but only 0 are free on 0 nodes"),
        (
            shards_of(4, gpu="A100"),
            "free are a: 8 CPUs, 4 GPUs \\(H100\\); b: 8 CPUs, 2 GPUs \\(L40S",
        ),
        (shards_of(5, gpu="H100"), "5 GPUs of kind H100, but only 4 are free on 1 node"),
        (
            shards_of(2, labels={"zone": "y"}, resources="gpu"),
            'on a node with zone = "y", but only 0 are free on 0 nodes',
        ),
        (
            shards_of(4, DrafterConfig(model="demo-draft", gpu="L40S", count=3), threads=1),
            r"drafter-2 .* a has ray.io/accelerator-type=H100 .*; b lacks .*1 GPUs; needed",
        ),
        (
            shards_of(1, DrafterConfig(model="demo-draft", threads=1, labels={"zone": "z"})),
            "drafter-0 .* a has no label zone.*; b has zone=x; needed are .* on a node with zone",
        ),
        (shards_of(2, threads=99), "room for shard-0 .* a lacks 91 CPUs; b lacks 91 CPUs; needed"),
    ],
)
def test_a_layout_that_does_not_fit_says_what_each_node_lacks(config: Config, words: str) -> None:
    with pytest.raises(UnavailableError, match=words):
        plan_placement(config, GPUS)


def test_memory_is_reserved_if_it_is_asked_for() -> None:
    config = shards_of(2, memory="3GiB", threads=1)
    plan = plan_placement(config, [Host("a", 8, memory=4 * 2**30), Host("b", 8, memory=5 * 2**30)])
    assert parts_of(plan) == [["shard-0"], ["shard-1"]]
    assert plan.groups[0].bundles == ({"CPU": 1.0, "memory": 3.0 * 2**30},)
    with pytest.raises(
        UnavailableError, match=r"shard-1 .* a lacks 1.0 GiB; needed are .* 3.0 GiB"
    ):
        plan_placement(config, [Host("a", 8, memory=5 * 2**30)])


def test_each_shard_gets_a_gpu_before_a_drafter_does() -> None:
    plan = plan_placement(shards_of(4, MODEL), [Host("n", 16, gpus=4)])
    assert [worker.reserved_gpus for worker in plan.workers] == [1, 1, 1, 1, 0]
    spread = plan_placement(shards_of(4), [Host("a", 8, gpus=2), Host("b", 8, gpus=2)])
    assert [len(part) for part in parts_of(spread)] == [2, 2]
    on_cpus = plan_placement(shards_of(2, resources="cpu"), [Host("n", 4, gpus=1)])
    assert [worker.reserved_gpus for worker in on_cpus.workers] == [0, 0]


def test_each_target_group_has_a_placement_group_of_its_own() -> None:
    nodes = [Host("a", 4, gpus=2), Host("b", 4, gpus=2)]
    plan = plan_placement(shards_of(2, MODEL, groups=2), nodes, enforce=False)
    assert [(one.name, one.rank, one.group, one.bundle) for one in plan.workers] == [
        ("shard-0", 0, 0, 0),
        ("shard-1", 1, 0, 1),
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


def test_further_target_groups_are_like_the_first_and_keep_together() -> None:
    """Each on one node if any has room, else on the fewest; or refused as a whole."""
    config = Config.model_validate({"target": {"tensor_parallel": 2, "threads": 2}, "drafters": []})
    first = plan_placement(config, [Host("a", 4.0)]).workers
    nodes = [Host("b", 5.0, node_id="b"), Host("c", 3.0, node_id="c"), Host("d", 2.0, node_id="d")]
    parts = plan_more_groups(first, (1, 2), nodes)
    assert [(node, [(one.name, one.bundle) for one in part]) for part, node in parts] == [
        ("b", [("replica-1.shard-0", 0), ("replica-1.shard-1", 1)]),
        ("c", [("replica-2.shard-0", 0)]),
        ("d", [("replica-2.shard-1", 0)]),
    ]
    for part, _ in parts:
        assert {(one.reserved_cpus, one.threads, one.group, one.cores) for one in part} == {
            (2, 2, -1, None)
        }
    with pytest.raises(UnavailableError) as refused:
        plan_more_groups(first, (1, 2, 3), nodes)
    said = str(refused.value)
    assert "no room for replica-3.shard-0" in said
    assert "b lacks 1 CPUs; c lacks 1 CPUs; d lacks 2 CPUs" in said
    assert "free are b: 5 CPUs" in said
