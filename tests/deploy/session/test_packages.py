"""Which packages a command or a job looks for before it imports any."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

from deploy.session.packages import SERVER_PACKAGES, missing_packages

ROOT = Path(__file__).resolve().parents[3]


def test_all_that_the_server_declares_is_looked_for() -> None:
    declared = tomllib.loads((ROOT / "paceline-server/pyproject.toml").read_text())["project"]
    names = {re.split(r"[\[<>=~! ]", one)[0] for one in declared["dependencies"]} - {"paceline"}
    # "google" is a namespace of several distributions.
    found = {**packages_distributions(), "google.rpc": ["googleapis-common-protos"]}
    covered = {_plain(one) for name in SERVER_PACKAGES for one in found[name]}
    assert covered >= set(map(_plain, names))
    assert missing_packages() == []


def _plain(name: str) -> str:
    return name.lower().replace("_", "-")


def test_a_python_without_them_names_them_all(tmp_path: Path) -> None:
    asked = subprocess.run(
        (sys.executable, "-I", "-S", "-c", _ASK),
        capture_output=True,
        text=True,
        check=True,
        env={"ROOT": str(ROOT)},
        cwd=tmp_path,
    )
    # pip may be in the standard library's folder.
    assert set(asked.stdout.split()) >= set(SERVER_PACKAGES) - {"pip"}


_ASK = """
import os, sys
sys.path.insert(0, os.environ["ROOT"])
from deploy.session.packages import missing_packages
print(*missing_packages())
"""
