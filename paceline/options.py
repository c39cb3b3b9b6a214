"""The fields of `GenerateOptions` as keywords of a call, as callers of other clients expect."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import TypedDict

from paceline.errors import InvalidRequestError
from paceline.generation import GenerateOptions
from paceline.text import did_you_mean


class OptionFields(TypedDict, total=False):
    """Any of the fields of `GenerateOptions`, which says what they mean."""

    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: Mapping[int, float]
    min_tokens: int | None
    seed: int | None
    max_tokens: int | None
    stop: Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    policy: str | None
    rule: str | None
    window: int | None
    stopping: str | None
    branches: int | None
    drafter: str | None
    merge: bool | None
    tenant: str | None
    request_id: str | None


def options_with(options: GenerateOptions | None, given: OptionFields) -> GenerateOptions:
    """`options`, or the defaults, with the fields that are given in their place.

    Raises InvalidRequestError for a field that does not exist, naming the nearest one.
    """
    known = [field.name for field in fields(GenerateOptions)]
    for name in given:
        if name not in known:
            raise InvalidRequestError(name, f"there is no such option{did_you_mean(name, known)}")
    if options is not None and not isinstance(options, GenerateOptions):
        raise InvalidRequestError("options", f"expected a GenerateOptions, got {options!r:.200}")
    return replace(options or GenerateOptions(), **given)
