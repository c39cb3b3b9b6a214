"""Counts of one sequence or of all. The counting rules are here and nowhere else.

- A verdict is a step's answer for one sequence. Acceptance length is committed output tokens over
  verdicts. It includes verdicts without candidates, the first token's verdict, and the tokens that
  the verdicts add themselves.
- A candidate is *drafted* when a step verified it and *accepted* when the verdict committed it.
  Tokens beyond a sequence's end are not committed, so candidates there are not accepted.
- Position i of a window, from 1 on, is that of its i-th candidate on a path. A position is
  *drafted* if the window has a candidate there, *tried* if also all before it were accepted, and
  *accepted* if one there was accepted. Accepted over tried is the chance of a candidate given those
  before it.
- A token is *proposed* when a drafter sent it, in time or not. A repeated token counts once. It is
  *used* when it was accepted, or when the driver held it as a candidate at the position of the
  verdict's own token, because what was drafted after it then stays.
- A verdict *diverged* if the driver held candidates at the position of its own token and the first
  of them was another token. It *hit* a branch if one of the others was that token.
- A step is *wasted* on a sequence if it verified candidates and accepted none.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from cluster.decoding.instructions import Slice
from paceline.generation import SpeculationStats
from paceline.limits import MAX_WINDOW
from workers.verification.candidates import depths_of


class Foresight(enum.Enum):
    """What was held at the position of a verdict's own token."""

    NOTHING = "nothing"
    FIRST = "first"
    BRANCH = "branch"
    OTHERS = "others"


@dataclass(slots=True)
class CountedVerdict:
    """What is counted of a verdict.

    - `window`: candidates; `depth`: those of its longest path; `accepted`: those accepted.
    - `tried`: positions that the verdict looked at.
    - `committed`: output tokens.
    - `firsts`: in a tree, for each position along the accepted path where the window had
      candidates, whether the first of them was right.
    """

    window: int
    depth: int
    tried: int
    accepted: int
    committed: int
    foresight: Foresight
    firsts: tuple[bool, ...] | None = None


def counted(
    part: Slice, *, path: Sequence[int], kept: int, committed: int, foresight: Foresight
) -> CountedVerdict:
    """The verdict on a slice that `committed` tokens, of which `kept` lie before the end.

    `path`: the candidates that it accepted. Positions beyond the end do not count as tried.
    """
    depth, accepted = depth_of(part.window, part.parents), len(path)
    if kept < committed:
        accepted = min(accepted, kept)
        return CountedVerdict(part.window, depth, accepted, accepted, kept, Foresight.NOTHING)
    tried = min(depth, accepted + 1)
    if not part.parents:
        return CountedVerdict(part.window, depth, tried, accepted, kept, foresight)
    firsts = firsts_along(part.parents, path)
    return CountedVerdict(part.window, depth, tried, accepted, kept, foresight, firsts)


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
    # Histograms over verdicts: by depth of the window, positions tried, positions accepted.
    _depths: list[int] = field(default_factory=lambda: [0] * (MAX_WINDOW + 1))
    _tried: list[int] = field(default_factory=lambda: [0] * (MAX_WINDOW + 1))
    _accepted: list[int] = field(default_factory=lambda: [0] * (MAX_WINDOW + 1))

    def add(self, verdict: CountedVerdict) -> None:
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
        """The counts in the form of the public statistics, without the shares of time."""
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
    """The longest path of a window. `parents` as in target.proto, Slice; empty: a chain."""
    return max(depths_of(parents)) if parents else window


def firsts_along(parents: Sequence[int], path: Sequence[int]) -> tuple[bool, ...]:
    """Whether the first candidate is right, by position along an accepted path.

    It covers the positions where the window has candidates. At the one after the last accepted
    candidate, the first candidate is wrong. `parents`: of the window, as in Slice.
    """
    first_after: dict[int, int] = {}
    for index, parent in enumerate(parents):
        first_after.setdefault(parent, index)
    above = (0, *(index + 1 for index in path))
    found = [first_after[parent] == index for parent, index in zip(above, path, strict=False)]
    return (*found, False) if above[-1] in first_after else tuple(found)


def _at_least(histogram: list[int]) -> tuple[int, ...]:
    """How many values are at least 1, at least 2, ..., up to the largest that occurs."""
    counts = list(accumulate(reversed(histogram[1:])))
    return tuple(reversed(counts[counts.count(0) :]))


@dataclass(slots=True)
class Totals:
    """Counts since the scheduler began; `counts` are those of all sequences together."""

    steps: int = 0
    finished: int = 0
    prefilled: int = 0
    dropped_proposals: int = 0
    malformed_proposals: int = 0
    counts: Counts = field(default_factory=Counts)
