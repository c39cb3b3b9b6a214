"""Logs of workers: their place, the parts of a line, their bounds, and a full disk."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest

from tests.small_disk import small_disk_at
from workers.process import logs
from workers.process.logs import BoundedFile, WorkerLog, new_run

ROOT = Path(__file__).resolve().parents[3]


def in_a_process(body: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a program whose first argument is the folder of a run."""
    opening = (
        "import logging, sys\nfrom pathlib import Path\n"
        "from workers.process.logs import WorkerLog\n"
        "log = WorkerLog(Path(sys.argv[1]), 'shard-0', takes_stderr=True)\nlog.open()\n"
    )
    return subprocess.run(
        [sys.executable, "-c", opening + body, *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
    )


def test_a_line_says_when_who_and_for_which_request(tmp_path: Path) -> None:
    in_a_process(
        "logging.getLogger('x').warning('too slow', extra={'request_id': 'a\\nb'})\n", tmp_path
    )
    [line] = (tmp_path / "shard-0.log").read_text().splitlines()
    assert line.endswith(r"WARNING shard-0 request=a\nb x: too slow")
    time.strptime(line.split(".")[0], "%Y-%m-%dT%H:%M:%S")


def test_a_json_line_says_the_same_and_stays_one_line(tmp_path: Path) -> None:
    in_a_process(
        "log = WorkerLog(Path(sys.argv[1]) / 'json', 'shard-0', is_json=True)\nlog.open()\n"
        "try: raise ValueError('a\\nb')\n"
        "except ValueError:\n"
        "    extra = {'request_id': 'a\\nb', 'fields': {'seconds': 0.5, 'odd': object}}\n"
        "    logging.getLogger('x').warning('too\\nslow', extra=extra, exc_info=True)\n",
        tmp_path,
    )
    [line] = (tmp_path / "json" / "shard-0.log").read_text().splitlines()
    told = json.loads(line)
    assert datetime.fromisoformat(told["time"]).tzinfo is not None
    assert told["level"] == "WARNING"
    assert told["process"] == "shard-0"
    assert told["logger"] == "x"
    assert told["message"] == "too\nslow"
    assert told["request_id"] == "a\nb"
    assert told["seconds"] == 0.5
    assert "ValueError: a\nb" in told["exception"]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("raise ValueError('the reason')", "ValueError: the reason"),
        (
            "import threading\n"
            "def fail(): raise ValueError('the reason')\n"
            "one = threading.Thread(target=fail)\none.start()\none.join()",
            "ValueError: the reason",
        ),
        ("import faulthandler\nfaulthandler._sigsegv()", "Segmentation fault"),
        ("import os\nos.write(2, b'terminate called')\nos.abort()", "terminate called"),
        ("import os\nos.abort()", "Aborted"),
    ],
)
def test_the_last_words_of_a_process_are_in_its_log(tmp_path: Path, body: str, said: str) -> None:
    in_a_process(body, tmp_path)
    assert said in (tmp_path / "shard-0.log").read_text()


def test_its_files_are_bounded(tmp_path: Path) -> None:
    handler = BoundedFile(tmp_path / "shard-0.log", file_bytes=10_000)
    try:
        for number in range(2_000):
            handler.emit(logging.makeLogRecord({"msg": f"line {number} {50 * 'x'}"}))
    finally:
        handler.close()
    sizes = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    assert sizes.keys() == {"shard-0.log", "shard-0.log.1", "shard-0.log.2"}
    assert all(0 < size <= 10_000 for size in sizes.values())
    assert "line 1999 " in (tmp_path / "shard-0.log").read_text()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for 64 KiB."""
    with small_disk_at(tmp_path / "disk", kibibytes=64) as folder:
        yield folder


def test_lines_that_a_full_disk_does_not_take_are_counted(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(logs, "PAUSE_SECONDS", 0.0)
    handler = BoundedFile(small_disk / "shard-0.log")
    try:
        for number in range(3_000):
            handler.emit(logging.makeLogRecord({"msg": f"line {number} {50 * 'x'}"}))
        written = (small_disk / "shard-0.log").read_text()
        assert "line 2999" not in written
        os.truncate(small_disk / "shard-0.log", 0)
        handler.emit(logging.makeLogRecord({"msg": "there is room again"}))
    finally:
        handler.close()
    first, second = (small_disk / "shard-0.log").read_text().splitlines()
    assert first.endswith("there is room again")
    assert "lines before this one could not be written" in second
    assert capfd.readouterr().err == ""


def test_a_folder_that_cannot_be_made_stops_nobody(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = in_a_process(
        "logging.getLogger('x').error('y')\nprint('went on')", tmp_path / "file/run"
    )
    assert (done.returncode, done.stdout) == (0, "went on\n")


def test_old_runs_are_removed_and_those_that_run_are_not(tmp_path: Path) -> None:
    runs = [tmp_path / "logs" / f"2026-01-{day:02}T00-00-00-1" for day in range(1, 16)]
    for run in runs[:-1]:
        run.mkdir(parents=True)
        (run / "driver.log").write_text("")
        (run / logs._LOCK).touch()
    (tmp_path / "logs" / "0-not-a-run").mkdir()
    with subprocess.Popen(
        [
            *(sys.executable, "-c"),
            "import sys; from pathlib import Path; from workers.process.logs import WorkerLog\n"
            "WorkerLog(Path(sys.argv[1]), 'x').open(); print('open', flush=True); sys.stdin.read()",
            str(runs[0]),
        ],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as oldest:
        assert oldest.stdout is not None
        oldest.stdout.readline()
        in_a_process("", runs[-1])
        oldest.communicate()
    left = sorted(path.name for path in (tmp_path / "logs").iterdir())
    kept = [run.name for run in (runs[0], *runs[-1 - logs.KEPT_RUNS :])]
    assert left == ["0-not-a-run", *kept]


def test_a_run_is_named_after_its_beginning(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    assert run.parent == tmp_path / "logs"
    assert WorkerLog(run, "driver").path == run / "driver.log"
