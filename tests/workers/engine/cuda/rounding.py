"""Make Triton's interpreter round as a device does. Unchanged, it cuts bits off."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from triton import language as tl
from triton.runtime import interpreter

_cutting = interpreter._convert_float


def round_as_devices_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Change the interpreter while a test runs."""
    monkeypatch.setattr(interpreter, "_convert_float", convert)


def convert(values: Any, source: Any, target: Any, mode: Any) -> Any:
    """Convert as the interpreter does, but round float32 to the nearest bfloat16 or float8."""
    if source != tl.float32 or target not in (tl.bfloat16, tl.float8e4nv):
        return _cutting(values, source, target, mode)
    floats = torch.from_numpy(np.array(values, dtype=np.float32))
    if target == tl.bfloat16:
        return floats.to(torch.bfloat16).view(torch.uint16).numpy()
    return floats.to(torch.float8_e4m3fn).view(torch.uint8).numpy()
