"""The prefill tokens of a step: bounded by their cost to decoding sequences, and shared fairly.

The promise: a prompt of any length delays another sequence's token by at most two steps of the same
batch without it. So a mixed step, which decodes and prefills, may take three times as long as one
without prefill. A step may take longer than expected, because the host is busy. So the time to aim
at is smaller by a factor, the room: the largest factor by which one of the last 32 steps exceeded
its expected time. Steps that exceeded it by more than half are left out, since no chunk is small
enough for such hiccups.

The time of a step without prefill is measured, never guessed: while prompts keep coming, a step now
and then goes without prefill, which costs the decoding sequences nothing. The time that prefill
adds is learned as well (PrefillPrice). Until enough is known, one fact holds on any device: a step
of n times the tokens takes at most n times as long. That bounds how fast chunks may grow.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

PROMISED = 3.0
"""Upper bound on a mixed step's time, as a multiple of a decode-only step's: two steps of delay."""
LEAST_ROOM, MOST_ROOM = 1.25, 1.5
"""Bounds on the room: the factor by which a step may exceed its expected time within the promise.
On a host where steps take 0.9 to 1.45 of the expected time, 16 to 21 % of them break the promise
with the learned room, and 22 to 32 % with a room fixed at 1.25."""

_OVERRUNS = 32
_PROGRESS = 0.25
"""Share of the time allowed to prefill that a chunk's tokens may take if its fixed part alone
exceeds that time."""
_SAMPLES = 5
_ENOUGH_SAMPLES = 2
_STALE_AFTER, _FIRST_AFTER = 32, 4
"""Mixed steps between two steps without prefill; the same while little is known of their size."""
_PRICE_DECAY = 0.98
"""The weight of earlier chunks in the fit is multiplied by this at each chunk, so that about fifty
chunks count."""
_PENALTY = 0.5
"""Weight of a penalty on the square of the fixed part, for each chunk that counts."""
_SWEEPS = 4
"""Passes over the three parts at each fit."""
_RECENT = 11
"""Number of last chunks from which the level is computed."""


@dataclass(slots=True)
class _PlainSteps:
    """The last steps without prefill of about one size: the tokens and milliseconds of each."""

    samples: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=_SAMPLES))
    prefills_since: int = 0

    @property
    def is_known(self) -> bool:
        return len(self.samples) >= _ENOUGH_SAMPLES

    def is_known_of(self, tokens: int) -> bool:
        return self.is_known and all(fed <= tokens for fed, _ in self.samples)

    @property
    def is_due(self) -> bool:
        return self.prefills_since >= (_STALE_AFTER if self.is_known else _FIRST_AFTER)

    def at_least_ms(self, tokens: int) -> float:
        """Lower bound on the time of a step of `tokens`: a median, which ignores a host's hiccups.

        A larger step takes no less time than a smaller one. A smaller one takes no less than its
        share of the tokens.
        """
        return statistics.median_low(ms * min(1.0, tokens / fed) for fed, ms in self.samples)


class PrefillPrice:
    """Milliseconds that a chunk adds: level x (fixed + tokens x (each + further x position)).

    Attention reads every position before a token, so tokens late in a prompt cost more: on a CPU,
    this project's engine takes two and a half times as long for the token at position 1,400 as for
    the first one. The parts fixed, each and further are fitted by least squares, none below 0, and
    change slowly. The level follows the load of the host at once: it is the median, over the last
    chunks, of their times over their expected times.

    Chunks are chosen by this price, so all mixed steps take about the same time. A fixed part alone
    would explain such data as well. So a penalty keeps the fixed part small, unless chunks of
    different sizes at similar positions show that it is larger.
    """

    __slots__ = ("_level", "_moments", "_parts", "_products", "_recent")

    def __init__(self) -> None:
        # Decayed sums over steps, with the features (tokens, tokens x position, 1): the products of
        # the features with each other, and with the step's ms.
        self._moments = [[0.0] * 3 for _ in range(3)]
        self._products = [0.0] * 3
        self._parts = [0.0] * 3
        # Tokens, position and ms of the last chunks that were compared.
        self._recent: deque[tuple[int, float, float]] = deque(maxlen=_RECENT)
        self._level = 1.0

    @property
    def is_known(self) -> bool:
        return self._moments[2][2] > 0

    @property
    def is_tried(self) -> bool:
        """Whether enough chunks were compared with their price to rely on it."""
        return len(self._recent) == _RECENT

    @property
    def fixed_ms(self) -> float:
        """What the smallest chunk adds."""
        return self._level * self._parts[2]

    def learn(self, tokens: int, position: float, ms: float, *, is_usual: bool) -> None:
        """A chunk of `tokens`, whose mean position is `position`, added `ms` to a step.

        `is_usual`: it had at least half of the chosen size, so it counts for the level.
        """
        if is_usual:
            self._recent.append((tokens, position, ms))
        features = (float(tokens), tokens * position, 1.0)
        for row, one in enumerate(features):
            self._products[row] = self._products[row] * _PRICE_DECAY + one * ms
            moments = self._moments[row]
            for column, other in enumerate(features):
                moments[column] = moments[column] * _PRICE_DECAY + one * other
        self._fit()
        expected_and_ms = [(self._parts_ms(*chunk[:2]), chunk[2]) for chunk in self._recent]
        ratios = [ms / expected for expected, ms in expected_and_ms if expected]
        self._level = statistics.median(ratios) if ratios else 1.0

    def ms(self, tokens: int, position: float) -> float:
        """What such a chunk should add; 0: nothing is known."""
        return self._level * self._parts_ms(tokens, position)

    def tokens_for(self, ms: float, start: float) -> float:
        """How many tokens from position `start` on should add `ms`."""
        each, further, fixed = self._parts
        level, first = self._level, each + further * start
        if not level or not (first or further):
            return math.inf
        left = max(0.0, ms / level - fixed)
        # Their mean position lies half of their number behind the start.
        return 2 * left / (first + math.sqrt(first * first + 2 * further * left) or math.inf)

    def _parts_ms(self, tokens: int, position: float) -> float:
        each, further, fixed = self._parts
        return fixed + tokens * (each + further * position)

    def _fit(self) -> None:
        """Fit one part after the other, starting from the last fit.

        So the parts stay as they were where the steps cannot tell them apart.
        """
        for _ in range(_SWEEPS):
            for row, moments in enumerate(self._moments):
                own = moments[row] * (1 + _PENALTY) if row == 2 else moments[row]
                if own:
                    others = [moments[column] * self._parts[column] for column in range(3)]
                    missing = self._products[row] - sum(others) + others[row]
                    self._parts[row] = max(0.0, missing / own)


class PrefillCosts:
    """How long steps without prefill take, by their tokens, and what prefill adds to them."""

    def __init__(self) -> None:
        # The key is the bit length of the number of tokens fed.
        self._plain: dict[int, _PlainSteps] = {}
        # The price of steps with prefill alone: more than the same prefill adds to a decoding step.
        # It bounds the first chunk beside decoding sequences by what was tried. Without it,
        # simulated runs of 40 to 140 steps take 3 to 6 steps more (1 to 6 % of their speed).
        self._alone = PrefillPrice()
        self._most_alone = 0
        self._beside = PrefillPrice()
        # The most tokens per millisecond that a mixed step has fed.
        self._tokens_a_ms = 0.0
        self._overruns: deque[float] = deque(maxlen=_OVERRUNS)

    @property
    def times(self) -> float:
        """A mixed step's time to aim at, as a multiple of a decode-only step's."""
        return PROMISED / max(self._overruns, default=LEAST_ROOM)

    def add(
        self,
        *,
        decoding_tokens: int,
        prefill_tokens: int,
        step_seconds: float,
        position: float = 0.0,
    ) -> None:
        """A step that fed these tokens was answered. `position`: mean position of its prefill."""
        step_ms = step_seconds * 1000
        if not decoding_tokens:
            self._alone.learn(prefill_tokens, position, step_ms, is_usual=True)
            self._most_alone = max(self._most_alone, prefill_tokens)
            return
        plain = self._plain.setdefault(decoding_tokens.bit_length(), _PlainSteps())
        if not prefill_tokens:
            plain.samples.append((decoding_tokens, step_ms))
            plain.prefills_since = 0
            return
        plain.prefills_since += 1
        plain_ms = self._plain_ms(decoding_tokens)
        if plain_ms is None:
            return
        if step_ms < plain_ms:
            plain.samples.append((decoding_tokens, step_ms))
        extra_ms = max(0.0, step_ms - plain_ms)
        self._learn(decoding_tokens, prefill_tokens, position, plain_ms, extra_ms)
        fed = decoding_tokens + prefill_tokens
        self._tokens_a_ms = max(self._tokens_a_ms, fed / max(step_ms, plain_ms))

    def _learn(
        self, decoding: int, prefill: int, position: float, plain_ms: float, extra_ms: float
    ) -> None:
        """Learn what prefill adds. Ignore a small chunk that costs no more than expected."""
        expected_ms = self._beside.ms(prefill, position)
        is_usual = 2 * prefill >= self._fitting(decoding, position, plain_ms)
        if is_usual and self._beside.is_tried:
            overrun = (plain_ms + extra_ms) / (plain_ms + expected_ms)
            if overrun <= MOST_ROOM:
                self._overruns.append(max(overrun, LEAST_ROOM))
        if not is_usual and self._beside.is_known and extra_ms <= expected_ms:
            return
        self._beside.learn(prefill, position, extra_ms, is_usual=is_usual)

    def _fitting(self, decoding: int, start: float, plain_ms: float) -> float:
        """How many prefill tokens from position `start` on are allowed beside `decoding` tokens."""
        bearable_ms = (self.times - 1) * plain_ms
        bearable_ms = max(bearable_ms, self._beside.fixed_ms + _PROGRESS * bearable_ms)
        harmless = self._tokens_a_ms * self.times * plain_ms - decoding
        return min(self._beside.tokens_for(bearable_ms, start), harmless)

    def chunk_beside(self, decoding_tokens: int, start: float = 0.0) -> int:
        """The most tokens of prefill in a step; 0: measure a step without prefill.

        `start`: the position of the first of them. Half of `decoding_tokens` are taken whatever
        they seem to cost, so that prefill goes on.
        """
        plain_ms = self._plain_ms(decoding_tokens)
        if plain_ms is None or self._is_due(decoding_tokens):
            return 0
        if self._beside.is_known:
            fits = self._fitting(decoding_tokens, start, plain_ms)
        else:
            fits = self._alone.tokens_for((self.times - 1) * plain_ms, start)
            fits = min(fits, self._most_alone)
        return max(1, decoding_tokens // 2, int(fits))

    def _is_due(self, tokens: int) -> bool:
        """Whether a step of `tokens` should go without prefill, to be measured.

        It need not if smaller steps are known, because they bound its time from below.
        """
        size = tokens.bit_length()
        if not any(plain.is_known for one, plain in self._plain.items() if one <= size):
            return True
        return size in self._plain and self._plain[size].is_due

    def _plain_ms(self, tokens: int) -> float | None:
        """Lower bound on a step of `tokens` without prefill; None: nothing is known."""
        size = tokens.bit_length()
        own = self._plain.get(size)
        if own is not None and own.is_known_of(tokens):
            return own.at_least_ms(tokens)
        known = sorted(one for one, plain in self._plain.items() if plain.samples)
        # Steps of fewer tokens bound this one from below. If none is known, a larger step does.
        nearest = [one for one in known if one <= size][-2:] or known[:1]
        return max((self._plain[one].at_least_ms(tokens) for one in nearest), default=None)


def share_prefill(missing: Sequence[int], budget: int) -> list[int]:
    """The number of prefill tokens that each sequence gets in a step, oldest sequence first.

    `missing`: the number of tokens that each sequence lacks. The oldest gets half of the budget, so
    later sequences at most double its time. Each sequence becomes the oldest one day, so none
    starves. The other half goes to those that lack least, so a short prompt does not wait for a
    long one before it. What is left over goes to the oldest again.
    """
    shares = [0] * len(missing)
    if not missing:
        return shares
    left = budget - min(missing[0], -(-budget // 2))
    for index in sorted(range(1, len(missing)), key=lambda index: missing[index]):
        shares[index] = min(missing[index], left)
        left -= shares[index]
    shares[0] = min(missing[0], budget - sum(shares))
    return shares


def start_of(starts: Sequence[int], missing: Sequence[int]) -> float:
    """The mean position at which a step's prefill starts. `starts`: the position of each sequence.

    Half of the prefill is the oldest's. The other half goes first to the sequence that lacks least
    (`share_prefill`).
    """
    least = min(range(len(missing)), key=lambda index: missing[index])
    return (starts[0] + starts[least]) / 2
