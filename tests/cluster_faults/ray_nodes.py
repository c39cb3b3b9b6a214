"""A Ray cluster of several nodes, each of which can be lost with all its processes; and jobs on it.

A node runs in its own process namespace, whose first process ends it, and may run on another host
(tests/cluster/two_hosts.py). Needs root, `unshare`, and that no cluster uses the ports.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from deploy.session.ray_head import SYSTEM_CONFIG, free_ports, is_listening
from tests.cluster.shard_processes import Host

START_SECONDS = 240.0
_TRIES = 3
_OWN_PROCESSES = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
_LOOPBACK_ONLY = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
_STARTED = "Ray runtime started"


class RayNodes:
    """Starts the head at once, and other nodes on request. Use as a context manager."""

    def __init__(self, head: Host, *, num_cpus: int, labels: str = "") -> None:
        """`labels`: as `ray start --labels` takes them."""
        port, client_port, dashboard_port, metrics_port = free_ports(4)
        self.address = f"{head.address}:{port}"
        self._folders: list[str] = []
        self._nodes: dict[str, subprocess.Popen[bytes]] = {}
        self._start(
            head,
            (
                "--head",
                f"--port={port}",
                f"--ray-client-server-port={client_port}",
                f"--dashboard-port={dashboard_port}",
                f"--metrics-export-port={metrics_port}",
                "--include-dashboard=false",
                f"--system-config={json.dumps(SYSTEM_CONFIG)}",
            ),
            num_cpus=num_cpus,
            labels=labels,
        )

    def __enter__(self) -> RayNodes:
        self._await(lambda: is_listening(self.address))
        return self

    def __exit__(self, *_: object) -> None:
        for address in list(self._nodes):
            self.lose(address)
        for folder in self._folders:
            shutil.rmtree(folder, ignore_errors=True)

    def add(self, *hosts: Host, num_cpus: int, labels: str = "") -> None:
        """Start a node for each number of CPUs, and wait until they are part of the cluster.

        They start one after another, again if one gives up: Ray allows 30 s for each, whatever the
        load.
        """
        for host in hosts:
            assert any(self._joins(host, num_cpus, labels) for _ in range(_TRIES)), self.logs()

    def lose(self, address: str) -> None:
        """Kill the node at this address, and every process on it."""
        node = self._nodes.pop(address)
        node.kill()
        node.wait()

    def logs(self) -> str:
        """The output of all nodes."""
        return "".join((Path(folder) / "log").read_text() for folder in self._folders)

    def _joins(self, host: Host, num_cpus: int, labels: str) -> bool:
        to_head = (f"--address={self.address}",)
        log = self._start(host, to_head, num_cpus=num_cpus, labels=labels)
        node = self._nodes[host.address]
        self._await(lambda: _STARTED in log.read_text() or node.poll() is not None)
        return node.poll() is None

    def _await(self, condition: Callable[[], bool]) -> None:
        give_up = time.monotonic() + START_SECONDS
        while not condition():
            assert time.monotonic() < give_up, self.logs()
            time.sleep(0.1)

    def _start(self, host: Host, arguments: Sequence[str], *, num_cpus: int, labels: str) -> Path:
        folder = tempfile.mkdtemp(prefix="pl-")
        self._folders.append(folder)
        command = [
            *(*host.run, *_OWN_PROCESSES),
            *(sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *arguments),
            *("--disable-usage-stats", "--include-log-monitor=false", "--num-gpus=0"),
            *("--min-worker-port=0", "--max-worker-port=0", "--dashboard-agent-listen-port=0"),
            f"--node-ip-address={host.address}",
            f"--num-cpus={num_cpus}",
            *([f"--labels={labels}"] if labels else []),
            "--object-store-memory=80000000",
            f"--temp-dir={folder}",
        ]
        with (Path(folder) / "log").open("wb") as log:
            self._nodes[host.address] = subprocess.Popen(
                command, env=environment(), stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        return Path(log.name)


class Job:
    """A deployment on these nodes, as a Ray job's process has it. Use as a context manager."""

    def __init__(self, nodes: RayNodes, config: Path) -> None:
        self._nodes = nodes
        self._process = subprocess.Popen(
            [sys.executable, "-m", "deploy.jobs.serve", "--config", str(config)],
            env=environment() | {"RAY_ADDRESS": nodes.address},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.communicate(timeout=60)

    def next_address(self) -> str:
        """Wait for the next address at which the job says that it serves."""
        assert self._process.stdout is not None
        lines: list[str] = []
        for line in self._process.stdout:
            lines.append(line)
            if line.startswith("serving: gRPC at "):
                return line.split()[-1]
        raise AssertionError("".join(lines) + self._nodes.logs())


def environment() -> dict[str, str]:
    """The environment of a cluster's process: it finds our packages, and may listen anywhere."""
    own = {name: value for name, value in os.environ.items() if name != _LOOPBACK_ONLY}
    own["PYTHONPATH"] = str(Path(__file__).resolve().parents[2])
    return own
