"""The head of a Ray cluster is lost: what runs on other nodes, and what `up` finds afterwards."""

from __future__ import annotations

import contextlib
import os
import signal
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from deploy.session.ray_head import free_ports
from deploy.session.record import read_record
from paceline import Chunk, Client, Retries
from paceline.errors import PacelineError
from tests.cluster.two_hosts import HERE, SecondHost
from tests.cluster_faults.killing import KILL_AT, PROMPT, options_of, plain_tokens
from tests.cluster_faults.ray_nodes import Job, RayNodes
from tests.deploy.shell import Shell, tiny_config

pytestmark = [pytest.mark.ray, pytest.mark.long]

# 18 ms a token of plain decoding on any machine.
CONFIG = """
[target]
emulated = "70b-4xh100"
threads = 1
[[drafters]]
emulated = "1b-h100"
threads = 1
[speculation]
window = 4
[server]
host = "0.0.0.0"
grpc_port = 0
http = false
"""

SHORT = replace(options_of("off"), max_tokens=300)


def test_requests_on_other_nodes_outlive_the_head(second_host: SecondHost, tmp_path: Path) -> None:
    """Those that run, and new ones too: they need neither Ray nor the controller."""
    config = tmp_path / "paceline.toml"
    config.write_text(CONFIG)
    with RayNodes(HERE, num_cpus=0) as nodes:
        nodes.add(second_host.host, num_cpus=2)
        with (
            Job(nodes, config) as job,
            Client(job.next_address(), retries=Retries(0)) as client,
        ):
            plain = plain_tokens(client)
            token_ids: list[int] = []
            for event in client.stream(PROMPT, options_of("chain")):
                token_ids += event.token_ids if isinstance(event, Chunk) else ()
                if len(token_ids) >= KILL_AT and HERE.address in nodes.addresses:
                    nodes.lose(HERE.address)
            assert HERE.address not in nodes.addresses
            assert tuple(token_ids) == plain
            assert client.generate(PROMPT, options_of("chain")).token_ids == plain


def test_up_finds_a_clean_place_after_its_head_is_lost(tmp_path: Path) -> None:
    """Ray's central process is killed during a request. The second `up` ends what is left."""
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    shell = Shell(tmp_path / "home", temporary)
    config = tiny_config(tmp_path)
    (port,) = free_ports(1)
    config.write_text(config.read_text().replace("grpc_port = 0", f"grpc_port = {port}"))
    try:
        first = shell.run("up", str(config))
        assert first.returncode == 0, first.stderr
        address = f"127.0.0.1:{port}"
        with Client(address, retries=Retries(0)) as client:
            plain = client.generate(PROMPT, SHORT).token_ids
            gcs: int | None = _gcs_of(shell.home)
            with contextlib.suppress(PacelineError):  # Ray ends its workers soon afterwards.
                for event in client.stream(PROMPT, SHORT):
                    if gcs is not None and isinstance(event, Chunk) and event.offset >= KILL_AT:
                        os.kill(gcs, signal.SIGKILL)
                        gcs = None
            assert gcs is None
        second = shell.run("up", str(config))
        assert second.returncode == 0, second.stderr
        assert second.stdout.splitlines()[-1] == address
        with Client(address, retries=Retries(0)) as client:
            assert client.generate(PROMPT, SHORT).token_ids == plain
    finally:
        shell.run("down")
    shell.assert_nothing_is_left()


def _gcs_of(home: Path) -> int:
    """The pid of the process without which a Ray cluster knows nothing."""
    record = read_record(home)
    assert record is not None
    assert record.head is not None
    pids = [pid for pid, _ in record.head.processes]
    (gcs,) = (pid for pid in pids if psutil.Process(pid).name() == "gcs_server")
    return gcs
