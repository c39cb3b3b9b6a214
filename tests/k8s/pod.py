"""Runs what the chart renders, as a pod would: `python -m tests.k8s.pod FOLDER`.

In network and process namespaces of its own, so that every port is the one of the chart. FOLDER has
rendered.json. Head and worker are one node here; the probes of both are asked. What a pod mounts is
in FOLDER. Prints what the chart's own test prints.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from deploy.jobs.leave import SETTLE_SECONDS
from tests.k8s.chart import ROOT

SECONDS = 240.0
_TOKEN = "0123456789abcdef" * 4


def main(folder: Path) -> None:
    objects = json.loads((folder / "rendered.json").read_text())
    service = _one(objects, "RayService")["spec"]
    cluster = service["rayClusterConfig"]
    head, worker = cluster["headGroupSpec"], cluster["workerGroupSpecs"][0]
    subprocess.run(("ip", "link", "set", "lo", "up"), check=True)
    mounted = {"/etc/paceline": folder / "etc", "/var/lib/paceline": folder / "home"}
    (folder / "etc").mkdir()
    (folder / "home").mkdir()
    (folder / "etc" / "paceline.toml").write_text(
        _one(objects, "ConfigMap")["data"]["paceline.toml"]
    )
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "RAY_SERVE_ENABLE_HA_PROXY": "0",
        # As the operator sets them for `authOptions`.
        "RAY_AUTH_MODE": cluster["authOptions"]["mode"],
        "RAY_AUTH_TOKEN": _TOKEN,
    }
    for variable in _container(worker)["env"]:
        value = variable["value"]
        for path, here in mounted.items():
            value = value.replace(path, str(here))
        environment[variable["name"]] = value
    environment["HOME"] = str(folder / "home")
    # As the operator starts a head, but with a worker's CPUs and no dashboard of another host.
    flags = [f"--{key}={value}" for key, value in head["rayStartParams"].items()]
    flags = [flag for flag in flags if not flag.startswith("--num-cpus")]
    ports = ("--port=6379", "--dashboard-agent-listen-port=52365", "--metrics-export-port=8080")
    with (folder / "ray.log").open("wb") as log:
        subprocess.Popen(
            (
                *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"),
                *(*flags, *ports, "--num-cpus=4", "--num-gpus=0", f"--temp-dir={folder / 'r'}"),
                *("--object-store-memory=80000000", "--node-ip-address=127.0.0.1"),
                "--disable-usage-stats",
            ),
            env=environment,
            stdout=log,
            stderr=log,
        )
    for group in (head, worker):
        container = _container(group)
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            _until_it_succeeds(container[probe]["exec"]["command"], environment)
    # As the operator does.
    request = urllib.request.Request(
        "http://127.0.0.1:8265/api/serve/applications/",
        data=json.dumps(yaml.safe_load(service["serveConfigV2"])).encode(),
        headers={"content-type": "application/json", "authorization": f"Bearer {_TOKEN}"},
        method="PUT",
    )
    urllib.request.urlopen(request, timeout=SECONDS).close()
    _until_ready("http://127.0.0.1:8000/ready")
    (test,) = _one(objects, "Pod")["spec"]["containers"]
    asked = {one["name"]: one["value"] for one in test["env"]}
    asked["SERVER"] = "http://127.0.0.1:8000"
    sys.stdout.write(_run(test["command"], environment | asked))
    _leave(_container(worker)["lifecycle"]["preStop"]["exec"]["command"], environment)


def _leave(command: Sequence[str], environment: dict[str, str]) -> None:
    """What a pod does before it ends: it waits for a caller, and then ends Ray."""
    with socket.create_connection(("127.0.0.1", 8000)) as caller:
        leaving = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        assert leaving.stdout is not None
        time.sleep(2 * SETTLE_SECONDS)
        assert leaving.poll() is None
        # The proxy still answers this caller.
        caller.sendall(b"GET /ready HTTP/1.1\r\nHost: here\r\n\r\n")
        assert caller.recv(1 << 16).startswith(b"HTTP/1.1 200")
    said = leaving.communicate(timeout=SECONDS)[0]
    assert leaving.returncode == 0, said
    assert said.startswith("ending Ray: 0 connections")
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", 8000)):
        raise AssertionError("Ray still listens")


def _one(objects: Sequence[dict[str, Any]], kind: str) -> dict[str, Any]:
    (found,) = (one for one in objects if one["kind"] == kind)
    return found


def _container(group: dict[str, Any]) -> dict[str, Any]:
    (found,) = group["template"]["spec"]["containers"]
    return dict(found)


def _run(command: Sequence[str], environment: dict[str, str]) -> str:
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _until_it_succeeds(command: Sequence[str], environment: dict[str, str]) -> None:
    give_up = time.monotonic() + SECONDS
    while True:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return
        assert time.monotonic() < give_up, (command, done.stderr)
        time.sleep(1.0)


def _until_ready(url: str) -> None:
    give_up, said = time.monotonic() + SECONDS, ""
    while time.monotonic() < give_up:
        try:
            with urllib.request.urlopen(url, timeout=10):
                return
        except urllib.error.HTTPError as error:
            said = error.read().decode()
        except OSError as error:
            said = str(error)
        time.sleep(0.5)
    raise AssertionError(said)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
