"""Frequent commands start fast: they do not import torch, ray or transformers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from deploy.cli.app import COMMANDS, load_command

_ROOT = Path(__file__).resolve().parents[3]
_RUN = """
import sys
from deploy.cli.__main__ import main
try:
    main()
except SystemExit as end:
    code = end.code
print("LOADED", code, *sorted({"torch", "ray", "transformers"} & set(sys.modules)))
"""
_HELP = _RUN.replace('"torch", "ray", "transformers"', '"numpy", "pydantic", "grpc", "cluster"')
_NOBODY = "127.0.0.1:9"
_SMALL = "--requests 4 --prompt-tokens 8 --output-tokens 4 --policies fanout --ratios 1:1"


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("--help", 0),
        ("plan --help", 0),
        (f"plan {_SMALL}", 0),
        ("trace --help", 0),
        (f"trace --server {_NOBODY} --output none.json", 3),
        (f"generate --server {_NOBODY} --input deploy/prompts/default.jsonl --output none", 3),
    ],
)
def test_no_heavy_package_is_imported(line: str, code: int) -> None:
    assert _loaded_by(_RUN, line) == f"LOADED {code}"


def test_the_help_imports_no_command() -> None:
    assert _loaded_by(_HELP, "--help") == "LOADED 0"


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_says_of_a_command_what_its_own_says(name: str) -> None:
    own = load_command(name, {}).help
    assert " ".join(own.split("\n\n")[0].split()) == COMMANDS[name]


def _loaded_by(program: str, line: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program, *line.split()],
        cwd=_ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    return done.stdout.splitlines()[-1] if done.stdout else done.stderr
