"""Counts that follow a text give exactly the penalties of new counts, after any change."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from functools import partialmethod
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from paceline.sampling import SamplingParams, SequenceSpec
from workers.verification.device_choice import Row, adjusted, pack_rows
from workers.verification.distribution import adjusted_logits
from workers.verification.prefix import CountedText, Prefix, TokenCounts

VOCAB = 40
SAMPLINGS = [
    SamplingParams(repetition_penalty=1.3),
    SamplingParams(repetition_penalty=0.7, presence_penalty=0.5),
    SamplingParams(presence_penalty=-1.0, frequency_penalty=0.3),
    SamplingParams(
        repetition_penalty=1.1, frequency_penalty=-0.7, logit_bias={3: 4.0, 5: -100.0, 39: 3.6e38}
    ),
]


def naive(
    logits_V: NDArray[np.float32], spec: SequenceSpec, prefix: list[int]
) -> NDArray[np.float32]:
    """The definition in float32 over the whole text: bias, repetition, presence, frequency."""
    sampling, limit = spec.sampling, np.finfo(np.float32).max
    row_V = logits_V.copy()
    with np.errstate(over="ignore", invalid="ignore"):
        for token_id, bias in sampling.logit_bias.items():
            row_V[token_id] = min(row_V[token_id] + np.float32(bias), limit)
        if sampling.repetition_penalty != 1.0:
            penalty = np.float32(sampling.repetition_penalty)
            for token_id in set(prefix):
                value = row_V[token_id]
                row_V[token_id] = min(value * penalty if value < 0 else value / penalty, limit)
        if sampling.presence_penalty or sampling.frequency_penalty:
            for token_id, count in Counter(prefix[spec.prompt_length :]).items():
                less = sampling.presence_penalty + sampling.frequency_penalty * count
                row_V[token_id] = min(row_V[token_id] - np.float32(less), limit)
    return row_V


def logits(seed: int) -> NDArray[np.float32]:
    """Logits with masked values and some huge ones."""
    rng = np.random.default_rng(seed)
    logits_V = (rng.standard_normal(VOCAB) * 4).astype(np.float32)
    logits_V[rng.integers(VOCAB)] = -np.inf
    logits_V[rng.integers(VOCAB)] = 3.4e38
    return logits_V


def check_row(prefix: Prefix, whole: list[int], sampling: SamplingParams, seed: int) -> None:
    """Check the row after `prefix`, on the host and as a device has it. `whole`: the text of
    `prefix`.
    """
    assert (list(prefix), len(prefix)) == (whole, len(whole))
    spec = SequenceSpec(sampling, seed=0, prompt_length=prefix.text.prompt_length)
    expected_V = naive(logits(seed), spec, whole)
    assert adjusted_logits(logits(seed), spec, prefix).tobytes() == expected_V.tobytes()
    # Beside a row of the same text and one of another, none of which may disturb it.
    rows = [
        Row(spec, prefix, (1, 2, 1)),
        Row(spec, prefix),
        Row(replace(spec, prompt_length=1), [7, 7]),
        Row(spec, prefix, (1, 2, 1)),
    ]
    params = pack_rows(rows, vocab_size=VOCAB, device=torch.device("cpu"))
    assert params.adjustments is not None
    logits_RV = torch.from_numpy(np.stack([logits(seed)] * 4))
    adjusted_RV = adjusted(logits_RV, params).numpy()
    longer_V = naive(logits(seed), spec, [*whole, 1, 2, 1])
    other_V = naive(logits(seed), replace(spec, prompt_length=1), [7, 7])
    for row_V, right_V in zip(adjusted_RV, (longer_V, expected_V, other_V, longer_V), strict=True):
        assert row_V.tobytes() == right_V.tobytes()


tokens = st.integers(0, VOCAB - 1)
changes = st.lists(
    st.one_of(
        st.tuples(st.just("extend"), st.lists(tokens, max_size=12)),
        st.tuples(st.just("truncate"), st.integers(0, 60)),
        st.tuples(st.just("put"), st.tuples(st.integers(0, 60), tokens)),
        st.tuples(st.just("row"), st.tuples(st.integers(0, 60), st.lists(tokens, max_size=5))),
    ),
    max_size=30,
)


@given(changes, st.integers(0, 20), st.sampled_from(SAMPLINGS), st.integers(0, 5))
def test_rows_of_a_text_that_grows_and_is_rolled_back(
    made: list[tuple[str, object]], prompt_length: int, sampling: SamplingParams, seed: int
) -> None:
    """Windows and trees come and go, and the text is cut anywhere, compared with a plain list."""
    text, plain = CountedText([3, 5], prompt_length=prompt_length), [3, 5]
    for what, value in made:
        match what, value:
            case "extend", list(ids):
                text.extend(ids)
                plain.extend(ids)
            case "truncate", int(length):
                text.truncate_to(length)
                del plain[length:]
            case "put", (int(position), int(token_id)) if position < len(plain):
                text.put(position, token_id)
                plain[position] = token_id
            case "row", (int(length), list(path)):
                prefix = text.prefix(min(length, len(plain)))
                whole = [*plain[:length], *path]
                check_row(prefix.followed_by(path), whole, sampling, seed)
        assert text.token_ids == plain
    check_row(text.prefix(len(plain)), plain, sampling, seed)


def test_a_row_after_much_text_counts_what_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each token is counted once, and a rollback costs what it removes."""
    counted: list[int] = []
    for name in ("add", "remove"):
        real = getattr(TokenCounts, name)

        def listening(counts: TokenCounts, real: Any, ids: list[int], *, are_output: bool) -> None:
            counted.append(len(ids))
            real(counts, ids, are_output=are_output)

        monkeypatch.setattr(TokenCounts, name, partialmethod(listening, real))
    draw = random.Random(1)
    text = CountedText([draw.randrange(VOCAB) for _ in range(32_000)], prompt_length=31_000)
    spec = SequenceSpec(SAMPLINGS[3], seed=0, prompt_length=31_000)
    adjusted_logits(logits(0), spec, text.prefix(32_000))
    assert sum(counted) == 32_000
    counted.clear()
    for step in range(100):
        text.truncate_to(32_000 + 2 * step)
        text.extend([draw.randrange(VOCAB) for _ in range(9)])
        prefix = text.prefix(32_000 + 2 * step + 1)
        for depth in range(9):
            adjusted_logits(logits(0), spec, prefix.followed_by((1,) * depth))
    assert sum(counted) <= 100 * 3, "the two tokens that were committed, and one that was refused"


def test_places_of_a_prefix_are_those_of_a_list() -> None:
    prefix, plain = (
        CountedText(range(6), prompt_length=2).prefix(4).followed_by((9, 8)),
        [0, 1, 2, 3, 9, 8],
    )
    for first in range(-8, 9):
        if -6 <= first < 6:
            assert prefix[first] == plain[first]
        else:
            with pytest.raises(IndexError):
                prefix[first]
        for end in range(-8, 9):
            for step in (1, 2, -1):
                assert prefix[first:end:step] == plain[first:end:step]
