"""The drafter keeps drafting. The target takes what has arrived and never waits."""

from __future__ import annotations

from cluster.decoding.policy import POLICIES, DraftView, LookaheadPolicy, Wait


class Chain(LookaheadPolicy):
    """The default."""

    name = "chain"
    help = "the drafter keeps drafting, and a step takes what has arrived"
    place_in_auto: int | None = 30

    def granted_candidates(self, view: DraftView) -> int:
        """The window being verified, the token after it, and one window more."""
        return 2 * view.window + 1

    def window(self, view: DraftView, now: float, wait_seconds: float) -> int | Wait:
        """The candidates that have arrived, at most a window."""
        return min(view.num_candidates, view.window)


CHAIN = POLICIES.add(Chain())
