"""The text of an emulated target, and the guesses of its drafter.

Both are pure functions of a digest of the token ids and positions that were read. On a recorded
path the next token is the recorded one; elsewhere a hash of the prefix chooses it. So a target that
reads other tokens than the committed ones (after a wrong rollback, or in a wrong block) continues
with another text.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from paceline.errors import ConfigError
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
    `hit_rate`: the probability that the second guess is true if the first is not. None for either:
    as recorded; off the recorded paths all guesses are then wrong. Drafters with different seeds
    guess differently. `kept`: the share of the right guesses that it keeps; the others are wrong.
    """

    acceptance: float | None = 0.75
    hit_rate: float | None = 0.0
    seed: int = 0
    kept: float = 1.0

    @cached_property
    def luck_key(self) -> int:
        """The seed, mixed."""
        return _mix(self.seed + 0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True)
class RecordedToken:
    """The true token after a recorded prefix, and its rank among the drafter's guesses."""

    token_id: int
    rank: int


class ReplayText:
    """The true text of every sequence, for a vocabulary of `vocab_size` tokens."""

    def __init__(
        self, vocab_size: int, recorded: Mapping[int, RecordedToken] | None = None
    ) -> None:
        self.vocab_size = vocab_size
        self._num_tokens = vocab_size - NUM_RESERVED
        self._recorded = recorded or {}

    def next_token(self, digest: int, spec: SequenceSpec) -> int:
        """The true token after a prefix."""
        key = prefix_key(digest, spec)
        return self._truth(key, self._recorded.get(key))

    def guesses(self, digest: int, spec: SequenceSpec, guess: Guess, count: int) -> tuple[int, ...]:
        """A drafter's `count` best guesses at the token after a prefix, all different."""
        key = prefix_key(digest, spec)
        recorded = self._recorded.get(key)
        truth = self._truth(key, recorded)
        rank = _rank_of(recorded, _mix(key ^ guess.luck_key), guess)
        stride = _stride(digest)
        return tuple(
            [
                truth if place == rank else self._wrong(truth, stride, place)
                for place in range(count)
            ]
        )

    def first_guess(self, digest: int, spec: SequenceSpec, guess: Guess) -> int:
        """The first of a drafter's guesses."""
        key = prefix_key(digest, spec)
        recorded = self._recorded.get(key)
        truth = self._truth(key, recorded)
        if _rank_of(recorded, _mix(key ^ guess.luck_key), guess) == 0:
            return truth
        return self._wrong(truth, _stride(digest), 0)

    def _wrong(self, truth: int, stride: int, place: int) -> int:
        """A wrong guess: `stride * (place + 1)` ids beyond the truth, modulo the vocabulary."""
        return NUM_RESERVED + (truth - NUM_RESERVED + stride * (place + 1)) % self._num_tokens

    def _truth(self, key: int, recorded: RecordedToken | None) -> int:
        return NUM_RESERVED + key % self._num_tokens if recorded is None else recorded.token_id


def _rank_of(recorded: RecordedToken | None, luck: int, guess: Guess) -> int | None:
    """The rank of the true token among the guesses, or None. `luck`: 64 random bits."""
    first, second = luck & 0xFFFFFFFF, luck >> 32
    most = guess.kept * 2**32
    if guess.acceptance is None:
        right = recorded is not None and recorded.rank == 0 and first < most
    else:
        right = first < guess.acceptance * most
    if right:
        return 0
    if guess.hit_rate is None:
        is_known = recorded is not None and recorded.rank > 0 and second < most
        return recorded.rank if recorded is not None and is_known else None
    return 1 if second < guess.hit_rate * most else None


def _stride(digest: int) -> int:
    return 1 + _mix(digest + 1) % 97


def prefix_key(digest: int, spec: SequenceSpec) -> int:
    """The key of a prefix under the request's seed. Greedy decoding ignores the seed."""
    if spec.sampling.greedy:
        return _mix(digest)
    return _mix(digest ^ _mix(spec.seed * 31 + spec.sample_index + 1))


def recorded_keys(
    prompt: Sequence[int], output: Sequence[int], ranks: Sequence[int], spec: SequenceSpec
) -> dict[int, RecordedToken]:
    """The recorded tokens of one sequence by prefix key. `ranks` has one entry per output token."""
    reader = PrefixReader().read(prompt, 0)
    found = {}
    for index, (token_id, rank) in enumerate(zip(output, ranks, strict=True)):
        found[prefix_key(reader.digest(), spec)] = RecordedToken(token_id, rank)
        reader.read((token_id,), len(prompt) + index)
    return found


def _mix(value: int) -> int:
    """The finalizer of SplitMix64 (Steele, Lea and Flood 2014)."""
    x = (value + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


MAX_RANK = 8
"""The rank of a token that is not among the drafter's best 8 guesses."""


def spec_of(prompt_length: int, temperature: float, seed: int) -> SequenceSpec:
    """The spec of a request with this temperature and seed; all else has its default."""
    return SequenceSpec(
        SamplingParams(temperature=temperature),
        seed=seed,
        prompt_length=prompt_length,
    )


class _Closed(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class RecordedSequence(_Closed):
    """A prompt, the target's answer at this temperature and seed, and the drafter's ranks.

    `ranks[i]`: the number of candidates that the drafter would have tried before `output[i]`, given
    all tokens before it; 0 is a right guess.
    """

    temperature: Annotated[float, Field(ge=0)]
    seed: Annotated[int, Field(ge=0)]
    prompt: tuple[int, ...]
    output: tuple[int, ...]
    ranks: tuple[Annotated[int, Field(ge=0, le=MAX_RANK)], ...]

    def spec(self) -> SequenceSpec:
        """The spec of this sequence."""
        return spec_of(len(self.prompt), self.temperature, self.seed)

    def folded(self, vocab_size: int) -> RecordedSequence:
        """The same sequence in a vocabulary of `vocab_size` tokens."""

        def fold(ids: Sequence[int]) -> tuple[int, ...]:
            return tuple(NUM_RESERVED + one % (vocab_size - NUM_RESERVED) for one in ids)

        return self.model_copy(update={"prompt": fold(self.prompt), "output": fold(self.output)})


class Recording(_Closed):
    """A recording of real decoding, and the models that it is from. A small JSON file, which
    `python -m deploy.bench.record_replay` makes.

    The stand-in vocabulary is smaller than the real one, so token ids are folded into it; only the
    ranks matter.

    `long_run_acceptance`: the share of right guesses over `long_run_tokens` tokens, of which the
    recording keeps a small part. The share in the kept part is within 1 % of it.
    """

    target: str
    drafter: str
    made: str
    long_run_acceptance: float
    long_run_tokens: int
    sequences: tuple[RecordedSequence, ...]

    @property
    def acceptance(self) -> float:
        """The share of right guesses in the kept sequences."""
        ranks = [rank for sequence in self.sequences for rank in sequence.ranks]
        return ranks.count(0) / len(ranks)

    def keys(self, vocab_size: int) -> dict[int, RecordedToken]:
        """The recorded tokens by prefix key, for ReplayText."""
        found: dict[int, RecordedToken] = {}
        for sequence in self.sequences:
            one = sequence.folded(vocab_size)
            found |= recorded_keys(one.prompt, one.output, one.ranks, one.spec())
        return found


def load_recording(path: Path) -> Recording:
    """Read a recording. Raises ConfigError naming the file."""
    try:
        return Recording.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        raise ConfigError(f"{path} is not a usable recording: {error}") from error
