"""On which kind of device an engine computes. Light: commands import it."""

from __future__ import annotations

from typing import Literal, get_args

Device = Literal["auto", "cpu", "cuda"]
"""As it is asked for; "auto": a GPU where the process sees one."""
DEVICES: tuple[Device, ...] = get_args(Device)
