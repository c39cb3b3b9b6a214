"""The options of an engine whose values are names: device, dtype, form of the weights.

Commands import this file, so it imports nothing heavy.
"""

from __future__ import annotations

from typing import Literal, get_args

Device = Literal["auto", "cpu", "cuda"]
"""The requested device; "auto": a GPU if the process sees one, else the CPU."""
DEVICES: tuple[Device, ...] = get_args(Device)


WeightForm = Literal["float32", "bfloat16", "float16", "int8", "int4"]
"""The form in which a CPU holds the weights of linears.

float32 and bfloat16: activations have the same dtype. float16: activations are float32. int8 and
int4: weights have scales, and activations are bfloat16.
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

UseKernels = Literal["auto"] | bool
"""Whether our own kernels run on a GPU (process/kernels.py)."""

Dtype = Literal["auto", "float32", "bfloat16", "float16", "int8"]
"""The requested dtype (target.dtype); "auto": the default of the device."""
DTYPES: tuple[Dtype, ...] = get_args(Dtype)


KvDtype = Literal["auto", "fp8"]
"""The dtype of stored keys and values (target.kv_cache_dtype); "auto": that of activations."""
KV_DTYPES: tuple[KvDtype, ...] = get_args(KvDtype)


def form_on_cpu(dtype: Dtype, default: WeightForm) -> WeightForm:
    """The form in which a CPU holds a model: `dtype`, or `default` if that is "auto"."""
    return default if dtype == "auto" else dtype
