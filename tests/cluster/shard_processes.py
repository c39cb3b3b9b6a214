"""The shards of a tensor-parallel target, each a process without Ray."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from deploy.bench.two_hosts import Host
from tests.held_ports import held_port


class ShardProcesses:
    """`degree` processes of `python -m workers.target.shard`. Use as a context manager."""

    def __init__(
        self,
        folders: Sequence[Path],
        *,
        hosts: Sequence[Host] = (),
        collective_seconds: float = 10.0,
        module: str = "workers.target.shard",
    ) -> None:
        """Make a rank for each folder (usually all equal), on the host of that number if given."""
        self._folders = folders
        self._module = module
        self._hosts = hosts or [Host()] * len(folders)
        self._collective_seconds = collective_seconds
        self._held = ExitStack()
        self.ports = [self._held.enter_context(held_port()) for _ in folders]
        self.processes = [self._start(rank) for rank in range(len(folders))]

    @property
    def addresses(self) -> tuple[str, ...]:
        pairs = zip(self._hosts, self.ports, strict=True)
        return tuple(f"{host.address}:{port}" for host, port in pairs)

    def __enter__(self) -> ShardProcesses:
        for rank in range(len(self.processes)):
            self.wait_until_serving(rank)
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.communicate()
        self._held.close()

    def wait_until_serving(self, rank: int) -> None:
        process = self.processes[rank]
        assert process.stdout is not None
        if not process.stdout.readline():
            raise AssertionError(f"rank {rank} did not start: {process.communicate()[1]}")

    def kill(self, rank: int) -> None:
        self.processes[rank].send_signal(signal.SIGKILL)
        self.processes[rank].communicate()

    def restart(self, rank: int) -> None:
        self.processes[rank] = self._start(rank)
        self.wait_until_serving(rank)

    def _start(self, rank: int) -> subprocess.Popen[str]:
        command = [
            *self._hosts[rank].run,
            *(sys.executable, "-m", self._module, str(self._folders[rank])),
            *("--host", self._hosts[rank].address),
            *("--port", str(self.ports[rank]), "--kv-memory-mib", "4"),
            *("--rank", str(rank), "--degree", str(len(self._folders))),
            *("--collective-seconds", str(self._collective_seconds)),
        ]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
