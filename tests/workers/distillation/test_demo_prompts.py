"""The prompts of `demo-draft` have no text of the benchmarks that it is measured on."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from workers.models.catalog import default_home, resolve_model

ROOT = Path(__file__).resolve().parents[3]
BENCHMARKS = os.environ.get("PACELINE_BENCHMARKS")
"""A folder of JSON lines with `prompt`, `question` or `turns`. They are not in the repository."""
RUN = 10
"""Words in a row that count as the same text, unless they are numbers."""


def runs_of(text: str) -> set[tuple[str, ...]]:
    words = re.findall(r"\w+", text.lower())
    runs = {tuple(words[at : at + RUN]) for at in range(len(words) - RUN + 1)}
    return {run for run in runs if not all(word.isdigit() for word in run)}


@pytest.mark.demo_model
@pytest.mark.long
@pytest.mark.skipif(BENCHMARKS is None, reason="PACELINE_BENCHMARKS names no folder")
def test_no_prompt_has_text_of_a_benchmark(tmp_path: Path) -> None:
    assert BENCHMARKS is not None
    out = tmp_path / "prompts.npz"
    script = [sys.executable, "scripts/demo_draft_prompts.py", str(out)]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run(script, cwd=ROOT, env=environ, check=True, timeout=600)
    folder = resolve_model("demo", home=default_home(os.environ)).folder
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    with np.load(out) as stored:
        parts = np.split(stored["token_ids"], np.cumsum(stored["lengths"])[:-1])
    ours: set[tuple[str, ...]] = set()
    for part in parts:
        ours |= runs_of(tokenizer.decode(part.tolist()))
    theirs = 0
    for path in Path(BENCHMARKS).glob("*.jsonl"):
        for line in path.read_text().splitlines():
            row = json.loads(line)
            text = row.get("prompt") or row.get("question") or " ".join(row["turns"])
            found = runs_of(text)
            theirs += len(found)
            assert not found & ours, (path.name, found & ours)
    assert theirs > 1000
