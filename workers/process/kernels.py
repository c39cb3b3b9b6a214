"""Whether our own GPU kernels run. They are written in Triton, which torch's CUDA builds include.

`target.kernels` decides: "auto": where a check passes; true: they must, and a worker refuses to
start if the check fails; false: never. The check compares them with torch on this device
(engine/cuda/kernel_check.py). Where they do not run, torch's operations compute the same. In tests
Triton's interpreter runs them on CPU tensors (TRITON_INTERPRET=1, tests/conftest.py).
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch

from paceline.errors import ConfigError

_log = logging.getLogger(__name__)
AMPERE = (8, 0)
"""The lowest compute capability on which kernels of attention run, ours and torch's."""

_wanted: Literal["auto"] | bool = False
_failed: set[torch.device] = set()
"""Devices on which a check failed."""


def use_kernels(wanted: Literal["auto"] | bool) -> None:
    """Set whether this process uses our kernels. Call it before an engine is made."""
    global _wanted
    _wanted = wanted


def can_run_kernels(device: torch.device) -> bool:
    """Whether our kernels are used for tensors of this device.

    If they are wanted but cannot run, the log says why, once per device.
    """
    return (
        _wanted is not False
        and device.type == "cuda"
        and device not in _failed
        and _obstacle(device) is None
    )


def check_kernels(device: torch.device, find_fault: Callable[[], str | None]) -> None:
    """Check the kernels that would run on this device. Log the result in one line.

    `find_fault` runs them and returns what is wrong. If it finds or raises something, torch's
    operations take their place from now on. If kernels are required, raises ConfigError instead.
    """
    if not can_run_kernels(device):
        if _wanted is True and device.type == "cuda":
            raise ConfigError(
                "target.kernels = true, but our GPU kernels cannot run here: "
                f"{_obstacle(device) or 'an earlier check failed'}; use the value auto or false"
            )
        return
    try:
        fault = find_fault()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        fault = f"{type(error).__name__}: {str(error)[:300]}"
    if fault is None:
        _log.info("our GPU kernels run on %s: they agree with torch", device)
        return
    if _wanted is True:
        raise ConfigError(
            f"target.kernels = true, but our GPU kernels fail the check on {device}: {fault}; "
            "use the value auto or false"
        )
    give_up_kernels(device, fault)


def give_up_kernels(device: torch.device, why: str) -> None:
    """From now on torch's operations take the place of our kernels on this device."""
    _failed.add(device)
    _log.warning("our GPU kernels do not run on %s, torch's take their place: %s", device, why)


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """A context in which to launch kernels: Triton uses the current device, not the tensors'."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@functools.cache
def _obstacle(device: torch.device) -> str | None:
    obstacle = None
    if importlib.util.find_spec("triton") is None:
        obstacle = "Triton is not installed"
    elif not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        obstacle = "Triton needs a C compiler (gcc, clang or what CC names), and there is none"
    elif torch.cuda.get_device_capability(device) < AMPERE:
        obstacle = "the GPU is older than Ampere"
    if obstacle is not None:
        _log.warning("our GPU kernels do not run, torch's take their place: %s", obstacle)
    return obstacle
