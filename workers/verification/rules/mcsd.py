"""Recursive rejection of children drawn with replacement (MCSD, Yang et al. 2024).

The children of a node are independent draws, so the draft distribution stays after a refusal.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from workers.verification.rule import RULES, CandidateKind, DraftDistribution, Promise, Rule
from workers.verification.rules.rejection import RejectionNode


def _begin(
    target_probs_V: NDArray[np.float64], draft: DraftDistribution | None, num_tests: int
) -> RejectionNode:
    assert draft is not None
    return RejectionNode(target_probs_V, draft, with_replacement=True)


RULES.add(
    Rule(
        name="mcsd",
        help="rejection sampling of trees whose children were drawn with replacement",
        paper="Yang et al. 2024",
        promise=Promise.LAW,
        exact_for=frozenset({CandidateKind.SAMPLED_CHAIN, CandidateKind.WITH_REPLACEMENT}),
        drawn_as=CandidateKind.WITH_REPLACEMENT,
        needs_draft_probs=True,
        begin=_begin,
    )
)
