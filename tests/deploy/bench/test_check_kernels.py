"""A dry run of scripts/check_kernels: its cases run, and the interpreter finds nothing wrong."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton")

from scripts.check_kernels.cases import Case, run, verdict
from tests.deploy.bench.benches import run_here


def check_kernels(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run_here(sys.executable, "-m", "scripts.check_kernels", *arguments)


@pytest.mark.release
@pytest.mark.parametrize(
    ("check", "last"), [("attention", "trees"), ("layers", "qwen3"), ("choice", "time top-k")]
)
def test_a_dry_run_finds_nothing_wrong(check: str, last: str) -> None:
    done = check_kernels(check, "--cpu")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("dry run on a CPU")
    assert lines[-1].startswith(last)


def test_what_is_wrong_or_fails_is_said_and_hides_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail() -> str:
        raise RuntimeError("no such page")

    device = torch.device("cpu")
    good = Case("sums", lambda: verdict(True, "equal"))
    bad = Case("norms", lambda: f"of 64 rows; {verdict(False, 'equal')}; 3 us")
    assert run([good, good], device) == 0
    assert run([bad, good], device) == 1
    capsys.readouterr()
    assert run([good, Case("heads", fail), good], device) == 1
    lines = capsys.readouterr().out.splitlines()[1:]
    assert [line.split("[")[0] for line in lines] == [
        "sums: equal ",
        "heads: FAILED RuntimeError: no such page ",
        "sums: equal ",
    ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_what_it_needs() -> None:
    done = check_kernels("attention")
    assert done.returncode == 2
    assert "needs a CUDA device" in done.stderr
    assert "--cpu" in done.stderr
