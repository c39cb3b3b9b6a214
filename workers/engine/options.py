"""The options of an engine that take one of a few names: device, dtype, form of the weights.

Commands import this file, so it imports nothing heavy.
"""

from __future__ import annotations

from typing import Literal, get_args

Device = Literal["auto", "cpu", "cuda"]
"""The device that is asked for; "auto": a GPU if the process sees one, else the CPU."""
DEVICES: tuple[Device, ...] = get_args(Device)


WeightForm = Literal["float32", "bfloat16", "float16", "int8", "int4"]
"""How a CPU holds the weights of linears.

float32 and bfloat16: weights and activations alike. float16: with float32 activations. int8 and
int4: with scales, and with bfloat16 activations.
"""
WEIGHT_FORMS: tuple[WeightForm, ...] = get_args(WeightForm)

BITS_OF_A_WEIGHT: dict[WeightForm, int] = {
    "float32": 32,
    "bfloat16": 16,
    "float16": 16,
    "int8": 8,
    "int4": 4,
}
"""Bits per weight, at least: scales are not counted, and some layers keep more bits."""

Dtype = Literal["auto", "float32", "bfloat16", "float16", "int8"]
"""The dtype that is asked for (target.dtype); "auto": the default of the device."""
DTYPES: tuple[Dtype, ...] = get_args(Dtype)


def form_on_cpu(dtype: Dtype, default: WeightForm) -> WeightForm:
    """The form in which a CPU holds a model: `dtype`, or `default` if that is "auto"."""
    return default if dtype == "auto" else dtype
