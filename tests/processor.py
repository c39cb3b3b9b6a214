"""Properties of the processor that tests need."""

from __future__ import annotations

import pytest

from workers.engine.cpu.linears import multiplies_bfloat16

NEEDS_BFLOAT16 = pytest.mark.skipif(
    not multiplies_bfloat16(), reason="this processor has no instructions for bfloat16"
)
