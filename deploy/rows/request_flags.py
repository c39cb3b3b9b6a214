"""Request flags that `generate` and `verify` share, checked before anything starts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import TypeVar

from cluster.config.model import Config
from cluster.decoding.lookahead import policy_named
from cluster.driver.fitting import (
    check_branches,
    check_deployed,
    check_layout,
    check_merge,
    check_merge_alone,
    check_policy_fits,
    check_rule_fits,
)
from paceline.errors import InvalidRequestError
from paceline.rules import DRAFTER_KINDS, MAX_WINDOW, Stopping
from paceline.sampling import SamplingParams
from workers.verification.rule import RULES, Promise, rule_named

T = TypeVar("T")

SEED_SPACE = 2**64


def check_sampling(*, temperature: float | None, top_k: int | None, top_p: float | None) -> None:
    """Raise InvalidRequestError naming the first value out of range. None: the checkpoint's."""
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


def check_name(flag: str, name: str | None, known: Iterable[str]) -> None:
    """Raise InvalidRequestError unless the name is missing or known."""
    names = list(known)
    if name is not None and name not in names:
        raise InvalidRequestError(flag, f"expected one of {', '.join(names)}, got {name!r}")


def check_text(verification: str | None, temperature: float) -> None:
    """Raise InvalidRequestError if the rule keeps the law of plain decoding but not its text."""
    rule = verification or "coupled"
    if temperature > 0 and rule_named(rule).promise is not Promise.TEXT:
        raise InvalidRequestError(
            "verification",
            f"the rule {rule!r} promises the law of plain decoding and not its text at "
            f"temperature {temperature:g}: compare texts at --temperature 0, or with coupled",
        )


@dataclass(frozen=True, slots=True)
class RequestFlags:
    """Options that all rows of a run share. None leaves the choice to checkpoint or server."""

    max_tokens: int
    temperature: float | None
    top_k: int | None
    top_p: float | None
    seed: int
    policy: str | None
    verification: str | None
    window: int | None
    branches: int | None = None
    stopping: str | None = None
    drafter: str | None = None
    merge: bool | None = None

    def __post_init__(self) -> None:
        check_at_least_one("max-tokens", self.max_tokens)
        check_sampling(temperature=self.temperature, top_k=self.top_k, top_p=self.top_p)
        check_seed(self.seed)
        drafts = self.policy is None or policy_named(self.policy).drafts
        check_name("verification", self.verification, RULES)
        check_window(self.window)
        if self.branches is not None:
            rule = self.verification or "coupled"
            check_branches(rule, self.branches, self.window or MAX_WINDOW)
        if self.policy is not None:
            rule = self.verification or "coupled"
            check_policy_fits(self.policy, rule, self.branches or 1)
        check_name("stopping", self.stopping, (stopping.value for stopping in Stopping))
        check_name("drafter", self.drafter, DRAFTER_KINDS)
        if self.drafter is not None and self.verification is not None and drafts:
            check_rule_fits(self.verification, {self.drafter}, field="verification")
        if self.merge:
            check_merge_alone(self.drafter)
            if self.policy is not None and drafts:
                rule = self.verification or "coupled"
                check_merge(self.policy, rule, None)

    def seed_of(self, index: int) -> int:
        """The seed of row `index`: the run's seed plus the index."""
        return (self.seed + index) % SEED_SPACE


def check_drafters(
    flags: RequestFlags, config: Config, policies: Collection[str] | None = None
) -> None:
    """Raise InvalidRequestError if no drafter of the configuration could draft what is asked.

    `policies`: those of a run with several; None: that of the flags, else the configuration's.
    """
    chosen = config.speculation
    asked = policies or [flags.policy or chosen.policy]
    num_drafters = sum(drafter.count for drafter in config.drafters)
    for policy in asked:
        check_layout(policy, num_drafters, config.target.groups)
    drafting = [policy for policy in asked if policy_named(policy).drafts]
    if not drafting:
        return
    rule, kinds = flags.verification or chosen.verification, config.drafter_kinds
    wanted = flags.drafter or chosen.drafter
    if wanted != "any":
        check_deployed(wanted, kinds)
        kinds = {wanted}
    check_rule_fits(rule, kinds, field="verification")
    if flags.merge:
        for policy in drafting:
            check_merge(policy, rule, kinds)


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
