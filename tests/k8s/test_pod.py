"""The commands, ports, probes and configuration of the chart, started as plain processes."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.k8s.chart import CHART, ROOT, render
from tests.tiny import make_tiny_checkpoint

pytestmark = [pytest.mark.ray, pytest.mark.long]


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
