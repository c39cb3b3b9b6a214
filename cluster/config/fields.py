"""Types of keys that several tables have, and how a validator refuses a value."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

from cluster.decoding.policy import POLICIES
from paceline.errors import ConfigError, InvalidRequestError
from paceline.text import did_you_mean
from workers.emulated.latency_profiles import load_profile
from workers.process.plugin_registry import Registry

GPU_LABEL = "ray.io/accelerator-type"
"""The label in which Ray names the kind of a node's GPUs, such as "H100"."""
INTERFACE = "GLOO_SOCKET_IFNAME"
"""The key of `target.environment` that names the network interface of collectives on CPUs."""
PIPELINES = ("pipeline_parallel", "pipeline_parallel_size", "pp")
"""Keys under which other servers divide a model by layers."""
_COLLECTIVES = re.compile(rf"(NCCL_[A-Z0-9_]+|{INTERFACE})")
_LABEL = r"[a-zA-Z0-9]([a-zA-Z0-9._-]{0,61}[a-zA-Z0-9])?"
_PREFIX = r"[a-zA-Z0-9]([a-zA-Z0-9.-]{0,251}[a-zA-Z0-9])?"
_BYTE_UNITS = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
}


class Closed(BaseModel):
    """A table of the configuration: frozen, and without other keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


def refusal(message: str) -> PydanticCustomError:
    # A template of its own, because braces in the message would count as placeholders.
    return PydanticCustomError("paceline", "{message}", {"message": message})


def read_bytes(value: object) -> int | None:
    """A number of bytes, given as a number or with a unit; None: it is neither."""
    if isinstance(value, int):
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*", str(value))
    unit = _BYTE_UNITS.get(match[2].upper()) if match else None
    return None if match is None or unit is None else int(float(match[1]) * unit)


def _or(besides: str | None, read: Callable[[object], int | None], what: str) -> BeforeValidator:
    """The value `besides`, or one that `read` turns into a positive number: `what`, in words."""

    def check(value: object) -> object:
        if value == besides:
            return value
        number = None if isinstance(value, bool) else read(value)
        if number is None or number < 1:
            either = "" if besides is None else f'"{besides}" or '
            raise refusal(f"expected {either}{what}, got {value!r}")
        return number

    return BeforeValidator(check)


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) else None


def _label(value: object) -> object:
    if not isinstance(value, str) or not re.fullmatch(_LABEL, value):
        raise refusal(f"expected 1 to 63 letters, digits and inner . _ - of a label, got {value!r}")
    return value


def _labels(given: object) -> object:
    if isinstance(given, Mapping):
        for name in given:
            if not isinstance(name, str) or not re.fullmatch(rf"({_PREFIX}/)?{_LABEL}", name):
                raise refusal(f'expected names of labels such as "zone", got {name!r}')
    return given


def _of_collectives(given: object) -> object:
    """Only what configures collectives may be set: other variables belong to us or to Ray."""
    if isinstance(given, Mapping):
        for name in given:
            if not isinstance(name, str) or not _COLLECTIVES.fullmatch(name):
                raise refusal(f"expected names NCCL_... or {INTERFACE}, got {name!r}; remove it")
    return given


_BYTES = 'a number of bytes such as 2147483648 or "2GiB"'
OptionalBytes = Annotated[int | None, _or(None, read_bytes, _BYTES)]
AutoBytes = Annotated[int | Literal["auto"], _or("auto", read_bytes, _BYTES)]
AutoCount = Annotated[int | Literal["auto"], _or("auto", _whole, "a whole number of at least 1")]
Text = Annotated[str, Field(min_length=1)]
LabelValue = Annotated[str, BeforeValidator(_label)]
Labels = Annotated[Mapping[str, LabelValue], BeforeValidator(_labels), Field(max_length=32)]
"""Labels of Ray nodes, with Ray's syntax. Ray's operators, such as "!", are not part of it."""
CollectiveSettings = Annotated[
    Mapping[str, Annotated[str, Field(min_length=1, max_length=1024)]],
    BeforeValidator(_of_collectives),
    Field(max_length=64),
]
"""Environment variables that configure collectives."""


def check_gpu(gpu: str | None, labels: Mapping[str, str]) -> None:
    """Raise a refusal if the kind of GPU is named twice."""
    if gpu is not None and GPU_LABEL in labels:
        raise refusal(f'"gpu" is the label "{GPU_LABEL}"; remove one of the two')


def selector_of(gpu: str | None, labels: Mapping[str, str]) -> dict[str, str]:
    """The labels that a node must have, the kind of GPU among them."""
    return dict(labels) | ({} if gpu is None else {GPU_LABEL: gpu})


def one_of(*available: str) -> BeforeValidator:
    def check(value: object) -> object:
        if value in available:
            return value
        hint = did_you_mean(value, available) if isinstance(value, str) else ""
        raise refusal(f"expected one of {', '.join(available)}, got {value!r}{hint}")

    return BeforeValidator(check)


def profile_of(role: Literal["target", "drafter"]) -> BeforeValidator:
    """Check that a value is the name of a latency profile for the role. None is left alone."""

    def check(value: object) -> object:
        if isinstance(value, str):
            try:
                load_profile(value, role=role)
            except ConfigError as error:
                raise refusal(str(error)) from None
        return value

    return BeforeValidator(check)


def registered(registry: Registry[Any], *besides: str) -> BeforeValidator:
    def check(value: object) -> object:
        if value in besides:
            return value
        try:
            return registry.get(str(value), field="").name
        except InvalidRequestError as error:
            raise refusal(error.args[1]) from None

    return BeforeValidator(check)


Policy = Annotated[str, registered(POLICIES)]


def _as_list(value: object) -> object:
    return value if isinstance(value, list | tuple) else [value]


LISTED = BeforeValidator(_as_list)
"""Turns a single value into a list."""


def checked_text(check: Callable[[str], object]) -> BeforeValidator:
    """A text that `check` takes. It raises ValueError, whose message is shown."""

    def checked(value: object) -> object:
        try:
            check(value if isinstance(value, str) else repr(value))
        except ValueError as error:
            raise refusal(str(error)) from None
        return value

    return BeforeValidator(checked)
