"""How often a second guess was right where the first was wrong, and what it was worth then."""

from __future__ import annotations

from collections.abc import Sequence

from cluster.decoding.choices import Choice
from cluster.decoding.counts import CountedVerdict, Foresight
from cluster.decoding.pilot import Pilot
from cluster.decoding.policies import PolicyName
from cluster.decoding.timings import Mean
from cluster.decoding.token_tree import TokenTree
from cluster.decoding.windows import lead_length

FIRST_HIT_RATE = 0.5
"""Of branches of which nothing is known: worth a try."""
_DOUBT = 4.0


class Hits:
    """What branches and trees bring, by whose they are: a part of the beliefs (beliefs.py)."""

    def __init__(self) -> None:
        # Of places where the first candidate was wrong, the share at which another was right; and
        # where a verdict's own token was such a one, how many candidates it then held.
        self._rates: dict[PolicyName, Mean] = {}
        self._lengths: dict[Choice, Mean] = {}

    @property
    def weight(self) -> float:
        """Verdicts against a first candidate, decayed, on which all of it rests."""
        return sum(rate.weight for rate in self._rates.values())

    def rates(self) -> dict[PolicyName, float]:
        """As counted, by the policy whose second guesses they are."""
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
        """Of a verdict: which of its first candidates were right, and what `tree` it left.

        `of`: sequences of which it is one.
        """
        rate = self._rates.setdefault(_foreseen_as(pilot.choice), Mean())
        for _ in range(rights[: verdict.accepted].count(False)):
            rate.add(1.0, of=of)
        if verdict.foresight in (Foresight.BRANCH, Foresight.OTHERS):
            hit = verdict.foresight is Foresight.BRANCH
            # Where nothing is sent ahead a place without another candidate tells nothing of them.
            if hit or verdict.refused_all or pilot.choice.policy.fans_out:
                rate.add(float(hit), of=of)
            if hit:
                lengths = self._lengths.setdefault(pilot.choice, Mean())
                lengths.add(lead_length(tree.root, pilot.window), of=of)

    def rate(self, choice: Choice) -> float:
        """Near that of other policies' second guesses, while little is known of its own."""
        own, likely = _foreseen_as(choice), FIRST_HIT_RATE
        for policy, rate in self._rates.items():
            likely = _leaning(rate, likely) if policy is not own else likely
        return _leaning(self._rates.get(own), likely)

    def branch_length(self, choice: Choice, *, likely: float) -> float:
        """Candidates held where a branch was right, near `likely` while little is known."""
        return _leaning(self._lengths.get(choice), likely)


def _foreseen_as(choice: Choice) -> PolicyName:
    """The policy by whose branches it foresees outcomes, however many groups verify them."""
    return PolicyName.FANOUT if choice.policy.replicates else choice.named


def _leaning(mean: Mean | None, prior: float) -> float:
    """The mean, near `prior` while it rests on little."""
    if mean is None:
        return prior
    return (mean.value * mean.weight + prior * _DOUBT) / (mean.weight + _DOUBT)
