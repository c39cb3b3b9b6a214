"""Two deployments of one Ray cluster share a pool: of plain processes, or another deployment."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from cluster.config.model import Config, DrafterConfig, PoolConfig
from paceline import Client, GenerateOptions
from paceline.errors import UnavailableError
from tests.cluster_faults.killing import PROMPT, client_of, cluster_of, config_of, eventually
from tests.held_ports import held_port
from tests.tiny import make_tiny_checkpoint

pytestmark = [pytest.mark.ray, pytest.mark.release]

OPTIONS = GenerateOptions(max_tokens=40, seed=7, ignore_eos=True, policy="lockstep")


@contextmanager
def _pool(folder: Path, port: int) -> Iterator[None]:
    """A drafter as a process, which is killed at the end."""
    command = [sys.executable, "-m", "workers.drafting.drafter", str(folder), "--port", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.readline().strip().endswith(f":{port}".encode())
        yield
    finally:
        process.kill()
        process.communicate()


def _config(model: Path, port: int, party: str) -> Config:
    pool = PoolConfig(addresses=(f"127.0.0.1:{port}",), party=party)
    return config_of(model).model_copy(update={"drafters": (), "pool": pool})


def _is_used(client: Client) -> bool:
    return any(one.name.startswith("pool-") and one.connected for one in client.stats().workers)


def test_two_deployments_share_a_pool_that_is_restarted(ray_address: str, tmp_path: Path) -> None:
    """Each has its own text before, during and after; when one ends, the other keeps the pool."""
    target = make_tiny_checkpoint(tmp_path / "target")
    drafter = make_tiny_checkpoint(tmp_path / "drafter")
    with held_port() as port, client_of(_config(target, port, "one"), tmp_path) as one:
        plain = one.generate(PROMPT, OPTIONS).token_ids  # without a pool
        with client_of(_config(target, port, "other"), tmp_path) as other:
            with _pool(drafter, port):
                for client in (one, other):
                    eventually(partial(_is_used, client))
                    answer = client.generate(PROMPT, OPTIONS)
                    assert answer.token_ids == plain
                    assert answer.stats.accepted > 0
            for client in (one, other):  # The pool was killed.
                assert client.generate(PROMPT, OPTIONS).token_ids == plain
            with _pool(drafter, port):
                eventually(lambda: _is_used(one) and _is_used(other))
                assert other.generate(PROMPT, OPTIONS).stats.accepted > 0
        with _pool(drafter, port):
            eventually(lambda: _is_used(one))
            answer = one.generate(PROMPT, OPTIONS)
            assert answer.token_ids == plain
            assert answer.stats.accepted > 0


def _named(model: Path, drafter: Path | None, **server: object) -> Config:
    """A pool of two drafters, or without `drafter` a deployment that uses it."""
    found = config_of(model)
    pool = PoolConfig() if drafter else PoolConfig(name="drafters", party="one")
    groups = {"groups": 0} if drafter else {}
    return found.model_copy(
        update={
            "target": found.target.model_copy(update=groups),
            "drafters": (DrafterConfig(model=str(drafter), threads=1, count=2),) if drafter else (),
            "pool": pool,
            "server": found.server.model_copy(update=server),
        }
    )


def test_a_pool_is_found_by_its_name_wherever_it_moves(ray_address: str, tmp_path: Path) -> None:
    """It may come later, lose a drafter, and end. The text is always the same."""
    target = make_tiny_checkpoint(tmp_path / "target")
    drafter = make_tiny_checkpoint(tmp_path / "drafter")
    with client_of(_named(target, None, name="one"), tmp_path) as client:
        plain = client.generate(PROMPT, OPTIONS).token_ids

        def is_used(number: int) -> bool:
            workers = [one for one in client.stats().workers if one.name.startswith("drafters/")]
            return sum(one.connected for one in workers) == number

        assert is_used(0)
        with cluster_of(_named(target, drafter, name="drafters"), tmp_path) as pool:
            assert pool.address == ""
            eventually(lambda: is_used(2))
            answer = client.generate(PROMPT, OPTIONS)
            assert answer.token_ids == plain
            assert answer.stats.accepted > 0
            uses = [use for worker in pool.workers() for use in worker.uses]
            assert {use.whose for use in uses} == {"one"}
            assert sum(use.tokens for use in uses) > 0

            lost = pool.workers()[0]
            assert lost.pid is not None
            os.kill(lost.pid, signal.SIGKILL)
            assert client.generate(PROMPT, OPTIONS).token_ids == plain
            eventually(lambda: pool.workers()[0].restarts == 1)
            assert pool.workers()[0].address != lost.address
            eventually(lambda: is_used(2))
            assert client.generate(PROMPT, OPTIONS).token_ids == plain
        eventually(lambda: is_used(0))
        assert client.generate(PROMPT, OPTIONS).token_ids == plain


def test_a_pool_may_be_changed_and_its_name_is_its_own(ray_address: str, tmp_path: Path) -> None:
    target = make_tiny_checkpoint(tmp_path / "target")
    drafter = make_tiny_checkpoint(tmp_path / "drafter")
    config = _named(target, drafter, name="drafters")
    from cluster.placement.ledger import read_drafters

    with cluster_of(config, tmp_path) as pool:
        taken = pytest.raises(UnavailableError, match="'drafters' is on this Ray cluster already")
        with taken, cluster_of(config, tmp_path):
            pass
        (two,) = config.drafters
        more = config.model_copy(update={"drafters": (two.model_copy(update={"count": 3}),)})
        assert [line.partition(":")[0] for line in pool.apply(more)] == ["drafter-2 joins"]
        assert len(pool.workers()) == len(read_drafters("drafters")) == 3
        pool.restart_controller()  # The next process takes over what runs.
        assert len(pool.workers()) == 3
        assert [line.partition(":")[0] for line in pool.apply(config)] == ["drafter-2 leaves"]
    assert read_drafters("drafters") == {}
