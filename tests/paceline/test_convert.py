"""Specs cross the wire unchanged, or are refused by field."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from paceline.errors import InvalidRequestError
from paceline.options import Stopping
from paceline.sampling import SamplingParams, SequenceSpec
from paceline.v1 import types_pb2
from paceline.wire.sequences import (
    spec_from_wire,
    spec_to_wire,
    stopping_from_wire,
    stopping_to_wire,
)

# Every float is exact in float32.
FULL = SequenceSpec(
    SamplingParams(
        temperature=0.75,
        top_k=40,
        top_p=0.875,
        min_p=0.0625,
        repetition_penalty=1.125,
        presence_penalty=-0.5,
        frequency_penalty=0.25,
        logit_bias={3: -1.5, 70000: 4.0},
        min_tokens=5,
    ),
    seed=(1 << 64) - 1,
    prompt_length=17,
    sample_index=2,
    end_token_ids=(0, 2),
    rule="mcsd",
    bad_words=((7,), (70000, 7, 7)),
)


@pytest.mark.parametrize("spec", [FULL, SequenceSpec(SamplingParams(), seed=0, prompt_length=1)])
def test_round_trip(spec: SequenceSpec) -> None:
    message = types_pb2.SequenceSpec.FromString(spec_to_wire(spec).SerializeToString())
    assert spec_from_wire(message) == spec


def test_every_stopping_rule_has_a_number_of_its_own() -> None:
    assert [stopping_from_wire(stopping_to_wire(one)) for one in Stopping] == list(Stopping)
    assert stopping_from_wire(types_pb2.STOPPING_RULE_UNSPECIFIED) is Stopping.FIXED
    with pytest.raises(InvalidRequestError, match=r"stopping: expected one of fixed.*got 99"):
        stopping_from_wire(99)


@pytest.mark.parametrize(
    ("field", "spec"),
    [
        ("top_p", replace(FULL, sampling=replace(FULL.sampling, top_p=0.0))),
        ("temperature", replace(FULL, sampling=replace(FULL.sampling, temperature=math.nan))),
        ("end_token_ids", replace(FULL, end_token_ids=(80000,))),
        ("bad_words", replace(FULL, bad_words=((7,), (3, 80000)))),
        ("bad_words", replace(FULL, bad_words=((7,), ()))),
        ("bad_words", replace(FULL, bad_words=((7,) * 1000, (8,) * 25))),
    ],
)
def test_a_bad_field_is_named(field: str, spec: SequenceSpec) -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        spec_from_wire(spec_to_wire(spec), vocab_size=80000)
    assert refusal.value.field == field
