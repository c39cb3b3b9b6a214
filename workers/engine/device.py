"""The kinds of devices on which an engine computes. Commands import it, so it imports little."""

from __future__ import annotations

from typing import Literal, get_args

Device = Literal["auto", "cpu", "cuda"]
"""As requested; "auto": a GPU if the process sees one."""
DEVICES: tuple[Device, ...] = get_args(Device)
