"""Draft the next window while this one is verified.

There are two kinds of steps. Post-verify: the target verifies a whole window while the drafter
drafts the next one. The first token of the next window is compared with the one that the target
adds. Pre-verify, after a verdict that left no candidates: the target verifies the first token of a
window while the drafter drafts the rest. Under the coupled rule that token need not be there to be
compared, so the step begins at once. Rules that toss coins need the token before its coin is
tossed, so the step waits for it.

To keep the text or its law, the scheduler treats the token that a verdict adds as follows. Under
the coupled rule it always commits the token, and the run-ahead stays if it begins with that token.
Under the other rules it drops the token if there is run-ahead, and the run-ahead's first token gets
a coin of its own (step_answers.py, gives_up_bonus).
"""

from __future__ import annotations

from cluster.decoding.policy import (
    POLICIES,
    DraftView,
    LookaheadPolicy,
    Needs,
    Wait,
    await_candidates,
)


class Pearl(LookaheadPolicy):
    """A window is verified while the next one is drafted. Each waits for the other."""

    name = "pearl"
    help = "draft the next window while one is verified; a step waits for it, at most wait_ms"
    paper = "PEARL, Liu et al. 2024, arXiv 2408.11850"
    needs = Needs(chains_only=True)
    waits = True
    grants_by_step = True
    place_in_auto = None

    def granted_candidates(self, view: DraftView) -> int:
        """The window being verified, the token after it, and the window of the next step."""
        return view.in_flight + 1 + self._full(view)

    def window(self, view: DraftView, now: float, wait_seconds: float) -> int | Wait:
        """A whole window if the last verdict left run-ahead, else only the first token."""
        full = min(self._full(view), view.useful_candidates)
        if view.kept:
            return await_candidates(view, full, now, wait_seconds)
        if view.is_coupled:
            return min(view.num_candidates, full)
        return await_candidates(view, min(1, full), now, wait_seconds)

    def _full(self, view: DraftView) -> int:
        """Candidates of a window: with the token after it, as many as are drafted in one step."""
        if not view.pace:
            return view.window
        return max(1, min(view.window, round(view.pace) - 1))


PEARL = POLICIES.add(Pearl())
