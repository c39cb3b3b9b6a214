"""A Ray head of our own: one node on the loopback interface, in a session of its own.

Ending a head ends every process of it, even if its first process died long ago, and no other
process. A process belongs to the head if its environment holds the head's token, or if it shares a
session with such a process or with one whose recorded pid and start time match. So anyone who knows
a head's plan, made before it starts, can end it. A pid that now belongs to another process, for
example after a reboot, is left alone. This module does not import Ray.

A guard, which is this module as a program, ends a head whose starter was killed:
    python -m deploy.session.ray_head HEAD_AS_JSON    with a pipe from the starter as standard input
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import psutil

from paceline.errors import UnavailableError

START_SECONDS = 180.0
ASK_SECONDS = 1.0
"""How long the processes of a head may take to end on SIGTERM, before SIGKILL."""
KILL_SECONDS = 15.0
"""How long they may take after SIGKILL. A process that waits for a device or file server that does
not answer (state D) ends only once that answers."""
_LOOK_SECONDS = 0.1
_TOKEN = "PACELINE_RAY_HEAD"
# Ray takes "127.0.0.1" for "this host's own address" unless it is told not to.
_LOOPBACK_ONLY = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
_LOOPBACK = "127.0.0.1"
_AUTH_MODE, _AUTH_TOKEN_PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH"
_AUTH_FILE = "paceline_auth_token"
"""In the folder of a head, which only its user can read: what Ray asks of those who join."""
_AUTH_TOKEN = secrets.token_hex(32)
"""Of all heads that this process starts."""
_OBJECT_STORE_BYTES = 80_000_000
_KEEP = b"keep"
SYSTEM_CONFIG = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 1000,
    "health_check_failure_threshold": 3,
    # The default of 15 would give way to every other process on this host.
    "worker_niceness": 0,
}
"""Options of a Ray cluster that we start. It notices lost nodes in some 6 s."""


@dataclass(frozen=True, slots=True)
class RayHead:
    """A head, planned or running. `address`: as in RAY_ADDRESS.

    `processes`: pid and start time (seconds since 1970) of each process that it had when it began
    to accept connections, the first process first. Empty: it never accepted any, or its starter
    died before recording them.
    """

    address: str
    token: str
    folder: str
    ports: Sequence[int]
    processes: Sequence[tuple[int, float]] = ()


def plan_head() -> RayHead:
    """Plan a head. The plan suffices to end the head, so make it before starting anything."""
    token = secrets.token_hex(16)
    ports = free_ports(3)
    return RayHead(
        address=f"{_LOOPBACK}:{ports[0]}",
        token=token,
        # Keep it short: it is part of the paths of Unix sockets.
        folder=str(Path(tempfile.gettempdir()) / f"paceline-{token[:8]}"),
        ports=ports,
    )


def start_head(
    head: RayHead | None = None,
    *,
    num_cpus: int,
    gpus: bool = False,
    meanwhile: Callable[[], object] = lambda: None,
) -> RayHead:
    """Start a head, a planned one if given. Returns once it accepts connections.

    `gpus`: it gets all GPUs that Ray finds on this host, else none. `meanwhile` is called once its
    first process runs. If it fails, this ends the head
    and raises UnavailableError with the last line of its log.
    """
    head = head or plan_head()
    log = Path(head.folder) / "start.log"
    command = _command(head, num_cpus=num_cpus, gpus=gpus)
    try:
        Path(head.folder).mkdir(mode=0o700)
        _write_auth_token(head)
        first = psutil.Process(_spawn(command, _environment(head), log))
        head = replace(head, processes=[(first.pid, first.create_time())])
        meanwhile()
        _await_start(first, _rays(head), log)
        others = [one for one in _processes_of(head, set()) if one != first]
        head = replace(head, processes=[*head.processes, *_marks(others)])
    except BaseException:
        stop_head(head)
        raise
    return head


def stop_head(head: RayHead) -> None:
    """End every process of the head and remove its folder. No error if they are dead.

    Raises UnavailableError naming processes that SIGKILL does not end. The folder then stays.
    """
    began = time.monotonic()
    sessions: set[int] = set()
    asked: set[psutil.Process] = set()
    while processes := _processes_of(head, sessions):
        seconds = time.monotonic() - began
        if seconds > ASK_SECONDS + KILL_SECONDS:
            raise UnavailableError(
                f"the Ray cluster at {head.address} has ended except for {_named(processes)}: "
                "SIGKILL does not end a process that waits for a device or a file server; once "
                "that answers, run `paceline down` again"
            )
        for process in processes:
            with contextlib.suppress(psutil.Error):  # Also if the pid belongs to another by now.
                if seconds > ASK_SECONDS:
                    process.kill()
                elif process not in asked:
                    asked.add(process)
                    process.terminate()
        psutil.wait_procs(processes, timeout=_LOOK_SECONDS)
    for first, _ in head.processes[:1]:
        with contextlib.suppress(ChildProcessError):  # `down` is not its parent.
            os.waitpid(first, os.WNOHANG)
    shutil.rmtree(head.folder, ignore_errors=True)


def is_running(head: RayHead) -> bool:
    """Whether one of the processes recorded at its start lives."""
    return bool(_known_of(head))


def is_listening(address: str) -> bool:
    """Whether something listens at "host:port" or "[ipv6]:port"."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=1.0):
            return True
    except (OSError, ValueError):
        return False


def prepare_to_join(head: RayHead) -> None:
    """Set what Ray reads when it is imported. Call this first in a process that joins a head."""
    _set_for_head_and_joiners(head, os.environ)


def _set_for_head_and_joiners(head: RayHead, environment: MutableMapping[str, str]) -> None:
    environment[_LOOPBACK_ONLY] = "0"
    present = environment.get(_AUTH_TOKEN_PATH, "")
    if _AUTH_MODE in environment and Path(present).name != _AUTH_FILE:
        return  # The user has chosen a mode, and Ray finds the user's token.
    path = Path(head.folder) / _AUTH_FILE
    # A user who once called `ray.init()` has another token, which Ray would take.
    environment[_AUTH_TOKEN_PATH] = str(path)
    environment.pop("RAY_AUTH_TOKEN", None)
    environment[_AUTH_MODE] = "token" if path.exists() else "disabled"


def _write_auth_token(head: RayHead) -> None:
    """Have Ray ask for a token, unless this process could not give it any more.

    Ray reads mode and token once in a process, so all heads of a process have the same.
    """
    if "ray" in sys.modules and os.environ.get(_AUTH_MODE) != "token":
        return
    path = Path(head.folder) / _AUTH_FILE
    number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(number, "w") as stream:
        stream.write(_AUTH_TOKEN)


def free_ports(count: int) -> list[int]:
    """Ports that are free at present."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind((_LOOPBACK, 0))
        return [one.getsockname()[1] for one in sockets]


def _command(head: RayHead, *, num_cpus: int, gpus: bool) -> list[str]:
    ports = head.ports
    return [
        sys.executable,
        *("-m", "ray.scripts.scripts", "start", "--head", "--block", "--disable-usage-stats"),
        *("--no-monitor", "--include-log-monitor=false"),
        *(() if gpus else ("--num-gpus=0",)),
        f"--node-ip-address={_LOOPBACK}",
        f"--port={ports[0]}",
        f"--ray-client-server-port={ports[1]}",
        "--include-dashboard=false",
        f"--dashboard-host={_LOOPBACK}",
        f"--dashboard-port={ports[2]}",
        "--dashboard-agent-listen-port=0",
        "--min-worker-port=0",
        "--max-worker-port=0",
        f"--num-cpus={num_cpus}",
        f"--object-store-memory={_OBJECT_STORE_BYTES}",
        f"--temp-dir={_rays(head)}",
        f"--system-config={json.dumps(SYSTEM_CONFIG)}",
    ]


def _environment(head: RayHead) -> dict[str, str]:
    """The caller's environment, with this Python first on PATH and our packages importable."""
    environment = dict(os.environ)
    environment.pop("RAY_ADDRESS", None)
    _set_for_head_and_joiners(head, environment)
    environment[_TOKEN] = head.token
    environment["RAY_USAGE_STATS_ENABLED"] = "0"
    environment["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    here = str(Path(__file__).resolve().parents[2])
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (here, environment.get("PYTHONPATH"))))
    environment["PATH"] = os.pathsep.join(
        (str(Path(sys.executable).parent), environment.get("PATH", ""))
    )
    return environment


def _spawn(command: list[str], environment: dict[str, str], log: Path) -> int:
    """Start a process in a session of its own, so that it can outlive this one. Returns its pid."""
    return os.posix_spawn(
        command[0],
        command,
        environment,
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, str(log), os.O_WRONLY | os.O_CREAT, 0o600),
            (os.POSIX_SPAWN_DUP2, 1, 2),
            *((os.POSIX_SPAWN_CLOSE, number) for number in _inheritable()),
        ],
        setsid=True,
    )


def _inheritable() -> list[int]:
    """Open files that a child would inherit from us. A head with them would hold their locks."""
    found = []
    for number in sorted(int(name) for name in os.listdir("/dev/fd")):
        with contextlib.suppress(OSError):  # The descriptor of the listing is closed by now.
            if number > 2 and os.get_inheritable(number):
                found.append(number)
    return found


def _rays(head: RayHead) -> Path:
    """Ray's own folder, which it opens to all users; the one around it stays this user's."""
    return Path(head.folder) / "ray"


def _await_start(first: psutil.Process, folder: Path, log: Path) -> None:
    give_up = time.monotonic() + START_SECONDS
    # Ray writes its address to this file once all its processes run.
    while not (folder / "ray_current_cluster").exists():
        if not _is_alive(first):
            raise UnavailableError(f"Ray did not start: {_last_line(log)}")
        if time.monotonic() > give_up:
            raise UnavailableError(
                f"Ray did not start within {START_SECONDS:g} s: {_last_line(log)}"
            )
        time.sleep(0.02)


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else "it printed nothing"


def _processes_of(head: RayHead, sessions: set[int]) -> list[psutil.Process]:
    """The head's living processes. Adds the sessions that belong to it to `sessions`.

    While a process of a session lives, its number is not given to another session.
    """
    alive = {process: _session_of(process) for process in psutil.process_iter()}
    carriers = {process for process in alive if _carries(process, head.token)}
    sessions.update(session for one in carriers if (session := alive[one]) is not None)
    sessions.update(session for one in _known_of(head) if (session := _session_of(one)) is not None)
    return [
        process for process, session in alive.items() if process in carriers or session in sessions
    ]


def _marks(processes: Sequence[psutil.Process]) -> Iterator[tuple[int, float]]:
    """Pid and start time of each process that lives."""
    for process in processes:
        with contextlib.suppress(psutil.Error):
            yield process.pid, process.create_time()


def _known_of(head: RayHead) -> list[psutil.Process]:
    """The head's recorded processes that still live, matched by pid and start time."""
    known = []
    for pid, started in head.processes:
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            if process.create_time() == started and _is_alive(process):
                known.append(process)
    return known


def _carries(process: psutil.Process, token: str) -> bool:
    """Whether the token is in the process's environment. Ray's agents overwrite theirs."""
    try:
        return bool(process.environ().get(_TOKEN) == token)
    except (psutil.Error, OSError):
        return False


def _is_alive(process: psutil.Process) -> bool:
    """Whether the process runs and is not a zombie."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def _session_of(process: psutil.Process) -> int | None:
    """The session of a process; None: it has ended."""
    try:
        return os.getsid(process.pid) if _is_alive(process) else None
    except OSError:
        return None


def _named(processes: list[psutil.Process]) -> str:
    said = []
    for process in processes:
        with contextlib.suppress(psutil.Error):
            said.append(f"{process.pid} ({process.name()}, {process.status()})")
    return ", ".join(said)


class Guard:
    """A process that ends a head when this process ends or is killed, unless `keep` is called."""

    def __init__(self, head: RayHead) -> None:
        """`head` may be a plan, since the guard starts before the head does."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "deploy.session.ray_head", json.dumps(asdict(head))],
            cwd=Path(__file__).resolve().parents[2],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C must not reach the guard.
        )

    def keep(self) -> None:
        """Let the head outlive this process."""
        self._process.communicate(_KEEP)

    def close(self) -> None:
        """End the guard, and what is left of a head that is not kept."""
        self._process.communicate()


@contextmanager
def guarded(head: RayHead) -> Iterator[None]:
    """End `head` with the block, or with this process, however that ends."""
    guard = Guard(head)
    try:
        yield
    finally:
        stop_head(head)
        guard.close()


def main() -> None:
    """The guard: wait for the end of standard input, then end the head."""
    head = RayHead(**json.loads(sys.argv[1]))
    if sys.stdin.buffer.read() != _KEEP:
        stop_head(head)


if __name__ == "__main__":
    main()
