"""Workers on a real Ray cluster are killed or hang during a request: the text is the same.

All tests use one deployment, and leave it complete.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from paceline import Client, Retries, Started
from paceline.errors import InternalError, PacelineError
from tests.cluster_faults.killing import (
    PROMPT,
    cluster_of,
    config_of,
    eventually,
    is_back,
    options_of,
    plain_tokens,
    stream_and_kill,
)
from tests.release import at_release
from tests.tiny import make_tiny_checkpoint

if TYPE_CHECKING:
    from cluster.placement.launch import ClusterHandle

pytestmark = [pytest.mark.ray, pytest.mark.long]

HUNG_AFTER = 8.0
LONGEST_PAUSE = 1.5
"""Seconds. To wait until a drafter is back, or found lost, would take at least 2.5."""


@pytest.fixture(scope="module")
def cluster(ray_address: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterHandle]:
    folder = tmp_path_factory.mktemp("lost")
    target = make_tiny_checkpoint(folder / "target", max_position_embeddings=2048)
    drafter = make_tiny_checkpoint(folder / "drafter", max_position_embeddings=2048)
    config = config_of(target, drafter=drafter, tensor_parallel=2, hung_after=HUNG_AFTER)
    with cluster_of(config, folder) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def serving(cluster: ClusterHandle) -> Iterator[Client]:
    with Client(cluster.address) as client:
        yield client


@pytest.fixture(scope="module")
def expected(serving: Client) -> tuple[int, ...]:
    return plain_tokens(serving)


@pytest.fixture
def client(serving: Client) -> Client:
    """A client of a deployment that has all its workers."""
    eventually(lambda: is_whole(serving))
    return serving


def restarts_of(cluster: ClusterHandle, name: str) -> int:
    """As the controller counts them, some time after the worker is back."""
    return next(worker.restarts for worker in cluster.workers() if worker.name == name)


@pytest.mark.release
@pytest.mark.timing
def test_a_killed_drafter_costs_nothing_and_comes_back(
    client: Client, expected: tuple[int, ...]
) -> None:
    """Other load on the machine makes pauses too, so the best of three kills counts."""
    pauses: list[float] = []
    while len(pauses) < 3 and min(pauses, default=LONGEST_PAUSE + 1) > LONGEST_PAUSE:
        pid = pids_of(client)["drafter-0"]
        token_ids, times = stream_and_kill(client, pid)
        assert tuple(token_ids) == expected
        pauses.append(max(later - earlier for earlier, later in pairwise(times)))

        eventually(partial(is_back, client, "drafter-0", pid))
        before = client.stats().accepted
        assert client.generate(PROMPT, options_of("chain")).token_ids == expected
        assert client.stats().accepted > before
    assert min(pauses) <= LONGEST_PAUSE


@pytest.mark.parametrize(
    ("name", "by"),
    [
        ("shard-1", signal.SIGKILL),
        *at_release(
            [
                ("shard-1", signal.SIGSTOP),
                ("shard-0", signal.SIGKILL),
                ("shard-0", signal.SIGSTOP),
            ]
        ),
    ],
)
def test_a_lost_shard_comes_back_and_the_request_goes_on(
    client: Client, expected: tuple[int, ...], name: str, by: signal.Signals
) -> None:
    check_that_only_it_is_started_again(client, expected, name, by)


def test_a_drafter_that_hangs_is_ended_and_started_again(
    client: Client, expected: tuple[int, ...]
) -> None:
    check_that_only_it_is_started_again(client, expected, "drafter-0", signal.SIGSTOP)


@pytest.mark.release
@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGSTOP])
def test_a_driver_that_is_lost_is_started_again_where_it_was(
    cluster: ClusterHandle, client: Client, expected: tuple[int, ...], by: signal.Signals
) -> None:
    """A client resumes its requests once it is back. The other workers stay."""
    before = {worker.name: worker for worker in cluster.workers()}
    pid = before["driver"].pid
    assert pid is not None
    with Client(cluster.address, retries=Retries(attempts=100, most_seconds=1.0)) as patient:
        token_ids, _ = stream_and_kill(patient, pid, by=by)
    assert tuple(token_ids) == expected
    eventually(lambda: is_whole(client))
    assert client.generate(PROMPT, options_of("chain")).token_ids == expected
    eventually(lambda: restarts_of(cluster, "driver") == before["driver"].restarts + 1)
    after = {worker.name: worker for worker in cluster.workers()}
    assert after["driver"].address == before["driver"].address
    for name in before.keys() - {"driver"}:
        assert after[name].pid == before[name].pid


def test_a_driver_that_a_defect_ends_is_started_again(
    cluster: ClusterHandle, client: Client, expected: tuple[int, ...]
) -> None:
    """Its requests end with InternalError at once, because their state is unknown."""
    import ray

    def break_scheduler(actor: Any) -> None:
        def steps_for(event: Any) -> None:
            raise ZeroDivisionError("injected")

        actor._driver.scheduler.steps_for = steps_for

    before = {worker.name: worker for worker in cluster.workers()}
    controller: Any = cluster._controller
    driver = ray.get(controller.__ray_call__.remote(lambda actor: actor._workforce.driver.handle))
    events = client.stream(PROMPT, options_of("off"))
    assert isinstance(next(events), Started)
    with suppress(ray.exceptions.ActorDiedError):  # It may be ended before it can answer.
        ray.get(driver.__ray_call__.remote(break_scheduler))
    with pytest.raises(InternalError, match="a defect ended the server"):
        list(events)
    eventually(lambda: is_whole(client))
    assert client.generate(PROMPT, options_of("chain")).token_ids == expected
    eventually(lambda: restarts_of(cluster, "driver") == before["driver"].restarts + 1)
    after = {worker.name: worker for worker in cluster.workers()}
    assert after["driver"].pid != before["driver"].pid
    eventually(lambda: not Path(f"/proc/{before['driver'].pid}").exists())
    for name in before.keys() - {"driver"}:
        assert after[name].pid == before[name].pid


def check_that_only_it_is_started_again(
    client: Client, expected: tuple[int, ...], name: str, by: signal.Signals
) -> None:
    pids = pids_of(client)
    token_ids, _ = stream_and_kill(client, pids[name], by=by)
    assert tuple(token_ids) == expected
    eventually(partial(is_back, client, name, pids[name]))
    eventually(lambda: not Path(f"/proc/{pids[name]}").exists())
    # The others were not restarted: a rank that waits for a hung one is not hung.
    after = pids_of(client)
    assert {one for one in pids if after[one] != pids[one]} == {name}
    assert client.generate("The fox", options_of("chain")).token_ids


def pids_of(client: Client) -> dict[str, int]:
    return {worker.name: worker.pid for worker in client.stats().workers}


def is_whole(client: Client) -> bool:
    try:
        return all(worker.connected for worker in client.stats().workers)
    except PacelineError:
        return False
