"""Two hosts on one machine, for faults of hosts and links: network namespaces, and Ray nodes there.

The other host is a network namespace at the far end of a virtual cable. It has its own interfaces,
loopback and ports. A Ray node runs in a process namespace of its own too, whose first process ends
it. Needs root and the commands `ip` and `unshare`.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from deploy.session.ray_head import SYSTEM_CONFIG, free_ports, is_listening
from paceline.errors import UnavailableError

START_SECONDS = 240.0
"""How long the nodes of a busy machine may take to start."""
_TRIES = 3
_LOOK_SECONDS = 0.1
_OWN_PROCESSES = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
_LOOPBACK_ONLY = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
_STARTED = "Ray runtime started"
_BLOCK, _PART = divmod(os.getpid() % 4096, 16)
# The addresses differ for each process, so several of them can go on side by side.
_HERE, _NEAR, *_THERE = (f"10.213.{_BLOCK}.{16 * _PART + number}" for number in range(1, 13))


@dataclass(frozen=True, slots=True)
class Host:
    """Where a process runs: its address, and the prefix of a command that runs there."""

    address: str = "127.0.0.1"
    run: tuple[str, ...] = ()


HERE, NEAR = Host(_HERE), Host(_NEAR)
"""This host, at the near end of the cable, with an address for another Ray node on it."""


class CannotMakeHostsError(Exception):
    """This machine does not allow network namespaces."""


class SecondHost:
    """Use it as a context manager. Raises CannotMakeHostsError.

    `host`: the other host; HERE is ours. `hosts`: its ten addresses, as if there were ten hosts
    behind one cable.
    """

    def __init__(self) -> None:
        self._name = f"pl-{os.getpid()}"
        self._cable = f"plc{os.getpid()}"
        self.hosts = [Host(there, ("ip", "netns", "exec", self._name)) for there in _THERE]
        self.host = self.hosts[0]

    def __enter__(self) -> SecondHost:
        far = f"{self._cable}x"
        try:
            _ip("netns", "add", self._name)
            _ip("link", "add", self._cable, "type", "veth", "peer", "name", far)
            _ip("link", "set", far, "netns", self._name)
            for here in (HERE, NEAR):
                _ip("addr", "add", f"{here.address}/28", "dev", self._cable)
            _ip("link", "set", self._cable, "up")
            for command in (
                *(("addr", "add", f"{there}/28", "dev", far) for there in _THERE),
                ("link", "set", far, "up"),
                ("link", "set", "lo", "up"),
            ):
                _ip("-n", self._name, *command)
        except (OSError, subprocess.CalledProcessError) as error:
            self.__exit__()
            raise CannotMakeHostsError(str(error)) from error
        return self

    def __exit__(self, *_: object) -> None:
        for command in (("link", "del", self._cable), ("netns", "del", self._name)):
            with contextlib.suppress(OSError, subprocess.CalledProcessError):
                _ip(*command)

    def cut(self) -> None:
        """Pull the cable: nothing passes, and neither side is told."""
        _ip("link", "set", self._cable, "down")

    def mend(self) -> None:
        """Plug the cable in again."""
        _ip("link", "set", self._cable, "up")


def _ip(*arguments: str) -> None:
    subprocess.run(("ip", *arguments), check=True, capture_output=True)


class RayNodes:
    """A Ray cluster: its head starts at once, other nodes on request. Use as a context manager."""

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
        """Start a node on each host, and wait until they are part of the cluster.

        They start one after another, again if one gives up: Ray allows 30 s for each, whatever the
        load. Raises UnavailableError.
        """
        for host in hosts:
            if not any(self._joins(host, num_cpus, labels) for _ in range(_TRIES)):
                raise UnavailableError(f"a Ray node did not join: {self.logs()}")

    @contextlib.contextmanager
    def kept(self, host: Host, *, num_cpus: int) -> Iterator[None]:
        """While the block runs, start the host's node again whenever it ends, as systemd or a
        kubelet does.
        """
        ended = threading.Event()

        def keep() -> None:
            while not ended.wait(_LOOK_SECONDS):
                node = self._nodes.get(host.address)
                if node is not None and node.poll() is not None:
                    self._start(host, (f"--address={self.address}",), num_cpus=num_cpus)

        keeping = threading.Thread(target=keep)
        keeping.start()
        try:
            yield
        finally:
            ended.set()
            keeping.join()

    def lose(self, address: str) -> None:
        """Kill the node at this address, and every process on it."""
        node = self._nodes.pop(address)
        node.kill()
        node.wait()

    def processes(self, address: str | None = None) -> list[psutil.Process]:
        """The living processes of the node at an address; None: of all nodes."""
        nodes = self._nodes.values() if address is None else [self._nodes[address]]
        found: list[psutil.Process] = []
        for node in nodes:
            with contextlib.suppress(psutil.Error):
                found += psutil.Process(node.pid).children(recursive=True)
        return found

    def logs(self) -> str:
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
            if time.monotonic() > give_up:
                raise UnavailableError(f"Ray did not start in {START_SECONDS:g} s: {self.logs()}")
            time.sleep(_LOOK_SECONDS)

    def _start(
        self, host: Host, arguments: Sequence[str], *, num_cpus: int, labels: str = ""
    ) -> Path:
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
                command, env=node_environment(), stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        return Path(log.name)


def node_environment() -> dict[str, str]:
    """The environment of a cluster's process: it finds our packages, and may listen anywhere."""
    own = {name: value for name, value in os.environ.items() if name != _LOOPBACK_ONLY}
    own["PYTHONPATH"] = str(Path(__file__).resolve().parents[2])
    own["RAY_USAGE_STATS_ENABLED"] = "0"
    own["RAY_AUTH_MODE"] = "disabled"
    own["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    return own
