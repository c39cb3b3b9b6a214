"""Compares the token ids of two runs over the same rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

from cluster.decoding.policies.off import OFF
from cluster.decoding.policy import policy_named
from deploy.rows.batch import Answer, Failure
from paceline.errors import InvalidRequestError
from paceline.generation import Completion
from workers.verification.rule import Promise, rule_named

TIE_MARGIN = 1e-4
"""Two tokens whose logits differ by less than this are a tie. Kernels differ by up to 2e-4."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to run the rows. `window`: None is the server's default."""

    policy: str
    window: int | None
    concurrency: int

    def __str__(self) -> str:
        window = "" if self.window is None else f" window {self.window}"
        return f"{self.policy}{window} x{self.concurrency}"


REFERENCE = Variant(OFF.name, None, 1)
"""Plain decoding, one row after the other. Every other run is compared with it."""


@dataclass(frozen=True, slots=True)
class Matrix:
    """The runs over each file: every temperature with every variant, the reference first."""

    temperatures: Sequence[float | None]
    variants: Sequence[Variant]


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first position where a row's tokens differ. A token is None if that text had ended.

    `margin`: the logit of plain decoding's own token there minus that of ours; None: not measured.
    It is measured for trees, whose rows are computed in another order than those of chains.
    """

    row: int
    position: int
    expected: int | None
    got: int | None
    margin: float | None = None

    @property
    def tie(self) -> bool:
        """Whether rounding alone explains the difference."""
        return self.margin is not None and abs(self.margin) < TIE_MARGIN


def first_difference(row: int, expected: Sequence[int], got: Sequence[int]) -> Divergence | None:
    """The first position where two lists of token ids differ; None: they are equal."""
    for position, (one, other) in enumerate(zip_longest(expected, got)):
        if one != other:
            return Divergence(row, position, one, other)
    return None


@dataclass(frozen=True, slots=True)
class Run:
    """The answers of one variant, and how long they took."""

    variant: Variant
    answers: Sequence[Answer]
    seconds: float

    @property
    def _completions(self) -> list[Completion]:
        return [one.outcome for one in self.answers if not isinstance(one.outcome, Failure)]

    @property
    def tokens(self) -> int:
        """Output tokens of all rows."""
        return sum(len(one.token_ids) for one in self._completions)

    @property
    def steps(self) -> int:
        """Verdicts of all rows."""
        return sum(one.stats.steps for one in self._completions)

    @property
    def failures(self) -> list[int]:
        """Indices of the rows without an answer."""
        return [answer.index for answer in self.answers if isinstance(answer.outcome, Failure)]


def divergences(expected: Run, got: Run) -> list[Divergence]:
    """The first difference of each row whose token ids differ. Rows that failed are left out."""
    found: list[Divergence] = []
    for one, other in zip(expected.answers, got.answers, strict=True):
        if isinstance(one.outcome, Failure) or isinstance(other.outcome, Failure):
            continue
        difference = first_difference(one.index, one.outcome.token_ids, other.outcome.token_ids)
        if difference is not None:
            found.append(difference)
    return found


@dataclass(frozen=True, slots=True)
class Comparison:
    """A run compared with plain decoding of the same rows and seeds."""

    run: Run
    temperature: float | None
    divergences: Sequence[Divergence]

    @property
    def ties(self) -> int:
        """Number of divergences that rounding explains."""
        return sum(found.tie for found in self.divergences)


def check_text(rule: str | None, temperature: float) -> None:
    """Raise InvalidRequestError if the rule keeps the law of plain decoding but not its text."""
    asked = rule_named(rule or "coupled")
    if temperature > 0 and asked.promise is not Promise.TEXT:
        raise InvalidRequestError(
            "verification",
            f"the rule {asked.name!r} promises the law of plain decoding and not its text at "
            f"temperature {temperature:g}: compare texts at --temperature 0, or with coupled",
        )


def variants_of(
    policies: Sequence[str],
    windows: Sequence[int | None],
    concurrencies: Sequence[int],
) -> list[Variant]:
    """Every combination except the reference. Plain decoding has no window."""
    found: list[Variant] = []
    for policy in policies:
        drafts = policy_named(policy).drafts
        for window in windows:
            for concurrency in concurrencies:
                variant = Variant(policy, window if drafts else None, concurrency)
                if variant != REFERENCE and variant not in found:
                    found.append(variant)
    return found
