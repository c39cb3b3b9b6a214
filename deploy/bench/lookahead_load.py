"""What the cells of `bench lookahead` decode, and luck that is no better than the long run.

800 tokens have a spread of 4 to 5 % by luck alone. So of many seeds of a drafter's luck the one is
taken whose acceptance over exactly these texts is that of the long run.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from cluster.simulation.closed_forms import expected_tokens
from paceline.sampling import SequenceSpec
from workers.emulated.recording import Recording, spec_of
from workers.emulated.replay_text import NUM_RESERVED, Guess, PrefixReader, ReplayText
from workers.emulated.stand_in import VOCAB_SIZE

PROMPT_LENGTH = 16
TEMPERATURES = (0.0, 1.0)
SEEDS_TRIED = 400
WARM_UP_TOKENS, MOST_WARM_UPS = 12, 8
PACE = 7
"""Draft passes in a step of the emulated pair."""


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """One request of a cell."""

    prompt: tuple[int, ...]
    temperature: float
    seed: int
    max_tokens: int

    def spec(self) -> SequenceSpec:
        """What a worker knows of it."""
        return spec_of(len(self.prompt), self.temperature, self.seed)


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


def first_of_each(load: Sequence[LoadRequest], count: int) -> list[LoadRequest]:
    """The first `count` requests at each temperature."""
    return [
        one
        for temperature in TEMPERATURES
        for one in [each for each in load if each.temperature == temperature][:count]
    ]


def rounds_of(load: Sequence[LoadRequest], batch: int) -> list[Sequence[LoadRequest]]:
    """What is decoded together, `batch` requests at a time."""
    return [load[start : start + batch] for start in range(0, len(load), batch)]


def warm_up_of(load: Sequence[LoadRequest], batch: int) -> list[LoadRequest]:
    """A few tokens of the first requests, decoded before anything counts.

    Of the load's own texts: on any other a drafter that guesses as recorded is always wrong, which
    would teach policy `auto` not to draft.
    """
    first = load[: min(batch, MOST_WARM_UPS)]
    return [replace(one, max_tokens=min(WARM_UP_TOKENS, one.max_tokens)) for one in first]


def pinned_guess(acceptance: float, hit_rate: float, load: Sequence[LoadRequest]) -> Guess:
    """A seed with which this load is guessed as well as an endless one would be.

    What is compared: the share of right guesses, and the tokens a step of walks over the texts as
    lockstep, pearl and fanout make them, with their expectations. `hit_rate` is that of fanout.
    """
    text = ReplayText(VOCAB_SIZE)
    digests = [_path(text, request) for request in load]
    expected = [
        expected_tokens(acceptance, PACE - 1),
        expected_walk(acceptance, 0.0),
        expected_walk(acceptance, hit_rate),
    ]

    def unlike(seed: int) -> float:
        guess = Guess(acceptance, hit_rate, seed)
        ranks: list[int] = []
        for path, request in zip(digests, load, strict=True):
            ranks += _ranks(text, path, request, guess)
        share = ranks.count(0) / len(ranks)
        found = [_lockstep_walk(ranks), walk(ranks, {0}), walk(ranks, {0, 1})]
        return abs(share / acceptance - 1) + sum(
            abs(one / wanted - 1) for one, wanted in zip(found, expected, strict=True)
        )

    return Guess(acceptance, hit_rate, min(range(SEEDS_TRIED), key=unlike))


def _ranks(
    text: ReplayText, path: Sequence[int], request: LoadRequest, guess: Guess
) -> Iterator[int]:
    """The place of each true token among the drafter's two best guesses; 2: it is neither."""
    spec = request.spec()
    for digest in path:
        truth, guesses = text.next_token(digest, spec), text.guesses(digest, spec, guess, 2)
        yield guesses.index(truth) if truth in guesses else 2


def _lockstep_walk(ranks: Sequence[int]) -> float:
    """Tokens a step when windows of PACE - 1 are verified, and a token is added to each."""
    place = steps = 0
    while place < len(ranks):
        place += _run(ranks, place) + 1
        steps += 1
    return place / steps


def walk(ranks: Sequence[int], foreseen: Collection[int]) -> float:
    """Tokens a step when windows are drafted while a step runs.

    A step whose last token had a rank in `foreseen` leaves a window for the next. That of a whole
    window must have been the first guess; so must the token of a step without a window.
    """
    place = steps = 0
    has_window = False
    while place < len(ranks):
        place += _run(ranks, place) if has_window else 0
        has_window = place < len(ranks) and ranks[place] in foreseen
        place += 1
        steps += 1
    return place / steps


def _run(ranks: Sequence[int], place: int) -> int:
    """Right guesses from there on, at most a window of them."""
    run = 0
    while run < PACE - 1 and place + run < len(ranks) and ranks[place + run] == 0:
        run += 1
    return run


def expected_walk(acceptance: float, hit_rate: float) -> float:
    """What `walk` gives over an endless text."""
    whole = acceptance**PACE
    foreseen = acceptance + (1 - acceptance) * hit_rate
    stays = whole + (1 - whole) * hit_rate
    with_window = foreseen / (1 - stays + foreseen)
    return 1 - with_window + with_window * expected_tokens(acceptance, PACE - 1)


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
