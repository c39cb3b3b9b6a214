"""Bad input is refused at the edge, with the name of the field."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cluster.driver.fitting import Speculation, rules_by_kind
from cluster.driver.requests import RequestResolver
from cluster.driver.text import TextCodec
from paceline import GenerateOptions, Message
from paceline.errors import InvalidRequestError, PromptTooLongError
from paceline.generation import GenerateInput
from paceline.limits import MAX_SEQUENCE_TOKENS
from paceline.options import Stopping
from paceline.structure import Structure
from paceline.v1 import inference_pb2, types_pb2
from paceline.wire.requests import request_from_wire, request_to_wire
from tests.tiny import make_tiny_checkpoint
from workers.engine.load.checkpoint import inspect_checkpoint
from workers.verification.grammars import Grammars
from workers.verification.rule import RULES

ROOM = 512


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("requests") / "tiny", temperature=0.5)


@pytest.fixture(scope="module")
def resolver(folder: Path) -> RequestResolver:
    return RequestResolver(TextCodec(folder), inspect_checkpoint(folder), Speculation(window=6))


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
    ("logit_bias", {"logit_bias": {3: math.nan}}),
    ("logit_bias", {"logit_bias": dict.fromkeys(range(384), -3.4e38), "presence_penalty": 2.0}),
    ("logit_bias", {"logit_bias": {3: 10_001.0}}),
    ("temperature", {"temperature": 1e39}),
    ("top_p", {"top_p": 1e-50}),
    ("repetition_penalty", {"repetition_penalty": 1e-50}),
    ("repetition_penalty", {"repetition_penalty": 1e38}),
    ("stop_token_ids", {"stop_token_ids": range(384), "min_tokens": 1}),
    ("stop_token_ids", {"stop_token_ids": set(range(384)) - {0, 2}, "min_tokens": 1}),
    ("min_tokens", {"min_tokens": 9, "max_tokens": 8}),
    ("max_tokens", {"max_tokens": 0}),
    ("stop", {"stop": ["x", ""]}),
    ("stop_token_ids", {"stop_token_ids": [384]}),
    ("bad_words", {"bad_words": ["x", ""]}),
    ("bad_words", {"bad_words": ["xyz" * 80] * 2 + ["zyx" * 80] * 2 + ["yxz" * 80]}),
    ("window", {"window": 0}),
    ("window", {"window": 65}),
    ("branches", {"branches": 0}),
    ("branches", {"branches": 9}),
    ("branches", {"branches": 3, "window": 2}),
    ("branches", {"branches": 2, "rule": "rejection"}),
    ("drafter", {"drafter": "oracle"}),
    ("rule", {"rule": "dice"}),
    ("rule", {"rule": "Coupled"}),
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
    options = replace(GenerateOptions(), **values)
    with pytest.raises(InvalidRequestError) as caught:
        resolver.resolve(*_through_the_wire("hello", options), room=ROOM)
    assert caught.value.field == field


def test_an_unknown_rule_is_refused_with_the_known_ones(resolver: RequestResolver) -> None:
    expected = f"rule: expected one of {', '.join(RULES)}, got 'copuled'; did you mean coupled"
    with pytest.raises(InvalidRequestError, match=re.escape(expected)):
        resolver.resolve("hello", GenerateOptions(rule="copuled"), room=ROOM)


@pytest.mark.parametrize(("field", "generate_input"), BAD_INPUTS)
def test_bad_inputs(resolver: RequestResolver, field: str, generate_input: GenerateInput) -> None:
    bad = _through_the_wire(generate_input, GenerateOptions())
    with pytest.raises(InvalidRequestError) as caught:
        resolver.resolve(*bad, room=ROOM)
    assert caught.value.field == field


@pytest.mark.parametrize("wrap", [str, lambda text: [Message("user", text)]])
def test_a_prompt_that_is_not_worth_tokenizing(
    resolver: RequestResolver, wrap: Callable[[str], GenerateInput]
) -> None:
    with pytest.raises(PromptTooLongError, match="10000000 characters"):
        resolver.resolve(wrap("a" * 10_000_000), GenerateOptions(), room=ROOM)


def test_a_prompt_that_fills_the_context(resolver: RequestResolver) -> None:
    with pytest.raises(PromptTooLongError, match=r"512 tokens.*at most 511"):
        resolver.resolve([5] * ROOM, GenerateOptions(), room=ROOM)
    assert resolver.resolve([5] * (ROOM - 1), GenerateOptions(), room=ROOM).max_tokens == 1


UNKNOWN_STOPPING = types_pb2.StoppingRule.ValueType(99)
UNSENDABLE = {
    "temperature": "hot",
    "top_k": -1,
    "min_tokens": -1,
    "max_tokens": -5,
    "seed": -1,
    "window": 2**40,
    "stop": "abc",
    "bad_words": "abc",
    "stop_token_ids": [-1],
    "logit_bias": {-1: 1.0},
    "policy": 3,
    "rule": ["coupled"],
    "stopping": "never",
    "branches": -1,
    "drafter": 3,
    "tenant": 3,
}


@pytest.mark.parametrize(("field", "value"), UNSENDABLE.items())
def test_what_cannot_be_told_on_the_wire(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        request_to_wire("hello", replace(GenerateOptions(), **{field: value}))
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("input", inference_pb2.GenerateRequest()),
        ("policy", inference_pb2.GenerateRequest(prompt="x", policy="p" * 129)),
        ("rule", inference_pb2.GenerateRequest(prompt="x", rule="a" * 129)),
        ("stopping", inference_pb2.GenerateRequest(prompt="x", stopping=UNKNOWN_STOPPING)),
    ],
)
def test_what_other_clients_may_send(field: str, message: inference_pb2.GenerateRequest) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        request_from_wire(message)
    assert caught.value.field == field


def test_an_unknown_policy_is_refused_with_the_known_ones(resolver: RequestResolver) -> None:
    asked = _through_the_wire("hello", GenerateOptions(policy="chian"))
    known = r"^policy: expected one of auto, chain, .*, got 'chian'; did you mean chain"
    with pytest.raises(InvalidRequestError, match=known):
        resolver.resolve(*asked, room=ROOM)


def test_defaults_are_the_checkpoint_s(resolver: RequestResolver) -> None:
    resolved = resolver.resolve(*_through_the_wire("hello", GenerateOptions()), room=ROOM)
    assert resolved.spec.sampling.temperature == 0.5
    assert resolved.spec.end_token_ids == (2, 0)
    assert resolved.spec.prompt_length == len(resolved.prompt_token_ids)
    assert resolved.max_tokens == ROOM - len(resolved.prompt_token_ids)
    assert resolved.speculation == Speculation(window=6)
    assert resolved.spec.rule == "coupled"
    assert resolved.tenant == ""
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
        rule="kseq",
        window=64,
        stopping="cost",
        branches=4,
        drafter="model",
        tenant="ours",
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
    assert resolved.speculation == Speculation("off", 64, "kseq", 4, Stopping.COST, "model")
    assert resolved.spec.rule == "kseq"
    assert (resolved.stop.strings, resolved.tenant, resolved.request_id) == (
        ("END",),
        "ours",
        "mine",
    )
    ignoring = resolver.resolve([5], replace(options, ignore_eos=True), room=ROOM)
    assert ignoring.spec.end_token_ids == (9, 2)


def test_bad_words_are_told_with_and_without_a_space(
    folder: Path, resolver: RequestResolver
) -> None:
    """Blanks before a word are left out, unless it has nothing else. Equal runs are one."""
    codec = TextCodec(folder)

    def tokens(*texts: str) -> tuple[tuple[int, ...], ...]:
        return tuple(codec.encode_prompt(text, special_tokens=False) for text in texts)

    for words, texts in (
        (["lazy", "  lazy"], ["lazy", " lazy"]),
        (["\n", "a dog"], ["\n", " \n", "a dog", " a dog"]),
    ):
        told = resolver.resolve(*_through_the_wire([5], GenerateOptions(bad_words=words)), room=99)
        assert told.spec.bad_words == tokens(*texts)


def test_samples_have_no_more_prompt_together_than_a_sequence(resolver: RequestResolver) -> None:
    most = MAX_SEQUENCE_TOKENS // 128
    options = GenerateOptions(samples=128, max_tokens=1)
    assert len(resolver.resolve([5] * most, options, room=2 * most).samples) == 128
    with pytest.raises(InvalidRequestError, match="samples: expected at most 2,097,152 tokens of"):
        resolver.resolve([5] * (most + 1), options, room=2 * most)


def test_only_some_samples_have_a_matcher(folder: Path) -> None:
    """It only gives candidates, and takes memory and time."""
    checkpoint = inspect_checkpoint(folder)
    ends = checkpoint.end_token_ids
    grammars = Grammars(folder, vocab_size=checkpoint.vocab_size, end_token_ids=ends)
    resolver = RequestResolver(TextCodec(folder), checkpoint, Speculation(), grammars)
    options = GenerateOptions(samples=4, structure=Structure.regex("a+b"))
    for most, expected in ((0, 0), (2, 2), (9, 4)):
        resolved = resolver.resolve("hello", options, room=ROOM, most_matchers=most)
        matchers = [one.matcher for one in resolved.samples]
        assert sum(one is not None for one in matchers) == expected
        assert len(set(map(id, matchers[:expected]))) == expected


def test_a_default_gives_way_to_what_was_asked_for(folder: Path) -> None:
    resolver = RequestResolver(
        TextCodec(folder), inspect_checkpoint(folder), Speculation(branches=4, window=8)
    )
    for options, branches in (
        (GenerateOptions(), 4),
        (GenerateOptions(window=2), 2),
        (GenerateOptions(rule="rejection"), 1),
    ):
        resolved = resolver.resolve("hello", options, room=ROOM)
        assert resolved.speculation.branches == branches


FITTING = [
    ("coupled", {"model", "ngram", "recycling"}),
    ("one-hot", {"ngram", "recycling"}),
    *((rule, {"model"}) for rule in ("rejection", "kseq", "recursive", "mcsd")),
]


@pytest.mark.parametrize(("rule", "fitting"), FITTING)
def test_rules_and_drafters_that_fit(
    resolver: RequestResolver, rule: str, fitting: set[str]
) -> None:
    kinds = frozenset({"model", "ngram", "recycling"})

    def resolve(deployed: frozenset[str] | None, **options: Any) -> None:
        drafters = None if deployed is None else rules_by_kind(deployed)
        resolver.resolve("hi", GenerateOptions(rule=rule, **options), room=ROOM, drafters=drafters)

    for kind in kinds:
        for deployed, options in (({kind}, {}), (kinds, {"drafter": kind})):
            if kind in fitting:
                resolve(frozenset(deployed), **options)
                continue
            with pytest.raises(InvalidRequestError) as caught:
                resolve(frozenset(deployed), **options)
            assert caught.value.field == "rule"
            assert repr(rule) in str(caught.value)
            assert repr(kind) in str(caught.value)
            resolve(frozenset(deployed), policy="off", **options)
    resolve(kinds)
    resolve(None)
    resolve(frozenset())


def test_a_kind_that_is_not_deployed(resolver: RequestResolver) -> None:
    options = GenerateOptions(drafter="recycling")
    with pytest.raises(InvalidRequestError, match="'recycling' is deployed") as caught:
        resolver.resolve("hi", options, room=ROOM, drafters=rules_by_kind(("model", "ngram")))
    assert caught.value.field == "drafter"
    assert "model, ngram" in str(caught.value)
    resolver.resolve("hi", options, room=ROOM, drafters=None)
