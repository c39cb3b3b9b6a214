"""The forms in which the weights of linears are held. Commands import it, so it imports little."""

from __future__ import annotations

from typing import Literal, get_args

WeightForm = Literal["float32", "bfloat16", "float16", "int8", "int4"]
"""float32 and bfloat16 unchanged; float16 with float32 activations; int8 and int4 with scales and
bfloat16 activations.
"""
WEIGHT_FORMS: tuple[WeightForm, ...] = get_args(WeightForm)

BITS_OF_A_WEIGHT: dict[WeightForm, int] = {
    "float32": 32,
    "bfloat16": 16,
    "float16": 16,
    "int8": 8,
    "int4": 4,
}
"""Minimum bits per weight: scales are not counted, and some layers keep more bits."""

Dtype = Literal["auto", "float32", "bfloat16", "float16", "int8"]
"""The dtypes that may be requested for a model (target.dtype); "auto": by the device."""
DTYPES: tuple[Dtype, ...] = get_args(Dtype)


def form_on_cpu(dtype: Dtype, own: WeightForm) -> WeightForm:
    """The form in which a CPU holds a model; "auto" means `own`."""
    return own if dtype == "auto" else dtype
