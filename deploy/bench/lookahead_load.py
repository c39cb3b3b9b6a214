"""What the cells of `bench lookahead` decode, and luck that is no better than the long run.

800 tokens have a spread of 4 to 5 % by luck alone. So of many seeds of a drafter's luck the one is
taken whose acceptance over exactly these texts is that of the long run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.rules import Rule
from paceline.sampling import SamplingParams, SequenceSpec
from workers.emulated.recording import Recording
from workers.emulated.replay_text import NUM_RESERVED, Guess, PrefixReader, ReplayText
from workers.emulated.stand_in import VOCAB_SIZE

PROMPT_LENGTH = 16
TEMPERATURES = (0.0, 1.0)
SEEDS_TRIED = 400
_LONGEST_RUN = 8


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """One request of a cell."""

    prompt: tuple[int, ...]
    temperature: float
    seed: int
    max_tokens: int

    def spec(self) -> SequenceSpec:
        """What a worker knows of it."""
        return SequenceSpec(
            SamplingParams(temperature=self.temperature),
            seed=self.seed,
            prompt_length=len(self.prompt),
            rule=Rule.COUPLED,
        )


def set_load(batch: int, max_tokens: int) -> list[LoadRequest]:
    """`batch` requests at each temperature, of `max_tokens` tokens."""
    return [
        LoadRequest(_prompt(number, temperature), temperature, 1000 + number, max_tokens)
        for temperature in TEMPERATURES
        for number in range(batch)
    ]


def recorded_load(recording: Recording, max_tokens: int, *, folded: bool) -> list[LoadRequest]:
    """The recorded requests, as far as they were recorded; `folded` for the stand-in vocabulary."""
    return [
        LoadRequest(
            one.folded(VOCAB_SIZE).prompt if folded else one.prompt,
            one.temperature,
            one.seed,
            min(max_tokens, len(one.output)),
        )
        for one in recording.sequences
    ]


def pinned_guess(acceptance: float, hit_rate: float, load: Sequence[LoadRequest]) -> Guess:
    """A seed with which this load is guessed as well as an endless one would be.

    What is compared: the share of right guesses, and the mean number of right ones in a row.
    """
    text = ReplayText(VOCAB_SIZE)
    digests = [_path(text, request) for request in load]
    expected_run = sum(acceptance**length for length in range(1, _LONGEST_RUN + 1))

    def unlike(seed: int) -> float:
        guess = Guess(acceptance, hit_rate, seed)
        tested = right = runs = 0
        for path, request in zip(digests, load, strict=True):
            spec = request.spec()
            hits = [
                text.guesses(digest, spec, guess, 1)[0] == text.next_token(digest, spec)
                for digest in path
            ]
            tested += len(hits)
            right += sum(hits)
            run = 0
            for hit in reversed(hits):
                run = run + 1 if hit else 0
                runs += min(run, _LONGEST_RUN)
        if not expected_run:
            return 0.0
        share, mean_run = right / tested, runs / tested
        return abs(share / acceptance - 1) + abs(mean_run / expected_run - 1)

    return Guess(acceptance, hit_rate, min(range(SEEDS_TRIED), key=unlike))


def _prompt(number: int, temperature: float) -> tuple[int, ...]:
    first = 64 + number * PROMPT_LENGTH + int(temperature) * 1600
    return tuple(
        NUM_RESERVED + (first + place) % (VOCAB_SIZE - NUM_RESERVED)
        for place in range(PROMPT_LENGTH)
    )


def _path(text: ReplayText, request: LoadRequest) -> list[int]:
    """The digest of every prefix that is continued."""
    spec, reader = request.spec(), PrefixReader().read(request.prompt, 0)
    found = []
    for index in range(request.max_tokens):
        found.append(reader.digest())
        reader.read((text.next_token(found[-1], spec),), len(request.prompt) + index)
    return found
