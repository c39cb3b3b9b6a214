"""The driver's clock where all times of the devices are multiplied."""

from __future__ import annotations

from cluster.driver_clock import DriverClock


def test_what_the_loop_took_is_shorter_by_the_devices_clock() -> None:
    clock = DriverClock(dilation=16.0)
    assert clock.of_the_loop(0.32) == 0.02
    assert clock.on_the_loop(0.02) == 0.32
