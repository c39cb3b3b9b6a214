"""Forecasts of each policy for one sequence: tokens, time, candidates and messages of a step.

A cycle goes from one verdict against the drafter to the next. A few numbers (`Conditions`)
determine what happens in it. The forecast follows the cycle step by step, so it covers round trips,
slow drafters and short grants, which closed forms leave out. All times are milliseconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from cluster.decoding.policy import forks_within
from cluster.decoding.token_tree import RANK_CHANCES

_NEGLIGIBLE = 0.01
_MOST_STEPS = 8
"""Steps of a cycle that are followed one by one. Further ones count as the last of these."""
_MOST_ROUNDS, _SETTLED = 3, 0.05
"""A step's time depends on what is drafted during the step, so the forecast iterates: the most
iterations, and the relative change that ends them."""


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
    """The outlook of a chain of `count` candidates. `chances`: as in Conditions."""
    reached, tokens = 1.0, 1.0
    for place in range(count):
        reached *= _chance(chances, place)
        tokens += reached
    goes_on = reached * _chance(chances, count)
    return Outlook(tokens, count, goes_on, count, 1 - goes_on)


@dataclass(frozen=True, slots=True)
class Shape:
    """A tree: the candidates of its chain, and of the branch at each position of the chain.

    It is the likeliest part of what `fanout` holds: a chain, a second guess beside each of its
    candidates, and after each second guess a chain that is at most as deep as the first one.
    """

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
    """The tree of at most `nodes` candidates that a step picks from what is held to `depth`."""
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
    """The chance at `place`, from 0 on. Places beyond the last one have the chance of the last."""
    return chances[min(place, len(chances) - 1)]


StepMs = Callable[[float, float, float], float]
"""Milliseconds of a step, as a function of each sequence's candidates, of the proposals that arrive
for it meanwhile, and of the milliseconds for which the drafter has work meanwhile.
"""


@dataclass(frozen=True, slots=True)
class Conditions:
    """What a forecast rests on. Times are milliseconds.

    - `chances`: for each position of a window, the chance that its candidate is right if those
      before it are.
    - `step_ms`: time of a step (`StepMs`).
    - `pass_ms`: time of a draft pass. It gives each sequence `tokens_a_pass` in one proposal.
    - `restart_ms`: from a verdict to the first candidate after it.
    - `messages_a_fork`: further proposals a pass for each position that may fork, where the drafter
      grows branches.
    - `crowd`: sequences of the drafter.
    - `hit_rate`: share of the verdicts against the first candidate that a branch foresaw.
      `branch_length`: candidates that are then at hand.
    - `second_chance`: the chance that a tree's second candidate is right if the first is wrong.
    - `groups`: target groups that verify the sequence, each at a step of its own.
    """

    chances: Sequence[float]
    step_ms: StepMs
    pass_ms: float
    tokens_a_pass: float
    restart_ms: float
    messages_a_fork: float = 0.0
    crowd: int = 1
    hit_rate: float = 0.0
    branch_length: float = 0.0
    second_chance: float = 0.0
    groups: int = 1


@dataclass(frozen=True, slots=True)
class Forecast:
    """Means of a step in the long run: tokens, candidates and milliseconds.

    `messages`: proposals that arrive while the target computes. `waited_ms`: time before the step.
    It is negative where several groups verify, since their steps overlap.
    """

    tokens: float
    candidates: float
    messages: float
    waited_ms: float
    step_ms: float

    @property
    def ms(self) -> float:
        """Milliseconds from one verdict to the next, waiting included."""
        return self.waited_ms + self.step_ms

    @property
    def tokens_per_ms(self) -> float:
        """Tokens a millisecond of the sequence."""
        return self.tokens / self.ms


def off(conditions: Conditions) -> Forecast:
    """Forecast of plain decoding."""
    return Forecast(1.0, 0.0, 0.0, 0.0, conditions.step_ms(0.0, 0.0, 0.0))


def lockstep(conditions: Conditions, window: int) -> Forecast:
    """Forecast of `lockstep`: draft a window, verify it, repeat. The drafter never runs ahead.

    A batch falls apart in two parts that take turns: the target verifies the windows of one while
    those of the other are drafted. Equal parts gain most. One sequence and all others gain nothing:
    they take as long as the whole batch in one step. The slower of both is expected.
    """
    tokens = chain_outlook(window, conditions.chances).tokens
    more_passes = max(0.0, window / max(0.1, conditions.tokens_a_pass) - 1)
    draft_ms = conditions.restart_ms + more_passes * conditions.pass_ms
    whole_ms = conditions.step_ms(window, 0.0, 0.0)
    if conditions.crowd == 1:
        return Forecast(tokens, window, 0.0, draft_ms, whole_ms)
    half_ms = conditions.step_ms((window - 1) / 2, 0.0, draft_ms)
    ms = max(max(draft_ms, half_ms) + half_ms, draft_ms + whole_ms)
    return Forecast(tokens, window, 0.0, ms - half_ms, half_ms)


def run_ahead(conditions: Conditions, window: int, *, is_tree: bool = False) -> Forecast:
    """Forecast of the policies whose drafter keeps drafting while the target works.

    The target verifies at most `window` of the arrived candidates. `is_tree`: branches are verified
    too. Where the conditions have a hit rate, that share of the cycles begins with a branch at hand
    (fanout).
    """

    def outlook(at_hand: int) -> Outlook:
        if is_tree:
            return shape_of(at_hand, window).outlook(conditions.chances, conditions.second_chance)
        return chain_outlook(min(at_hand, window), conditions.chances)

    granted = granted_ahead(window, conditions.groups)
    tokens_a_pass = max(0.1, conditions.tokens_a_pass)
    step_ms = conditions.step_ms(0.0, 0.0, 0.0)
    for _ in range(_MOST_ROUNDS):
        mean = _mean_cycle(conditions, window, outlook, step_ms=step_ms)
        passes = min(step_ms / conditions.pass_ms, granted / tokens_a_pass)
        pace = 0.0 if is_tree else step_ms / conditions.pass_ms
        forks = forks_within(granted, pace=pace, crowd=conditions.crowd)
        messages = passes * (1 + conditions.messages_a_fork * forks)
        # After a verdict against it the drafter drafts all that is granted, else what is new.
        drafted = mean.tokens + mean.ends * max(0.0, granted - mean.tokens)
        drafting_ms = drafted / tokens_a_pass * conditions.pass_ms
        before, step_ms = step_ms, conditions.step_ms(mean.candidates, messages, drafting_ms)
        if abs(step_ms - before) <= _SETTLED * before:
            break
    return Forecast(mean.tokens, mean.candidates, messages, mean.waited_ms, step_ms)


def granted_ahead(window: int, groups: int = 1) -> int:
    """Candidates granted beyond what is committed (policies/chain.py and replicas.py)."""
    return groups * (window + 1) + window


_Outlook = Callable[[int], Outlook]
"""The outlook of a step, as a function of the candidates at hand on a path."""


@dataclass(slots=True)
class _Cycle:
    """Sums over the steps of a cycle, each weighted by the chance that the cycle reaches it."""

    steps: float = 0.0
    tokens: float = 0.0
    candidates: float = 0.0
    waited_ms: float = 0.0
    ends: float = 0.0
    open_ends: float = 0.0

    def add(self, alive: float, outlook: Outlook, waited_ms: float, *, beside: float) -> None:
        """Add a step, reached with chance `alive`. `beside`: candidates of other groups in it."""
        self.steps += alive
        self.tokens += alive * outlook.tokens
        self.candidates += alive * (outlook.candidates + beside)
        self.waited_ms += alive * waited_ms
        self.ends += alive * (1 - outlook.goes_on)
        self.open_ends += alive * outlook.is_open

    def mixed(self, other: _Cycle, share: float) -> _Cycle:
        own = 1 - share
        return _Cycle(
            own * self.steps + share * other.steps,
            own * self.tokens + share * other.tokens,
            own * self.candidates + share * other.candidates,
            own * self.waited_ms + share * other.waited_ms,
            own * self.ends + share * other.ends,
        )

    def foreseen(self, hit_rate: float) -> float:
        """The chance that a branch holds the token that ends the cycle."""
        return hit_rate * self.open_ends / self.ends if self.ends else 0.0

    def mean(self) -> _Cycle:
        steps = self.steps
        return _Cycle(
            1.0,
            self.tokens / steps,
            self.candidates / steps,
            self.waited_ms / steps,
            self.ends / steps,
        )


def _mean_cycle(
    conditions: Conditions, window: int, outlook: _Outlook, *, step_ms: float
) -> _Cycle:
    miss = _cycle(conditions, window, outlook, held=0.0, step_ms=step_ms)
    hit_rate = conditions.hit_rate
    if not hit_rate:
        return miss.mean()
    held = conditions.branch_length
    hit = _cycle(conditions, window, outlook, held=held, step_ms=step_ms)
    after_miss, after_hit = miss.foreseen(hit_rate), hit.foreseen(hit_rate)
    return miss.mixed(hit, after_miss / (1 - after_hit + after_miss)).mean()


def _cycle(
    conditions: Conditions,
    window: int,
    outlook: _Outlook,
    *,
    held: float,
    step_ms: float,
) -> _Cycle:
    """One cycle, from a verdict after which `held` candidates continue the committed tokens."""
    cycle = _Cycle()
    groups, most_held = conditions.groups, granted_ahead(window, conditions.groups)
    pace = conditions.tokens_a_pass / conditions.pass_ms
    # Candidates arrived by a moment. On average the last pass ended half a pass before.
    first_at, first = conditions.restart_ms, held + conditions.tokens_a_pass / 2
    # A further group begins once its share of a step's drafting is new.
    share = max(1, min(window, round(step_ms / conditions.pass_ms / groups)))
    taken, alive, now = 0.0, 1.0, 0.0
    begun: list[float] = []
    decided: list[float] = []  # Tokens of each step, if everything before it was right.

    def next_begin() -> float:
        """When a group is free and either no other verifies or enough is new."""
        enough_at = first_at + max(0.0, taken - 1 + share - first) / pace if pace else math.inf
        # At first all groups compute steps whose candidates are wrong, begun at even intervals.
        before = begun[-groups] if len(begun) >= groups else (len(begun) / groups - 1) * step_ms
        return max(before + step_ms, min(begun[-1] + step_ms, enough_at))

    for step in range(_MOST_STEPS):
        waited = 0.0
        if step:
            now = next_begin()
            waited = now - begun[-1] - step_ms
        at_hand = min(
            (held if now < first_at else first + (now - first_at) * pace) - taken, most_held
        )
        expected = outlook(max(0, int(at_hand + 0.5)))
        beside = sum(decided[1 - groups :]) if groups > 1 else 0.0
        cycle.add(alive, expected, waited, beside=beside)
        begun.append(now)
        decided.append(expected.depth + 1)
        taken += expected.depth + 1
        # The cycle goes on if the token that the verdict adds is the drafter's next one as well.
        alive *= expected.goes_on
        if alive < _NEGLIGIBLE:
            return cycle
    further = alive / max(_NEGLIGIBLE, 1 - expected.goes_on)
    cycle.add(further, expected, waited, beside=beside)
    return cycle
