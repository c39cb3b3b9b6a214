"""Bad input is refused at the edge, with the name of the field."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cluster.decoding.policies import PolicyName
from cluster.requests import RequestResolver
from cluster.text import TextCodec
from paceline import GenerateOptions, Message
from paceline.errors import InvalidRequestError, PromptTooLongError
from paceline.generation import GenerateInput
from paceline.inference_wire import request_from_wire, request_to_wire
from paceline.v1 import inference_pb2
from tests.tiny import make_tiny_checkpoint
from workers.engine.checkpoint import inspect_checkpoint

ROOM = 512


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("requests") / "tiny", temperature=0.5)


@pytest.fixture(scope="module")
def resolver(folder: Path) -> RequestResolver:
    return RequestResolver(
        TextCodec(folder), inspect_checkpoint(folder), policy=PolicyName.CHAIN, window=6
    )


BAD_OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("temperature", {"temperature": -0.1}),
    ("temperature", {"temperature": math.nan}),
    ("temperature", {"temperature": math.inf}),
    ("top_p", {"top_p": 0.0}),
    ("top_p", {"top_p": math.nan}),
    ("min_p", {"min_p": 1.5}),
    ("repetition_penalty", {"repetition_penalty": 0.0}),
    ("presence_penalty", {"presence_penalty": 2.5}),
    ("frequency_penalty", {"frequency_penalty": -2.5}),
    ("logit_bias", {"logit_bias": {384: 1.0}}),
    ("logit_bias", {"logit_bias": {3: math.inf}}),
    ("min_tokens", {"min_tokens": 9, "max_tokens": 8}),
    ("max_tokens", {"max_tokens": 0}),
    ("stop", {"stop": ["x", ""]}),
    ("stop", {"stop": ["x"] * 17}),
    ("stop_token_ids", {"stop_token_ids": [384]}),
    ("window", {"window": 0}),
    ("window", {"window": 65}),
    ("request_id", {"request_id": "x" * 129}),
]
BAD_INPUTS: list[tuple[str, GenerateInput]] = [
    ("prompt", ""),
    ("prompt", "word " * 600),
    ("prompt", [5] * ROOM),
    ("prompt_token_ids", [5, 384]),
    ("messages", [Message("wizard", "hello")]),
]


def _through_the_wire(
    generate_input: GenerateInput, options: GenerateOptions
) -> tuple[GenerateInput, GenerateOptions]:
    return request_from_wire(request_to_wire(generate_input, options))


@pytest.mark.parametrize(("field", "values"), BAD_OPTIONS)
def test_bad_options(resolver: RequestResolver, field: str, values: dict[str, Any]) -> None:
    bad = _through_the_wire("hello", replace(GenerateOptions(), **values))
    with pytest.raises(InvalidRequestError) as caught:
        resolver.resolve(*bad, room=ROOM)
    assert caught.value.field == field


@pytest.mark.parametrize(("field", "generate_input"), BAD_INPUTS)
def test_bad_inputs(resolver: RequestResolver, field: str, generate_input: GenerateInput) -> None:
    bad = _through_the_wire(generate_input, GenerateOptions())
    with pytest.raises(InvalidRequestError) as caught:
        resolver.resolve(*bad, room=ROOM)
    assert caught.value.field == field


@pytest.mark.parametrize("wrap", [str, lambda text: [Message("user", text)]])
def test_a_prompt_that_is_not_worth_tokenising(
    resolver: RequestResolver, wrap: Callable[[str], GenerateInput]
) -> None:
    with pytest.raises(PromptTooLongError, match="10000000 characters"):
        resolver.resolve(wrap("a" * 10_000_000), GenerateOptions(), room=ROOM)


def test_a_prompt_that_fills_the_context(resolver: RequestResolver) -> None:
    with pytest.raises(PromptTooLongError, match=r"512 tokens.*at most 511"):
        resolver.resolve([5] * ROOM, GenerateOptions(), room=ROOM)
    assert resolver.resolve([5] * (ROOM - 1), GenerateOptions(), room=ROOM).max_tokens == 1


UNSENDABLE: list[tuple[str, Callable[[], object]]] = [
    (name, lambda name=name, value=value: replace(GenerateOptions(), **{name: value}))
    for name, value in {
        "temperature": "hot",
        "top_k": -1,
        "min_tokens": -1,
        "max_tokens": -5,
        "seed": -1,
        "window": 2**40,
        "stop": "abc",
        "stop_token_ids": [-1],
        "logit_bias": {-1: 1.0},
        "policy": "sideways",
        "rule": "dice",
    }.items()
]


@pytest.mark.parametrize(("field", "options"), UNSENDABLE)
def test_what_cannot_be_told_on_the_wire(field: str, options: Callable[[], Any]) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        request_to_wire("hello", options())
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("input", inference_pb2.GenerateRequest()),
        ("policy", inference_pb2.GenerateRequest(prompt="x", policy=7)),  # type: ignore[arg-type]
        ("rule", inference_pb2.GenerateRequest(prompt="x", rule=9)),  # type: ignore[arg-type]
    ],
)
def test_what_other_clients_may_send(field: str, message: inference_pb2.GenerateRequest) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        request_from_wire(message)
    assert caught.value.field == field


def test_defaults_are_the_checkpoint_s(resolver: RequestResolver) -> None:
    resolved = resolver.resolve(*_through_the_wire("hello", GenerateOptions()), room=ROOM)
    assert resolved.spec.sampling.temperature == 0.5
    assert resolved.spec.end_token_ids == (2, 0)
    assert resolved.spec.prompt_length == len(resolved.prompt_token_ids)
    assert resolved.max_tokens == ROOM - len(resolved.prompt_token_ids)
    assert (resolved.policy, resolved.window) == (PolicyName.CHAIN, 6)
    assert resolved.request_id
    other = resolver.resolve("hello", GenerateOptions(), room=ROOM)
    assert (other.spec.seed, other.request_id) != (resolved.spec.seed, resolved.request_id)


def test_what_is_set_wins(resolver: RequestResolver) -> None:
    options = GenerateOptions(
        temperature=0.0,
        top_k=4,
        logit_bias={7: -1.5},
        seed=2**64 - 1,
        max_tokens=10_000,
        stop=["END"],
        stop_token_ids=[9, 2],
        policy="off",
        rule="coupled",
        window=64,
        request_id="mine",
    )
    resolved = resolver.resolve(*_through_the_wire([5, 6], options), room=ROOM)
    assert resolved.spec.sampling.greedy
    assert resolved.spec.sampling.top_k == 4
    assert resolved.spec.sampling.logit_bias == {7: -1.5}
    assert resolved.spec.seed == 2**64 - 1
    assert resolved.spec.end_token_ids == (2, 0, 9)
    assert resolved.prompt_token_ids == (5, 6)
    assert resolved.max_tokens == ROOM - 2
    assert (resolved.stop, resolved.window) == (("END",), 64)
    assert (resolved.policy, resolved.request_id) == (PolicyName.OFF, "mine")
    ignoring = resolver.resolve([5], replace(options, ignore_eos=True), room=ROOM)
    assert ignoring.spec.end_token_ids == (9, 2)
