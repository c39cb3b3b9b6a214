"""How many prompt tokens go into a step, and which sequences they belong to.

The promise: a prompt of any length delays another sequence's token by at most two steps. So a mixed
step (decoding and prefill) may take three times as long as the same step without prefill. Part of
that is kept as room for whatever else the host does. The room is learned: the largest ratio of
measured to expected time over the last 32 mixed steps. Ratios above 1.5 are hiccups that no chunk
size prevents, so they are left out.

The time of a decode-only step is measured. Where prompts never pause, a step goes without prefill
now and then; this costs nothing, since decoding continues. What prefill adds is learned too
(prefill_price.py). Until enough is known one bound holds on any device: a step with n times the
tokens takes at most n times as long. This bound limits how fast chunks grow.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from cluster.decoding.prefill_price import PrefillPrice

PROMISED = 3.0
"""Upper bound on a mixed step's time, as a multiple of a decode-only step's: two steps of delay."""
LEAST_ROOM, MOST_ROOM = 1.25, 1.5
"""Bounds of the learned room: measured over expected time of a mixed step."""

_OVERRUNS = 32
_DECAY = 0.8
_PROGRESS = 0.25
"""Share of the bearable time for a chunk's tokens where its fixed cost alone exceeds that time."""
_SAMPLES = 5
_ENOUGH_SAMPLES = 2
_STALE_AFTER, _FIRST_AFTER = 32, 4
"""Mixed steps after which a decode-only step is due: once its size is known, and before."""


@dataclass(slots=True)
class _PlainSteps:
    """Tokens and milliseconds of the last decode-only steps of about one size."""

    samples: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=_SAMPLES))
    prefills_since: int = 0

    @property
    def is_known(self) -> bool:
        return len(self.samples) >= _ENOUGH_SAMPLES

    def is_known_of(self, tokens: int) -> bool:
        """Whether every known step fed at most `tokens` tokens."""
        return self.is_known and all(fed <= tokens for fed, _ in self.samples)

    @property
    def is_due(self) -> bool:
        return self.prefills_since >= (_STALE_AFTER if self.is_known else _FIRST_AFTER)

    def at_least_ms(self, tokens: int) -> float:
        """The least milliseconds of a step with `tokens` tokens; the median discards hiccups.

        A larger step takes at least as long as a smaller one. A smaller step takes at least its
        share of a larger one, by tokens.
        """
        return statistics.median_low(ms * min(1.0, tokens / fed) for fed, ms in self.samples)


@dataclass(slots=True)
class _AlonePrice:
    """Milliseconds a token of steps that hold prefill alone, by a line through the origin."""

    _tokens_ms: float = 0.0
    _tokens_squared: float = 0.0
    _largest: int = 0

    def learn(self, tokens: int, ms: float) -> None:
        self._tokens_ms = self._tokens_ms * _DECAY + tokens * ms
        self._tokens_squared = self._tokens_squared * _DECAY + tokens**2
        self._largest = max(self._largest, tokens)

    def tokens_for(self, ms: float) -> float:
        """Tokens that fit into `ms`, at most the largest chunk tried; 0: nothing is known."""
        if not self._tokens_ms:
            return 0.0
        return min(ms * self._tokens_squared / self._tokens_ms, self._largest)


class PrefillCosts:
    """Learns how long steps take and what prefill adds to them; chooses chunk sizes."""

    def __init__(self) -> None:
        # By the bit length of the number of tokens fed.
        self._plain: dict[int, _PlainSteps] = {}
        # Steps of prefill alone, with all costs of a step: an upper bound on what prefill adds.
        self._alone = _AlonePrice()
        self._beside = PrefillPrice()
        self._decoding: float = 0  # Mean decoding tokens of the steps that `_beside` learned from.
        # The highest throughput of a mixed step, in tokens of both kinds.
        self._tokens_a_ms = 0.0
        self._overruns: deque[float] = deque(maxlen=_OVERRUNS)

    @property
    def times(self) -> float:
        """The time that a mixed step should take, as a multiple of a decode-only step's."""
        return PROMISED / max(self._overruns, default=LEAST_ROOM)

    def add(
        self,
        *,
        decoding_tokens: int,
        prefill_tokens: int,
        step_seconds: float,
        position: float = 0.0,
    ) -> None:
        """Learn from a finished step.

        `position`: mean position of the prefill tokens in their prompts.
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
        """Learn what prefill adds.

        A chunk below half the usual size that took no longer than expected teaches nothing: it is
        the rest of a prompt, which may fit into a step at no cost.
        """
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
        """Prefill tokens from position `start` on that a step bears, by what is known."""
        bearable_ms = (self.times - 1) * plain_ms
        bearable_ms = max(bearable_ms, self._beside.fixed_ms + _PROGRESS * bearable_ms)
        # More decoding tokens than learned from may use up room that prefill had for nothing.
        more = max(0.0, decoding - self._decoding)
        harmless = self._tokens_a_ms * self.times * plain_ms - decoding
        return min(self._beside.tokens_for(bearable_ms, start) - more, harmless)

    def chunk_beside(self, decoding_tokens: int, start: float = 0.0) -> int:
        """Prefill tokens beside `decoding_tokens`; 0: measure a step without prefill.

        `start`: position of the first of them. At least half as many as decode are taken whatever
        they seem to cost, so that prefill always advances.
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
        """Whether a step of `tokens` tokens should go without prefill, to be measured.

        A known smaller size suffices: it bounds this step's time from below.
        """
        size = tokens.bit_length()
        if not any(plain.is_known for one, plain in self._plain.items() if one <= size):
            return True
        return size in self._plain and self._plain[size].is_due

    def _plain_ms(self, tokens: int) -> float | None:
        """The least milliseconds of a decode-only step of `tokens`; None: nothing is known."""
        size = tokens.bit_length()
        own = self._plain.get(size)
        if own is not None and own.is_known_of(tokens):
            return own.at_least_ms(tokens)
        known = sorted(one for one, plain in self._plain.items() if plain.samples)
        # A smaller step's time bounds a larger one's from below, and so does a larger one's share.
        nearest = [one for one in known if one <= size][-2:] or known[:1]
        return max((self._plain[one].at_least_ms(tokens) for one in nearest), default=None)


def share_prefill(missing: Sequence[int], budget: int) -> list[int]:
    """Split a step's `budget` of prefill tokens, given what each sequence lacks, oldest first.

    The oldest gets half of the budget, so later arrivals at most double its time. Every sequence
    becomes the oldest, so none starves. The other half goes to those that lack least, so a short
    prompt does not wait for a long one. The oldest gets what is left over.
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
    """Mean position where a step's prefill continues, given the position of each sequence.

    Half of the prefill is the oldest's; the other half goes first to the one that lacks least.
    """
    least = min(range(len(missing)), key=lambda index: missing[index])
    return (starts[0] + starts[least]) / 2
