"""`paceline bench` in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.deploy.shell import ROOT


def figure(details: Mapping[str, object], name: str) -> float:
    """A number among the details of a row."""
    value = details[name]
    assert isinstance(value, int | float)
    return value


def run_bench(
    suite: str, config: Path, folder: Path, *arguments: str | Path
) -> tuple[list[dict[str, Any]], str]:
    """Run a suite. Returns the rows of its JSON, which is written to `folder`, and its output."""
    found = folder / "found.json"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "deploy.cli", "bench", suite, "--config", config),
            *("--json", found, *arguments),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    rows: list[dict[str, Any]] = json.loads(found.read_text())["rows"]
    return rows, done.stdout
