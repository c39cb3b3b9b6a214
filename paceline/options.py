"""The options of a request: their names, and the values that each may have.

`GenerateOptions` is the declaration, and `check_option` checks a value against it: for a client
before it sends a request and for a server when one arrives (paceline/wire/requests.py), for a
worker (paceline/sampling.py), for the defaults in a configuration and for the flags of commands.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypedDict

from paceline.errors import InvalidRequestError
from paceline.limits import (
    MAX_BAD_WORD_LENGTH,
    MAX_BAD_WORDS,
    MAX_BIASED_TOKENS,
    MAX_BRANCHES,
    MAX_LOGPROBS,
    MAX_NAME_LENGTH,
    MAX_PREDICTION_BYTES,
    MAX_RESUMED_TOKENS,
    MAX_SAMPLES,
    MAX_STOP_LENGTH,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKENS,
    MAX_WINDOW,
)
from paceline.structure import Structure, check_structure
from paceline.text import did_you_mean

MAX_LOGIT_BIAS = 10_000.0
"""Largest absolute value of a bias. It exceeds any difference of logits (OpenAI allows 100), and
keeps logits within float32 under any penalty: only masked tokens have -inf."""
MAX_REPETITION_PENALTY = 100.0
"""The lowest penalty is its inverse. It multiplies logits, which must stay within float32."""

_MIN_FLOAT32, _MAX_FLOAT32 = 1.1754944e-38, 3.4028234e38
"""The wire has float32, which rounds no number between these two to 0 or to infinity."""

_MAX_UINT32, _MAX_UINT64 = 2**32 - 1, 2**64 - 1

_Check = Callable[[str, Any], None]
"""Raises InvalidRequestError for a value that the option with this name may not have."""


def _checked(check: _Check, **more: object) -> Any:
    return field(default=None, metadata={"check": check, **more})


def _number(lowest: float, highest: float, expected: str | None = None) -> Any:
    expected = expected or f"a number from {lowest:g} to {highest:g}"

    def check(name: str, value: float) -> None:
        if not lowest <= value <= highest:
            raise InvalidRequestError(name, f"expected {expected}, got {value}")

    return _checked(check, bounds=(lowest, highest))


def _integer(lowest: int, highest: int) -> Any:
    return _number(lowest, highest, f"an integer from {lowest} to {highest}")


def _name() -> Any:
    return _checked(
        lambda name, value: check_count(name, len(value), MAX_NAME_LENGTH, "characters")
    )


def _check_stopping(name: str, value: str) -> None:
    known = [rule.value for rule in Stopping]
    if value not in known:
        hint = did_you_mean(value, known)
        raise InvalidRequestError(name, f"expected one of {', '.join(known)}, got {value!r}{hint}")


def _check_logit_bias(name: str, value: Mapping[int, float]) -> None:
    check_count(name, len(value), MAX_BIASED_TOKENS, "entries")
    for token_id, bias in value.items():
        if not -MAX_LOGIT_BIAS <= bias <= MAX_LOGIT_BIAS:
            expected = f"biases from {-MAX_LOGIT_BIAS:g} to {MAX_LOGIT_BIAS:g}"
            raise InvalidRequestError(name, f"expected {expected}, got {bias} for token {token_id}")


def _check_prediction(name: str, value: str) -> None:
    check_count(name, len(value.encode()), MAX_PREDICTION_BYTES, "bytes of text")


def _strings(most: int, longest: int) -> Any:
    def check(name: str, value: Sequence[str]) -> None:
        check_count(name, len(value), most, "strings")
        length = max(map(len, value), default=0)
        check_count(name, length, longest, "characters in each string")
        if not all(value):
            raise InvalidRequestError(name, "expected strings with text, got an empty one")

    return field(default=(), metadata={"check": check})


def _tokens(most: int) -> Any:
    def check(name: str, value: Sequence[int]) -> None:
        check_count(name, len(value), most, "tokens")

    return field(default=(), metadata={"check": check})


def _check_resume_samples(name: str, value: Sequence[Sequence[int]]) -> None:
    check_count(name, len(value), MAX_SAMPLES, "samples")
    check_count(name, sum(map(len, value)), MAX_RESUMED_TOKENS, "tokens")


class Stopping(enum.Enum):
    """When a drafter stops before it has used its grant (docs/rules.md)."""

    FIXED = "fixed"
    ADAEDL = "adaedl"
    CONFIDENCE = "confidence"
    COST = "cost"


@dataclass(frozen=True, slots=True)
class GenerateOptions:
    """How to decode. None or an empty value leaves an option to the server.

    The protocol says what each option does: inference.proto, GenerateRequest, and types.proto,
    SamplingParams. The names that an option may have:

    - `policy`: one of those that the server knows (`ModelDescription.policies`), such as "chain";
    - `rule`: a verification rule that the server has, such as "coupled" (docs/rules.md);
    - `stopping`: the values of `Stopping`;
    - `drafter`: a kind of drafter that the server has, such as "model" (docs/rules.md).

    `logprobs` and `prompt_logprobs` ask for `TokenLogprobs`, each with that many of the likeliest
    tokens.

    With `merge`, one drafter of each kind drafts, and their candidates form one tree. Requests of
    one `tenant` share the KV of equal prefixes and what drafters learn from text.

    `resume`: output tokens that the caller has already. The answer is what follows them. With
    `steady`, each event has one token, at an even pace.

    `truncate_prompt`: only that many of the prompt's last tokens are used; 0: as many as fit.
    `include_stop`: the text also has the stop string, or the end token, that ended it.
    `special_tokens`: special tokens in the answer have their names as text. `bad_words`: the answer
    never has these words, as tokens, with a space before them or without one.

    `tell_refused`: chunks tell which candidates the target refused (`Chunk.refused`).

    `prediction`: a text that the answer should repeat in large parts, such as a file that it edits.
    What is right of it is verified many tokens at a time.

    `samples`: how many answers, each with noise of its own; events say which one they belong to.
    Sample 0 is the answer without this option. `resume_samples`: `resume` of each.
    """

    temperature: float | None = _number(0, _MAX_FLOAT32, "a finite number of at least 0")
    top_k: int | None = _integer(0, _MAX_UINT32)
    top_p: float | None = _number(_MIN_FLOAT32, 1, "a number above 0 and at most 1")
    min_p: float | None = _number(0, 1)
    repetition_penalty: float | None = _number(1 / MAX_REPETITION_PENALTY, MAX_REPETITION_PENALTY)
    presence_penalty: float | None = _number(-2, 2)
    frequency_penalty: float | None = _number(-2, 2)
    logit_bias: Mapping[int, float] = field(
        default_factory=dict, metadata={"check": _check_logit_bias}
    )
    min_tokens: int | None = _integer(0, _MAX_UINT32)
    seed: int | None = _integer(0, _MAX_UINT64)
    max_tokens: int | None = _integer(1, _MAX_UINT32)
    stop: Sequence[str] = _strings(MAX_STOP_STRINGS, MAX_STOP_LENGTH)
    stop_token_ids: Sequence[int] = _tokens(MAX_STOP_TOKENS)
    ignore_eos: bool = False
    logprobs: int | None = _integer(0, MAX_LOGPROBS)
    prompt_logprobs: int | None = _integer(0, MAX_LOGPROBS)
    structure: Structure | None = field(default=None, metadata={"check": check_structure})
    policy: str | None = _name()
    rule: str | None = _name()
    window: int | None = _number(
        1, MAX_WINDOW, f"1 to {MAX_WINDOW} candidates (plain decoding is the policy 'off')"
    )
    stopping: str | None = _checked(_check_stopping)
    branches: int | None = _integer(1, MAX_BRANCHES)
    drafter: str | None = _name()
    merge: bool | None = None
    tenant: str | None = _name()
    request_id: str | None = _name()
    resume: Sequence[int] = _tokens(MAX_RESUMED_TOKENS)
    steady: bool = False
    prediction: str | None = _checked(_check_prediction)
    truncate_prompt: int | None = _integer(0, _MAX_UINT32)
    include_stop: bool = False
    special_tokens: bool = False
    tell_refused: bool = False
    bad_words: Sequence[str] = _strings(MAX_BAD_WORDS, MAX_BAD_WORD_LENGTH)
    samples: int | None = _integer(1, MAX_SAMPLES)
    resume_samples: Sequence[Sequence[int]] = field(
        default=(), metadata={"check": _check_resume_samples}
    )


class OptionFields(TypedDict, total=False):
    """The fields of `GenerateOptions` as keywords of a call. A type checker needs them in full.

    `samples` is not among them: calls have it as a parameter, since it decides what they return.
    """

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
    logprobs: int | None
    prompt_logprobs: int | None
    structure: Structure | None
    policy: str | None
    rule: str | None
    window: int | None
    stopping: str | None
    branches: int | None
    drafter: str | None
    merge: bool | None
    tenant: str | None
    request_id: str | None
    resume: Sequence[int]
    steady: bool
    prediction: str | None
    truncate_prompt: int | None
    include_stop: bool
    special_tokens: bool
    tell_refused: bool
    bad_words: Sequence[str]
    resume_samples: Sequence[Sequence[int]]


OPTION_NAMES = tuple(one.name for one in fields(GenerateOptions))
_CHECKS: Mapping[str, _Check] = {
    one.name: one.metadata["check"] for one in fields(GenerateOptions) if one.metadata
}

BOUNDS: Mapping[str, tuple[float, float]] = {
    one.name: one.metadata["bounds"] for one in fields(GenerateOptions) if "bounds" in one.metadata
}
"""The lowest and the highest value of options that are numbers."""


def check_option(name: str, value: Any) -> None:
    """Raise InvalidRequestError if `value`, which has the option's type, is out of its bounds."""
    if name in _CHECKS:
        _CHECKS[name](name, value)


def check_options(options: GenerateOptions) -> None:
    """Raise InvalidRequestError, which names the first option that is out of its bounds."""
    for name in OPTION_NAMES:
        value = getattr(options, name)
        if value is not None:
            check_option(name, value)


def check_count(
    name: str,
    count: int,
    most: int,
    unit: str,
    error: type[InvalidRequestError] = InvalidRequestError,
) -> None:
    """Raise `error`, which names the field, if there are more than `most` of `unit`."""
    if count > most:
        raise error(name, f"expected at most {most:,} {unit}, got {count:,}")


def options_with(options: GenerateOptions | None, given: OptionFields) -> GenerateOptions:
    """`options`, or the defaults, with the fields in `given` replaced.

    Raises InvalidRequestError for a name that is no option, and suggests the nearest one.
    """
    for name in given:
        if name not in OPTION_NAMES:
            hint = did_you_mean(name, OPTION_NAMES)
            raise InvalidRequestError(name, f"there is no such option{hint}")
    if options is not None and not isinstance(options, GenerateOptions):
        raise InvalidRequestError("options", f"expected a GenerateOptions, got {options!r:.200}")
    return replace(options or GenerateOptions(), **given)
