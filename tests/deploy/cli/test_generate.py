"""`paceline generate`: rows in, rows out, in order. What is wrong is reported before it starts."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from cluster.config.load import load_config
from deploy.session.record import ClusterRecord, write_record
from paceline import Client, GenerateOptions, Message
from tests.deploy.conftest import Call, Served, becomes_true
from tests.deploy.shell import ROOT

ROWS = [
    {"id": "one", "prompt": "The quick brown fox"},
    {"id": 2, "question": "What is a train?"},
    {"turns": ["Write a poem.", "Another."], "category": "writing"},
    {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]},
]
FIELDS = {
    "index",
    "prompt_token_ids",
    "token_ids",
    "text",
    "finish_reason",
    "steps",
    "drafted",
    "accepted",
    "acceptance_length",
    "seconds",
    "ttft_seconds",
    "speculation",
}


def write_rows(path: Path, rows: list[Any]) -> Path:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(lines) + "\n")
    return path


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def input_file(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "in.jsonl", ROWS)


def test_rows_come_back_in_order_with_their_ids(
    call: Call, served: Served, input_file: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out.jsonl"
    flags = ("--max-tokens", 12, "--temperature", 1, "--seed", 5, "--concurrency", 3)
    done = call(
        *("generate", "--server", served.address, "--config", served.config),
        *("--input", input_file, "--output", output, *flags),
    )
    assert done.code == 0, done.stderr
    rows = read(output)
    assert [row["index"] for row in rows] == [0, 1, 2, 3]
    assert [row.get("id") for row in rows] == ["one", 2, None, None]
    assert set(rows[2]) == FIELDS
    assert done.stdout.startswith("4 rows, ")
    assert "acceptance length" in done.stdout
    # Row i is the request with seed 5 + i, whatever its neighbors.
    with Client(served.address) as client:
        alone = client.generate(
            [Message("user", "Write a poem.")],
            GenerateOptions(temperature=1.0, seed=7, max_tokens=12, policy="off"),
        )
    assert tuple(rows[2]["token_ids"]) == alone.token_ids
    assert tuple(rows[2]["prompt_token_ids"]) == alone.prompt_token_ids
    assert rows[2]["text"] == alone.text
    assert rows[2]["acceptance_length"] == len(rows[2]["token_ids"]) / rows[2]["steps"]
    drafting = rows[2]["speculation"]
    assert sum(drafting["accepted_at"]) == rows[2]["accepted"]
    assert drafting["proposed"] >= drafting["used"] >= rows[2]["accepted"]
    assert 0 <= drafting["target_idle"] <= 1
    # There is none if no draft's time fell between a row's first token and its last.
    assert drafting["efficiency"] is None or drafting["efficiency"] > 0


def test_a_rule_that_does_not_fit_fails_the_rows_with_both_names(
    call: Call, served: Served, input_file: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out.jsonl"
    done = call(
        *("generate", "--server", served.address, "--input", input_file, "--output", output),
        *("--verification", "one-hot"),
    )
    assert done.code == 1
    assert all("'one-hot'" in row["error"] and "'model'" in row["error"] for row in read(output))


def test_limit_takes_the_first_rows(
    call: Call, served: Served, input_file: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out.jsonl"
    done = call(
        *("generate", "--server", served.address, "--input", input_file, "--output", output),
        *("--limit", 2, "--max-tokens", 2),
    )
    assert done.code == 0, done.stderr
    assert [row["id"] for row in read(output)] == ["one", 2]


def test_bad_rows_are_named_by_line_and_the_others_run(
    call: Call, served: Served, tmp_path: Path
) -> None:
    too_long = {"prompt": "word " * 2000}
    rows = [ROWS[0], "{not json", {"id": "none"}, too_long, ROWS[1]]
    source = write_rows(tmp_path / "in.jsonl", rows)
    output = tmp_path / "out.jsonl"
    done = call(
        *("generate", "--server", served.address, "--input", source, "--output", output),
        *("--max-tokens", 3),
    )
    assert done.code == 1
    started, *named, wrote = done.stderr.splitlines()
    assert started == (
        f"generating: 5 rows of {source} on the server at {served.address}, 1 request at a time"
    )
    assert wrote.startswith(f"wrote {output} after ")
    places = [f"error: {source}:{line}: " for line in (2, 3, 4)]
    assert [line.startswith(place) for line, place in zip(named, places, strict=True)] == [True] * 3
    assert "4: prompt: it has" in named[2]
    quiet = call(
        *("generate", "--server", served.address, "--input", source, "--output", output),
        *("--max-tokens", 3, "--quiet"),
    )
    assert quiet.stderr.splitlines() == named
    answers = read(output)
    assert [row["finish_reason"] == "error" for row in answers] == [False, True, True, True, False]
    assert set(answers[3]) == FIELDS | {"error"}
    assert "3 rows failed" in done.stdout


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (("--temperature", "nan"), "temperature"),
        (("--temperature", "-0.5"), "temperature"),
        (("--top-p", "0"), "top-p"),
        (("--top-k", "-1"), "top-k"),
        (("--window", "0"), "window"),
        (("--window", "65"), "window"),
        (("--concurrency", "0"), "concurrency"),
        (("--limit", "0"), "limit"),
        (("--max-tokens", "0"), "max-tokens"),
        (("--seed", "-1"), "seed"),
        (("--policy", "warp"), "policy"),
        (("--verification", "dice"), "verification"),
        (("--verification", "rejection", "--branches", "2"), "branches"),
        (("--branches", "9"), "branches"),
        (("--branches", "3", "--window", "2"), "branches"),
        (("--stopping", "never"), "stopping"),
        (("--drafter", "oracle"), "drafter"),
        (("--drafter", "ngram", "--verification", "kseq"), "verification: the rule 'kseq'"),
        (("--merge", "--policy", "pearl"), "merge: the policy 'pearl' cannot merge drafters"),
        (("--merge", "--drafter", "model"), "merge: drafters of every kind are merged; leave out"),
        (("--input", "/nowhere/in.jsonl"), "input"),
        (("--output", "/nowhere/out.jsonl"), "output"),
        (("--output", "/"), "output"),
        (("--config", "/nowhere/paceline.toml"), "no such file"),
    ],
)
def test_bad_flags_are_one_line_and_exit_2_before_anything_starts(
    call: Call, input_file: Path, tmp_path: Path, flags: tuple[str, ...], named: str
) -> None:
    output = tmp_path / "out.jsonl"
    # No server is there. If it were asked first, the exit code would be 3.
    done = call(
        *("generate", "--server", "127.0.0.1:1", "--input", input_file, "--output", output), *flags
    )
    assert done.code == 2
    assert named in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl"]


def test_the_input_is_not_overwritten(call: Call, input_file: Path) -> None:
    before = input_file.read_text()
    link = input_file.with_name("link.jsonl")
    link.symlink_to(input_file)
    done = call("generate", "--server", "127.0.0.1:1", "--input", input_file, "--output", link)
    assert (done.code, input_file.read_text()) == (2, before)
    assert done.stderr.strip() == "error: output: is the input file; name another one"


@pytest.mark.parametrize(
    "server",
    [
        *("", "here", "8001", ":8001", "here:", "here:port", "here:0", "here:65536", "here:-1"),
        *("http://here:8001", "::1:8001", "here:8001:8002", "here: 8001", "here:" + "9" * 5000),
    ],
)
def test_a_malformed_server_is_exit_2_before_anything_starts(
    call: Call, input_file: Path, tmp_path: Path, server: str
) -> None:
    output = tmp_path / "out.jsonl"
    done = call("generate", "--server", server, "--input", input_file, "--output", output)
    assert done.code == 2
    assert "server: expected HOST:PORT such as 127.0.0.1:8001" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not output.exists()


@pytest.mark.parametrize("server", ["localhost:1", "127.0.0.1:1", "[::1]:1"])
def test_a_server_that_is_well_formed_is_looked_for(
    call: Call, input_file: Path, tmp_path: Path, server: str
) -> None:
    output = tmp_path / "out.jsonl"
    done = call("generate", "--server", server, "--input", input_file, "--output", output)
    assert done.code == 3


def test_an_absent_server_is_exit_3_and_leaves_no_file(
    call: Call, input_file: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out.jsonl"
    output.write_text("of an earlier run\n")
    done = call(*("generate", "--server", "127.0.0.1:1", "--input", input_file, "--output", output))
    assert done.code == 3
    assert "127.0.0.1:1" in done.stderr
    assert output.read_text() == "of an earlier run\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_no_file_and_no_sequence(
    served: Served, tmp_path: Path, number: signal.Signals
) -> None:
    rows = [{"prompt": f"Number {number}"} for number in range(400)]
    source = write_rows(tmp_path / "in.jsonl", rows)
    command = subprocess.Popen(
        [
            *(sys.executable, "-m", "deploy.cli", "generate", "--server", served.address),
            *("--input", str(source), "--output", str(tmp_path / "out.jsonl")),
            *("--max-tokens", "200", "--concurrency", "2"),
        ],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
        # If the tests run in the background, ignored interrupts are inherited.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    with command, Client(served.address) as client:
        while not client.stats().sequences_running:
            assert command.poll() is None
            time.sleep(0.02)
        command.send_signal(number)
        _, stderr = command.communicate(timeout=120)
        assert command.returncode == 128 + number, stderr
        assert "Traceback" not in stderr
        assert becomes_true(lambda: client.stats().sequences_running == 0)
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_a_running_cluster_that_is_not_used_is_named(
    call: Call, served: Served, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Another server that answers may have another model, so `--quiet` does not hide this."""
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))
    running = load_config(served.config, {})
    write_record(
        tmp_path,
        ClusterRecord("paceline", served.address, running.deployment(), "127.0.0.1:1", None, ""),
    )
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "x"}\n')
    files = ("--input", source, "--output", output, "--max-tokens", "2")
    same = call("generate", "--config", served.config, *files)
    assert (same.code, "not used" in same.stderr) == (0, False)

    other = tmp_path / "other.toml"
    other.write_text('[target]\nmodel = "/absent"\nthreads = 3\n[[drafters]]\nkind = "ngram"\n')
    done = call("generate", "--config", other, *files, "--quiet")
    [note] = [line for line in done.stderr.splitlines() if line.startswith("note: ")]
    assert f"at {served.address} is not used" in note
    assert f"target.model: '{served.checkpoint}' there, '/absent' here" in note
    assert "target.threads: 'auto' there, 3 here" in note
    assert "drafters[0].kind: 'model' there, 'ngram' here" in note
    assert f"--server {served.address}" in note
    assert done.code == 2  # a private one cannot be started: there is no such checkpoint
