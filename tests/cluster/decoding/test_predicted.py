"""A prediction and an output are aligned, meet again after edits, and cost little where wrong."""

from __future__ import annotations

from random import Random

import pytest

from cluster.decoding.predicted import (
    FAR_RUN,
    FIRST_TRUST,
    MAX_LOST,
    MAX_MISSES,
    MEETING_TRUST,
    NEAR,
    PredictedText,
    Prediction,
)

PROMPT = [0, 0, 0]


class Played:
    """A sequence whose output is known, decoded with the candidates of a prediction."""

    def __init__(self, predicted: list[int], output: list[int], window: int) -> None:
        self.prediction = Prediction(PredictedText(predicted))
        self.steps = self.wrong = 0
        committed, done = list(PROMPT), 0
        offered: list[int] = []
        while done < len(output):
            right = 0
            while right < min(len(offered), len(output) - done):
                if offered[right] != output[done + right]:
                    break
                right += 1
            new = output[done : done + right + 1]
            committed += new
            done += len(new)
            self.steps += 1
            self.wrong += len(offered) - right
            self.prediction.advance(committed, len(new))
            offered = list(self.prediction.foretold(window))


def _text(random: Random, length: int) -> list[int]:
    return [random.randrange(300) for _ in range(length)]


@pytest.mark.parametrize("window", [1, 4, 8, 32])
def test_a_text_that_is_all_predicted_takes_few_steps(window: int) -> None:
    text = _text(Random(1), 400)
    played = Played(text, text, window)
    assert (played.wrong, played.prediction.num_accepted) == (0, 400)
    # A first step without candidates, then FIRST_TRUST of them, twice as many after each step.
    assert played.steps <= 5 + 400 / (window + 1)


@pytest.mark.parametrize("seed", range(20))
def test_after_edits_the_two_meet_again(seed: int) -> None:
    """Every tenth of the text is edited: tokens are replaced, put in or left out."""
    random = Random(seed)
    predicted = _text(random, 600)
    output = list(predicted)
    for place in range(580, 0, -40):
        output[place : place + random.randrange(5)] = [
            random.randrange(300, 600) for _ in range(random.randrange(5))
        ]
    played = Played(predicted, output, 8)
    assert not played.prediction.is_given_up
    assert played.prediction.num_accepted > 0.85 * len(predicted)
    assert len(output) / played.steps > 4
    assert played.wrong < 0.25 * len(output)


def test_a_large_part_that_moved_is_found() -> None:
    text = _text(Random(3), 600)
    moved = [*text[400:600], *text[100:400]]
    played = Played(text, moved, 8)
    assert played.prediction.num_accepted > 450
    assert NEAR + FAR_RUN < 400


def test_a_wrong_prediction_costs_a_few_candidates_and_is_given_up() -> None:
    random = Random(4)
    # The commonest tokens of any text are in both, so that they seem to meet again and again.
    common = [[random.choice([*range(8), random.randrange(300)]) for _ in range(900)] for _ in "ab"]
    played = Played(common[0], common[1], 8)
    assert played.prediction.is_given_up
    assert played.wrong <= FIRST_TRUST + 12 * MEETING_TRUST
    nothing = Played(_text(random, 400), [random.randrange(300, 600) for _ in range(600)], 8)
    assert nothing.prediction.is_given_up
    assert nothing.wrong <= FIRST_TRUST
    assert MAX_LOST < 600
    assert MAX_MISSES > 1


def test_resumed_output_is_followed_and_not_counted() -> None:
    text = _text(Random(5), 100)
    prediction = Prediction(PredictedText(text), text[:60])
    assert prediction.num_accepted == 0
    assert list(prediction.foretold(8)) == text[60 : 60 + FIRST_TRUST]
    assert list(Prediction(PredictedText(text), text).foretold(8)) == []
