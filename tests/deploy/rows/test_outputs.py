"""Output files: whole or absent, and only a regular file is ever replaced."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from deploy.rows.outputs import check_writable, whole_file, write_json
from paceline.errors import InvalidRequestError
from tests.deploy.conftest import Call


def test_a_symlink_stays_and_its_target_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    target, link = tmp_path / "there" / "rows.json", tmp_path / "link.json"
    target.write_text("old")
    link.symlink_to(target)
    write_json(link, {"new": 1})
    assert link.is_symlink()
    assert json.loads(target.read_text()) == {"new": 1}
    assert [path.name for path in target.parent.iterdir()] == ["rows.json"]


def test_the_target_of_a_dangling_symlink_is_made(tmp_path: Path) -> None:
    link = tmp_path / "link.json"
    link.symlink_to("new.json")
    write_json(link, {"new": 1})
    assert link.is_symlink()
    assert json.loads((tmp_path / "new.json").read_text()) == {"new": 1}


def test_a_fifo_a_link_to_one_and_a_loop_are_refused_and_stay(tmp_path: Path) -> None:
    fifo, link, loop = tmp_path / "fifo", tmp_path / "link", tmp_path / "loop"
    os.mkfifo(fifo)
    link.symlink_to(fifo)
    loop.symlink_to(loop)
    for path in (fifo, link, loop):
        with pytest.raises(InvalidRequestError, match=r"^json: .* is not a regular file"):
            check_writable("json", path)
        with pytest.raises(InvalidRequestError, match=r"^output: "), whole_file(path):
            pytest.fail("the block must not run")
    assert stat.S_ISFIFO(fifo.stat().st_mode)
    assert len(list(tmp_path.iterdir())) == 3


def test_the_open_pipe_behind_a_link_of_proc_is_refused(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    link = tmp_path / "stdout"
    try:
        link.symlink_to(f"/proc/self/fd/{writer}")
        with pytest.raises(InvalidRequestError, match="not a regular file"):
            check_writable("json", link)
    finally:
        os.close(reader)
        os.close(writer)
    assert link.is_symlink()


@pytest.mark.parametrize("command", ["generate", "verify", "bench"])
def test_the_commands_refuse_a_fifo_before_anything_starts(
    call: Call, tmp_path: Path, command: str
) -> None:
    fifo, rows = tmp_path / "fifo", tmp_path / "in.jsonl"
    os.mkfifo(fifo)
    rows.write_text('{"prompt": "Hi"}\n')
    # No server is there. If it were asked first, the exit code would be 3.
    server = ("--server", "127.0.0.1:1", "--input", rows)
    done = {
        "generate": lambda: call("generate", *server, "--output", fifo),
        "verify": lambda: call("verify", *server, "--json", fifo),
        "bench": lambda: call("bench", "decode", "--json", fifo),
    }[command]()
    assert done.code == 2
    assert "not a regular file" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert stat.S_ISFIFO(fifo.stat().st_mode)
