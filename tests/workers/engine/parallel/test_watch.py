"""The watch notices a lost rank or late work, frees the device, and else ends the process."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.workers.engine.parallel.ranks import Ranks
from workers.engine.parallel.group import RankGroup
from workers.engine.parallel.watch import Watch
from workers.process.threads import EXIT_BROKEN

ROOT = Path(__file__).resolve().parents[4]
SOON = 60.0
"""Seconds to wait for what comes at once, on a busy host."""


class Device:
    """Stands for a device that waits for other ranks until it is released, or forever."""

    def __init__(self, *, hears: bool = True) -> None:
        self.released = threading.Event()
        self.ended = threading.Event()
        self.reasons: list[str] = []
        self._hears = hears

    def release(self) -> None:
        self.released.set()

    def end(self, reason: str) -> None:
        self.reasons.append(reason)
        self.ended.set()

    def wait(self) -> None:
        """As a host's call that returns when the device goes on; here also if a test fails."""
        (self.released if self._hears else self.ended).wait(SOON)

    def watch(self, group: RankGroup, *, patience: float = SOON) -> Watch:
        return Watch(
            group._on_host,
            rank=group.place.rank,
            degree=group.place.degree,
            release=self.release,
            patience=patience,
            end=self.end,
        )


@pytest.mark.parametrize("degree", [2, 4])
def test_a_rank_that_leaves_frees_the_devices_of_all(degree: int) -> None:
    """Each rank hears it from the next one, around the circle."""
    devices = [Device() for _ in range(degree)]
    watches: list[Watch] = []  # A group keeps its watch, without which its word may not be sent.
    with Ranks(degree) as ranks:
        ranks.meet()

        def work(group: RankGroup) -> str | None:
            device = devices[group.place.rank]
            watch = device.watch(group)
            watches.append(watch)
            if group.place.rank != 1:
                with watch.over(SOON, "a step"):
                    device.wait()
            watch.close()
            return watch.lost

        found = ranks.together(work)
    assert found[1] is None
    assert found[0] == "rank 1 has left"
    assert all(reason is not None and "has left" in reason for reason in found[2:])
    assert not any(device.reasons for device in devices)


def test_late_work_is_freed_and_has_a_reason() -> None:
    device = Device()
    with Ranks(1) as ranks:
        ranks.meet()
        watch = device.watch(ranks.groups[0])
        with watch.over(0.05, "step 7"):
            device.wait()
        assert device.released.is_set()
        assert watch.lost == "step 7 took longer than 0.05 s"
        watch.close()
    assert not device.reasons


def test_a_device_that_stays_stuck_ends_the_process() -> None:
    device = Device(hears=False)
    with Ranks(1) as ranks:
        ranks.meet()
        watch = device.watch(ranks.groups[0], patience=0.1)
        with watch.over(0.05, "step 7"):
            device.wait()
        watch.close()
    assert device.released.is_set()
    assert device.reasons == ["step 7 took longer than 0.05 s; 0.1 s later the device still waited"]


@pytest.mark.timing
def test_work_in_time_is_left_alone() -> None:
    """Negative control: several pieces of work, with more time between than each may take."""
    device = Device()
    with Ranks(1) as ranks:
        ranks.meet()
        watch = device.watch(ranks.groups[0])
        for _ in range(3):
            with watch.over(SOON, "a step"):
                pass
        with watch.over(1.0, "a step"):
            pass
        time.sleep(1.2)
        assert watch.lost is None
        watch.close()
    assert not device.released.is_set()


_PROCESS = """
import sys, time
from workers.engine.parallel.cuts import Place
from workers.engine.parallel.group import RankGroup
from workers.engine.parallel.watch import Watch

rank = int(sys.argv[1])
group = RankGroup(Place(rank, 2), host="127.0.0.1")
if rank == 0:
    print(group.rendezvous, flush=True)
group.meet("once", group.rendezvous or sys.argv[2])
watch = Watch(group._on_host, rank=rank, degree=2, release=lambda: None, patience=0.2)
print("watches", flush=True)
with watch.over(1000.0, "a step"):
    time.sleep(1000)  # the device hears nothing
"""


def _start(*args: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", _PROCESS, *args], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )


def test_a_killed_rank_is_noticed_at_once() -> None:
    """Two processes, and a step that may take long. The other rank ends with its own status."""
    first = _start("0")
    try:
        line = _line_of(first)
        second = _start("1", line)
        try:
            for one in (first, second):
                assert _line_of(one) == "watches"
            second.kill()
            assert first.wait(SOON) == EXIT_BROKEN
        finally:
            second.kill()
            second.communicate()
    finally:
        first.kill()
        first.communicate()


def _line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    read: Callable[[], str] = process.stdout.readline
    return read().strip()
