"""A deployment to break, on Ray nodes of its own: what `bench faults` and the chaos tests use."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path

import psutil

from deploy.bench.two_hosts import (
    HERE,
    NEAR,
    START_SECONDS,
    CannotMakeHostsError,
    RayNodes,
    SecondHost,
    node_environment,
)
from deploy.session.ray_head import (
    free_ports,
    guarded,
    is_listening,
    plan_head,
    start_head,
    stop_head,
)
from paceline.errors import UnavailableError

BACK_SECONDS = 120.0
"""How long to wait until what was lost is back."""
_LOOK_SECONDS = 0.02
_END_SECONDS = 20.0
_TOLD = ("shard-0", "drafter-0", "driver", "gateway", "serving")


@dataclass(frozen=True, slots=True)
class Deployed:
    """A deployment to break: `deploy.jobs.serve` on a Ray cluster of its own.

    `address`: the driver's gRPC. `http_address`: the gateway's. `cable`: between the hosts; None:
    there is one host. `kept`: a block in which the drafter's node is started again when it ends.
    `lose_head`: loses the node of Ray's head.
    """

    address: str
    http_address: str
    logs: Path
    cable: SecondHost | None
    processes_of: Callable[[], Sequence[psutil.Process]]
    lose_head: Callable[[], None]
    kept: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext

    def process(self, actor: str) -> psutil.Process:
        """The process of an actor, by the title that Ray gives it. Raises UnavailableError."""
        for process in self.processes_of():
            with contextlib.suppress(psutil.Error):
                if re.match(rf"ray::{actor}\b", " ".join(process.cmdline())):
                    return process
        raise UnavailableError(f"no process of {actor} is running")

    def logged(self, worker: str) -> Iterator[dict[str, str]]:
        """The entries of a worker's log. What is no entry, such as half a line, is left out."""
        log = self.logs / f"{worker}.log"
        for line in log.read_text(encoding="utf-8", errors="replace").splitlines():
            told = None
            with contextlib.suppress(ValueError):
                told = json.loads(line)
            if isinstance(told, dict):
                yield told

    def start_seconds(self, worker: str) -> float:
        """How long the last process of a worker took from its first line to serving, by its log."""
        began: datetime | None = None
        took = 0.0
        for told in self.logged(worker):
            with contextlib.suppress(ValueError, TypeError, KeyError):
                at = datetime.fromisoformat(told["time"])
                if told["message"].startswith("started, pid"):
                    began = at
                elif told["message"].startswith("serving at") and began is not None:
                    took = (at - began).total_seconds()
        return took


CONFIG = """
[target]
emulated = "70b-4xh100"
threads = 2  # Two CPUs, so that with two hosts it has room on the first alone.
hung_after = {hung_after}
[[drafters]]
emulated = "1b-h100"
acceptance = 0.8
threads = 1
[server]
host = "{host}"
grpc_port = 0
http_port = 0
log_format = "json"
"""


@contextmanager
def deployed(
    home: Path, folder: Path, tell: Callable[[str], None], *, hung_after: float = 60.0
) -> Iterator[Deployed]:
    """The deployment on two hosts, or on one if this machine allows no other."""
    with ExitStack() as stack:
        try:
            cable: SecondHost | None = stack.enter_context(SecondHost())
        except CannotMakeHostsError as error:
            tell(f"one host only, without the rows of links and hosts: {error}")
            cable = None
        tell("Ray: starting a cluster")
        processes_of: Callable[[], Sequence[psutil.Process]]
        kept: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
        if cable is None:
            head = plan_head()
            stack.enter_context(guarded(head))
            head = start_head(head, num_cpus=3)
            stack.callback(stop_head, head)
            host, address = "127.0.0.1", head.address
            processes_of = partial(psutil.Process(head.processes[0][0]).children, recursive=True)
            lose_head = partial(stop_head, head)
        else:
            # The head has no CPUs, so only the controller is lost with it.
            nodes = stack.enter_context(RayNodes(HERE, num_cpus=0))
            nodes.add(NEAR, num_cpus=2)
            nodes.add(cable.host, num_cpus=1)
            host, address, processes_of = NEAR.address, nodes.address, nodes.processes
            lose_head = partial(nodes.lose, HERE.address)
            kept = partial(nodes.kept, cable.host, num_cpus=1)
        config = folder / "faults.toml"
        config.write_text(CONFIG.format(host=host, hung_after=hung_after))
        job = stack.enter_context(Job(config, address, home, tell))
        yield Deployed(
            job.told("serving: gRPC at "),
            job.told("gateway: HTTP at ").removeprefix("http://").removesuffix("/v1"),
            Path(job.told("logs in ").removesuffix(", on each worker's host")),
            cable,
            processes_of,
            lose_head,
            kept,
        )


class Job:
    """`deploy.jobs.serve` as a process, which prints where it serves. Use as a context manager."""

    def __init__(
        self, config: Path, ray_address: str, home: Path, tell: Callable[[str], None]
    ) -> None:
        self._lines: list[str] = []
        self._tell = tell
        self._process = subprocess.Popen(
            [sys.executable, "-m", "deploy.jobs.serve", str(config), "--drain", "0"],
            env=node_environment() | {"RAY_ADDRESS": ray_address, "PACELINE_HOME": str(home)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._reading = threading.Thread(target=self._read)
        self._reading.start()

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:  # It waits for a Ray head that is lost.
            self._process.kill()
            self._process.wait()
        self._reading.join()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def told(self, beginning: str) -> str:
        """What follows a beginning, in the last line that has it. Waits for that line."""
        give_up = time.monotonic() + START_SECONDS
        while time.monotonic() < give_up and self._reading.is_alive():
            for line in reversed(self._lines):
                if line.startswith(beginning):
                    return line.removeprefix(beginning)
            time.sleep(_LOOK_SECONDS)
        raise UnavailableError("the deployment did not start: " + "\n".join(self._lines[-20:]))

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.append(line.rstrip())
            if line.partition(":")[0] in _TOLD:
                self._tell(line.rstrip())


class Front:
    """`paceline gateway` with gRPC, which is started again at once when it ends."""

    def __init__(self, driver: str, folder: Path) -> None:
        port, grpc_port = free_ports(2)
        self.address = f"127.0.0.1:{grpc_port}"
        self._log = folder / "front.log"
        self._command = [
            *(sys.executable, "-m", "deploy.cli", "gateway", "--address", driver, "--drain", "0"),
            *("--port", str(port), "--grpc-port", str(grpc_port)),
        ]
        self._process = self._start()
        self._ending = False

    def kill(self) -> None:
        """End it as a fault does, and start it again as its supervisor does."""
        self._process.kill()
        self._process.wait()
        self._process = self._start()

    def wait(self) -> None:
        """Wait until it serves. Raises UnavailableError."""
        give_up = time.monotonic() + BACK_SECONDS
        while not is_listening(self.address):
            if time.monotonic() > give_up or self._process.poll() is not None:
                raise UnavailableError(f"no gateway: {self._log.read_text(errors='replace')}")
            time.sleep(_LOOK_SECONDS)

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait()

    def _start(self) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as log:
            return subprocess.Popen(self._command, stdout=log, stderr=log)
