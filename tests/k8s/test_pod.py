"""The commands, ports, probes and configuration of the chart, started as plain processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from cluster.config.model import PoolConfig
from paceline import Client, GenerateOptions, Stats
from tests.cluster_faults.killing import PROMPT, client_of, config_of, eventually
from tests.held_ports import held_port
from tests.k8s.chart import CHART, ROOT, render
from tests.tiny import make_tiny_checkpoint

pytestmark = [pytest.mark.ray, pytest.mark.release]


def test_what_the_chart_renders_answers_the_request_of_helm_test() -> None:
    """Needs root, as all namespaces do."""
    # A short path: Ray's sockets are in it.
    with tempfile.TemporaryDirectory(prefix="pl-pod-") as name:
        folder = Path(name)
        model = str(make_tiny_checkpoint(folder / "model"))
        target = {"model": model, "kv_memory": "8MiB", "threads": 1}
        drafters = [{"kind": "model", "model": model, "threads": 1}]
        config = json.dumps({"target": target, "drafters": drafters})
        values = ("--values", CHART / "examples/cpu-demo.yaml", "--set-json", f"config={config}")
        (folder / "rendered.json").write_text(json.dumps(render(*values)))
        pod = subprocess.run(
            (
                *("unshare", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"),
                *(sys.executable, "-m", "tests.k8s.pod", str(folder)),
            ),
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=600,
        )
        log = folder / "ray.log"
        assert pod.returncode == 0, pod.stderr + (log.read_text() if log.exists() else "")
        assert pod.stdout.strip()


def test_the_pool_that_the_chart_renders_drafts(ray_address: str, tmp_path: Path) -> None:
    target = make_tiny_checkpoint(tmp_path / "target")
    drafter = make_tiny_checkpoint(tmp_path / "drafter")
    with held_port() as port:
        values = f"drafterPool.enabled=true,drafterPool.model={drafter},drafterPool.port={port}"
        (deployment,) = [one for one in render("--set", values) if one["kind"] == "Deployment"]
        (container,) = deployment["spec"]["template"]["spec"]["containers"]
        environment = {one["name"]: one["value"] for one in container["env"]}
        python, *arguments = container["command"]
        assert python == "python"
        with subprocess.Popen(
            (sys.executable, *arguments),
            cwd=ROOT,
            env=os.environ | environment | {"PACELINE_HOME": str(tmp_path)},
            stdout=subprocess.PIPE,
        ) as process:
            assert process.stdout is not None
            try:
                assert process.stdout.readline().strip().endswith(f":{port}".encode())
                pool = PoolConfig(addresses=(f"127.0.0.1:{port}",))
                config = config_of(target).model_copy(update={"drafters": (), "pool": pool})
                with client_of(config, tmp_path) as client:
                    eventually(lambda: any(one.shares for one in _drafted(client).workers))
            finally:
                process.kill()


def _drafted(client: Client) -> Stats:
    """The statistics after a request."""
    client.generate(PROMPT, GenerateOptions(max_tokens=16, policy="lockstep", ignore_eos=True))
    return client.stats()
