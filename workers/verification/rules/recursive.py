"""Recursive rejection of children drawn without replacement (RSD, Jeon et al. 2024).

A refused token leaves the draft distribution, since it cannot be drawn again.
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
    return RejectionNode(target_probs_V, draft, with_replacement=False)


RULES.add(
    Rule(
        name="recursive",
        help="rejection sampling of trees whose children were drawn without replacement",
        paper="RSD, Jeon et al. 2024",
        promise=Promise.LAW,
        exact_for=frozenset({CandidateKind.SAMPLED_CHAIN, CandidateKind.WITHOUT_REPLACEMENT}),
        drawn_as=CandidateKind.WITHOUT_REPLACEMENT,
        needs_draft_probs=True,
        begin=_begin,
    )
)
