"""In which form the weights of linears are held in memory. Light: commands import it."""

from __future__ import annotations

from typing import Literal, get_args

WeightForm = Literal["float32", "bfloat16", "float16", "int8", "int4"]
"""float32 and bfloat16 as they are; float16 with float32 activations; int8 and int4 with scales and
bfloat16 activations."""

BITS_OF_A_WEIGHT: dict[WeightForm, int] = {
    "float32": 32,
    "bfloat16": 16,
    "float16": 16,
    "int8": 8,
    "int4": 4,
}
"""Without scales, and though some layers keep more: at least so many."""

Dtype = Literal["auto", "float32", "bfloat16", "float16", "int8"]
"""What a model may be asked to be held in (target.dtype); "auto": by the device."""
DTYPES: tuple[Dtype, ...] = get_args(Dtype)


def form_on_cpu(dtype: Dtype, own: WeightForm) -> WeightForm:
    """The form that a CPU holds a model in; "auto" is its `own`."""
    return own if dtype == "auto" else dtype
