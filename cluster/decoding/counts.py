"""What is counted of a sequence and of all together: the one place that holds the counting rules.

- A verdict is a step's answer for one sequence. Acceptance length is committed output tokens over
  verdicts, those without candidates and the first token's included, the verdicts' own tokens too.
- A candidate is *drafted* when a step verified it, *accepted* when the verdict committed it.
  Tokens beyond a sequence's end are not committed, so candidates there are not accepted.
- Position i of a window is that of its i-th candidate on a path, from 1 on. It is *drafted* when
  the window has a candidate there, *tried* when besides all before it were accepted, *accepted*
  when one there was. Accepted over tried is the chance of a candidate given those before it.
- A token is *proposed* when a drafter sent it, in time or not; told again it counts once. It is
  *used* when it was accepted, or when the verdict's own token was held as a candidate, since then
  all that was drafted after it stays.
- A verdict *diverged* when the driver held candidates for the place of its own token and the first
  of them was another; it was a *hit* of a branch when one of the others was that token.
- A step is *wasted* on a sequence when it verified candidates and accepted none.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from cluster.decoding.instructions import Slice
from paceline.generation import SpeculationStats
from paceline.rules import MAX_WINDOW


class Foresight(enum.Enum):
    """What was held for the place of a verdict's own token."""

    NOTHING = "nothing"
    FIRST = "first"
    BRANCH = "branch"
    OTHERS = "others"


@dataclass(slots=True)
class CountedVerdict:
    """A verdict as it is counted. `depth`: of the window's longest path; `accepted` of it.

    `tried`: positions that the verdict looked at; `committed`: output tokens. `firsts`: of a tree,
    for each place along the path where it had candidates, whether the first of them was right;
    `refused_all`: at the last of them several were wrong.
    """

    window: int
    depth: int
    tried: int
    accepted: int
    committed: int
    foresight: Foresight
    firsts: tuple[bool, ...] | None = None
    refused_all: bool = False


def counted(
    part: Slice, *, path: Sequence[int], kept: int, committed: int, foresight: Foresight
) -> CountedVerdict:
    """The verdict on a slice that committed so many tokens, of which the sequence's end `kept`.

    `path`: the candidates that it accepted. What lies beyond the end was not tried.
    """
    depth, accepted = depth_of(part.window, part.parents), len(path)
    if kept < committed:
        accepted = min(accepted, kept)
        return CountedVerdict(part.window, depth, accepted, accepted, kept, Foresight.NOTHING)
    tried = min(depth, accepted + 1)
    if not part.parents:
        return CountedVerdict(part.window, depth, tried, accepted, kept, foresight)
    firsts = firsts_along(part.parents, path)
    refused_all = part.parents.count(path[-1] + 1 if path else 0) > 1
    return CountedVerdict(part.window, depth, tried, accepted, kept, foresight, firsts, refused_all)


@dataclass(slots=True)
class Counts:
    """Counts of one sequence, or of all."""

    verdicts: int = 0
    committed: int = 0
    drafted: int = 0
    accepted: int = 0
    proposed: int = 0
    used: int = 0
    wasted: int = 0
    diverged: int = 0
    branch_hits: int = 0
    # How many verdicts had so deep a window, tried so many positions, accepted so many.
    _depths: list[int] = field(default_factory=lambda: [0] * (MAX_WINDOW + 1))
    _tried: list[int] = field(default_factory=lambda: [0] * (MAX_WINDOW + 1))
    _accepted: list[int] = field(default_factory=lambda: [0] * (MAX_WINDOW + 1))

    def add(self, verdict: CountedVerdict) -> None:
        """Count one verdict."""
        accepted, foresight = verdict.accepted, verdict.foresight
        self.verdicts += 1
        self.committed += verdict.committed
        self._depths[verdict.depth] += 1
        self._tried[verdict.tried] += 1
        self._accepted[accepted] += 1
        if verdict.window:
            self.drafted += verdict.window
            self.accepted += accepted
            self.used += accepted
            self.wasted += not accepted
        if foresight is Foresight.NOTHING:
            return
        if foresight is Foresight.FIRST:
            self.used += 1
            return
        self.diverged += 1
        if foresight is Foresight.BRANCH:
            self.used += 1
            self.branch_hits += 1

    @property
    def acceptance(self) -> float | None:
        """The chance of a candidate given those before it; None: none was tried."""
        tried = sum(index * count for index, count in enumerate(self._tried))
        return self.accepted / tried if tried else None

    def speculation(self) -> SpeculationStats:
        """The counts as they are told outside, without the shares of time."""
        return SpeculationStats(
            drafted_at=_at_least(self._depths),
            tried_at=_at_least(self._tried),
            accepted_at=_at_least(self._accepted),
            proposed=self.proposed,
            used=self.used,
            wasted_steps=self.wasted,
            diverged=self.diverged,
            branch_hits=self.branch_hits,
        )


def depth_of(window: int, parents: tuple[int, ...]) -> int:
    """The longest path of a window (target.proto, Slice); no parents: a chain."""
    if not parents:
        return window
    depths = [0]
    for parent in parents:
        depths.append(depths[parent] + 1)
    return max(depths)


def firsts_along(parents: Sequence[int], path: Sequence[int]) -> tuple[bool, ...]:
    """For each place along an accepted path that a window has candidates for, whether the first of
    them was right: after the path none of them was. `parents`: of the window, as Slice has them.
    """
    first_after: dict[int, int] = {}
    for index, parent in enumerate(parents):
        first_after.setdefault(parent, index)
    above = (0, *(index + 1 for index in path))
    found = [first_after[parent] == index for parent, index in zip(above, path, strict=False)]
    return (*found, False) if above[-1] in first_after else tuple(found)


def _at_least(histogram: list[int]) -> tuple[int, ...]:
    """Of how many the number was at least 1, 2, ...; up to the last that there is."""
    counts = list(accumulate(reversed(histogram[1:])))
    return tuple(reversed(counts[counts.count(0) :]))
