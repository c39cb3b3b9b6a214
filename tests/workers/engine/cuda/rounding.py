"""Make Triton's interpreter round to bfloat16 as a device does. Unchanged, it cuts bits off."""

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
    """Convert as the interpreter does, but round to the nearest bfloat16."""
    if (source, target) != (tl.float32, tl.bfloat16):
        return _cutting(values, source, target, mode)
    floats = torch.from_numpy(np.array(values, dtype=np.float32))
    return floats.to(torch.bfloat16).view(torch.uint16).numpy()
