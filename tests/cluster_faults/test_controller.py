"""On a real Ray cluster: the controller dies, is started again, and nothing is left at the end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from paceline import Chunk, Client
from paceline.errors import ConfigError, UnavailableError
from tests.cluster_faults.killing import (
    KILL_AT,
    PROMPT,
    config_of,
    eventually,
    options_of,
    plain_tokens,
    stream_and_kill,
    worker_of,
)
from tests.release import at_release
from tests.tiny import make_tiny_checkpoint

if TYPE_CHECKING:
    from cluster.config.model import Config
    from cluster.placement.launch import ClusterHandle

pytestmark = [pytest.mark.ray, pytest.mark.long]

ROOT = Path(__file__).resolve().parents[2]
NAME = "tested"


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    folder = tmp_path_factory.mktemp("controller")
    return config_of(make_tiny_checkpoint(folder / "model", max_position_embeddings=2048))


def start(config: Config, home: Path, *, name: str | None = NAME) -> ClusterHandle:
    from cluster.placement.launch import start_cluster

    return start_cluster(
        config, home=home, logs=home / "logs", progress=lambda line: None,
        detached=name is not None, name=name,
    )  # fmt: skip


def run_of(name: str) -> str:
    from cluster.placement.ledger import read_ledger

    ledger = read_ledger(name)
    assert ledger is not None
    return ledger.run


def is_gone(name: str, run: str, pids: list[int]) -> bool:
    """Whether nothing is left of a deployment: in Ray, and of its processes."""
    from ray.util import list_named_actors
    from ray.util.placement_group import placement_group_table

    from cluster.placement.ledger import read_ledger

    actors = [one["name"] for one in list_named_actors(all_namespaces=True)]
    groups = placement_group_table().values()
    return not (
        [one for one in actors if one == name or one.startswith(run)]
        or [one for one in groups if one["name"].startswith(run) and one["state"] != "REMOVED"]
        or read_ledger(name)
        or [pid for pid in pids if psutil.pid_exists(pid)]
    )


def pids_of(handle: ClusterHandle) -> list[int]:
    return [one.pid for one in handle.workers() if one.pid] + [handle.controller_pid() or 0]


@pytest.fixture(scope="module")
def cluster(
    ray_address: str, config: Config, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ClusterHandle]:
    cluster = start(config, tmp_path_factory.mktemp("home"))
    run, pids = run_of(NAME), pids_of(cluster)
    try:
        yield cluster
        pids += pids_of(cluster)
    finally:
        cluster.stop()
    eventually(lambda: is_gone(NAME, run, pids))


@pytest.fixture(scope="module")
def client(cluster: ClusterHandle) -> Iterator[Client]:
    with Client(cluster.address) as client:
        yield client


def test_requests_and_workers_go_on_without_their_controller(
    cluster: ClusterHandle, client: Client
) -> None:
    plain = plain_tokens(client)
    before, controller = cluster.workers(), cluster.controller_pid()
    assert controller is not None
    token_ids, _ = stream_and_kill(client, controller)
    assert tuple(token_ids) == plain
    assert cluster.controller_pid() != controller
    assert cluster.workers() == before
    assert cluster.present_address() == client.address


@pytest.mark.parametrize("is_away", [True, *at_release([False])])
def test_a_controller_that_is_back_starts_lost_workers_again(
    cluster: ClusterHandle, client: Client, is_away: bool
) -> None:
    """One that is lost later, and one that was lost while the controller was away."""
    shard, drafter, driver = cluster.workers()
    if is_away:
        os.kill(cluster.controller_pid() or 0, signal.SIGKILL)
    assert drafter.pid is not None
    os.kill(drafter.pid, signal.SIGKILL)
    eventually(lambda: cluster.workers()[1].restarts == drafter.restarts + 1)
    eventually(lambda: worker_of(client.stats(), "drafter-0").connected)
    after = cluster.workers()
    assert (after[0], after[2]) == (shard, driver)
    assert after[1].pid == worker_of(client.stats(), "drafter-0").pid != drafter.pid
    # The controller counts first, and tells the driver then.
    eventually(
        lambda: (
            {life.name: life.restarts for life in client.stats().lives}["drafter-0"]
            == drafter.restarts + 1
        )
    )


@pytest.mark.release
def test_drafters_and_defaults_change_while_requests_run(
    cluster: ClusterHandle, client: Client, config: Config
) -> None:
    """Drafters join, are exchanged and leave, in the midst of a request at temperature 1."""
    from cluster.config.model import DrafterConfig

    plain = plain_tokens(client)
    ngram = DrafterConfig(kind="ngram", own_process=True)
    recycling = DrafterConfig(kind="recycling", own_process=True)
    model = DrafterConfig(model=config.target.model, threads=1)
    steps = [(ngram, recycling), (recycling, model), (model,), (), (ngram,)]
    others = [one for one in cluster.workers() if not one.name.startswith("drafter")]
    for drafters in steps:
        said: list[str] = []
        changed = config.model_copy(update={"drafters": drafters})

        def change(changed: Config = changed, said: list[str] = said) -> None:
            said += cluster.apply(changed)

        changing = threading.Thread(target=change, daemon=True)
        token_ids: list[int] = []
        while not said:  # A change may take longer than a request.
            token_ids = []
            for event in client.stream(PROMPT, options_of("chain")):
                if isinstance(event, Chunk):
                    token_ids += event.token_ids
                if len(token_ids) >= KILL_AT and changing.ident is None:
                    changing.start()
            assert tuple(token_ids) == plain
            assert changing.is_alive() or said, "the change failed"
        changing.join()
        after = cluster.workers()
        kinds = [one.kind for one in after if one.name.startswith("drafter")]
        assert sorted(kinds) == sorted(one.kind for one in drafters)
        assert [one for one in after if not one.name.startswith("drafter")] == others
        assert len([one for one in client.stats().workers if one.kind != "target"]) == len(drafters)
    kept = config.model_copy(
        update={"speculation": config.speculation.model_copy(update={"window": 3})}
    )
    assert cluster.apply(kept) == ["speculation.window: 8 -> 3"]
    assert client.describe().default_window == 3
    os.kill(cluster.controller_pid() or 0, signal.SIGKILL)
    assert cluster.apply(kept) == []  # It is kept, and the next process knows it.
    moved = kept.model_copy(update={"server": kept.server.model_copy(update={"grpc_port": 9})})
    with pytest.raises(ConfigError, match=r"server\.grpc_port: 0 -> 9"):
        cluster.apply(moved)
    assert cluster.apply(config) == ["speculation.window: 3 -> 8"]


def test_a_second_start_reports_the_first(
    cluster: ClusterHandle, config: Config, tmp_path: Path
) -> None:
    with pytest.raises(UnavailableError) as refused:
        start(config, tmp_path)
    assert f"serves at {cluster.address}" in str(refused.value)


_OWNER = """
import os, sys
from pathlib import Path
from tests.cluster_faults.killing import config_of
from tests.cluster_faults.test_controller import pids_of, start
from cluster.placement import launch
launch.connect(sys.argv[1])
handle = start(config_of(Path(sys.argv[2])), Path(sys.argv[3]), name=sys.argv[4] or None)
print(handle.name, *pids_of(handle), flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def an_owner(ray_address: str, config: Config, home: Path, name: str = "") -> Iterator[Any]:
    command = [sys.executable, "-c", _OWNER, ray_address, config.target.model, str(home), name]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        try:
            yield owner
        finally:
            owner.kill()


@pytest.mark.release
@pytest.mark.parametrize("is_away", [False, True])
def test_what_an_owner_started_ends_with_it(
    ray_address: str, config: Config, tmp_path: Path, is_away: bool
) -> None:
    """Also if the controller is away when its owner ends."""
    with an_owner(ray_address, config, tmp_path) as owner:
        name, *said = owner.stdout.readline().split()
        pids = list(map(int, said))
        assert run_of(name) == name
        if is_away:
            os.kill(pids[-1], signal.SIGKILL)
    eventually(lambda: is_gone(name, name, pids))


@pytest.mark.release
def test_a_starter_that_is_killed_half_way_leaves_nothing(
    ray_address: str, config: Config, tmp_path: Path
) -> None:
    """Nor does it keep the name, and neither does a deployment whose controller was ended."""
    import ray

    from cluster.placement.launch import find_cluster
    from cluster.placement.ledger import NAMESPACE, read_ledger

    name = "half"
    with an_owner(ray_address, config, tmp_path, name) as starter:
        eventually(lambda: find_cluster(name) is not None)
        eventually(lambda: read_ledger(name) is not None)
        run = run_of(name)
        starter.kill()
    first = start(config, tmp_path, name=name)
    assert run_of(name) != run
    run, pids = run_of(name), pids_of(first)
    ray.kill(ray.get_actor(name, namespace=NAMESPACE))
    second = start(config, tmp_path, name=name)
    try:
        eventually(lambda: not any(map(psutil.pid_exists, pids)))
        assert run_of(name) != run
        run, pids = run_of(name), pids_of(second)
        with Client(second.address) as client:
            assert len(plain_tokens(client)) > 0
    finally:
        second.stop()
    eventually(lambda: is_gone(name, run, pids))
