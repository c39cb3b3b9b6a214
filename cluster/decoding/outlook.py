"""What the verdict on a window is likely to be: of a chain, and of a tree.

The tree is the likeliest part of what `fanout` holds: a chain, beside each of its candidates a
second guess, and after that a chain of its own, as far as the first one reaches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from cluster.decoding.windows import RANK_CHANCES


@dataclass(frozen=True, slots=True)
class Outlook:
    """Means over the verdicts on a window of `candidates` candidates.

    `tokens`: committed, the verdict's own included. `goes_on`: the chance that all of a path is
    right and the drafter's next token after it as well; `depth`: of that path. `is_open`: the
    chance that the verdict goes against the drafter at a place where the window had no other
    candidate, so that a branch which was sent ahead may still hold its token.
    """

    tokens: float
    candidates: int
    goes_on: float
    depth: float
    is_open: float


def chain_outlook(count: int, chances: Sequence[float]) -> Outlook:
    """Of a chain of `count`. `chances`: of a candidate given those before it, by position."""
    reached, tokens = 1.0, 1.0
    for place in range(count):
        reached *= _chance(chances, place)
        tokens += reached
    goes_on = reached * _chance(chances, count)
    return Outlook(tokens, count, goes_on, count, 1 - goes_on)


@dataclass(frozen=True, slots=True)
class Shape:
    """A tree: candidates of its chain, and of the branch at each position of that."""

    chain: int
    branches: tuple[int, ...]

    def outlook(self, chances: Sequence[float], second_chance: float) -> Outlook:
        """`second_chance`: the chance that a second guess is right where the first is wrong."""
        reached, tokens = 1.0, 1.0
        goes_on, depth, is_open = 0.0, 0.0, 0.0
        for place, length in enumerate(self.branches):
            chance = _chance(chances, place)
            astray = reached * (1 - chance)
            if length:
                astray *= second_chance
                on_branch = astray
                tokens += on_branch
                for further in range(place + 1, place + length):
                    on_branch *= _chance(chances, further)
                    tokens += on_branch
                on_branch *= _chance(chances, place + length)
                goes_on += on_branch
                depth += on_branch * (place + length)
                astray -= on_branch
            is_open += astray
            reached *= chance
            tokens += reached
        along_chain = reached * _chance(chances, self.chain)
        goes_on, depth = goes_on + along_chain, depth + along_chain * self.chain
        return Outlook(
            tokens,
            self.chain + sum(self.branches),
            goes_on,
            depth / goes_on if goes_on else 0.0,
            is_open + reached - along_chain,
        )


@lru_cache(maxsize=4096)
def shape_of(depth: int, nodes: int) -> Shape:
    """Of a tree of at most `nodes`, as a step picks them of what is held to this depth."""
    depth = min(depth, nodes)
    first, second = RANK_CHANCES[:2]
    places = [(first ** (length + 1), depth) for length in range(depth)]
    for place in range(depth):
        for length in range(depth - place):
            places.append((first ** (place + length) * second, place))
    places.sort(key=lambda one: -one[0])
    counts = [0] * (depth + 1)
    for _, place in places[:nodes]:
        counts[place] += 1
    chain = counts[depth]
    return Shape(chain, tuple(counts[:chain]))


def _chance(chances: Sequence[float], place: int) -> float:
    """At a place, from 0 on; later ones are like the last."""
    return chances[min(place, len(chances) - 1)]
