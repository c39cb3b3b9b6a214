"""Devices that are slower or faster than those of the profiles."""

from __future__ import annotations

from workers.emulated.profiles import DeviceProfile


def scaled(profile: DeviceProfile, factor: float) -> DeviceProfile:
    """The same device, all of whose passes take `factor` times as long."""
    times = profile.pass_ms
    table = tuple(tuple(ms * factor for ms in row) for row in times.table)
    return profile.model_copy(update={"pass_ms": times.model_copy(update={"table": table})})
