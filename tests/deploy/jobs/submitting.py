"""A Ray head with its dashboard, which asks for a token, and jobs on it as documented."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from deploy.session import ray_head
from tests.deploy.conftest import becomes_true

ROOT = Path(__file__).resolve().parents[3]
ENDED = ("SUCCEEDED", "FAILED", "STOPPED")


@dataclass(frozen=True)
class Head:
    """A Ray cluster that takes jobs at `url`. What it starts has `environment`, with the token."""

    address: str
    url: str
    environment: dict[str, str]
    token: str

    def submit(self, *command: str, runtime_env: dict[str, Any] | None = None) -> str:
        """`ray job submit`, as docs/operations.md has it. Returns the job's id."""
        job = f"test-{os.urandom(4).hex()}"
        subprocess.run(
            [
                *(sys.executable, "-m", "ray.scripts.scripts", "job", "submit", "--no-wait"),
                *("--address", self.url, "--submission-id", job, "--working-dir", "."),
                *("--runtime-env-json", json.dumps(runtime_env or {})),
                *("--", *command),
            ],
            cwd=ROOT,
            env=self.environment,
            check=True,
            capture_output=True,
            timeout=240,
        )
        return job

    def stop(self, job: str) -> None:
        """`ray job stop`."""
        self._ask(f"/api/jobs/{job}/stop", method="POST")

    def told(self, job: str) -> dict[str, Any]:
        """What the API says of a job: `status`, `message`, `driver_exit_code`, ..."""
        return self._ask(f"/api/jobs/{job}")

    def log(self, job: str) -> str:
        """What the job has printed."""
        return str(self._ask(f"/api/jobs/{job}/logs")["logs"])

    def end_of(self, job: str) -> dict[str, Any]:
        """Wait for the end of a job."""
        assert becomes_true(lambda: self.told(job)["status"] in ENDED), self.log(job)
        return self.told(job)

    def _ask(self, path: str, method: str = "GET") -> dict[str, Any]:
        headers = {"Authorization": f"Bearer {self.token}"}
        request = urllib.request.Request(self.url + path, method=method, headers=headers)
        with urllib.request.urlopen(request, timeout=60) as answer:
            told: dict[str, Any] = json.load(answer)
        return told


def processes_with(*words: str) -> list[psutil.Process]:
    """Running processes whose command line has all these words, each an argument of its own."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if {*words} <= {*(process.info["cmdline"] or ())}:
            found.append(process)
    return found


@contextmanager
def head_with_dashboard() -> Iterator[Head]:
    """A head of the test. `python` there is the Python of this test."""
    plan = ray_head.plan_head()
    [agent] = ray_head.free_ports(1)
    token = secrets.token_hex(32)
    path = Path(plan.folder) / "auth_token"
    environment = os.environ | {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(path),
        "PACELINE_RAY_HEAD": plan.token,  # By it stop_head knows its processes.
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "no_proxy": "127.0.0.1",
    }
    command = [
        *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"),
        *("--disable-usage-stats", "--no-monitor", "--include-log-monitor=false"),
        *("--num-gpus=0", "--num-cpus=8", "--object-store-memory=80000000"),
        *("--node-ip-address=127.0.0.1", f"--port={plan.ports[0]}"),
        *(f"--ray-client-server-port={plan.ports[1]}", f"--dashboard-port={plan.ports[2]}"),
        *("--include-dashboard=true", "--dashboard-host=127.0.0.1"),
        *(f"--dashboard-agent-listen-port={agent}", "--min-worker-port=0", "--max-worker-port=0"),
        f"--temp-dir={plan.folder}",
    ]
    Path(plan.folder).mkdir(mode=0o700)
    path.write_text(token)
    nowhere = subprocess.DEVNULL
    with subprocess.Popen(
        command, env=environment, start_new_session=True, stdout=nowhere, stderr=nowhere
    ) as first:
        try:
            head = Head(plan.address, f"http://127.0.0.1:{plan.ports[2]}", environment, token)
            assert becomes_true(lambda: _takes_jobs(head)), "the dashboard did not start"
            yield head
        finally:
            ray_head.stop_head(plan)
            first.wait(timeout=60)


def _takes_jobs(head: Head) -> bool:
    try:
        head.told("")
        return True
    except OSError:
        return False
