"""Checks that several sections of a configuration share."""

from __future__ import annotations

from typing import Literal

from pydantic_core import PydanticCustomError

from paceline.errors import ConfigError
from workers.emulated.profiles import load_profile


def refusal(message: str) -> PydanticCustomError:
    """The exception that a validator raises to show `message` as it is."""
    # A template of its own, because braces in the message would count as placeholders.
    return PydanticCustomError("paceline", "{message}", {"message": message})


def check_profile(name: str, role: Literal["target", "drafter"]) -> None:
    """Raise a refusal unless `name` is a latency profile for the role."""
    try:
        load_profile(name, role=role)
    except ConfigError as error:
        raise refusal(str(error)) from None
