"""Structured output over HTTP, asked for by the real `openai` client and in vLLM's fields."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any, Literal

import jsonschema
import openai
import pytest
import pytest_asyncio
from pydantic import BaseModel, ConfigDict
from pydantic.config import JsonDict

from tests.cluster.gateway.serving import Served

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT: Any = [{"role": "user", "content": "Describe a lighthouse."}]
COMPACT: JsonDict = {"whitespace_flexible": False}
"""A model with random weights would write blanks without end."""


class Lighthouse(BaseModel):
    model_config = ConfigDict(json_schema_extra={"x-guidance": COMPACT})

    color: Literal["red", "white"]
    automatic: bool
    lamps: list[Literal["old", "new"]]


SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"color": {"enum": ["red", "white"]}, "automatic": {"type": "boolean"}},
    "required": ["color", "automatic"],
    "additionalProperties": False,
    "x-guidance": COMPACT,
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(served: Served) -> AsyncIterator[openai.AsyncOpenAI]:
    url = f"{served.url}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client


async def test_a_json_schema(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        model="target",
        messages=CHAT,
        temperature=1.0,
        seed=1,
        max_tokens=100,
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "lighthouse", "schema": SCHEMA, "strict": True},
        },
    )
    [choice] = answer.choices
    assert choice.finish_reason == "stop"
    jsonschema.validate(json.loads(choice.message.content or ""), SCHEMA)


async def test_a_pydantic_model(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.parse(
        model="target",
        messages=CHAT,
        temperature=1.0,
        seed=2,
        max_tokens=200,
        response_format=Lighthouse,
    )
    assert isinstance(answer.choices[0].message.parsed, Lighthouse)


async def test_a_stream_adds_up_to_the_whole(client: openai.AsyncOpenAI) -> None:
    asked: Any = {
        "model": "target",
        "messages": CHAT,
        "seed": 1,
        "max_tokens": 100,
        "temperature": 1.0,
        "extra_body": {"structured_outputs": {"json": SCHEMA}},
    }
    whole = await client.chat.completions.create(**asked)
    stream = await client.chat.completions.create(**asked, stream=True)
    text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    assert text == whole.choices[0].message.content
    jsonschema.validate(json.loads(text), SCHEMA)


@pytest.mark.parametrize(
    ("fields", "fits"),
    [
        ({"structured_outputs": {"regex": "[0-9]{3}"}}, str.isdecimal),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, {"yes", "no"}.__contains__),
        ({"structured_outputs": {"grammar": 'start: "a" "b"'}}, "ab".__eq__),
        ({"guided_regex": "[0-9]{3}"}, str.isdecimal),
        ({"guided_choice": ["yes", "no"]}, {"yes", "no"}.__contains__),
        ({"guided_grammar": 'start: "a" "b"'}, "ab".__eq__),
        ({"guided_json": json.dumps({"const": 7})}, "7".__eq__),
        ({"response_format": {"type": "text"}, "guided_choice": ["a"]}, "a".__eq__),
    ],
)
async def test_the_fields_of_vllm(
    client: openai.AsyncOpenAI, fields: dict[str, Any], fits: Any
) -> None:
    answer = await client.completions.create(
        model="target", prompt="A number", max_tokens=20, temperature=1.0, seed=1, extra_body=fields
    )
    assert answer.choices[0].finish_reason == "stop"
    assert fits(answer.choices[0].text)


@pytest.mark.parametrize("kind", [{"response_format": {"type": "json_object"}}])
async def test_any_object(client: openai.AsyncOpenAI, kind: dict[str, Any]) -> None:
    answer = await client.chat.completions.create(
        model="target", messages=CHAT, max_tokens=40, temperature=1.0, seed=3, **kind
    )
    [choice] = answer.choices
    assert (choice.message.content or "").startswith("{")
    if choice.finish_reason == "stop":
        assert isinstance(json.loads(choice.message.content or ""), dict)


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("response_format", {"response_format": "json"}),
        ("response_format", {"response_format": {"type": "yaml"}}),
        ("response_format", {"response_format": {"type": "json_schema"}}),
        (
            "response_format",
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}},
        ),
        ("structured_outputs", {"structured_outputs": {"regex": "a("}}),
        ("structured_outputs", {"structured_outputs": {"regex": 5}}),
        ("structured_outputs", {"structured_outputs": {"jsno": {}}}),
        ("structured_outputs", {"structured_outputs": {"choice": []}}),
        ("structured_outputs", {"structured_outputs": {"regex": "a" * 65_537}}),
        ("structured_outputs", {"structured_outputs": {"json": {}, "regex": "a"}}),
        ("guided_grammar", {"guided_grammar": "start: x"}),
        ("guided_regex", {"guided_regex": "a", "response_format": {"type": "json_object"}}),
        ("ignore_eos", {"guided_regex": "a", "ignore_eos": True}),
    ],
)
async def test_what_cannot_be_is_refused_by_name(
    client: openai.AsyncOpenAI, param: str, fields: dict[str, Any]
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await client.completions.create(model="target", prompt="a", extra_body=fields)
    assert isinstance(caught.value.body, dict)
    assert caught.value.body["param"] == param
