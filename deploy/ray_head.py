"""A Ray head of our own: one node on the loopback interface, in a session of its own.

Ending it ends every process of that session, though its first may be long dead, and nothing else:
a token in their environment tells ours from a later session that got the same number. This module
imports Ray nowhere but where it counts GPUs.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import UnavailableError

START_SECONDS = 180.0
_TOKEN = "PACELINE_RAY_HEAD"
# Ray takes "127.0.0.1" for "this host's own address" unless it is told not to.
_LOOPBACK_ONLY = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
_LOOPBACK = "127.0.0.1"
_OBJECT_STORE_BYTES = 80_000_000
SYSTEM_CONFIG = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 1000,
    "health_check_failure_threshold": 3,
    # Its default of 15 would give way to whatever else runs on this host.
    "worker_niceness": 0,
}
"""What we ask of Ray where we start it: lost nodes are noticed in some 6 s."""


@dataclass(frozen=True, slots=True)
class RayHead:
    """A running head. `address` is what RAY_ADDRESS would hold; `session` its system session."""

    address: str
    session: int
    token: str
    folder: str
    dashboard: str | None = None


def start_head(*, num_cpus: int, gpus: bool = False, dashboard: bool = False) -> RayHead:
    """Start a head and return when it takes connections. Raises UnavailableError with its log.

    `gpus`: it has all GPUs that Ray finds on this host, else none.
    """
    folder = tempfile.mkdtemp(prefix="paceline-")  # Unix sockets lie in it: it must be short.
    ports = free_ports(3)
    token = secrets.token_hex(16)
    log = Path(folder) / "start.log"
    environment = _environment(token)
    command = _command(folder, ports, num_cpus=num_cpus, gpus=gpus, dashboard=dashboard)
    session = _spawn(command, environment, log)
    head = RayHead(
        address=f"{_LOOPBACK}:{ports[0]}",
        session=session,
        token=token,
        folder=folder,
        dashboard=f"http://{_LOOPBACK}:{ports[2]}" if dashboard else None,
    )
    try:
        _await_start(session, Path(folder), log)
    except BaseException:
        stop_head(head)
        raise
    return head


def stop_head(head: RayHead) -> None:
    """End every process of the head and remove its folder. No error where they are dead."""
    while processes := _processes_of(head):
        for pid in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    with contextlib.suppress(ChildProcessError):  # `down` is not its parent.
        os.waitpid(head.session, 0)
    shutil.rmtree(head.folder, ignore_errors=True)


def is_listening(address: str) -> bool:
    """Whether something listens at "host:port" or "[ipv6]:port"."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=1.0):
            return True
    except (OSError, ValueError):
        return False


def stay_on_loopback() -> None:
    """To be called before Ray is imported in a process that joins a head of ours."""
    os.environ[_LOOPBACK_ONLY] = "0"


def gpus_here() -> int:
    """The GPUs that a head on this host would find. Imports a part of Ray."""
    from ray._private.accelerators import NvidiaGPUAcceleratorManager

    return int(NvidiaGPUAcceleratorManager.get_current_node_num_accelerators())


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind((_LOOPBACK, 0))
        return [one.getsockname()[1] for one in sockets]


def _command(
    folder: str, ports: list[int], *, num_cpus: int, gpus: bool, dashboard: bool
) -> list[str]:
    return [
        sys.executable,
        *("-m", "ray.scripts.scripts", "start", "--head", "--block", "--disable-usage-stats"),
        *("--no-monitor", "--include-log-monitor=false"),
        *(() if gpus else ("--num-gpus=0",)),
        f"--node-ip-address={_LOOPBACK}",
        f"--port={ports[0]}",
        f"--ray-client-server-port={ports[1]}",
        f"--include-dashboard={str(dashboard).lower()}",
        f"--dashboard-host={_LOOPBACK}",
        f"--dashboard-port={ports[2]}",
        "--dashboard-agent-listen-port=0",
        "--min-worker-port=0",
        "--max-worker-port=0",
        f"--num-cpus={num_cpus}",
        f"--object-store-memory={_OBJECT_STORE_BYTES}",
        f"--temp-dir={folder}",
        f"--system-config={json.dumps(SYSTEM_CONFIG)}",
    ]


def _environment(token: str) -> dict[str, str]:
    """The caller's, with this Python first and our packages to be found by it."""
    environment = dict(os.environ)
    environment.pop("RAY_ADDRESS", None)
    environment[_TOKEN] = token
    environment[_LOOPBACK_ONLY] = "0"
    environment["RAY_USAGE_STATS_ENABLED"] = "0"
    environment["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    here = str(Path(__file__).resolve().parents[1])
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (here, environment.get("PYTHONPATH"))))
    environment["PATH"] = os.pathsep.join(
        (str(Path(sys.executable).parent), environment.get("PATH", ""))
    )
    return environment


def _spawn(command: list[str], environment: dict[str, str], log: Path) -> int:
    """Start it in a session of its own, in which it may outlive us; return its number."""
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
    """Files that whoever started us left open to children: a head would hold their locks."""
    found = []
    for number in sorted(int(name) for name in os.listdir("/dev/fd")):
        with contextlib.suppress(OSError):  # that of the listing is closed by now
            if number > 2 and os.get_inheritable(number):
                found.append(number)
    return found


def _await_start(session: int, folder: Path, log: Path) -> None:
    give_up = time.monotonic() + START_SECONDS
    # Ray writes its address there when all its processes are up.
    while not (folder / "ray_current_cluster").exists():
        if _is_zombie(session):
            raise UnavailableError(f"Ray did not start: {_last_line(log)}")
        if time.monotonic() > give_up:
            raise UnavailableError(
                f"Ray did not start within {START_SECONDS:g} s: {_last_line(log)}"
            )
        time.sleep(0.02)


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else "it printed nothing"


def _processes_of(head: RayHead) -> list[int]:
    """The living processes of the head."""
    if not Path(f"/proc/{head.session}").exists() or _is_zombie(head.session):
        is_ours = (
            True  # No new session can have the number of a process that is gone or not reaped.
        )
    else:
        is_ours = _carries(head.session, head.token)
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]
    return [
        pid
        for pid in pids
        if _carries(pid, head.token) or (is_ours and _session_of(pid) == head.session)
    ]


def _carries(pid: int, token: str) -> bool:
    """Whether the token is in the environment of a process; Ray's agents overwrite theirs."""
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False
    return f"{_TOKEN}={token}".encode() in environment.split(b"\0")


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat after the command's name; none where it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _is_zombie(pid: int) -> bool:
    return _stat(pid)[:1] == ["Z"]


def _session_of(pid: int) -> int | None:
    """Its session; None for a process that has ended."""
    fields = _stat(pid)
    return int(fields[3]) if fields and fields[0] != "Z" else None
