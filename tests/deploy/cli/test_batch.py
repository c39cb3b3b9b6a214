"""`paceline batch`: exit codes, what it says, and what it refuses before it starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.conftest import Call, Served


def write(path: Path, *bodies: dict[str, Any]) -> Path:
    rows = [
        {"custom_id": str(index), "method": "POST", "url": "/v1/completions", "body": body}
        for index, body in enumerate(bodies)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


GOOD = {"prompt": "hello", "max_tokens": 3}


def test_rows_go_in_and_answers_come_out(call: Call, served: Served, tmp_path: Path) -> None:
    source, output = write(tmp_path / "in.jsonl", GOOD, GOOD), tmp_path / "out.jsonl"
    flags = ("--server", served.address, "--input", source, "--output", output)
    done = call("batch", *flags)
    assert done.code == 0, done.stderr
    assert done.stdout.startswith("2 of 2 rows after ")
    assert "tokens/s, acceptance length " in done.stdout
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert [line["custom_id"] for line in lines] == ["0", "1"]
    before = output.read_bytes()
    output.unlink()
    # Nothing is left to do, so no server is needed.
    done = call("batch", "--server", "127.0.0.1:9", *flags[2:])
    assert done.code == 0, done.stderr
    assert output.read_bytes() == before


def test_a_damaged_journal_is_reported_and_the_rest_is_redone(
    call: Call, served: Served, tmp_path: Path
) -> None:
    source, output = write(tmp_path / "in.jsonl", GOOD, GOOD, GOOD), tmp_path / "out.jsonl"
    flags = ("--server", served.address, "--input", source, "--output", output, "--quiet")
    assert call("batch", *flags, "--concurrency", "1").code == 0
    before, journal = output.read_bytes(), tmp_path / "out.jsonl.journal"
    damaged = bytearray(journal.read_bytes())
    place = damaged.index(b'"custom_id":"1"')
    damaged[place] ^= 1
    journal.write_bytes(damaged)
    output.unlink()
    done = call("batch", *flags)
    assert done.code == 0, done.stderr
    assert " bytes of " in done.stderr
    assert "are incomplete or damaged; 1 row before them are kept" in done.stderr
    assert output.read_bytes() == before


def test_failed_rows_are_named_and_in_the_output(
    call: Call, served: Served, tmp_path: Path
) -> None:
    bad = {"prompt": "hello", "temperature": -1}
    source, output = write(tmp_path / "in.jsonl", GOOD, bad), tmp_path / "out.jsonl"
    flags = ("batch", "--quiet", "--server", served.address, "--input", source)
    for _ in range(2):  # A second run answers from the journal, and reports the same.
        done = call(*flags, "--output", output)
        assert done.code == 1
        assert "1 row failed" in done.stdout
    done = call(*flags, "--output", tmp_path / "other")
    assert done.stderr.splitlines() == [
        f"error: {source}:2: temperature: expected a finite number of at least 0, got -1.0"
    ]
    codes = [
        json.loads(line)["response"]["status_code"] for line in output.read_text().splitlines()
    ]
    assert codes == [200, 400]


def test_the_model_has_the_name_that_the_bodies_use(
    call: Call, served: Served, tmp_path: Path
) -> None:
    source, output = write(tmp_path / "in.jsonl", GOOD | {"model": "mine"}), tmp_path / "out.jsonl"
    flags = ("--server", served.address, "--input", source, "--output", output)
    done = call("batch", *flags, "--served-model-name", "mine")
    assert done.code == 0, done.stderr
    assert json.loads(output.read_text())["response"]["body"]["model"] == "mine"
    done = call("batch", *flags, "--served-model-name", "other")
    assert done.code == 2
    assert "it is of the model mine, not of the model other" in done.stderr


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--seed", "-1"), "seed: expected 0 to 2^64 - 1, got -1"),
        (("--concurrency", "0"), "concurrency: expected an integer from 1 to 1024, got 0"),
        (("--journal", "none/j"), "journal: cannot write none/j"),
        (("--output", "none/out"), "output: cannot write "),
        (("--input", "none"), "input: cannot read none: No such file or directory"),
        (("--input", "empty"), "input: empty holds no row"),
        (("--input", "."), "input: . is not a regular file"),
        (("--output", "in.jsonl"), "output: is the input file"),
        (("--journal", "in.jsonl"), "journal: is the input file"),
        (("--journal", "out.jsonl"), "journal: is the output file"),
        (("--server", "nowhere"), "server: "),
    ],
)
def test_bad_usage_is_refused_before_anything_starts(
    call: Call,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    flags: tuple[str, ...],
    told: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "in.jsonl", GOOD)
    (tmp_path / "empty").write_text("\n")
    done = call("batch", "--input", "in.jsonl", "--output", "out.jsonl", *flags)
    assert done.code == 2
    assert done.stderr.splitlines()[-1].startswith(f"error: {told}"), done.stderr
    assert not (tmp_path / "out.jsonl").exists()
    assert write(tmp_path / "again", GOOD).read_bytes() == (tmp_path / "in.jsonl").read_bytes()
