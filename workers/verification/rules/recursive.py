"""Recursive rejection of children drawn without replacement (RSD, Jeon et al. 2024).

A refused token leaves the draft distribution, since it cannot be drawn again.
"""

from __future__ import annotations

from workers.verification.rule import RULES, CandidateKind, Promise, Rule
from workers.verification.rules.rejection import begin_without_replacement

RULES.add(
    Rule(
        name="recursive",
        help="rejection sampling of trees whose children were drawn without replacement",
        paper="RSD, Jeon et al. 2024",
        promise=Promise.LAW,
        exact_for=frozenset({CandidateKind.SAMPLED_CHAIN, CandidateKind.WITHOUT_REPLACEMENT}),
        drawn_as=CandidateKind.WITHOUT_REPLACEMENT,
        needs_draft_probs=True,
        begin=begin_without_replacement,
    )
)
