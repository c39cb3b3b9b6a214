"""How much prefill goes into a step: bounded by what it costs those who decode, and shared fairly.

The promise: a prompt of any length delays another sequence's token by at most two steps of the same
batch without it. So a step with prefill may take three times as long as without; what a host does
meanwhile must have room in that. How much room is learned: what the last 32 steps took at most over
what was expected of them. Those that took half as much again are left out, since no chunk is small
enough for such hiccups.

What a step without prefill takes is measured, never guessed: where prompts do not pause, a step now
and then goes without (nothing is lost by that: those who decode go on). What prefill adds is
learned as well (prefill_price.py). Until enough is known, one thing holds on any device: a step of
so many times the tokens takes at most so many times as long. That bounds how fast chunks may grow.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from cluster.decoding.prefill_price import PrefillPrice

PROMISED = 3.0
"""How often the time of a step without prefill one with it may take: two steps of delay."""
LEAST_ROOM, MOST_ROOM = 1.25, 1.5
"""How often longer than expected a step may become, for that promise to hold."""

_OVERRUNS = 32
_DECAY = 0.8
_PROGRESS = 0.25
"""Of what is bearable: what a chunk's tokens may cost where its fixed part alone is too much."""
_SAMPLES = 5
_ENOUGH_SAMPLES = 2
_STALE_AFTER, _FIRST_AFTER = 32, 4
"""So many steps with prefill upon one without; so many while of their size little is known."""


@dataclass(slots=True)
class _PlainSteps:
    """Steps of about one size that had no prefill: the last ones' tokens and milliseconds."""

    samples: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=_SAMPLES))
    prefills_since: int = 0

    @property
    def is_known(self) -> bool:
        return len(self.samples) >= _ENOUGH_SAMPLES

    def is_known_of(self, tokens: int) -> bool:
        """Whether all that is known was measured with no more than so many tokens."""
        return self.is_known and all(fed <= tokens for fed, _ in self.samples)

    @property
    def is_due(self) -> bool:
        return self.prefills_since >= (_STALE_AFTER if self.is_known else _FIRST_AFTER)

    def at_least_ms(self, tokens: int) -> float:
        """What a step of so many tokens takes at least. The median: a host's hiccup is no step.

        A larger step takes no less time than a smaller one, a smaller one no less than its part.
        """
        return statistics.median_low(ms * min(1.0, tokens / fed) for fed, ms in self.samples)


@dataclass(slots=True)
class _AlonePrice:
    """Milliseconds a token of prefill alone, by a line through the origin."""

    _tokens_ms: float = 0.0
    _tokens_squared: float = 0.0
    _largest: int = 0

    def learn(self, tokens: int, ms: float) -> None:
        self._tokens_ms = self._tokens_ms * _DECAY + tokens * ms
        self._tokens_squared = self._tokens_squared * _DECAY + tokens**2
        self._largest = max(self._largest, tokens)

    def tokens_for(self, ms: float) -> float:
        """How many tokens take so long, at most as many as were tried; 0: nothing is known."""
        if not self._tokens_ms:
            return 0.0
        return min(ms * self._tokens_squared / self._tokens_ms, self._largest)


class PrefillCosts:
    """How long steps take by the tokens that they feed, and what prefill adds to them."""

    def __init__(self) -> None:
        # By the bit length of the number of tokens fed.
        self._plain: dict[int, _PlainSteps] = {}
        # Of prefill alone with all of its steps' costs: more than it adds to those who decode.
        self._alone = _AlonePrice()
        self._beside = PrefillPrice()
        self._decoding: float = 0  # Beside how many tokens of decoding that was learned.
        # The most that a whole step with prefill fed in a millisecond.
        self._tokens_a_ms = 0.0
        self._overruns: deque[float] = deque(maxlen=_OVERRUNS)

    @property
    def times(self) -> float:
        """How often the time of a step without prefill one with it is to take."""
        return PROMISED / max(self._overruns, default=LEAST_ROOM)

    def add(
        self,
        *,
        decoding_tokens: int,
        prefill_tokens: int,
        step_seconds: float,
        position: float = 0.0,
    ) -> None:
        """A step was answered that fed so many tokens for decoding and for prefill.

        `position`: the mean one of those for prefill.
        """
        step_ms = step_seconds * 1000
        if not decoding_tokens:
            self._alone.learn(prefill_tokens, step_ms)
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
        """What prefill adds; of a prompt's short rest that a step takes for nothing: nothing."""
        expected_ms = self._beside.ms(prefill, position)
        is_usual = 2 * prefill >= self._fitting(decoding, position, plain_ms)
        if is_usual and self._beside.is_tried:
            overrun = (plain_ms + extra_ms) / (plain_ms + expected_ms)
            if overrun <= MOST_ROOM:
                self._overruns.append(max(overrun, LEAST_ROOM))
        if not is_usual and self._beside.is_known and extra_ms <= expected_ms:
            return
        if not self._beside.is_known:
            self._decoding = decoding
        self._decoding += (1 - _DECAY) * (decoding - self._decoding)
        self._beside.learn(prefill, position, extra_ms, is_usual=is_usual)

    def _fitting(self, decoding: int, start: float, plain_ms: float) -> float:
        """How much prefill is bearable by what is known, and where it goes on from there."""
        bearable_ms = (self.times - 1) * plain_ms
        bearable_ms = max(bearable_ms, self._beside.fixed_ms + _PROGRESS * bearable_ms)
        # More who decode may take what a step does for nothing. The step has as many tokens then.
        more = max(0.0, decoding - self._decoding)
        harmless = self._tokens_a_ms * self.times * plain_ms - decoding
        return min(self._beside.tokens_for(bearable_ms, start) - more, harmless)

    def chunk_beside(self, decoding_tokens: int, start: float = 0.0) -> int:
        """The most tokens of prefill beside so many of decoding; 0: measure a step without.

        `start`: the position from which they go on. Half as many as decode are taken whatever they
        seem to cost, so that prefill goes on.
        """
        plain_ms = self._plain_ms(decoding_tokens)
        if plain_ms is None or self._is_due(decoding_tokens):
            return 0
        if self._beside.is_known:
            fits = self._fitting(decoding_tokens, start, plain_ms)
        else:
            fits = self._alone.tokens_for((self.times - 1) * plain_ms)
        return max(1, decoding_tokens // 2, int(fits))

    def _is_due(self, tokens: int) -> bool:
        """Whether a step of so many tokens should go without prefill, to be measured.

        Where steps of fewer are known, they say what this one takes at least.
        """
        size = tokens.bit_length()
        if not any(plain.is_known for one, plain in self._plain.items() if one <= size):
            return True
        return size in self._plain and self._plain[size].is_due

    def _plain_ms(self, tokens: int) -> float | None:
        """What a step of so many tokens takes at least without prefill; None: nothing is known."""
        size = tokens.bit_length()
        own = self._plain.get(size)
        if own is not None and own.is_known_of(tokens):
            return own.at_least_ms(tokens)
        known = sorted(one for one, plain in self._plain.items() if plain.samples)
        # What is known of fewer tokens holds for more, and a part of what more take for fewer.
        nearest = [one for one in known if one <= size][-2:] or known[:1]
        return max((self._plain[one].at_least_ms(tokens) for one in nearest), default=None)


def share_prefill(missing: Sequence[int], budget: int) -> list[int]:
    """How many tokens each sequence gets of a step's prefill, given what each lacks, oldest first.

    The oldest gets half of the budget, so whatever comes after it at most doubles its time, and
    each becomes the oldest: none starves. The other half goes to those that lack least, so a short
    prompt does not wait for a long one before it. What is left over goes to the oldest again.
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
    """From where a step's prefill goes on, on the mean, given where each sequence does.

    Half is the oldest's, the other half first of all that one's which lacks least.
    """
    least = min(range(len(missing)), key=lambda index: missing[index])
    return (starts[0] + starts[least]) / 2
