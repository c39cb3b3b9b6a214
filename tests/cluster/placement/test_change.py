"""What changes between the configuration of a running deployment and a new one."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.config.model import Config, DrafterConfig
from cluster.placement.change import plan_change
from cluster.placement.plan import Host, WorkerPlan, plan_placement
from paceline.errors import ConfigError

NGRAM = DrafterConfig(kind="ngram", own_process=True)
DEMO = DrafterConfig(model="demo-draft", threads=1)


def config_of(*drafters: DrafterConfig, **tables: Any) -> Config:
    return Config.model_validate({"drafters": drafters, **tables})


def running(config: Config) -> tuple[WorkerPlan, ...]:
    return plan_placement(config, [Host("one", 8.0)], cores=range(8)).workers


def test_nothing_changes_between_equal_configurations() -> None:
    config = config_of(NGRAM, DEMO)
    change = plan_change(config, config, running(config))
    assert (change.joining, change.leaving, change.keys) == ((), (), ())


def test_more_of_a_kind_join_and_fewer_leave() -> None:
    one, three = config_of(DEMO), config_of(DEMO.model_copy(update={"count": 3}))
    change = plan_change(one, three, running(one))
    assert [plan.name for plan in change.joining] == ["drafter-1", "drafter-2"]
    assert change.leaving == ()
    back = plan_change(three, one, running(three))
    assert (back.joining, back.leaving) == ((), ("drafter-1", "drafter-2"))


def test_another_checkpoint_is_another_drafter_on_the_same_cores() -> None:
    """It has a new name, so no message for the one is taken by the other."""
    old = config_of(NGRAM, DEMO)
    new = config_of(NGRAM, DEMO.model_copy(update={"model": "/other"}))
    workers = running(old)
    change = plan_change(old, new, workers)
    [joining] = change.joining
    assert (joining.name, joining.model, joining.reserved_cpus) == ("drafter-2", "/other", 1)
    assert change.leaving == ("drafter-1",)
    assert joining.cores == workers[-1].cores is not None


def test_target_groups_join_and_leave_at_the_end() -> None:
    one, three = (config_of(DEMO, target={"groups": n, "threads": 1}) for n in (1, 3))
    up = plan_change(one, three, running(one))
    assert (up.joining_groups, up.joining, up.leaving) == ((1, 2), (), ())
    down = plan_change(three, one, running(three))
    assert (down.joining_groups, down.leaving) == ((), ("replica-1.shard-0", "replica-2.shard-0"))
    half_way = [*running(one), *running(three)[1:2]]
    assert plan_change(one, three, half_way).joining_groups == (2,)


@pytest.mark.parametrize(("old", "new"), [(0, 1), (1, 0), (2, 0)])
def test_a_pool_of_drafters_and_a_target_do_not_become_each_other(old: int, new: int) -> None:
    before, after = (
        config_of(DEMO, target={"groups": groups, "threads": 1}) for groups in (old, new)
    )
    with pytest.raises(ConfigError, match=rf"^target\.groups: {old} -> {new}: a pool"):
        plan_change(before, after, running(before))


def test_drafters_in_the_driver_keep_their_names_and_stay() -> None:
    in_driver = DrafterConfig(kind="ngram")
    old = config_of(DEMO, in_driver)
    change = plan_change(old, config_of(DEMO, DEMO, in_driver), running(old))
    assert [plan.name for plan in change.joining] == ["drafter-2"]
    for drafters in ([DEMO], [DEMO, in_driver, in_driver], [DEMO, NGRAM]):
        with pytest.raises(ConfigError, match="own_process = true"):
            plan_change(old, config_of(*drafters), running(old))


def test_drafters_are_compared_with_those_that_run() -> None:
    """A change that was interrupted is finished by the next."""
    config = config_of(NGRAM)
    more = running(config_of(NGRAM, DEMO))
    assert plan_change(config, config, more).leaving == ("drafter-1",)


def test_defaults_that_change_are_named() -> None:
    old = config_of(NGRAM)
    new = config_of(NGRAM, speculation={"window": 4}, server={"max_waiting": 3})
    assert plan_change(old, new, running(old)).keys == (
        "speculation.window: 8 -> 4",
        "server.max_waiting: 256 -> 3",
    )


@pytest.mark.parametrize(
    ("tables", "key"),
    [
        ({"target": {"model": "/another"}}, "target.model: 'demo' -> '/another'"),
        ({"target": {"tensor_parallel": 2}}, "target.tensor_parallel: 1 -> 2"),
        ({"server": {"grpc_port": 9}}, "server.grpc_port: 8001 -> 9"),
        ({"server": {"http": False}}, "server.http: True -> False"),
        ({"speculation": {"wait_ms": 5.0}}, "speculation.wait_ms: 1000.0 -> 5.0"),
    ],
)
def test_what_may_not_change_is_refused_by_name(tables: dict[str, Any], key: str) -> None:
    old = config_of(NGRAM)
    with pytest.raises(ConfigError) as refused:
        plan_change(old, config_of(NGRAM, **tables), running(old))
    assert str(refused.value).startswith(key)
