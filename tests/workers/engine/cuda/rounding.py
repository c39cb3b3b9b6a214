"""Triton's interpreter, made to round to bfloat16 as a device does: by itself it cuts bits off."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from triton import language as tl
from triton.runtime import interpreter

_cutting = interpreter._convert_float


def round_as_devices_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a test runs."""
    monkeypatch.setattr(interpreter, "_convert_float", convert)


def convert(values: Any, source: Any, target: Any, mode: Any) -> Any:
    """What the interpreter's own does, but to the nearest bfloat16."""
    if (source, target) != (tl.float32, tl.bfloat16):
        return _cutting(values, source, target, mode)
    floats = torch.from_numpy(np.array(values, dtype=np.float32))
    return floats.to(torch.bfloat16).view(torch.uint16).numpy()
