"""`paceline up` with mutual TLS within the deployment, and a Ray head that asks for a token."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from deploy.cli.certs import write_certificates
from deploy.session.record import ClusterRecord, read_record
from paceline import Client
from tests.deploy.shell import ROOT, Shell, tiny_config

pytestmark = [pytest.mark.long, pytest.mark.ray]

JOIN = """
import sys
import ray
try:
    ray.init(address=sys.argv[1], log_to_driver=False)
except Exception as error:
    print(type(error).__name__, error)
else:
    print("joined")
"""
DIAL = """
import asyncio, sys
from pathlib import Path
from cluster.driver.connections import open_channel
from paceline.v1 import target_pb2, target_pb2_grpc
from workers.process.mutual_tls import WorkerTls

async def main():
    tls = WorkerTls.of(sys.argv[2] if len(sys.argv) > 2 else None)
    try:
        async with open_channel(sys.argv[1], tls) as channel:
            stub = target_pb2_grpc.TargetServiceStub(channel)
            await stub.DescribeTarget(target_pb2.DescribeTargetRequest(), timeout=20)
            print("served")
    except Exception as error:
        print(error)

asyncio.run(main())
"""


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    # Ray's sockets need short paths.
    with TemporaryDirectory(prefix="pl-") as temporary:
        shell = Shell(tmp_path / "home", Path(temporary))
        shell.environment.pop("RAY_AUTH_MODE")  # As a user has it.
        try:
            yield shell
        finally:
            shell.run("down")
            shell.assert_nothing_is_left()


def python(script: str, *arguments: str, **variables: str) -> str:
    environ = {name: value for name, value in os.environ.items() if "RAY_AUTH" not in name}
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        cwd=ROOT,
        env=environ | variables,
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done.stdout


def test_a_deployment_with_mutual_tls_serves_and_strangers_reach_no_part_of_it(
    shell: Shell, tmp_path: Path
) -> None:
    write_certificates(tmp_path / "tls", ["localhost"])
    workers = tmp_path / "tls" / "workers"
    config = tiny_config(tmp_path)
    config.write_text(f'{config.read_text()}[workers]\ntls = "{workers}"\n')
    write_certificates(tmp_path / "old", ["localhost"], days=1e-9)
    spoiled = tmp_path / "spoiled.toml"
    spoiled.write_text(config.read_text().replace(str(workers), str(tmp_path / "old/workers")))
    refused = shell.run("up", str(spoiled))
    assert refused.returncode != 0
    assert "workers.tls: " in refused.stderr
    assert "has expired" in refused.stderr
    assert "Ray" not in refused.stderr  # It was found before anything started.

    up = shell.run("up", str(config))
    assert up.returncode == 0, up.stderr
    record = read_record(shell.home)
    assert record is not None
    with Client(up.stdout.strip()) as client:
        text = client.generate("the sea", max_tokens=8, seed=1).text
        [shard] = [one.address for one in client.stats().workers if one.kind == "target"]
    completed = python(ASK_HTTP, f"http://{record.http_address}/v1/completions")
    assert completed.strip() == repr(text), completed
    assert python(DIAL, shard, str(workers)).strip() == "served"
    assert "speaks TLS, and this process plain text" in python(DIAL, shard)
    told = shell.run("status")
    assert told.returncode == 0, told.stderr
    check_token(record)


ASK_HTTP = """
import json, sys, urllib.request
body = {"prompt": "the sea", "max_tokens": 8, "seed": 1}
request = urllib.request.Request(
    sys.argv[1], json.dumps(body).encode(), {"content-type": "application/json"}
)
print(repr(json.load(urllib.request.urlopen(request, timeout=60))["choices"][0]["text"]))
"""


def check_token(record: ClusterRecord) -> None:
    """Ray takes nobody without the token, which only the user can read."""
    assert record.head is not None
    path = Path(record.head.folder) / "paceline_auth_token"
    assert (path.stat().st_mode | path.parent.stat().st_mode) & 0o077 == 0
    refused = python(JOIN, record.ray_address, RAY_AUTH_MODE="disabled")
    assert "joined" not in refused, refused
    own = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(path)}
    assert python(JOIN, record.ray_address, **own).strip().endswith("joined")
    wrong = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64}
    assert "joined" not in python(JOIN, record.ray_address, **wrong)
