"""A recording of real decoding: the target's text, and the drafter's rank of each token.

`python -m deploy.bench.record_replay` makes it as a small JSON file. The stand-in vocabulary is
smaller than the real one, so token ids are folded into it; only the ranks matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from paceline.errors import ConfigError
from paceline.sampling import SamplingParams, SequenceSpec
from workers.emulated.replay_text import NUM_RESERVED, RecordedToken, recorded_keys

MAX_RANK = 8
"""The rank of any token that the drafter's best 8 guesses did not hold."""


def spec_of(prompt_length: int, temperature: float, seed: int) -> SequenceSpec:
    """The spec of a text requested at this temperature and seed, all else at its default."""
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
    """What was recorded, and of which models.

    `long_run_acceptance`: the share of right guesses over `long_run_tokens` tokens, many more than
    are kept here. The share of the kept ones is within 1 % of it.
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
