"""Like fanout, and several target groups verify one sequence.

While one group verifies a window, another begins with the next, as if the first were accepted. It
begins once the drafter has added the candidates of a group's share of a step, so verdicts come at
even intervals. Each step holds all candidates from the last committed token on
(cluster/decoding/replicas.py).
"""

from __future__ import annotations

from cluster.decoding.policies.fanout import FanOut
from cluster.decoding.policy import POLICIES, DraftView, Needs, Wait
from paceline.limits import MAX_WINDOW


class Replicas(FanOut):
    """Successive windows of a sequence in several target groups."""

    name = "replicas"
    help = "as fanout, and several target groups verify successive windows of a sequence"
    paper = "DSI, Timor et al. 2024, arXiv 2405.14105"
    needs = Needs(chains_only=True, shared_noise=True, groups=2)
    replicates = True
    place_in_auto = 60

    def granted_candidates(self, view: DraftView) -> int:
        """A window of each group, the token after it, and one window more."""
        return view.num_groups * (view.window + 1) + view.window

    def window(self, view: DraftView, now: float, wait_seconds: float) -> int | Wait:
        """All that has arrived if no group verifies; else what others verify and enough new."""
        if not view.verifying:
            return min(view.num_candidates, view.window)
        most = min(view.in_flight + 1 + view.window, MAX_WINDOW)
        new = min(view.num_candidates, most) - view.in_flight
        share = max(1, min(view.window, round(view.pace / view.num_groups)))
        enough = 1 if view.waits_in_vain else share
        return view.in_flight + new if new >= enough else Wait()


REPLICAS = POLICIES.add(Replicas())
