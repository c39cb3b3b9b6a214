"""Processes of benches: what they started ends with them."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from deploy.bench import processes
from deploy.bench.processes import LineProcess

HANGS = """\
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print('{"child": %d}' % child.pid, flush=True)
time.sleep(600)
"""


def test_a_process_that_does_not_end_is_killed_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that loads reads nothing, and has started processes of its own."""
    monkeypatch.setattr(processes, "_END_SECONDS", 0.1)
    (tmp_path / "hangs.py").write_text(HANGS)
    environ = {"PYTHONPATH": str(tmp_path)}
    with LineProcess("hangs", (), log=tmp_path / "log", environ=environ) as process:
        child = psutil.Process(process.ask({})["child"])
        assert child.is_running()
    assert process.process.poll() is not None
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
