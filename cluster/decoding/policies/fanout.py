"""Like chain, and the drafter also drafts for the likeliest other outcomes, in branches.

Branches are sent ahead of the verdict. If a branch begins with the verdict's token, the driver goes
on with that branch. If none does, the drafter begins an ordinary chain.
"""

from __future__ import annotations

from cluster.decoding.policies.chain import Chain
from cluster.decoding.policy import POLICIES, DraftView, Needs, forks_within


class FanOut(Chain):
    """A chain with branches."""

    name = "fanout"
    help = "as chain, and the drafter also drafts for the likeliest other outcomes"
    paper: str | None = (
        "after SSD (Saguaro), Kumar et al. 2026, whose drafter answers once it has the outcome"
    )
    needs = Needs(no_draft_probs=True)
    fans_out = True
    place_in_auto = 40

    def granted_branches(self, view: DraftView) -> int:
        """One for each position that may fork; twice as many if several drafters share them.

        The first drafter draws the likelier half, as it would alone, so that none of these branches
        is missing when the verdict needs it. More than twice as many would gain little, and the
        driver places a token of each branch in every pass.

        A chain forks at most at as many positions as the drafter makes passes in two steps, so a
        slow drafter gets fewer branches. MOST_CHAINS bounds all chains and branches of a drafter.
        """
        if not view.useful_candidates:
            return 0
        pace = 0.0 if view.is_tree else view.pace
        forks = forks_within(self.granted_candidates(view), pace=pace, crowd=view.crowd)
        return forks * min(2, max(1, view.num_drafters))


FANOUT = POLICIES.add(FanOut())
