"""Copies what followed the longest earlier occurrence of the text's end (SuffixDecoding).

Occurrences are looked up in the request's own text and in recent answers of its tenant. How long
the common part is, and how many occurrences agree on the next token, say how sure a candidate is.
"""

from __future__ import annotations

import heapq
import math
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from workers.drafting.chances import RankChances
from workers.drafting.kind import (
    DRAFTERS,
    ROOT,
    CandidateKind,
    Draft,
    DrafterInfo,
    DrafterKind,
    DrafterOptions,
    DraftTree,
    Kept,
    NewNodes,
    TakesNoTime,
    TopTokens,
)

MAX_COMMON = 32
"""Tokens before an occurrence that are compared with the text's end. Longer matches count alike."""
MAX_OCCURRENCES = 16
"""Maximum number of occurrences that a draft looks at in each text, the newest ones."""
OWN_RUNS, RECENT_RUNS = (4, 2, 1), (3,)
"""Lengths of the runs by which occurrences are found, in the own text and in recent answers."""
MAX_RECENT = 32_768
"""Tokens of a tenant's recent answers in one generation. There are two: when the newer one is full,
the older one is forgotten. A full one takes some 10 MB of memory."""
MAX_TENANTS = 16
"""Maximum number of tenants with recent answers. Beyond that, the one that opened a sequence
longest ago is forgotten."""

_LENGTH_EDGES = (1, 2, 3, 4, 6, 10, 20)
"""The longest common part of each class of RankChances but the last one."""
_WEIGHT = 2.0
"""An occurrence with one more common token counts as this many, up to _MOST_WEIGHED tokens."""
_MOST_WEIGHED = 12
_OLDER = 0.9
"""Weight of an occurrence, as a multiple of that of the next newer one."""


class FoundText:
    """A growing text in which the occurrences of runs are found, as compressors find matches."""

    def __init__(self, run_lengths: Sequence[int]) -> None:
        self.token_ids: list[int] = []
        self._lengths = run_lengths
        # By length of runs: the last position after each run; and by position, the one before it
        # after the same run. 0: there is none, since a run has a token before that position.
        self._last: list[dict[tuple[int, ...], int]] = [{} for _ in run_lengths]
        self._before = [array("I") for _ in run_lengths]

    def add(self, token_ids: Sequence[int]) -> None:
        text, first = self.token_ids, len(self.token_ids)
        text.extend(token_ids)
        for length, last, before in zip(self._lengths, self._last, self._before, strict=True):
            for position in range(first, len(text)):
                if position < length:
                    before.append(0)
                    continue
                run = tuple(text[position - length : position])
                before.append(last.get(run, 0))
                last[run] = position

    def occurrences(self, end: Sequence[int]) -> list[tuple[int, int]]:
        """Occurrences of the end of a text: (number of common tokens, position after them).

        `end`: the last MAX_COMMON tokens of the text. Runs of the longest length that has
        occurrences are looked up; the newest come first.
        """
        text = self.token_ids
        found: list[tuple[int, int]] = []
        for length, last, before in zip(self._lengths, self._last, self._before, strict=True):
            if length > len(end):
                continue
            position = last.get(tuple(end[-length:]), 0)
            while position and len(found) < MAX_OCCURRENCES:
                common, most = length, min(len(end), position)
                while common < most and text[position - 1 - common] == end[-1 - common]:
                    common += 1
                found.append((common, position))
                position = before[position]
            if found:
                break
        return found


@dataclass(slots=True, eq=False)
class _Recent:
    """The recent answers of a tenant: the newer generation and the older one."""

    texts: list[FoundText] = field(default_factory=lambda: [FoundText(RECENT_RUNS)])

    def add(self, token_ids: Sequence[int]) -> None:
        for first in range(0, len(token_ids), MAX_RECENT):
            if len(self.texts[0].token_ids) + len(token_ids) - first > MAX_RECENT:
                self.texts = [FoundText(RECENT_RUNS), self.texts[0]]
            self.texts[0].add(token_ids[first : first + MAX_RECENT])


@dataclass(slots=True, eq=False)
class _Guess:
    """An occurrence that a draft follows. `loops`: at the text's end it goes on with its start."""

    text: Sequence[int]
    position: int
    common: int
    weight: float
    loops: bool

    def token_at(self, depth: int) -> int | None:
        """The token that it has after `depth` others; None: its text ends before."""
        if self.loops:
            return self.text[self.position + depth % (len(self.text) - self.position)]
        place = self.position + depth
        return self.text[place] if place < len(self.text) else None


@dataclass(frozen=True, slots=True)
class _Evidence:
    """Why a node was drafted: the class of its common part, and -log of the share that agreed."""

    parent: int
    length_class: int
    gap: float


@dataclass(slots=True, eq=False)
class _Held:
    own: FoundText
    recent: _Recent
    evidence: dict[int, _Evidence] = field(default_factory=dict)


class SuffixProposer(TakesNoTime):
    """Follows the occurrences of the text's end, those with the longest common part first."""

    def __init__(self) -> None:
        self._recent: OrderedDict[tuple[str, int | None], _Recent] = OrderedDict()
        self._held: dict[DraftTree, _Held] = {}
        self._chances = RankChances(_prior)

    @property
    def info(self) -> DrafterInfo:
        return DrafterInfo(SUFFIX.name, SUFFIX.rules)

    def open(self, tree: DraftTree) -> None:
        owner = (tree.tenant, tree.vocab_size)
        recent = self._recent.setdefault(owner, _Recent())
        self._recent.move_to_end(owner)
        if len(self._recent) > MAX_TENANTS:
            self._recent.popitem(last=False)
        held = self._held[tree] = _Held(FoundText(OWN_RUNS), recent)
        held.own.add(tree.committed[: tree.num_settled])

    def settle(self, tree: DraftTree, count: int) -> None:
        own = self._held[tree].own
        first = len(own.token_ids)
        own.add(tree.committed[first : first + count])

    def close(self, tree: DraftTree) -> None:
        held = self._held.pop(tree)
        # The answer, after the tokens by which its beginning is found.
        first = max(0, tree.spec.prompt_length - RECENT_RUNS[-1])
        if tree.num_committed > tree.spec.prompt_length:
            held.recent.add(held.own.token_ids[first:])

    def committed(self, tree: DraftTree, kept: Kept, top_tokens: Sequence[TopTokens]) -> None:
        held = self._held[tree]
        if tree.is_settled:
            held.own.add(tree.committed[len(held.own.token_ids) :])
        tested = [ROOT, *kept.path][: len(kept.token_ids)]
        for node, why in held.evidence.items():
            if why.parent in tested:
                self._chances.observe(why.length_class, why.gap, accepted=node in kept.path)
        number_of = {old: number for number, old in enumerate(kept.nodes, start=1)}
        root = kept.path[-1] if kept.path else ROOT
        number_of[root] = ROOT
        held.evidence = {
            number_of[node]: _Evidence(number_of[why.parent], why.length_class, why.gap)
            for node, why in held.evidence.items()
            if node in number_of and why.parent in number_of and node != root
        }

    def draft(self, tree: DraftTree) -> Draft:
        held, grant, price = self._held[tree], tree.grant, tree.price
        is_forked = grant.branches > 1 or not tree.is_chain
        begin = ROOT if is_forked else tree.end
        text = tree.prefix(begin)
        guesses = _guesses(held, text[-MAX_COMMON:])
        if not guesses:
            return Draft(tree, NewNodes(), last=True)
        room = tree.room(ROOT) if is_forked else tree.chain_room
        most = tree.nodes_left + tree.num_nodes if is_forked else room
        grown = _Grown(self._chances, guesses, tree.spec.end_token_ids, price)
        # The first candidate is drafted in any case: else its cost would not be measured.
        grown.grow(most, room, branches=grant.branches if is_forked else 1)
        if is_forked:
            new = tree.unknown_part(grown.token_ids, grown.parents)
            numbers = _numbers_of(tree, new, grown)
        else:
            new = NewNodes(grown.token_ids)
            numbers = [begin, *range(tree.end + 1, tree.end + 1 + len(grown.token_ids))]
        for index, (parent, why) in enumerate(zip(grown.parents, grown.evidence, strict=True)):
            number, above = numbers[index + 1], numbers[parent]
            if number is not None and above is not None:
                held.evidence.setdefault(number, _Evidence(above, *why))
        state = {"gain": grown.last_chance, "price": price} if price else {}
        is_last = is_forked or grown.stopped
        return Draft(tree, new, last=is_last, grant_used=True, stopping_state=state)

    def check_integrity(self, trees: Sequence[DraftTree]) -> None:
        assert set(self._held) == set(trees), "a sequence was leaked or lost"
        assert len(self._recent) <= MAX_TENANTS, "answers of too many tenants are kept"
        for tree, held in self._held.items():
            assert held.own.token_ids == list(tree.committed[: tree.num_settled])
            assert all(node <= tree.end for node in held.evidence)
        for recent in self._recent.values():
            assert all(len(text.token_ids) <= MAX_RECENT for text in recent.texts)


def _prior(length_class: int, gap: float) -> float:
    return min(0.95, 0.35 + 0.08 * length_class) * math.exp(-gap)


def _class_of(common: int) -> int:
    for number, edge in enumerate(_LENGTH_EDGES):
        if common <= edge:
            return number
    return len(_LENGTH_EDGES)


def _guesses(held: _Held, end: Sequence[int]) -> list[_Guess]:
    """The occurrences of the text's end, the likeliest first."""
    guesses: list[_Guess] = []
    for text in (held.own, *held.recent.texts):
        is_own, weight = text is held.own, 1.0
        for common, position in text.occurrences(end):
            counts = weight * _WEIGHT ** min(common, _MOST_WEIGHED)
            guesses.append(_Guess(text.token_ids, position, common, counts, is_own))
            weight *= _OLDER
    guesses.sort(key=lambda guess: -guess.weight)
    return guesses


class _Grown:
    """A tree of candidates from guesses; parents as on the wire."""

    def __init__(
        self, chances: RankChances, guesses: list[_Guess], ends: Sequence[int], price: float
    ) -> None:
        self._chances, self._guesses, self._ends, self._price = chances, guesses, ends, price
        self.token_ids: list[int] = []
        self.parents: list[int] = []
        self.evidence: list[tuple[int, float]] = []
        self.last_chance = 0.0
        self.stopped = False
        """Whether it ended for another reason than the room."""

    def grow(self, most: int, room: int, *, branches: int) -> None:
        """Add the likeliest candidates, at most `most`, with `room` for a path's tokens."""
        edge: list[tuple[float, int, int, int, list[_Guess], tuple[int, float]]] = []
        pushed = 0

        def push(parent: int, depth: int, reached: float, guesses: list[_Guess]) -> None:
            nonlocal pushed
            following: dict[int, list[_Guess]] = {}
            for guess in guesses:
                if (token_id := guess.token_at(depth)) is not None:
                    following.setdefault(token_id, []).append(guess)
            weights = {one: sum([g.weight for g in agree]) for one, agree in following.items()}
            total = sum(weights.values())
            ranked = sorted(weights, key=weights.__getitem__, reverse=True)[:branches]
            for token_id in ranked:
                agree = following[token_id]
                common = max([guess.common for guess in agree]) + depth
                why = (_class_of(common), -math.log(weights[token_id] / total))
                chance = reached * self._chances.estimate(*why)
                pushed += 1
                heapq.heappush(edge, (-chance, pushed, parent, token_id, agree, why))

        depths = [0]
        push(0, 0, 1.0, self._guesses)
        while edge and len(self.token_ids) < most:
            negative, _, parent, token_id, agree, why = heapq.heappop(edge)
            if -negative < self._price and self.token_ids:
                self.stopped = True
                return
            self.last_chance = -negative
            self.token_ids.append(token_id)
            self.parents.append(parent)
            self.evidence.append(why)
            depths.append(depths[parent] + 1)
            if token_id not in self._ends and depths[-1] < room:
                push(len(self.token_ids), depths[-1], -negative, agree)
        self.stopped = len(self.token_ids) < most


def _numbers_of(tree: DraftTree, new: NewNodes, grown: _Grown) -> list[int | None]:
    """The node numbers of a tree's candidates, the root's first; None: left out."""
    assert new.parents is not None
    added = {
        (parent, token_id): number
        for number, (parent, token_id) in enumerate(
            zip(new.parents, new.token_ids, strict=True), start=tree.end + 1
        )
    }
    numbers: list[int | None] = [ROOT]
    for token_id, parent in zip(grown.token_ids, grown.parents, strict=True):
        above = numbers[parent]
        number = None
        if above is not None:
            known = tree.child_with(above, token_id) if above <= tree.end else None
            number = known if known is not None else added.get((above, token_id))
        numbers.append(number)
    return numbers


async def _load(options: DrafterOptions) -> SuffixProposer:
    return SuffixProposer()


SUFFIX = DRAFTERS.add(
    DrafterKind(
        name="suffix",
        help="copies what followed the longest match, in its text and in the tenant's answers",
        paper="Oliaro et al. 2024, SuffixDecoding, arXiv:2411.04975",
        load=_load,
        candidates=CandidateKind.DETERMINISTIC,
    )
)
