"""deploy.jobs.serve: it serves on a running cluster, and ends what it started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from deploy.session.ray_head import is_listening
from paceline import Client, GenerateOptions
from tests.deploy.conftest import becomes_true
from tests.tiny import make_tiny_checkpoint

pytestmark = [pytest.mark.ray, pytest.mark.long]

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.release
def test_it_serves_until_it_is_stopped(ray_address: str, tmp_path: Path) -> None:
    target = make_tiny_checkpoint(tmp_path / "target")
    config = tmp_path / "tiny.toml"
    config.write_text(
        f'drafters = []\n[target]\nmodel = "{target}"\nkv_memory = "8MiB"\nthreads = 1\n'
        "[server]\ngrpc_port = 0\nhttp_port = 0\n"
    )
    with subprocess.Popen(
        [sys.executable, "-m", "deploy.jobs.serve", "--config", str(config)],
        cwd=ROOT,
        env=os.environ | {"RAY_ADDRESS": ray_address, "PACELINE_HOME": str(tmp_path)},
        stdout=subprocess.PIPE,
        text=True,
    ) as job:
        assert job.stdout is not None
        lines = iter(job.stdout.readline, "")
        address = next(line.split()[-1] for line in lines if line.startswith("serving:"))
        with Client(address) as client:
            completion = client.generate("hello", GenerateOptions(max_tokens=3, ignore_eos=True))
        assert len(completion.token_ids) == 3
        job.send_signal(signal.SIGTERM)
        assert job.wait(timeout=120) == 128 + signal.SIGTERM
    assert becomes_true(lambda: not is_listening(address))
    assert is_listening(ray_address)


def test_without_a_cluster_it_says_what_to_do(tmp_path: Path) -> None:
    environ = os.environ | {"RAY_ADDRESS": "127.0.0.1:1", "PACELINE_HOME": str(tmp_path)}
    config = tmp_path / "empty.toml"
    target = make_tiny_checkpoint(tmp_path / "target")
    config.write_text(f'drafters = []\n[target]\nmodel = "{target}"\n')
    ended = subprocess.run(
        [sys.executable, "-m", "deploy.jobs.serve", "--config", str(config)],
        cwd=ROOT,
        env=environ,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert ended.returncode == 3
    assert ended.stderr.startswith("error: no Ray cluster at 127.0.0.1:1")
