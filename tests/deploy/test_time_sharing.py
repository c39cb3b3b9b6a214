"""What computes in a benchmark has no priority over its driver."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

from deploy.bench.time_sharing import time_sharing

POLICY_OF_A_CHILD = [sys.executable, "-c", "import os; print(os.sched_getscheduler(0))"]


def test_in_the_block_all_share_their_time_and_after_it_the_class_is_back() -> None:
    """SCHED_BATCH, which anybody may take, stands for real-time priority."""
    found: list[int] = []

    def look() -> None:
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        with time_sharing():
            found.append(os.sched_getscheduler(0))
            child = subprocess.run(POLICY_OF_A_CHILD, capture_output=True, text=True, check=True)
            found.append(int(child.stdout))
        found.append(os.sched_getscheduler(0))

    thread = threading.Thread(target=look)  # it alone changes its class
    thread.start()
    thread.join()
    assert found == [os.SCHED_OTHER, os.SCHED_OTHER, os.SCHED_BATCH]


def test_without_priority_nothing_changes() -> None:
    before = os.sched_getscheduler(0)
    with time_sharing():
        assert os.sched_getscheduler(0) == os.SCHED_OTHER
    assert os.sched_getscheduler(0) == before
