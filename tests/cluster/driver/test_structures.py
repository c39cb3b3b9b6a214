"""Requests with a structure, over a real system: their text, their ids, and what fails."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any, Unpack

import jsonschema
import pytest
import pytest_asyncio

from cluster.driver.requests import COMPILE_SECONDS
from paceline import (
    Completion,
    GenerateOptions,
    InvalidRequestError,
    RequestFaultError,
    Structure,
)
from paceline.options import OptionFields
from tests.cluster.system import System, make_checkpoints, running_system
from tests.release import at_release
from workers.verification.grammars import _LIMITS

pytestmark = pytest.mark.asyncio(loop_scope="module")

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "kind": {"enum": ["lighthouse", "harbor", "island"]},
        "height": {"type": "integer", "minimum": 0, "maximum": 999},
        "open": {"type": "boolean"},
        "tags": {"type": "array", "items": {"enum": ["old", "white"]}, "maxItems": 3},
    },
    "required": ["name", "kind", "height", "open", "tags"],
    "additionalProperties": False,
    # A model with random weights would write blanks without end.
    "x-guidance": {"whitespace_flexible": False},
}
STRUCTURE = Structure.json_schema(SCHEMA)
WAYS: dict[str, dict[str, Any]] = {
    "chain": {"policy": "chain"},
    "tree": {"policy": "chain", "branches": 3},
    "fanout": {"policy": "fanout"},
    "ngram": {"policy": "chain", "drafter": "ngram"},
    "merged": {"policy": "chain", "merge": True},
    "lockstep": {"policy": "lockstep"},
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def system(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[System]:
    checkpoints = make_checkpoints(tmp_path_factory.mktemp("structures"))
    drafters = {"d0": checkpoints.drafter, "n0": None}
    async with running_system(checkpoints, drafters=drafters) as system:
        yield system


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def plain_system(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[System]:
    """Without drafters."""
    checkpoints = make_checkpoints(tmp_path_factory.mktemp("plain"))
    async with running_system(checkpoints) as system:
        yield system


async def _answer(system: System, seed: int, /, **options: Unpack[OptionFields]) -> Completion:
    asked = GenerateOptions(seed=seed, structure=STRUCTURE, max_tokens=150)
    return await system.client.generate("The lighthouse", asked, **options)


def _check(answer: Completion) -> bool:
    """Whether the answer is finished. If so, it must be valid."""
    if answer.finish_reason == "length":
        return False
    jsonschema.validate(json.loads(answer.text), SCHEMA)
    return True


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_ids_are_those_of_plain_decoding(system: System, temperature: float) -> None:
    plain = await _answer(system, 3, temperature=temperature, policy="off")
    assert _check(plain)
    for way, options in WAYS.items():
        answer = await _answer(system, 3, temperature=temperature, **options)
        assert answer.token_ids == plain.token_ids, way


@pytest.mark.parametrize("rule", ["rejection", "recursive", "mcsd", "kseq"])
async def test_text_of_every_rule_is_valid(system: System, rule: str) -> None:
    branches = 1 if rule == "rejection" else 2
    answer = await _answer(
        system, 5, temperature=1.0, rule=rule, branches=branches, policy="lockstep"
    )
    assert _check(answer)
    assert answer.stats.accepted > 0


@pytest.mark.long
@pytest.mark.parametrize("branches", [3, *at_release([1])])
async def test_a_hundred_answers_are_valid_and_equal_to_plain_ones(
    system: System, branches: int
) -> None:
    """Chains and trees. Under `lockstep` a step waits for candidates, so there are many."""
    places = asyncio.Semaphore(16)

    async def one(seed: int, **options: Any) -> Completion:
        async with places:
            return await _answer(system, seed, temperature=1.0, **options)

    plain = await asyncio.gather(*(one(seed, policy="off") for seed in range(100)))
    drafted = await asyncio.gather(
        *(one(seed, policy="lockstep", branches=branches) for seed in range(100))
    )
    assert [answer.token_ids for answer in drafted] == [answer.token_ids for answer in plain]
    assert sum(map(_check, drafted)) > 90
    assert sum(answer.stats.accepted for answer in drafted) > 500
    assert len({answer.text for answer in drafted}) > 50


async def test_the_answer_may_end_only_when_it_is_complete(system: System) -> None:
    """Three tokens cut it; the end token is the last one of a whole answer."""
    cut = await _answer(system, 3, temperature=0.0, max_tokens=3)
    assert (cut.finish_reason, len(cut.token_ids)) == ("length", 3)
    choice = Structure.choice(["yes", "no"])
    whole = await _answer(system, 3, temperature=1.0, structure=choice)
    assert whole.finish_reason == "stop"
    assert whole.text in ("yes", "no")
    assert whole.token_ids[-1] in (0, 2)


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("structure", {"structure": Structure.json_schema("{")}),
        ("structure", {"structure": Structure.regex("a(")}),
        ("structure", {"structure": Structure.grammar("start: nothing")}),
        ("structure", {"structure": Structure.grammar('start: "a" start')}),
        ("structure", {"structure": Structure.regex("a" * 65_537)}),
        ("structure", {"structure": Structure.choice(["a"] * 1025)}),
        ("structure", {"structure": Structure.choice([])}),
        ("min_tokens", {"min_tokens": 2}),
        ("ignore_eos", {"ignore_eos": True}),
    ],
)
async def test_what_cannot_be_is_refused_by_name(
    system: System, field: str, options: dict[str, Any]
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        await _answer(system, 3, **options)
    assert caught.value.field == field


async def test_a_structure_that_takes_long_to_compile_is_refused(
    system: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    costly = Structure.json_schema({"enum": [f"value {number}" for number in range(3000)]})
    assert (await _answer(system, 3, structure=costly, max_tokens=2)).text
    monkeypatch.setattr("cluster.driver.requests.COMPILE_SECONDS", COMPILE_SECONDS / 1000)
    with pytest.raises(InvalidRequestError, match="to compile, more than") as caught:
        await _answer(system, 3, structure=costly)
    assert caught.value.field == "structure"


async def test_an_endless_structure_ends_by_length(system: System) -> None:
    endless = Structure.grammar("start: /[ab]/ start")
    answer = await _answer(system, 3, structure=endless, max_tokens=20)
    assert (answer.finish_reason, set(answer.text)) == ("length", {"a", "b"})


async def test_a_structure_that_fails_on_the_way_ends_its_request_alone(
    system: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside = GenerateOptions(temperature=1.0, seed=9, max_tokens=100, ignore_eos=True)
    expected = await system.client.generate("The sea", beside)
    monkeypatch.setitem(_LIMITS, "max_lexer_states", 300)
    costly = Structure.regex("(.*a.{40}b)")
    failing, going_on = await asyncio.gather(
        _answer(system, 3, temperature=1.0, structure=costly),
        system.client.generate("The sea", beside),
        return_exceptions=True,
    )
    assert isinstance(failing, RequestFaultError)
    assert "too many states" in str(failing)
    assert isinstance(going_on, Completion)
    assert going_on.token_ids == expected.token_ids
    await system.settle()


@pytest.mark.parametrize("policy", ["chain", "lockstep"])
@pytest.mark.parametrize("rule", ["coupled", "rejection", "one-hot"])
async def test_forced_text_is_drafted_where_there_is_no_drafter(
    plain_system: System, policy: str, rule: str
) -> None:
    """The structure's own text becomes candidates, all of which are accepted; `off` has none."""
    plain = await _answer(plain_system, 3, temperature=1.0, policy="off")
    assert plain.stats.drafted == 0
    answer = await _answer(plain_system, 3, temperature=1.0, policy=policy, rule=rule)
    assert answer.stats.accepted == answer.stats.drafted > 10
    assert answer.stats.steps < plain.stats.steps
    assert answer.token_ids == plain.token_ids, "forced tokens leave no coin to toss"
    await plain_system.settle()
