"""In which form the weights of linears are held in memory. Light: commands import it."""

from __future__ import annotations

from typing import Literal

WeightForm = Literal["float32", "bfloat16", "int8", "int4"]
"""float32 and bfloat16 as they are; int8 and int4 with scales, for drafters."""
