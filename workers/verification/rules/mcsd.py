"""Recursive rejection of children drawn with replacement (MCSD, Yang et al. 2024).

The children of a node are independent draws, so the draft distribution stays after a refusal.
"""

from __future__ import annotations

from workers.verification.rule import RULES, CandidateKind, Promise, Rule
from workers.verification.rules.rejection import begin_with_replacement

RULES.add(
    Rule(
        name="mcsd",
        help="rejection sampling of trees whose children were drawn with replacement",
        paper="Yang et al. 2024",
        promise=Promise.LAW,
        exact_for=frozenset({CandidateKind.SAMPLED_CHAIN, CandidateKind.WITH_REPLACEMENT}),
        drawn_as=CandidateKind.WITH_REPLACEMENT,
        needs_draft_probs=True,
        begin=begin_with_replacement,
    )
)
