"""`paceline distill`: a drafter and its report, and errors of one line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny import make_tiny_checkpoint
from workers.engine.load.checkpoint import inspect_checkpoint

ROOT = Path(__file__).resolve().parents[3]


def distill(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "deploy.cli", "distill", *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("models") / "target")


def test_a_drafter_is_made_with_a_report(target: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    rows = [{"prompt": "The quick brown"}, {"question": "How far is it?"}, {"turns": ["Hello"]}]
    prompts.write_text("\n".join(map(json.dumps, rows)))
    out = tmp_path / "drafter"
    small = ("--hours", "0.001", "--layers", "1", "--head", "300", "--length", "32")
    done = distill(str(target), str(out), "--prompts", str(prompts), *small)
    assert done.returncode == 0, done.stderr
    for part in ("position", "accepted", "a pass:", "expected:"):
        assert part in done.stdout
    report = json.loads((out / "report.json").read_text())
    assert report["draft_ms"] > 0
    assert len(report["accepted"]) == 8
    mine, theirs = inspect_checkpoint(out), inspect_checkpoint(target)
    assert mine.vocabulary_digest == theirs.vocabulary_digest
    assert len(json.loads((out / "draft_tokens.json").read_text())) == 300

    refused = distill(str(target), str(out), "--prompts", str(prompts), "--layers", "2")
    assert refused.returncode == 2
    [line] = refused.stderr.splitlines()[-1:]
    assert line.startswith("error: ")
    assert "a student is smaller" in line
    prompts.write_text('{"prompt": 1}')
    malformed = distill(str(target), str(out), "--prompts", str(prompts))
    assert malformed.returncode == 2
    assert "prompts.jsonl:1:" in malformed.stderr
