"""scripts/verify_all.sh and the total that it ends with."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.deploy.conftest import ROOT


def report(name: str, *, divergences: int = 0, ties: int = 0, peer: bool = False) -> dict[str, Any]:
    run = {"tokens": 100, "ties": ties, "divergences": [{}] * (divergences + ties)}
    plain = {"tokens": 100, "ties": 0, "divergences": [], "failed_rows": []}
    transformers = {
        "tokens": 100,
        "ties": 1,
        "divergences": [{}],
        "rows_with_other_prompt_tokens": [],
    }
    return {
        "files": [
            {
                "input": name,
                "rows": 20,
                "runs": [plain, run | {"failed_rows": []}],
                "transformers": transformers if peer else None,
            }
        ]
    }


def totalled(folder: Path) -> tuple[int, dict[str, int]]:
    done = subprocess.run(
        [sys.executable, "scripts/verify_total.py", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    pairs = (line.split(": ") for line in done.stdout.splitlines())
    return done.returncode, {name: int(count) for name, count in pairs}


def test_the_total_counts_a_prompt_once_and_ties_apart(tmp_path: Path) -> None:
    (tmp_path / "a.0.json").write_text(json.dumps(report("a", ties=2, peer=True)))
    (tmp_path / "a.1.json").write_text(json.dumps(report("a")))
    (tmp_path / "b.0.json").write_text(json.dumps(report("b")))
    code, counts = totalled(tmp_path)
    assert code == 0
    assert counts == {
        "prompts": 40,
        "runs": 6,
        "tokens": 600,
        "divergences": 0,
        "ties": 2,
        "failed rows": 0,
        "transformers tokens": 100,
        "transformers divergences": 0,
        "transformers ties": 1,
    }
    (tmp_path / "b.1.json").write_text(json.dumps(report("b", divergences=1)))
    code, counts = totalled(tmp_path)
    assert (code, counts["divergences"]) == (1, 1)


def test_a_folder_without_prompts_is_exit_2_before_anything_starts(tmp_path: Path) -> None:
    for arguments in ([], [str(tmp_path)], [str(tmp_path), str(tmp_path / "results")]):
        done = subprocess.run(
            ["sh", "scripts/verify_all.sh", *arguments],
            cwd=ROOT,
            env=os.environ | {"PACELINE_HOME": str(tmp_path / "home")},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 2
        assert len(done.stderr.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []
