"""Forecasts of each policy for one sequence: tokens, candidates and milliseconds of a step.

A cycle goes from one verdict against the drafter to the next. A few numbers (`Conditions`)
determine what happens in it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

_NEGLIGIBLE = 0.01
_MOST_STEPS = 8
"""Steps of a cycle that are followed one by one. Further ones count as the last of these."""


@dataclass(frozen=True, slots=True)
class Conditions:
    """What a forecast rests on. Times are milliseconds.

    - `acceptance`: the chance that a candidate is right if those before it are.
    - `step_ms`: time of a step, as a function of each sequence's candidates, and of the
      milliseconds for which the drafter has work meanwhile.
    - `pass_ms`: time of a draft pass, which gives each sequence `tokens_a_pass`.
    - `restart_ms`: from a verdict to the first candidate after it.
    - `crowd`: sequences that draft.
    - `hit_rate`: share of the verdicts against the first candidate that a branch foresaw.
      `branch_length`: candidates that are then at hand.
    - `second_chance`: the chance that a tree's second candidate is right if the first is wrong.
    - `groups`: target groups that verify the sequence, each at a step of its own.
    """

    acceptance: float
    step_ms: Callable[[float, float], float]
    pass_ms: float
    tokens_a_pass: float
    restart_ms: float
    crowd: int = 1
    hit_rate: float = 0.0
    branch_length: float = 0.0
    second_chance: float = 0.0
    groups: int = 1


@dataclass(frozen=True, slots=True)
class Forecast:
    """Means of a step in the long run. `ms`: from one verdict to the next, waiting included."""

    tokens: float
    candidates: float
    ms: float

    @property
    def tokens_per_ms(self) -> float:
        """Tokens a millisecond of the sequence."""
        return self.tokens / self.ms


@dataclass(frozen=True, slots=True)
class Outlook:
    """Means over the verdicts on a window of `candidates` candidates.

    `tokens`: committed, the verdict's own included. `goes_on`: the chance that all of a path is
    right and the drafter's next token after it as well. `is_open`: the chance that the verdict goes
    against the drafter at a place where the window had no other candidate, so that a branch which
    was sent ahead may still hold its token.
    """

    tokens: float
    candidates: int
    goes_on: float
    is_open: float


def outlook_of(
    depth: int, acceptance: float, *, nodes: int = 0, second_chance: float = 0.0
) -> Outlook:
    """The outlook of a chain of `depth` candidates, or of a tree with this chain.

    A tree of `nodes` has a second guess beside each of the first candidates of its chain, and after
    each second guess a chain. All of these end at the same position, as many as there are nodes.
    """
    more = max(0, nodes - depth)
    level = min(depth, int((math.sqrt(8 * more + 1) - 1) / 2))
    reached = tokens = 1.0
    goes_on = closed = 0.0
    for place in range(depth):
        if place < level:
            astray = reached * (1 - acceptance)
            closed += astray * (1 - second_chance)
            astray *= second_chance
            for _ in range(level - place):
                tokens += astray
                astray *= acceptance
            goes_on += astray
        reached *= acceptance
        tokens += reached
    goes_on += reached * acceptance
    return Outlook(tokens, depth + level * (level + 1) // 2, goes_on, 1 - goes_on - closed)


def lockstep(given: Conditions, window: int) -> Forecast:
    """Forecast of `lockstep`: draft a window, verify it, repeat. The drafter never runs ahead.

    A batch falls apart in two parts that take turns: the target verifies the windows of one while
    those of the other are drafted. The slower is expected of this, and of all at once.
    """
    tokens = outlook_of(window, given.acceptance).tokens
    passes = max(0.0, window / max(0.1, given.tokens_a_pass) - 1)
    draft_ms = given.restart_ms + passes * given.pass_ms
    ms = draft_ms + given.step_ms(window, 0.0)
    if given.crowd > 1:
        half_ms = given.step_ms((window - 1) / 2, draft_ms)
        ms = max(ms, 2 * half_ms)
    return Forecast(tokens, window, ms)


def granted_ahead(window: int, groups: int = 1) -> int:
    """Candidates granted beyond what is committed (policies/chain.py and replicas.py)."""
    return groups * (window + 1) + window


def run_ahead(given: Conditions, window: int, *, is_tree: bool = False) -> Forecast:
    """Forecast of the policies whose drafter keeps drafting while the target works.

    The target verifies at most `window` of the arrived candidates. `is_tree`: branches are verified
    too. Where the conditions have a hit rate, that share of the cycles begins with a branch at hand
    (fanout). With several groups a step begins at each group's share of a step's time, and the
    verdict against the drafter still comes a whole step after its own begin.
    """
    groups, granted = given.groups, granted_ahead(window, given.groups)
    step_ms = given.step_ms(0.0, 0.0)
    for _ in range(2):  # A step's time depends on its candidates, and they on its time.
        steps, tokens, candidates, foreseen = _cycle(given, window, step_ms / groups, is_tree, 0.0)
        if given.hit_rate:
            held = given.branch_length
            *hit, again = _cycle(given, window, step_ms / groups, is_tree, held)
            share = foreseen / (1 - again + foreseen)
            steps, tokens, candidates = (
                (1 - share) * after_miss + share * after_hit
                for after_miss, after_hit in zip((steps, tokens, candidates), hit, strict=True)
            )
        candidates += (groups - 1) * tokens  # Those that other groups verify are in it as well.
        # After a verdict against it the drafter drafts all that is granted, else what is new.
        drafted = (tokens + max(0.0, granted - tokens / steps)) / steps
        drafting_ms = drafted / given.tokens_a_pass * given.pass_ms
        step_ms = given.step_ms(candidates / steps, drafting_ms)
    ms = step_ms / groups * (steps + groups - 1)
    return Forecast(tokens / steps, candidates / steps, ms / steps)


def _cycle(
    given: Conditions, window: int, period_ms: float, is_tree: bool, held: float
) -> tuple[float, float, float, float]:
    """One cycle, from a verdict after which `held` candidates continue the committed tokens.

    Expected steps, tokens and candidates, and the chance that a branch holds the token that ends
    it. A step begins each `period_ms`.
    """
    pace = given.tokens_a_pass / given.pass_ms
    most_held = granted_ahead(window, given.groups)
    alive, taken = 1.0, 0.0
    steps = tokens = candidates = ends = open_ends = 0.0
    for step in range(_MOST_STEPS):
        now = step * period_ms - given.restart_ms
        # On average the last pass ended half a pass before.
        arrived = held + (given.tokens_a_pass / 2 + now * pace if now >= 0 else 0.0)
        depth = min(window, max(0, int(min(arrived - taken, most_held) + 0.5)))
        nodes, second_chance = (window, given.second_chance) if is_tree else (0, 0.0)
        expected = outlook_of(depth, given.acceptance, nodes=nodes, second_chance=second_chance)
        goes_on = expected.goes_on
        last = step + 1 == _MOST_STEPS or alive * goes_on < _NEGLIGIBLE
        times = alive / max(_NEGLIGIBLE, 1 - goes_on) if last else alive
        steps += times
        tokens += times * expected.tokens
        candidates += times * expected.candidates
        ends += times * (1 - goes_on)
        open_ends += times * expected.is_open
        # The cycle goes on if the token that the verdict adds is the drafter's next one as well.
        alive *= goes_on
        taken += depth + 1
        if last:
            break
    return steps, tokens, candidates, given.hit_rate * open_ends / ends if ends else 0.0
