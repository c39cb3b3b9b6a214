"""Checks of values that several tables of the configuration share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from cluster.config.fields import refusal
from cluster.decoding.policy import POLICIES
from paceline.errors import ConfigError, InvalidRequestError
from workers.emulated.profiles import load_profile
from workers.process.registry import Registry


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
    """A name in the registry, or one of `besides`."""

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
