"""Processes to measure: deployments on Ray, workers without Ray, and peers that answer lines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

from cluster.config.model import Config, DrafterConfig
from deploy.session.cluster import check_models, enter_ray, own_cores
from deploy.session.ray_head import guarded, plan_head, start_head
from paceline.client import Client
from paceline.errors import UnavailableError
from workers.process.logs import new_run

CPUS_EACH = 2
"""CPUs that each deployment may reserve in Ray. In fact all deployments share the same cores."""
_END_SECONDS = 5.0


def on_free_ports(config: Config, **changes: object) -> Config:
    """The configuration with `changes`, served on any free ports."""
    server = config.server.model_copy(update={"http": False, "grpc_port": 0})
    return config.model_copy(update={**changes, "server": server})


def deployment(
    config: Config, threads: int, drafters: Sequence[DrafterConfig], **changes: object
) -> Config:
    """The configuration on free ports, with these drafters. `threads`: of the target."""
    target = config.target.model_copy(update={"threads": threads})
    return on_free_ports(config, target=target, drafters=tuple(drafters), **changes)


def model_drafters(config: Config) -> list[DrafterConfig]:
    """The drafters with a model, or the usual one: one of each, on a core."""
    models = [one for one in config.drafters if one.model is not None] or [DrafterConfig()]
    return [one.model_copy(update={"count": 1, "threads": 1}) for one in models]


@contextmanager
def running_side_by_side(
    configs: Mapping[str, Config], *, home: Path, tell: Callable[[str], None]
) -> Iterator[dict[str, Client]]:
    """Start the deployments and yield a client for each. They end with the block.

    Workers are pinned to the cores of this process, the target to the first. Raises what
    check_models and start_cluster raise.
    """
    for config in configs.values():
        check_models(config, home=home)
    with ExitStack() as stack:
        tell("Ray: starting a local cluster")
        head = plan_head()
        stack.enter_context(guarded(head))
        start_head(head, num_cpus=CPUS_EACH * len(configs))
        if leave := enter_ray(head.address, head):
            stack.callback(leave)
        from cluster.placement.launch import start_cluster

        clients: dict[str, Client] = {}
        for name, config in configs.items():
            handle = start_cluster(
                config,
                home=home,
                logs=new_run(home),
                progress=partial(_tell_of, tell, name),
                detached=False,
                name=None,
                cores=own_cores(),
            )
            stack.callback(handle.stop)
            clients[name] = stack.enter_context(Client(handle.address))
        yield clients


def _tell_of(tell: Callable[[str], None], name: str, line: str) -> None:
    tell(f"{name}: {line}")


class _Process:
    """`python -m MODULE ARGUMENTS`, whose standard error goes to the file `log`."""

    def __init__(
        self,
        module: str,
        arguments: Sequence[str],
        *,
        log: Path,
        threads: int | None = None,
        python: Path | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        """`threads`: OpenMP's number of threads; None: OpenMP's default. `python`: that of another
        environment. `environ`: further variables.
        """
        self._log = log
        limits = {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
        with log.open("wb") as errors:
            self.process = subprocess.Popen(
                [str(python or sys.executable), "-m", module, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={**os.environ, **limits, **(environ or {})},
            )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.stdin, self.stdout = self.process.stdin, self.process.stdout

    def said_last(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace").strip()[-400:]

    def wait_or_kill(self) -> None:
        """Wait a while for the process to end, then kill it and what it started."""
        try:
            self.process.wait(timeout=_END_SECONDS)
        except subprocess.TimeoutExpired:
            own = psutil.Process(self.process.pid)
            for one in [*own.children(recursive=True), own]:
                with suppress(psutil.NoSuchProcess):
                    one.kill()
            self.process.wait()
        self.stdin.close()
        self.stdout.close()


class LineProcess(_Process):
    """A process that answers each line of JSON with a line of JSON (workers/process/lines.py).

    An idle one waits on a pipe and takes no time.
    """

    def ask(self, task: Mapping[str, object]) -> dict[str, Any]:
        """Send a task and await its answer. Raises UnavailableError when the process is gone."""
        try:
            self.stdin.write(json.dumps(task) + "\n")
            self.stdin.flush()
            line = self.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise UnavailableError(f"a peer's process ended: {self.said_last()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with suppress(BrokenPipeError):  # the process had ended with a task in its pipe
            self.stdin.close()
        self.wait_or_kill()


class WorkerProcess(_Process):
    """A worker that prints its addresses, one per line (workers/process/standalone.py)."""

    def addresses(self, count: int) -> list[str]:
        """The next `count` addresses that it prints. Blocks. Raises UnavailableError if it ends."""
        found = []
        for _ in range(count):
            line = self.stdout.readline().strip()
            if not line:
                raise UnavailableError(f"a worker ended as it started: {self.said_last()}")
            found.append(line)
        return found

    def end(self) -> None:
        """End it by SIGTERM, and by SIGKILL if that does not help."""
        self.process.terminate()
        self.wait_or_kill()
