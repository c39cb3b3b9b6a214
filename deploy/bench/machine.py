"""What a benchmark ran on."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path


def describe_machine() -> Mapping[str, object]:
    """Processor, usable cores, instruction set and the versions that set the speed."""
    import torch

    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "instruction_set": torch.backends.cpu.get_cpu_capability(),
        "load_average": os.getloadavg()[0],
        "python": platform.python_version(),
        "torch": version("torch"),
        "transformers": version("transformers"),
        "ray": version("ray"),
    }


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.processor() or platform.machine()
