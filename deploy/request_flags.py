"""The request flags that `generate` and `verify` share, checked before anything is started."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from cluster.decoding.policies import PolicyName
from paceline.errors import InvalidRequestError
from paceline.sampling import SamplingParams

T = TypeVar("T")

MAX_WINDOW = 64
SEED_SPACE = 2**64
VERIFICATION_RULES = ("coupled",)
"""Rules of this version. All of them keep the very text of plain decoding."""


def check_sampling(*, temperature: float | None, top_k: int | None, top_p: float | None) -> None:
    """Raise InvalidRequestError naming the first one out of range; None is the checkpoint's."""
    defaults = SamplingParams()
    SamplingParams(
        temperature=defaults.temperature if temperature is None else temperature,
        top_k=defaults.top_k if top_k is None else top_k,
        top_p=defaults.top_p if top_p is None else top_p,
    ).validate(vocab_size=0)


def check_at_least_one(name: str, value: int | None) -> None:
    """Raise InvalidRequestError unless the count is missing or positive."""
    if value is not None and value < 1:
        raise InvalidRequestError(name, f"expected an integer of at least 1, got {value}")


def check_seed(seed: int) -> None:
    """Raise InvalidRequestError unless the seed is an unsigned 64-bit number."""
    if not 0 <= seed < SEED_SPACE:
        raise InvalidRequestError("seed", f"expected an integer from 0 to 2^64 - 1, got {seed}")


def check_window(window: int | None) -> None:
    """Raise InvalidRequestError unless the window is missing or 1 to MAX_WINDOW."""
    if window is not None and not 1 <= window <= MAX_WINDOW:
        raise InvalidRequestError(
            "window",
            f"expected 1 to {MAX_WINDOW} candidates, got {window}; plain decoding is --policy off",
        )


def check_policy(policy: str | None) -> None:
    """Raise InvalidRequestError unless the policy is missing or one of this version."""
    known = [name.value for name in PolicyName]
    if policy is not None and policy not in known:
        raise InvalidRequestError("policy", f"expected one of {', '.join(known)}, got {policy!r}")


def check_rule(rule: str | None) -> None:
    """Raise InvalidRequestError unless the verification rule is missing or one of this version."""
    if rule is not None and rule not in VERIFICATION_RULES:
        raise InvalidRequestError(
            "verification",
            f"expected {', '.join(VERIFICATION_RULES)} (the only rule so far), got {rule!r}",
        )


@dataclass(frozen=True, slots=True)
class RequestFlags:
    """What every row of a run has in common; None leaves a choice to checkpoint or server."""

    max_tokens: int
    temperature: float | None
    top_k: int | None
    top_p: float | None
    seed: int
    policy: str | None
    verification: str | None
    window: int | None

    def __post_init__(self) -> None:
        check_at_least_one("max-tokens", self.max_tokens)
        check_sampling(temperature=self.temperature, top_k=self.top_k, top_p=self.top_p)
        check_seed(self.seed)
        check_policy(self.policy)
        check_rule(self.verification)
        check_window(self.window)

    def seed_of(self, index: int) -> int:
        """Row `index` of a run uses the run's seed plus its index."""
        return (self.seed + index) % SEED_SPACE


def parse_list(name: str, text: str, parse: Callable[[str], T], expected: str) -> list[T]:
    """The values of a comma-separated flag, without repeats. Raises InvalidRequestError."""
    values: list[T] = []
    for part in text.split(","):
        try:
            value = parse(part.strip())
        except ValueError as error:
            raise InvalidRequestError(name, f"expected {expected}, got {text!r}") from error
        if value not in values:
            values.append(value)
    return values
