"""`up`, `status`, `down` and private sessions: what they start, and that nothing is left."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from deploy.session.ray_head import is_listening
from deploy.session.record import read_record, write_record
from paceline import Client
from tests.deploy.conftest import becomes_true
from tests.deploy.shell import ROOT, Shell, tiny_config

pytestmark = [pytest.mark.ray, pytest.mark.long]

TOKENS = 700
"""Tokens of the emulated target, which take 13 s; `down` needs some 5 s to ask for the end."""
PRIVATE_SESSION = """
import sys, time
from pathlib import Path
from cluster.config.load import load_config
from deploy.session.cluster import open_cluster
with open_cluster(
    load_config(Path(sys.argv[1]), {}), home=Path(sys.argv[2]), progress=print, server=None
) as cluster:
    print("address", cluster.address, flush=True)
    time.sleep(100)
"""


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_config(tmp_path_factory.mktemp("up"))


def test_up_stays_until_down(shell: Shell, config: Path) -> None:
    # A proxy that does not exist, without exceptions. Our processes must not use it.
    shell.environment |= dict.fromkeys(("http_proxy", "https_proxy"), "http://127.0.0.1:9")
    shell.environment |= {"no_proxy": "", "NO_PROXY": ""}
    reading, writing = os.pipe()
    up = shell.run("up", str(config), pass_fds=(writing,))
    os.close(writing)
    assert up.returncode == 0, up.stderr
    address = up.stdout.splitlines()[-1]
    assert is_listening(address)
    assert "shard-0: serving" in up.stderr
    # What stays up must not keep the shell's files open, such as a lock of a script around `up`.
    os.set_blocking(reading, False)
    assert os.read(reading, 1) == b""
    os.close(reading)

    second = shell.run("up", str(config))
    assert second.returncode == 3
    assert "paceline down" in second.stderr
    assert is_listening(address)

    status = json.loads(shell.run("status", "--json").stdout)
    assert status["address"] == address
    workers = {worker["name"]: worker for worker in status["workers"]}
    assert workers.keys() >= {"shard-0", "drafter-0"}
    assert workers["drafter-0"]["kind"] == "ngram"
    with Client(address) as client:
        assert becomes_true(lambda: all(one.connected for one in client.stats().workers))
    shown = shell.run("status").stdout
    assert "shard-0" in shown
    assert f"logs: {shell.home / 'logs'}" in shown

    head = json.loads((shell.home / "run" / "cluster.json").read_text())["head"]
    os.kill(head["processes"][0][0], signal.SIGKILL)
    down = shell.run("down")
    assert (down.returncode, down.stdout, down.stderr) == (0, "down\n", "")
    shell.assert_nothing_is_left()
    # Its logs stay where `up` and `status` said.
    logs = Path(up.stderr.splitlines()[-1].rpartition("logs in ")[2])
    assert logs.parent == shell.home / "logs"
    assert {"shard-0.log", "drafter-0.log", "driver.log", "controller.log"} <= {
        path.name for path in logs.iterdir()
    }
    assert f"serving at {address}" in (logs / "driver.log").read_text()
    assert shell.run("status").returncode == 3
    again = shell.run("down")
    assert (again.returncode, again.stdout, again.stderr) == (0, "nothing is up\n", "")


def test_down_lets_requests_end_that_run(shell: Shell, tmp_path: Path) -> None:
    config = tmp_path / "slow.toml"  # 18 ms a token on any machine
    config.write_text('drafters = []\n[target]\nemulated = "70b-4xh100"\n[server]\ngrpc_port = 0\n')
    up = shell.run("up", str(config))
    assert up.returncode == 0, up.stderr
    with Client(up.stdout.splitlines()[-1]) as client, ThreadPoolExecutor(1) as threads:
        asked = threads.submit(
            client.generate, "The sea", max_tokens=TOKENS, ignore_eos=True, temperature=0.0
        )
        assert becomes_true(lambda: client.stats().sequences_running)
        down = shell.run("down", "--drain", "200")
        assert (down.returncode, down.stdout, down.stderr) == (0, "down\n", "")
        assert len(asked.result().token_ids) == TOKENS
    shell.assert_nothing_is_left()


def test_a_ray_cluster_that_is_not_there_is_one_line(tmp_path: Path, config: Path) -> None:
    shell = Shell(tmp_path / "home", tmp_path, "127.0.0.1:1")
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt": "x"}\n')
    files = ("--input", str(source), "--output", str(tmp_path / "out.jsonl"))
    for command in (("up", str(config)), ("generate", "--config", str(config), *files)):
        done = shell.run(*command)
        assert done.returncode == 3
        [line] = done.stderr.splitlines()
        assert line.startswith("error: no Ray cluster at 127.0.0.1:1")
    shell.assert_nothing_is_left()


def test_on_a_cluster_that_runs_down_ends_the_deployment_alone(
    tmp_path: Path, config: Path, ray_address: str
) -> None:
    from cluster.placement.launch import find_cluster

    shell = Shell(tmp_path / "home", tmp_path, ray_address)
    up = shell.run("up", str(config))
    assert up.returncode == 0, up.stderr
    address = up.stdout.splitlines()[-1]
    cluster = find_cluster("paceline")
    assert cluster is not None
    assert cluster.address == address
    assert {worker.name for worker in cluster.workers()} == {"shard-0", "drafter-0", "driver"}

    # As if the driver had moved to another node: the command asks the controller for it.
    record = read_record(shell.home)
    assert record is not None
    write_record(shell.home, replace(record, address="127.0.0.1:1"))
    assert json.loads(shell.run("status", "--json").stdout)["address"] == address

    assert shell.run("down").returncode == 0
    # Ray ends actors in its own time.
    assert becomes_true(lambda: find_cluster("paceline") is None)
    assert becomes_true(lambda: not is_listening(address))
    assert is_listening(ray_address)


def test_a_taken_port_is_said_before_anything_starts(shell: Shell, config: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        shell.environment["PACELINE_SERVER__GRPC_PORT"] = str(port)
        up = shell.run("up", str(config))
    assert up.returncode == 3
    assert f"127.0.0.1:{port}" in up.stderr
    assert "Ray" not in up.stderr
    shell.assert_nothing_is_left()


def test_a_broken_checkpoint_is_said_before_anything_starts(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "broken").mkdir()
    config = tmp_path / "broken.toml"
    config.write_text(f'drafters = []\n[target]\nmodel = "{tmp_path / "broken"}"\n')
    shell.environment["PACELINE_SERVER__GRPC_PORT"] = "0"
    up = shell.run("up", str(config))
    assert up.returncode == 2
    assert len(up.stderr.splitlines()) == 1
    shell.assert_nothing_is_left()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_private_session_ends_with_its_process(
    shell: Shell, config: Path, number: signal.Signals
) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PRIVATE_SESSION, str(config), str(shell.home)],
        cwd=ROOT,
        env=shell.environment,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        lines = iter(process.stdout.readline, "")
        address = next(line.split()[1] for line in lines if line.startswith("address"))
        assert is_listening(address)
        process.send_signal(number)
        process.wait(timeout=120)
    assert process.returncode == (128 + number if number == signal.SIGTERM else -number)
    assert becomes_true(lambda: not shell.processes())
    shell.assert_nothing_is_left()
