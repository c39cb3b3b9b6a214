"""Plain decoding."""

from __future__ import annotations

from cluster.decoding.policy import POLICIES, DraftView, LookaheadPolicy, Wait


class Off(LookaheadPolicy):
    """No drafter, no candidates."""

    name = "off"
    help = "plain decoding, without drafts"
    drafts = False
    drafting_is_free = False

    def granted_candidates(self, view: DraftView) -> int:
        return 0

    def window(self, view: DraftView, now: float, wait_seconds: float) -> int | Wait:
        """Always 0: step at once, without candidates."""
        return 0


OFF = POLICIES.add(Off())
