"""The text of an emulated target, and the guesses of its drafter.

Both are pure functions of a digest of the token ids and positions that were read. So a target that
reads other tokens than the committed ones (after a wrong rollback, or in a wrong block) continues
with another text.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import count

from paceline.sampling import SamplingParams, SequenceSpec
from workers.models.stand_in import NUM_RESERVED

_MASK = 0xFFFFFFFFFFFFFFFF
_PAIR = struct.Struct("<ii")


class PrefixReader:
    """A running digest over (token id, position) pairs."""

    __slots__ = ("_hasher",)

    def __init__(self) -> None:
        self._hasher = hashlib.blake2b(digest_size=8)

    def copy(self) -> PrefixReader:
        """A copy that has read the same."""
        other = PrefixReader.__new__(PrefixReader)
        other._hasher = self._hasher.copy()
        return other

    def read(self, token_ids: Iterable[int], position: int) -> PrefixReader:
        """Read tokens from `position` on. Returns itself."""
        pairs = [number for pair in zip(token_ids, count(position)) for number in pair]
        self._hasher.update(struct.pack(f"<{len(pairs)}i", *pairs))
        return self

    def read_one(self, token_id: int, position: int) -> PrefixReader:
        """Read one token. Returns itself."""
        self._hasher.update(_PAIR.pack(token_id, position))
        return self

    def read_bytes(self, pairs: bytes) -> PrefixReader:
        """Read pairs of little-endian int32. Returns itself."""
        self._hasher.update(pairs)
        return self

    def digest(self) -> int:
        """The digest of what was read, as a 64-bit integer."""
        return int.from_bytes(self._hasher.digest(), "little")


@dataclass(frozen=True)
class Guess:
    """How well a drafter guesses: whether, and at which rank, its guesses have the true token.

    `acceptance`: the probability that the first guess is true, independent at each prefix.
    `hit_rate`: the probability that the second guess is true if the first is not. Drafters with
    different seeds guess differently. `kept`: the share of the right guesses that it keeps; the
    others are wrong.
    """

    acceptance: float = 0.75
    hit_rate: float = 0.0
    seed: int = 0
    kept: float = 1.0

    @cached_property
    def luck_key(self) -> int:
        return _mix(self.seed + 0x9E3779B97F4A7C15)


class ReplayText:
    """The true text of every sequence, for a vocabulary of `vocab_size` tokens."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._num_tokens = vocab_size - NUM_RESERVED

    def next_token(self, digest: int, spec: SequenceSpec) -> int:
        return NUM_RESERVED + prefix_key(digest, spec) % self._num_tokens

    def guesses(self, digest: int, spec: SequenceSpec, guess: Guess, count: int) -> tuple[int, ...]:
        """A drafter's `count` best guesses at the token after a prefix, all different."""
        key = prefix_key(digest, spec)
        truth = NUM_RESERVED + key % self._num_tokens
        rank, stride = _rank_of(_mix(key ^ guess.luck_key), guess), _stride(digest)
        return tuple(
            [
                truth if place == rank else self._wrong(truth, stride, place)
                for place in range(count)
            ]
        )

    def first_guess(self, digest: int, spec: SequenceSpec, guess: Guess) -> int:
        key = prefix_key(digest, spec)
        truth = NUM_RESERVED + key % self._num_tokens
        if _rank_of(_mix(key ^ guess.luck_key), guess) == 0:
            return truth
        return self._wrong(truth, _stride(digest), 0)

    def _wrong(self, truth: int, stride: int, place: int) -> int:
        """A wrong guess: `stride * (place + 1)` ids beyond the truth, modulo the vocabulary."""
        return NUM_RESERVED + (truth - NUM_RESERVED + stride * (place + 1)) % self._num_tokens


def _rank_of(luck: int, guess: Guess) -> int | None:
    """The rank of the true token among the guesses, or None. `luck`: 64 random bits."""
    most = guess.kept * 2**32
    if (luck & 0xFFFFFFFF) < guess.acceptance * most:
        return 0
    return 1 if (luck >> 32) < guess.hit_rate * most else None


def _stride(digest: int) -> int:
    return 1 + _mix(digest + 1) % 97


def prefix_key(digest: int, spec: SequenceSpec) -> int:
    """The key of a prefix under the request's seed. Greedy decoding ignores the seed."""
    if spec.sampling.greedy:
        return _mix(digest)
    return _mix(digest ^ _mix(spec.seed * 31 + spec.sample_index + 1))


def _mix(value: int) -> int:
    """The finalizer of SplitMix64 (Steele, Lea and Flood 2014)."""
    x = (value + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def spec_of(prompt_length: int, temperature: float, seed: int) -> SequenceSpec:
    """The spec of a request with this temperature and seed; all else has its default."""
    return SequenceSpec(
        SamplingParams(temperature=temperature),
        seed=seed,
        prompt_length=prompt_length,
    )
