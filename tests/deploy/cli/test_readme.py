"""The README's Python example runs as it is printed."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap

from tests.deploy.conftest import Served
from tests.deploy.shell import ROOT


def test_the_python_example_prints_a_text_that_ends_soon(served: Served) -> None:
    found = re.search(r"(?m)^    from paceline import .*\n(?:(?:    .*)?\n)+", _readme())
    assert found is not None
    example = textwrap.dedent(found[0])
    assert "max_tokens=64" in example
    done = subprocess.run(
        [sys.executable, "-c", example.replace("127.0.0.1:8001", served.address)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def _readme() -> str:
    return (ROOT / "README.md").read_text(encoding="utf-8")
