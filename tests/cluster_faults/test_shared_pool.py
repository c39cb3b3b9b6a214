"""Two deployments of one Ray cluster share a pool of drafters, which is a plain process."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cluster.config.model import Config, PoolConfig
from paceline import Client, GenerateOptions
from tests.cluster_faults.killing import PROMPT, client_of, config_of, eventually
from tests.held_ports import held_port
from tests.tiny import make_tiny_checkpoint

pytestmark = [pytest.mark.ray, pytest.mark.long]

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
                    eventually(lambda client=client: _is_used(client))
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
