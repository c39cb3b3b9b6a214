"""A Ray cluster of several nodes (deploy/bench/two_hosts.py), and jobs on it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from deploy.bench.two_hosts import RayNodes, node_environment

__all__ = ["Job", "RayNodes"]


class Job:
    """A deployment on these nodes, as a Ray job's process has it. Use as a context manager."""

    def __init__(self, nodes: RayNodes, config: Path) -> None:
        self._nodes = nodes
        self._process = subprocess.Popen(
            [sys.executable, "-m", "deploy.jobs.serve", "--config", str(config)],
            env=node_environment() | {"RAY_ADDRESS": nodes.address},
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
