"""A batch on replayed devices that is killed again and again, and one that is not.

    python -m tests.deploy.batch.killed FOLDER --rows 20000

Prints how long both took and by how much memory grew. docs/batch.md has such figures.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random

import psutil

from tests.deploy.shell import ROOT


@dataclass(frozen=True)
class Figures:
    """Seconds of the run without kills and of all runs with them; growth of memory in bytes.

    `growth`: of the batch and of the server, from a quarter of the rows to the end. `answers`: the
    size of the output.
    """

    whole_seconds: float
    killed_seconds: float
    growth: tuple[int, ...]
    answers: int


def run_both(folder: Path, *, num_rows: int, kills: int, seed: int) -> Figures:
    """Asserts that both outputs have the same bytes and that every row was answered."""
    source = folder / "in.jsonl"
    with source.open("w") as sink:
        for index in range(num_rows):
            body = {"prompt": f"Row {index}", "max_tokens": 1 + index % 3, "ignore_eos": True}
            row = {"custom_id": f"row-{index}", "method": "POST", "url": "/v1/completions"}
            sink.write(json.dumps(row | {"body": body}) + "\n")
    with _replayed(folder / "home") as (address, server):
        began = time.monotonic()
        whole = _Run(address, source, folder / "whole.jsonl")
        growth = _growth(whole, server, num_rows)
        whole_seconds = time.monotonic() - began
        size = whole.journal.stat().st_size
        draw = Random(seed)
        output = folder / "killed.jsonl"
        for point in sorted(draw.randrange(size) for _ in range(kills)):
            killed = _Run(address, source, output)
            assert killed.wait_for(point)
            killed.process.kill()
            killed.process.wait()
            assert not output.exists()
        _Run(address, source, output).end()
        killed_seconds = time.monotonic() - began - whole_seconds
    expected = (folder / "whole.jsonl").read_bytes()
    lines = expected.splitlines()
    assert len(lines) == num_rows
    assert all(b'"status_code":200' in line for line in lines)
    assert output.read_bytes() == expected
    return Figures(whole_seconds, killed_seconds, growth, len(expected))


@contextmanager
def _replayed(home: Path) -> Iterator[tuple[str, psutil.Process]]:
    """A server of replayed devices: its address and its process."""
    with subprocess.Popen(
        [sys.executable, "-m", "tests.deploy.batch.replayed", str(home)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        try:
            address = server.stdout.readline().strip()
            assert address
            yield address, psutil.Process(server.pid)
        finally:
            server.stdin.close()
            server.wait(timeout=60)


class _Run:
    """`paceline batch` as a process."""

    def __init__(self, address: str, source: Path, output: Path) -> None:
        self.journal = output.with_name(f"{output.name}.journal")
        self.process = psutil.Popen(
            [
                *(sys.executable, "-m", "deploy.cli", "batch", "--quiet", "--server", address),
                *("--input", str(source), "--output", str(output), "--concurrency", "256"),
            ],
            cwd=ROOT,
        )

    def wait_for(self, size: int) -> bool:
        """Wait until the journal has `size` bytes. Returns whether it has before the run ends."""
        while self.process.poll() is None:
            if self.journal.exists() and self.journal.stat().st_size >= size:
                return True
            time.sleep(0.005)
        return False

    def end(self) -> None:
        assert self.process.wait() == 0


def _growth(run: _Run, server: psutil.Process, num_rows: int) -> tuple[int, ...]:
    """Run to the end. By how many bytes the run and the server grew after the first quarter."""
    processes = [run.process, server]
    rows = 0
    while rows < num_rows // 4:  # Each answer in the journal has its row's custom_id.
        assert run.process.poll() is None
        time.sleep(0.2)
        rows = run.journal.read_bytes().count(b'"custom_id"') if run.journal.exists() else 0
    before = [process.memory_info().rss for process in processes]
    most = before
    while run.process.poll() is None:
        with contextlib.suppress(psutil.Error):  # It may end meanwhile.
            now = [process.memory_info().rss for process in processes]
            most = list(map(max, most, now))
        time.sleep(0.05)
    run.end()
    return tuple(last - first for last, first in zip(most, before, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--seed", type=int, default=18)
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    found = run_both(given.folder, num_rows=given.rows, kills=given.kills, seed=given.seed)
    sys.stdout.write(f"{found}\n")


if __name__ == "__main__":
    main()
