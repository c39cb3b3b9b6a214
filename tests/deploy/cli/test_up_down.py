"""`up`, `status`, `down` and private sessions: what they start, and that nothing is left."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import ssl
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest

from deploy.cli.certs import write_certificates
from deploy.session.ray_head import is_listening
from deploy.session.record import read_record, write_record
from paceline import Client, Retries
from paceline.errors import PacelineError
from tests.cluster.access.key_files import keys_in
from tests.deploy.conftest import becomes_true
from tests.deploy.shell import ROOT, Shell, tiny_config
from tests.release import at_release

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
    assert f"HTTP at http://{status['http_address']}/v1: ready" in shown
    _check_http(shell, address, status["http_address"])
    assert f"logs: {shell.home / 'logs'}" in shown

    head = json.loads((shell.home / "run" / "cluster.json").read_text())["head"]
    os.kill(head["processes"][0][0], signal.SIGKILL)
    down = shell.run("down")
    assert (down.returncode, down.stdout, down.stderr) == (0, "down\n", "")
    shell.assert_nothing_is_left()
    # Its logs stay where `up` and `status` said.
    logs = Path(up.stderr.splitlines()[-1].rpartition("logs in ")[2])
    assert logs.parent == shell.home / "logs"
    assert {"shard-0.log", "driver.log", "controller.log"} <= {path.name for path in logs.iterdir()}
    assert f"serving at {address}" in (logs / "driver.log").read_text()
    assert shell.run("status").returncode == 3
    again = shell.run("down")
    assert (again.returncode, again.stdout, again.stderr) == (0, "nothing is up\n", "")


@pytest.mark.release
def test_up_with_keys_and_tls(shell: Shell, config: Path, tmp_path: Path) -> None:
    """The gateway reaches its driver with a key that is in no file."""
    write_certificates(tmp_path / "tls", ["localhost", "127.0.0.1"])
    keys = keys_in(tmp_path / "keys", alice={}, boss={"role": "operator"})
    secured = tmp_path / "secured.toml"
    secured.write_text(
        config.read_text()
        + f'api_keys = "{tmp_path}/keys"\ntls_cert = "{tmp_path}/tls/server.pem"\n'
        f'tls_key = "{tmp_path}/tls/server-key.pem"\nserved_model_name = "ours"\n'
    )
    up = shell.run("up", str(secured))
    assert up.returncode == 0, up.stderr
    assert "open: " not in up.stderr
    refused = shell.run("status")
    assert refused.returncode == 3
    assert "speaks TLS" in refused.stderr
    ca = tmp_path / "tls" / "ca.pem"
    shell.environment |= {"PACELINE_CA": str(ca), "PACELINE_API_KEY": keys["boss"]}
    status = json.loads(shell.run("status", "--json").stdout)
    assert (status["http"], status["model"]) == ("ready", "ours")
    asked = {"prompt": "sea", "max_tokens": 8, "seed": 3, "ignore_eos": True, "model": "ours"}
    context = ssl.create_default_context(cafile=ca)
    with (
        httpx2.Client(trust_env=False, timeout=60, verify=context) as http,
        Client(status["address"], key=keys["alice"], ca=ca) as client,
    ):
        url = f"https://{status['http_address']}/v1/completions"
        assert http.post(url, json=asked).status_code == 401
        bearer = {"authorization": f"Bearer {keys['alice']}"}
        answer = http.post(url, json=asked, headers=bearer).json()
        text = client.generate("sea", max_tokens=8, seed=3, ignore_eos=True).text
        assert answer["choices"][0]["text"] == text
    assert shell.run("down").returncode == 0
    shell.assert_nothing_is_left()
    logs = Path(up.stderr.splitlines()[-1].rpartition("logs in ")[2])
    logged = "".join(path.read_text() for path in logs.iterdir())
    assert not any(key in logged for key in keys.values())


def _check_http(shell: Shell, address: str, http_address: str) -> None:
    """HTTP and gRPC give the same text. A killed gateway is started again at the same port."""
    asked = {"prompt": "sea", "max_tokens": 8, "seed": 3, "ignore_eos": True}
    url = f"http://{http_address}"
    with Client(address) as client:
        told = client.generate("sea", max_tokens=8, seed=3, ignore_eos=True).text

    def answers() -> bool:
        try:
            with httpx2.Client(trust_env=False, timeout=60) as http:
                answer = http.post(f"{url}/v1/completions", json=asked)
        except httpx2.TransportError:
            return False
        return answer.status_code == 200 and answer.json()["choices"][0]["text"] == told

    assert answers()
    log = next((shell.home / "logs").glob("*/gateway.log"))
    os.kill(int(log.read_text().partition("pid ")[2].split()[0]), signal.SIGKILL)
    assert becomes_true(lambda: not answers())
    assert becomes_true(answers)
    with Client(address) as client:

        def restarts() -> dict[str, int]:
            return {life.name: life.restarts for life in client.stats().lives}

        assert becomes_true(lambda: restarts()["gateway"] == 1)
        assert restarts()["driver"] == 0


def test_down_lets_requests_end_that_run(shell: Shell, tmp_path: Path) -> None:
    config = tmp_path / "slow.toml"  # 18 ms a token on any machine
    config.write_text(
        'drafters = []\n[target]\nemulated = "70b-4xh100"\n[server]\ngrpc_port = 0\nhttp_port = 0\n'
    )
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


def test_serve_answers_until_a_signal(shell: Shell, config: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "deploy.cli", "serve", str(config), "--served-model-name", "own"],
        cwd=ROOT,
        env=shell.environment,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        with Client(address) as client:
            assert client.generate("a", max_tokens=4).token_ids
        told = shell.run("status", "--json")
        assert json.loads(told.stdout)["model"] == "own"
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=120) == 128 + signal.SIGTERM
    shell.assert_nothing_is_left()


def port_that_stays_free() -> int:
    """One that the system gives to no connection of another test, while nothing listens there."""
    while True:
        with socket.socket() as one, contextlib.suppress(OSError):
            one.bind(("127.0.0.1", random.randrange(20_000, 30_000)))
            return int(one.getsockname()[1])


def test_up_finds_a_clean_place_after_its_head_is_lost(
    shell: Shell, config: Path, tmp_path: Path
) -> None:
    """Ray's central process is killed during a request. The next `up` ends what is left."""
    port = port_that_stays_free()
    fixed = tmp_path / "fixed.toml"
    fixed.write_text(config.read_text().replace("grpc_port = 0", f"grpc_port = {port}"))
    asked: dict[str, Any] = {"max_tokens": 300, "ignore_eos": True, "temperature": 1.0, "seed": 3}
    first = shell.run("up", str(fixed))
    assert first.returncode == 0, first.stderr
    with Client(f"127.0.0.1:{port}", retries=Retries(0)) as client:
        plain = client.generate("The sea", **asked).token_ids
        record = read_record(shell.home)
        assert record is not None
        assert record.head is not None
        known = [psutil.Process(pid) for pid, _ in record.head.processes]
        (central,) = (one for one in known if one.name() == "gcs_server")
        with contextlib.suppress(PacelineError):  # Ray ends its workers soon afterwards.
            for _ in client.stream("The sea", **asked):
                with contextlib.suppress(psutil.NoSuchProcess):
                    central.kill()
    second = shell.run("up", str(fixed))
    assert second.returncode == 0, second.stderr
    assert second.stdout.splitlines()[-1] == f"127.0.0.1:{port}"
    with Client(f"127.0.0.1:{port}", retries=Retries(0)) as client:
        assert client.generate("The sea", **asked).token_ids == plain
    assert shell.run("down").returncode == 0
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


@pytest.mark.release
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
    assert {worker.name for worker in cluster.workers()} == {
        "shard-0",
        "gateway",
        "driver",
    }

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


@pytest.mark.parametrize("number", [signal.SIGKILL, *at_release([signal.SIGTERM])])
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
