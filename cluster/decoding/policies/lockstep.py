"""Speculative decoding as published: draft a window, verify it, repeat."""

from __future__ import annotations

from cluster.decoding.policy import (
    POLICIES,
    DraftView,
    LookaheadPolicy,
    Wait,
    await_candidates,
)


class Lockstep(LookaheadPolicy):
    """The drafter rests while the target works, and the target waits for a full window."""

    name = "lockstep"
    help = "draft a window, verify it, repeat; a step waits for a full window, at most wait_ms"
    paper = "Leviathan et al. 2023, arXiv 2211.17192"
    drafting_is_free = False
    waits = True
    place_in_auto = 10

    def granted_candidates(self, view: DraftView) -> int:
        """One window. The grant is spent once the window is drafted."""
        return view.window

    def window(self, view: DraftView, now: float, wait_seconds: float) -> int | Wait:
        """A full window, or what has arrived if no more will come or the wait is over."""
        full = min(view.window, view.useful_candidates)
        if view.is_tree and full > 0:
            full = view.window  # Side by side, more candidates are useful than fit on one path.
        return await_candidates(view, full, now, wait_seconds)


LOCKSTEP = POLICIES.add(Lockstep())
