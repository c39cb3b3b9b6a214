"""What tests need of the processor that they run on."""

from __future__ import annotations

import pytest

from workers.engine.cpu.linears import multiplies_bfloat16

NEEDS_BFLOAT16 = pytest.mark.skipif(
    not multiplies_bfloat16(), reason="this processor has no instructions for bfloat16"
)
