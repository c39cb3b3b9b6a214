"""`paceline bench` in a process of its own."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from cluster.config.model import Config
from deploy.bench.harness import Asked, Document
from tests.deploy.shell import ROOT


def shown_by(show: Callable[[Console, Document], None], document: Document) -> str:
    """What a suite prints, whose lines have at most 80 columns."""
    stream = io.StringIO()
    show(Console(file=stream, width=80), document)
    assert max(map(len, stream.getvalue().splitlines())) <= 80
    return stream.getvalue()


def asked_of(folder: Path, config: Config | None = None, **flags: Any) -> Asked:
    """What a suite is asked, with its files in `folder`. It tells and saves nothing."""
    usual = {"inputs": (), "tell": lambda line: None, "save": lambda document: None}
    return Asked(config or Config(), folder, folder, **{**usual, **flags})


def run_here(*command: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a command in the repository, whatever its exit code."""
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)


def run_bench(
    suite: str, config: Path, folder: Path, *arguments: str | Path
) -> tuple[list[dict[str, Any]], str]:
    """Run a suite. Returns the rows of its JSON, which is written to `folder`, and its output."""
    found = folder / "found.json"
    done = run_here(
        *(sys.executable, "-m", "deploy.cli", "bench", suite, "--config", config),
        *("--json", found, *arguments),
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(found.read_text())
    assert document["suite"] == suite
    rows: list[dict[str, Any]] = document["rows"]
    return rows, done.stdout
