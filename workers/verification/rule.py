"""What a verification rule is, and the registry of all rules.

A rule decides which candidates of a window are committed (docs/rules.md). Each is one file, here in
`workers/verification/rules/`, or in another package that names it in an entry point of the group
`paceline.rules` (docs/extending.md). The file makes a `Rule` and registers it by `RULES.add`. For
that it needs only this module.

Other code refers to a rule by its name, and `rule_named` returns the rule. Reading the registry
must import neither torch nor Ray, so a rule's file must import neither.

Shapes: V vocabulary, M tokens of a draft distribution.
"""

from __future__ import annotations

import enum
import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from paceline.errors import ConfigError
from workers.process.plugin_registry import Registry


class CandidateKind(enum.Enum):
    """How a drafter makes its candidates, given the tokens before them."""

    SHARED_NOISE = "shared noise"
    """The tokens with the largest log draft_probs + coupled noise (purpose 0): chains and trees."""
    DETERMINISTIC = "deterministic"
    """Chosen without random numbers: n-grams, tables, greedy trees."""
    SAMPLED_CHAIN = "sampled chain"
    """One draw per position: the simplest case of each of the following kinds."""
    INDEPENDENT_PATHS = "independent paths"
    """Whole paths drawn independently, merged where equal and counted."""
    WITHOUT_REPLACEMENT = "draws without replacement"
    """The children of each node, in the order drawn; no token is drawn twice."""
    WITH_REPLACEMENT = "draws with replacement"
    """The children of each node, drawn independently, in the order drawn; equal ones are kept."""


class Promise(enum.Enum):
    """What a rule promises about the output, for all candidates of the kinds in `exact_for`."""

    TEXT = "text"
    """The text of plain decoding with the same seed."""
    LAW = "law"
    """The law (the probability distribution) of plain decoding; at temperature 0, its text."""


@dataclass(frozen=True, slots=True, eq=False)
class DraftDistribution:
    """Ascending token ids [M] and their float64 probabilities, whose sum is 1. Other ids have 0."""

    token_ids_M: NDArray[np.int64]
    probs_M: NDArray[np.float64]

    def prob_of(self, token_id: int) -> float:
        """The probability of a token."""
        index = int(np.searchsorted(self.token_ids_M, token_id))
        if index == self.token_ids_M.size or self.token_ids_M[index] != token_id:
            return 0.0
        return float(self.probs_M[index])

    def without(self, token_id: int) -> DraftDistribution:
        """The distribution of the next draw if this token cannot be drawn again."""
        probs_M = np.where(self.token_ids_M == token_id, 0.0, self.probs_M)
        total = float(probs_M.sum())
        return DraftDistribution(self.token_ids_M, probs_M / total if total > 0 else probs_M)


class RuleNode(Protocol):
    """A rule at one node of the candidate tree: arithmetic without random numbers.

    The children of the node are tested one after another, and the first that is accepted ends the
    tests. `verify.walk` draws the random numbers (tosses the coins).
    """

    def acceptance(self, token_id: int) -> float:
        """The probability that the child tested next is accepted, after the earlier refusals."""

    def refused(self, token_id: int) -> RuleNode:
        """The node after this child was refused."""

    def residual_V(self) -> NDArray[np.float64]:
        """The distribution [V] of the token after all children were refused.

        It need not be normalized, but its sum is above 0, even where a refusal is impossible:
        rounding may cause one.
        """


Begin = Callable[[NDArray[np.float64], DraftDistribution | None, int], RuleNode]
"""Makes a node whose children have not been tested yet, from three arguments: the target's
probabilities [V] after the node, which must not be changed; the distribution from which the
children were drawn, or None if the rule needs none; and the number of tests, at least 1."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rule:
    """A verification rule: what it requires, what it promises, and how it verifies."""

    name: str
    """The name on the wire and in files: at most 32 lower-case letters, digits and hyphens."""
    help: str
    """One line for people, without a period at its end."""
    paper: str
    """Authors and year."""
    promise: Promise
    exact_for: frozenset[CandidateKind]
    """The kinds of candidates for which the promise holds. Drafters of other kinds are refused."""
    drawn_as: CandidateKind | None
    """How a model drafts for this rule; None: a model does not draft for it. This decides which
    shapes the candidates of any drafter may have (`chain_only`, `equal_siblings`,
    `counts_paths`)."""
    needs_draft_probs: bool = False
    """Whether drafters must send the distributions from which they drew. Without them, candidates
    of several drafters may be siblings, and branches may be drafted ahead of the verdict."""
    begin: Begin | None = None
    """Makes the rule's nodes. None: a candidate is accepted if it is the target's own token."""

    def __post_init__(self) -> None:
        if self.drawn_as is not None and self.drawn_as not in self.exact_for:
            raise ConfigError(f"rule {self.name!r}: drawn_as is not in exact_for")
        if (wrong := self._contradiction()) is not None:
            raise ConfigError(f"rule {self.name!r}: {wrong}")

    def _contradiction(self) -> str | None:
        """Facts under which other requests would pay for this rule, and what to do."""
        kinds, drawn_as = self.exact_for, self.drawn_as
        if drawn_as is CandidateKind.DETERMINISTIC:
            return "a model draws, so drawn_as cannot be DETERMINISTIC: use None"
        if self.begin is None:
            if drawn_as not in (CandidateKind.SHARED_NOISE, None) or self.needs_draft_probs:
                return (
                    "without `begin` the target's own token decides: drawn_as must be SHARED_NOISE "
                    "or None, and needs_draft_probs False"
                )
            return None
        if CandidateKind.SHARED_NOISE in kinds:
            return (
                "candidates with shared noise tell the target's token, so no coin may decide on "
                "them: take SHARED_NOISE out of exact_for"
            )
        if drawn_as is not None and not self.needs_draft_probs:
            return (
                "a model's draws can be verified only with their distributions: set "
                "needs_draft_probs, or drawn_as to None"
            )
        if self.needs_draft_probs and CandidateKind.DETERMINISTIC in kinds:
            return (
                "candidates that were not drawn have no distribution: take DETERMINISTIC out of "
                "exact_for"
            )
        return None

    @property
    def shares_noise(self) -> bool:
        """Whether the target's own token decides. Drafters then share the noise that chooses it."""
        return self.begin is None

    @property
    def chain_only(self) -> bool:
        """Whether a position has at most one candidate."""
        return self.drawn_as is CandidateKind.SAMPLED_CHAIN

    @property
    def equal_siblings(self) -> bool:
        """Whether two children of one node may be the same token."""
        return self.drawn_as is CandidateKind.WITH_REPLACEMENT

    @property
    def counts_paths(self) -> bool:
        """Whether equal paths are merged and counted, so that a candidate has several tests.

        The tree then does not keep the order of the draws, and tests are done in a random order:
        any fixed order would favor tokens that were drawn twice.
        """
        return self.drawn_as is CandidateKind.INDEPENDENT_PATHS


def _load_own() -> None:
    folder = importlib.import_module("workers.verification.rules")
    for module in pkgutil.iter_modules(folder.__path__):
        importlib.import_module(f"workers.verification.rules.{module.name}")


RULES: Registry[Rule] = Registry("verification rule", group="paceline.rules", load_own=_load_own)
"""All rules, by name."""


def rule_named(name: str) -> Rule:
    """The rule with this name, which was checked where it arrived (`RULES.get`)."""
    return RULES.all()[name]
