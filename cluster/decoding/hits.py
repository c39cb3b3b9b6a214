"""How often a second guess was right where the first was wrong, and how long its branch was."""

from __future__ import annotations

from collections.abc import Sequence

from cluster.decoding.choices import FANOUT, Choice
from cluster.decoding.counts import CountedVerdict, Foresight
from cluster.decoding.pilot import Pilot
from cluster.decoding.timings import Mean
from cluster.decoding.token_tree import TokenTree
from cluster.decoding.windows import lead_length

FIRST_HIT_RATE = 0.5
"""Hit rate assumed for branches of which nothing is known. It makes them worth a try."""
_DOUBT = 4.0


class Hits:
    """Hit rates and lengths of branches, by policy; a part of the beliefs (beliefs.py)."""

    def __init__(self) -> None:
        # By name of the policy: the share of positions with a wrong first candidate where another
        # one was right. By choice: the candidates then held after it.
        self._rates: dict[str, Mean] = {}
        self._lengths: dict[Choice, Mean] = {}

    @property
    def weight(self) -> float:
        """Verdicts against a first candidate, decayed, that all rates rest on."""
        return sum(rate.weight for rate in self._rates.values())

    def rates(self) -> dict[str, float]:
        """The counted rates, by the policy that made the second guesses."""
        return {policy: rate.value for policy, rate in self._rates.items()}

    def count(
        self,
        pilot: Pilot,
        verdict: CountedVerdict,
        rights: Sequence[bool],
        tree: TokenTree,
        *,
        of: int,
    ) -> None:
        """Learn from a verdict on a sequence.

        `rights`: whether its first candidates were right. `tree`: what the verdict left. `of`:
        sequences of the step.
        """
        rate = self._rates.setdefault(_foreseen_as(pilot.choice), Mean())
        for _ in range(rights[: verdict.accepted].count(False)):
            rate.add(1.0, of=of)
        if verdict.foresight in (Foresight.BRANCH, Foresight.OTHERS):
            hit = verdict.foresight is Foresight.BRANCH
            # Nothing was sent ahead, so a position with one candidate says nothing of second ones.
            if hit or verdict.refused_all or pilot.choice.policy.fans_out:
                rate.add(float(hit), of=of)
            if hit:
                lengths = self._lengths.setdefault(pilot.choice, Mean())
                lengths.add(lead_length(tree.root, pilot.window), of=of)

    def rate(self, choice: Choice) -> float:
        """The hit rate, near that of other policies while little is known of this one's."""
        own, likely = _foreseen_as(choice), FIRST_HIT_RATE
        for policy, rate in self._rates.items():
            likely = _leaning(rate, likely) if policy is not own else likely
        return _leaning(self._rates.get(own), likely)

    def branch_length(self, choice: Choice, *, likely: float) -> float:
        """Candidates held after a hit, near `likely` while little is known."""
        return _leaning(self._lengths.get(choice), likely)


def _foreseen_as(choice: Choice) -> str:
    """Name of the policy whose branches a choice uses. With several groups these are fanout's."""
    return FANOUT.policy.name if choice.policy.replicates else choice.policy.name


def _leaning(mean: Mean | None, prior: float) -> float:
    """The mean, drawn towards `prior` while it rests on few values."""
    if mean is None:
        return prior
    return (mean.value * mean.weight + prior * _DOUBT) / (mean.weight + _DOUBT)
