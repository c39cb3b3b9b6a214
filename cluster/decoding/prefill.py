"""How much prefill goes into a step: bounded by what it costs those who decode, and shared fairly.

A step that decodes may take twice as long with prefill as without, no longer: so a prompt of any
length delays another sequence's token by about one step of the same batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

MIN_CHUNK = 16
"""Tokens of prefill that a step takes whatever they cost, so that prefill always goes on."""

_SLOW_CHANGE = 0.8


@dataclass(slots=True)
class PrefillCosts:
    """How long decoding steps take by the tokens they feed, and what a token of prefill adds."""

    # Mean milliseconds of steps without prefill, by the bit length of the number of tokens fed.
    _decoding_ms: dict[int, float] = field(default_factory=dict)
    # Decayed sums over steps with prefill.
    _extra_ms: float = 0.0
    _tokens: float = 0.0
    # No chunk beside decoding sequences is larger. Costs bend where a step ceases to be bound by
    # memory, so a chunk at most doubles, and only after one that was cheap enough.
    _largest: int = 2 * MIN_CHUNK

    def add(self, *, decoding_tokens: int, prefill_tokens: int, step_seconds: float) -> None:
        """A step was answered that fed so many tokens for decoding and for prefill."""
        step_ms = step_seconds * 1000
        if not prefill_tokens:
            size = decoding_tokens.bit_length()
            before = self._decoding_ms.get(size, step_ms)
            self._decoding_ms[size] = _SLOW_CHANGE * before + (1 - _SLOW_CHANGE) * step_ms
            return
        decoding_ms = self._decoding_step_ms(decoding_tokens)
        size = decoding_tokens.bit_length()
        if size and prefill_tokens <= MIN_CHUNK and size < min(self._decoding_ms, default=math.inf):
            # Where prompts never pause, no step so small may ever come without prefill. What is
            # known of prefill is taken off, for too little does less harm than too much.
            known_ms = self._extra_ms / self._tokens * prefill_tokens if self._tokens else None
            share = 0.25 if known_ms is None else min(0.75, known_ms / step_ms)
            self._decoding_ms[size] = step_ms * (1 - share)
            return
        extra_ms = max(0.0, step_ms - (decoding_ms or 0.0))
        self._extra_ms = self._extra_ms * _SLOW_CHANGE + extra_ms
        self._tokens = self._tokens * _SLOW_CHANGE + prefill_tokens
        if decoding_tokens and decoding_ms is not None:
            if extra_ms <= decoding_ms:
                self._largest = max(self._largest, 2 * prefill_tokens)
            else:
                self._largest = max(MIN_CHUNK, min(self._largest, prefill_tokens))

    def chunk_beside(self, decoding_tokens: int) -> int:
        """The most tokens of prefill beside so many of decoding; at least MIN_CHUNK.

        As many as decode are always bearable: a step of twice the tokens takes at most twice as
        long, whatever a device's costs are.
        """
        at_least = max(MIN_CHUNK, decoding_tokens)
        decoding_ms = self._decoding_step_ms(decoding_tokens)
        if decoding_ms is None or not self._tokens:
            return at_least
        ms_per_token = self._extra_ms / self._tokens
        most = decoding_ms / ms_per_token if ms_per_token > 0 else self._largest
        return max(at_least, int(min(most, self._largest)))

    def _decoding_step_ms(self, tokens: int) -> float | None:
        """The mean time of a step of about so many tokens; None: nothing is known of any.

        Of a size not seen yet, too little is said rather than too much: the time of a smaller one,
        or the proportional part of a larger one's.
        """
        size = tokens.bit_length()
        smaller = [known for known in self._decoding_ms if known <= size]
        if smaller:
            return self._decoding_ms[max(smaller)]
        if not self._decoding_ms:
            return None
        larger = min(self._decoding_ms)
        return self._decoding_ms[larger] * 0.5 ** (larger - size)


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
