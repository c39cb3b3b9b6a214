"""Whether our own GPU kernels run. They are written in Triton, which torch's CUDA builds include.

They have been interpreted and compiled, and have NEVER RUN ON A GPU. So they run only if the
configuration asks for them (target.kernels); docs/gpu.md says how to prove them. Otherwise, and
where they cannot run, torch's operations compute the same. In tests Triton's interpreter runs them
on CPU tensors (TRITON_INTERPRET=1, tests/conftest.py).
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
import shutil
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

_log = logging.getLogger(__name__)
AMPERE = (8, 0)
"""The lowest compute capability on which kernels of attention run, ours and torch's."""

_wanted = False


def use_kernels(wanted: bool) -> None:
    """Set whether this process uses our kernels. Call it before an engine is made."""
    global _wanted
    _wanted = wanted


def can_run_kernels(device: torch.device) -> bool:
    """Whether our kernels are used for tensors of this device.

    If they are wanted but cannot run, the log says why, once per device.
    """
    return _wanted and device.type == "cuda" and _obstacle(device) is None


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
