"""The rules, and what each of them requires of candidates (docs/rules.md shows the same table)."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from paceline.errors import InvalidRequestError, ProtocolError
from paceline.rules import Rule
from workers.verification.candidates import CandidateTree
from workers.verification.draft_probs import DraftProbs


class CandidateKind(enum.Enum):
    """How a drafter makes its candidates, given the tokens before them."""

    SHARED_NOISE = "shared noise"
    """The largest of log draft_probs + the coupled noise (purpose 0): chains and trees."""
    DETERMINISTIC = "deterministic"
    """Without a draw: n-grams, tables, greedy trees."""
    SAMPLED_CHAIN = "sampled chain"
    """One draw per position."""
    INDEPENDENT_PATHS = "independent paths"
    """Whole paths drawn independently, merged where equal and counted."""
    WITHOUT_REPLACEMENT = "draws without replacement"
    """The children of each node in the order drawn, none twice."""
    WITH_REPLACEMENT = "draws with replacement"
    """The children of each node drawn independently, in the order drawn, equal ones kept."""


class Promise(enum.Enum):
    """What a rule promises of the output, whatever is proposed within its kinds."""

    TEXT = "text"
    """The text of plain decoding with the same seed."""
    LAW = "law"
    """The law of plain decoding; at temperature 0 this is its text."""


@dataclass(frozen=True, slots=True)
class RuleFacts:
    """What a rule requires and promises. `candidates` are the kinds for which it is exact."""

    needs_draft_probs: bool
    candidates: frozenset[CandidateKind]
    promise: Promise
    chain_only: bool = False
    equal_siblings: bool = False


# A chain of draws is the simplest case of each way of drawing.
FACTS: Mapping[Rule, RuleFacts] = MappingProxyType(
    {
        Rule.COUPLED: RuleFacts(False, frozenset(CandidateKind), Promise.TEXT),
        Rule.REJECTION: RuleFacts(
            True, frozenset({CandidateKind.SAMPLED_CHAIN}), Promise.LAW, chain_only=True
        ),
        Rule.KSEQ: RuleFacts(
            True,
            frozenset({CandidateKind.SAMPLED_CHAIN, CandidateKind.INDEPENDENT_PATHS}),
            Promise.LAW,
        ),
        Rule.RECURSIVE: RuleFacts(
            True,
            frozenset({CandidateKind.SAMPLED_CHAIN, CandidateKind.WITHOUT_REPLACEMENT}),
            Promise.LAW,
        ),
        Rule.MCSD: RuleFacts(
            True,
            frozenset({CandidateKind.SAMPLED_CHAIN, CandidateKind.WITH_REPLACEMENT}),
            Promise.LAW,
            equal_siblings=True,
        ),
        # Drawn candidates are as good as fixed ones, unless their noise is that of the target.
        Rule.ONE_HOT: RuleFacts(
            False, frozenset(CandidateKind) - {CandidateKind.SHARED_NOISE}, Promise.LAW
        ),
    }
)


def check_fits(rule: Rule, kind: CandidateKind, *, drafter: str) -> None:
    """Raise InvalidRequestError, naming rule and drafter, if the rule would not be exact."""
    facts = FACTS[rule]
    if kind not in facts.candidates:
        kinds = sorted(one.value for one in facts.candidates)
        raise InvalidRequestError(
            "verification",
            f"the rule {rule.value!r} is exact for {' or '.join(kinds)}, and the drafter "
            f"{drafter!r} gives {kind.value} candidates: choose another rule or drafter",
        )


def check_proposal(
    rule: Rule,
    tree: CandidateTree,
    draft_probs: DraftProbs | None,
    *,
    vocab_size: int,
    max_nodes: int,
) -> None:
    """Raise ProtocolError if candidates are malformed, or the rule cannot verify them.

    This cannot check that they were drawn as their drafter says.
    """
    facts = FACTS[rule]
    tree.check(vocab_size=vocab_size, max_nodes=max_nodes, equal_siblings=facts.equal_siblings)
    if facts.chain_only and not tree.is_chain:
        raise ProtocolError(
            f"expected a chain for the rule {rule.value!r}, got the parents {list(tree.parents)}: "
            "draft one candidate per position"
        )
    if rule is not Rule.KSEQ and max(tree.multiplicities, default=1) > 1:
        raise ProtocolError(
            f"expected candidates without multiplicities for the rule {rule.value!r}, got "
            f"{list(tree.multiplicities)}: only 'kseq' tests a candidate several times"
        )
    if not facts.needs_draft_probs:
        return
    if draft_probs is None:
        if len(tree):
            raise ProtocolError(
                f"expected draft probabilities for the rule {rule.value!r}, got none: send what "
                "the candidates were drawn from"
            )
        return
    draft_probs.check(tree, vocab_size=vocab_size)
