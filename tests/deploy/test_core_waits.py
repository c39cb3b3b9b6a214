"""What threads wait for a core, as Linux counts it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from deploy.bench.core_waits import CoreWaits, longest_wait

BUSY = "while True: pass"


@pytest.mark.skipif(
    not Path("/proc/self/schedstat").exists(), reason="this kernel does not count waits for a core"
)
def test_two_processes_that_share_a_core_wait_for_each_other() -> None:
    core = {min(os.sched_getaffinity(0))}
    busy = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(2)]
    try:
        for one in busy:
            os.sched_setaffinity(one.pid, core)
        waits = CoreWaits(busy[0].pid, 1)
        assert waits.are_known
        before = waits.read()
        deadline = time.monotonic() + 60
        while longest_wait(before, waits.read()) < 0.02:
            assert time.monotonic() < deadline, "no wait was counted"
            time.sleep(0.01)
    finally:
        for one in busy:
            one.kill()
            one.wait()
    assert waits.read() >= before, "what has ended keeps what it waited"


def test_the_thread_that_waited_most_counts() -> None:
    assert longest_wait([1.0, 2.0], [1.25, 2.0]) == 0.25
    assert longest_wait([], []) == 0


def test_of_a_process_that_is_gone_nothing_is_known() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    waits = CoreWaits(ended.pid, 2)
    assert not waits.are_known
    assert waits.read() == []
