"""What the sections of a configuration check alike."""

from __future__ import annotations

from typing import Literal

from pydantic_core import PydanticCustomError

from paceline.errors import ConfigError
from workers.emulated.profiles import load_profile


def refusal(message: str) -> PydanticCustomError:
    """What a validator raises, in words of ours."""
    # Braces would be taken for the template's own.
    return PydanticCustomError("paceline", "{message}", {"message": message})


def check_profile(name: str, role: Literal["target", "drafter"]) -> None:
    """Raise a refusal unless this names a latency profile of the role."""
    try:
        load_profile(name, role=role)
    except ConfigError as error:
        raise refusal(str(error)) from None
