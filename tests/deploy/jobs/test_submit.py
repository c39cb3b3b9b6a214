"""The documented jobs on a real head with its dashboard. The API tells how a job ended."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from deploy.session.ray_head import is_listening
from paceline import Client, GenerateOptions
from tests.deploy.conftest import Call, becomes_true
from tests.deploy.jobs.submitting import Head, head_with_dashboard, processes_with
from tests.deploy.shell import tiny_config

pytestmark = [pytest.mark.ray, pytest.mark.release]

NUM_ROWS = 120


@pytest.fixture(scope="module")
def head() -> Iterator[Head]:
    with head_with_dashboard() as head:
        yield head


def environment(home: Path, **more: str) -> dict[str, object]:
    return {"env_vars": {"PACELINE_HOME": str(home)} | more}


def write_rows(path: Path) -> Path:
    rows = [
        {
            "custom_id": f"row-{index}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"prompt": f"Row {index}", "max_tokens": 48, "temperature": 1.0, "n": 2},
        }
        for index in range(NUM_ROWS)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_batch_that_is_killed_and_submitted_again_yields_the_same_bytes(
    head: Head, tmp_path: Path, call: Call
) -> None:
    config, source = tiny_config(tmp_path), write_rows(tmp_path / "in.jsonl")
    output = tmp_path / "out.jsonl"
    journal = tmp_path / "out.jsonl.journal"
    command = (
        *("python", "-m", "deploy.jobs.batch", "--config", str(config)),
        *("--input", str(source), "--output", str(output), "--concurrency", "16"),
    )
    job = head.submit(*command, runtime_env=environment(tmp_path / "home"))
    assert becomes_true(lambda: journal.exists() and journal.stat().st_size > 15_000), head.log(job)
    [driver] = processes_with("deploy.jobs.batch", str(output))
    driver.send_signal(signal.SIGKILL)
    told = head.end_of(job)
    assert told["status"] == "FAILED", told
    assert not output.exists()

    again = head.submit(*command, runtime_env=environment(tmp_path / "home"))
    told = head.end_of(again)
    assert told["status"] == "SUCCEEDED", head.log(again)
    found = re.search(r"of which (\d+) are in", head.log(again))
    assert found is not None, head.log(again)
    assert 0 < int(found[1]) < NUM_ROWS
    assert f"{NUM_ROWS} of {NUM_ROWS} rows after" in head.log(again)

    # The same rows from the shell, on a server that runs, one after the other.
    serving = head.submit(
        *("python", "-m", "deploy.jobs.serve", str(config)),
        runtime_env=environment(tmp_path / "home"),
    )
    whole = tmp_path / "whole.jsonl"
    done = call(
        *("batch", "--server", address_of(head, serving), "--config", config),
        *("--input", source, "--output", whole, "--concurrency", 64),
    )
    assert done.code == 0, done.stderr
    assert whole.read_bytes() == output.read_bytes()
    head.stop(serving)
    assert head.end_of(serving)["status"] == "STOPPED"


def address_of(head: Head, job: str) -> str:
    """Where the serving job serves, once it does."""
    pattern = re.compile(r"^serving: gRPC at (\S+)$", re.MULTILINE)
    assert becomes_true(lambda: pattern.search(head.log(job))), head.log(job)
    found = pattern.search(head.log(job))
    assert found is not None
    return found[1]


def num_sequences(client: Client) -> int:
    """How many the server has, running or waiting."""
    stats = client.stats()
    return stats.sequences_running + stats.sequences_waiting


def test_a_serving_job_that_is_stopped_ends_running_requests_first(
    head: Head, tmp_path: Path
) -> None:
    job = head.submit(
        *("python", "-m", "deploy.jobs.serve", str(tiny_config(tmp_path)), "--drain", "50"),
        runtime_env=environment(tmp_path / "home", RAY_JOB_STOP_WAIT_TIME_S="60"),
    )
    address = address_of(head, job)
    options = GenerateOptions(max_tokens=480, ignore_eos=True, policy="off")
    with ThreadPoolExecutor(16) as pool, Client(address) as client:
        running = [pool.submit(client.generate, f"hello {i}", options) for i in range(16)]
        assert becomes_true(lambda: num_sequences(client) == 16)
        head.stop(job)
        lengths = [len(one.result(timeout=120).token_ids) for one in running]
    assert lengths == [480] * 16
    assert head.end_of(job)["status"] == "STOPPED"
    assert "ending: running requests have 50 s" in head.log(job)
    assert "cut off" not in head.log(job)
    assert becomes_true(lambda: not is_listening(address))


def test_a_submission_without_the_token_is_refused(head: Head) -> None:
    stranger = replace(head, environment=head.environment | {"RAY_AUTH_MODE": "disabled"})
    with pytest.raises(subprocess.CalledProcessError) as caught:
        stranger.submit("python", "-c", "print(1)")
    assert b"token" in caught.value.stdout + caught.value.stderr


def test_a_job_of_a_python_without_our_packages_says_what_to_do(
    head: Head, empty_python: Path
) -> None:
    job = head.submit(str(empty_python), "-m", "deploy.jobs.serve")
    told = head.end_of(job)
    assert (told["status"], told["driver_exit_code"]) == ("FAILED", 2)
    assert f"error: {empty_python} lacks typer, " in head.log(job)
    assert "Traceback" not in head.log(job)
