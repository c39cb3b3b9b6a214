"""A job in a Python without paceline-server says what to do, on one line."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.deploy.shell import ROOT


@pytest.mark.parametrize("module", ["deploy.jobs.serve", "deploy.jobs.batch"])
def test_missing_packages_are_named(empty_python: Path, module: str) -> None:
    ended = subprocess.run(
        [empty_python, "-m", module], cwd=ROOT, env={}, capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 2
    [line] = ended.stderr.splitlines()
    assert line.startswith(f"error: {empty_python} lacks typer, rich, ")
    assert f"/path/to/.venv/bin/python -m {module}" in line
