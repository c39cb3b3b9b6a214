"""scripts/gpu_check.sh: it goes on after a failure, ends what hangs, resumes, and has a dry run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.gpu_check.__main__ import Checks, Step, missing_of, steps
from tests.deploy.bench.benches import run_here
from tests.deploy.shell import ROOT
from workers.emulated.latency_profiles import read_profile


def step(name: str, code: str, *, seconds: int = 20, needs: tuple[str, ...] = ()) -> Step:
    return Step(name, ("-c", code, "{figures}"), ("-c", "pass"), seconds, needs)


WRITES = "import sys, pathlib; pathlib.Path(sys.argv[1]).write_text('[7]'); print('hello')"


def read(folder: Path) -> dict[str, dict[str, object]]:
    document = json.loads((folder / "gpu_check.json").read_text())
    assert document["dry_run"] is False
    found: dict[str, dict[str, object]] = document["steps"]
    return found


def test_each_step_has_a_status_whatever_happens_to_it(tmp_path: Path) -> None:
    checks = Checks(tmp_path, dry_run=False)
    for one in (
        step("good", WRITES),
        step("bad", "raise SystemExit('no such page')"),
        step("hangs", f"{WRITES}; import time; time.sleep(60)", seconds=1),
        step("needs", WRITES, needs=("json", "no_such_package.part")),
    ):
        checks.run(one)
    checks.leave_out(step("many", WRITES), "needs 2 GPUs, there are 1")
    found = read(tmp_path)
    assert [(name, one["status"]) for name, one in found.items()] == [
        ("good", "done"),
        ("bad", "failed"),
        ("hangs", "failed"),
        ("needs", "not run"),
        ("many", "not run"),
    ]
    assert found["good"]["figures"] == [7]
    assert found["good"]["output"] == ["hello"]
    assert found["bad"]["why"] == "exit code 1: no such page"
    assert found["hangs"]["why"] == "ended after 1 s"
    assert found["hangs"]["figures"] == [7], "what it wrote before is kept"
    assert found["needs"]["why"] == "missing: no_such_package.part"
    assert "=== hangs" in (tmp_path / "gpu_check.log").read_text()


def test_it_resumes_with_what_has_no_result(tmp_path: Path) -> None:
    chosen = [step("bad", "raise SystemExit(1)"), step("good", WRITES), step("later", WRITES)]
    checks = Checks(tmp_path, dry_run=False)
    for one in chosen[:2]:
        checks.run(one)
    again = Checks(tmp_path, dry_run=False)
    assert [one.name for one in again.pending(chosen)] == ["later", "bad"]
    # A dry run proves nothing about a GPU.
    assert len(Checks(tmp_path, dry_run=True).pending(chosen)) == 3


def test_its_modules_are_named_as_they_are_imported() -> None:
    """Each step's needs are there in the environment that the tests need."""
    assert missing_of([module for one in steps() for module in one.needs]) == []
    assert missing_of(["no_such_package", "json.no_such_part"]) == [
        "no_such_package",
        "json.no_such_part",
    ]


def gpu_check(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Without a `.venv` in its folder the script takes the first Python on PATH: here, this one."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return run_here("env", f"PATH={path}", "bash", "scripts/gpu_check.sh", *arguments)


def test_its_files_are_few() -> None:
    """All that must be copied to a machine with a GPU."""
    done = run_here("git", "ls-files", "-z")
    assert done.returncode == 0
    paths = [ROOT / name for name in done.stdout.split("\0") if name]
    assert sum(path.stat().st_size for path in paths if path.is_file()) < 40 << 20


def test_an_unknown_step_is_refused() -> None:
    done = gpu_check("--only", "z")
    assert done.returncode == 2
    assert "expected some of machine, a-layers" in done.stderr


@pytest.mark.release
def test_a_dry_run_measures_tiny_shapes(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    done = gpu_check(
        "--cpu",
        "--out",
        str(tmp_path),
        "--only",
        "machine",
        "c",
        "e-replay-8b",
        "e-loading",
        "f",
        "h-meeting-1b",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "gpu_check.json").read_text())["steps"]
    assert {one["status"] for one in found.values()} == {"done"}
    for name, part in (
        ("c-8b", "gpu, context 40"),
        ("c-8b-fp8-kv", "gpu, fp8 KV, context 40"),
        ("c-8b-fp8-weights", "gpu, float8 weights, context 40"),
    ):
        rows = found[name]["figures"]["rows"]
        assert [(row["part"], row["name"]) for row in rows] == [
            (part, "off"),
            (part, "verify 8"),
        ] * 2
        assert all(row["same_text_in_windows"] for row in rows)
    assert found["e-replay-8b"]["figures"]["batch 1 window 0"]["by_name"]
    written = tmp_path / "profile.toml"
    written.write_text(found["f-profile-8b"]["figures"])
    assert "Measured by" in read_profile(written, name="tiny").source
    assert found["e-loading"]["figures"]["gb_per_second"]["as stored"] > 0
    meetings = found["h-meeting-1b"]["figures"]
    for name in ("first meeting", "second meeting"):
        assert meetings[name]["same_bits"] is True
        assert meetings[name]["after_an_abort"].startswith("refused")
