"""The replayed text and its guesses: pure, at the set rates, and wrong if KV is misread."""

from __future__ import annotations

import pytest

from paceline.sampling import SamplingParams, SequenceSpec
from workers.emulated.replay_text import (
    Guess,
    PrefixReader,
    ReplayText,
)
from workers.models.stand_in import NUM_RESERVED

GREEDY = SequenceSpec(SamplingParams(temperature=0.0), seed=1, prompt_length=2)
VOCAB_SIZE = 4096
TEXT = ReplayText(VOCAB_SIZE)
NUM_PREFIXES = 20_000


def _digest(*token_ids: int, position: int = 0) -> int:
    return PrefixReader().read(token_ids, position).digest()


def test_bytes_and_tokens_are_read_alike() -> None:
    pairs = b"".join(value.to_bytes(4, "little") for pair in ((7, 0), (9, 1)) for value in pair)
    assert PrefixReader().read_bytes(pairs).digest() == _digest(7, 9)


def test_what_is_misread_gives_another_text() -> None:
    truth = TEXT.next_token(_digest(20, 21, 22), GREEDY)
    others = [_digest(20, 22, 21), _digest(20, 21), _digest(20, 21, 22, position=1)]
    assert all(TEXT.next_token(other, GREEDY) != truth for other in others)


def test_sampled_text_depends_on_the_seed_and_greedy_text_does_not() -> None:
    digests = [_digest(number) for number in range(50)]

    def text(temperature: float, seed: int) -> list[int]:
        spec = SequenceSpec(SamplingParams(temperature=temperature), seed=seed, prompt_length=2)
        return [TEXT.next_token(digest, spec) for digest in digests]

    assert text(0.0, 1) == text(0.0, 2)
    assert text(1.0, 1) != text(1.0, 2)
    assert text(1.0, 1) != text(0.0, 1)


@pytest.mark.parametrize(("acceptance", "hit_rate"), [(0.75, 0.85), (0.85, 0.5), (0.0, 0.0)])
def test_the_set_rates(acceptance: float, hit_rate: float) -> None:
    guess = Guess(acceptance, hit_rate, seed=3)
    right = second = 0
    for number in range(NUM_PREFIXES):
        digest = _digest(number)
        truth = TEXT.next_token(digest, GREEDY)
        guesses = TEXT.guesses(digest, GREEDY, guess, 4)
        assert len(set(guesses)) == 4
        assert all(NUM_RESERVED <= one < VOCAB_SIZE for one in guesses)
        assert guesses == TEXT.guesses(digest, GREEDY, guess, 4)
        right += guesses[0] == truth
        second += guesses[1] == truth
        assert truth not in guesses[2:]
    # Five standard deviations of a binomial of 20,000.
    assert right / NUM_PREFIXES == pytest.approx(acceptance, abs=0.018)
    wrong = NUM_PREFIXES - right
    assert second / wrong == pytest.approx(hit_rate, abs=2.5 / wrong**0.5)


def test_another_seed_is_another_luck() -> None:
    digests = [_digest(number) for number in range(200)]
    lucks = [
        [TEXT.guesses(digest, GREEDY, Guess(0.5, 0.0, seed), 1) for digest in digests]
        for seed in (1, 2)
    ]
    assert lucks[0] != lucks[1]
