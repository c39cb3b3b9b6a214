"""The real `anthropic` client against a real system: text, thinking, tools, counts and errors."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import pytest
import pytest_asyncio

from cluster.access.gate import Gate
from cluster.access.keys import KeyFile
from tests.cluster.access.key_files import keys_in
from tests.cluster.gateway.scripted import scripted_checkpoints
from tests.cluster.gateway.serving import Served, running_gateway
from tests.cluster.system import Checkpoints, System

pytestmark = pytest.mark.asyncio(loop_scope="module")

ASKED: Any = [{"role": "user", "content": "How is the weather?"}]
WEATHER: Any = {
    "name": "weather",
    "description": "The weather of a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
TOOLS: Any = [WEATHER, {"name": "add", "type": "custom", "input_schema": {"type": "object"}}]
CALLED = {"city": "Ulm", "days": [1, 2]}
SECOND = {"x": "}\n</tool_call>"}
THOUGHT, TEXT = ("thinking", "Is it sunny?"), ("text", "It is.\n")
ANSWERS: dict[str, list[tuple[str, Any]]] = {
    "text": [("text", "The sky is blue.")],
    "call": [("weather", CALLED)],
    "two": [("text", "I will look.\n"), ("weather", CALLED), ("add", SECOND)],
    "think": [THOUGHT, TEXT, ("weather", CALLED)],
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return scripted_checkpoints(tmp_path_factory)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(served: Served) -> AsyncIterator[anthropic.AsyncAnthropic]:
    url = served.url
    async with anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as client:
        yield client


def _fields(script: str, **more: Any) -> dict[str, Any]:
    extra = {"chat_template_kwargs": {"script": script}, **more.pop("extra_body", {})}
    asked = {"model": "target", "messages": ASKED, "max_tokens": 200, "tools": TOOLS}
    return {**asked, "extra_body": extra, **more}


def _told(message: anthropic.types.Message) -> list[tuple[str, Any]]:
    told: list[tuple[str, Any]] = []
    for block in message.content:
        if block.type == "tool_use":
            told.append((block.name, block.input))
        elif block.type == "thinking":
            told.append(("thinking", block.thinking))
        else:
            assert block.type == "text"
            told.append(("text", block.text))
    return told


@pytest.mark.parametrize("script", ANSWERS)
@pytest.mark.parametrize("policy", ["off", "chain"])
async def test_blocks_whole_and_streamed(
    client: anthropic.AsyncAnthropic, script: str, policy: str
) -> None:
    fields = _fields(script, extra_body={"speculation": {"policy": policy}})
    whole = await client.messages.create(**fields)
    assert _told(whole) == ANSWERS[script]
    assert (whole.model, whole.role, whole.type) == ("target", "assistant", "message")
    assert whole.stop_reason == ("end_turn" if script == "text" else "tool_use")
    ids = [block.id for block in whole.content if block.type == "tool_use"]
    assert len(set(ids)) == len(ids)
    assert whole.usage.output_tokens > 3
    asked_again = await client.messages.create(**fields)
    assert asked_again.usage.cache_read_input_tokens
    kinds = []
    async with client.messages.stream(**fields) as stream:
        async for event in stream:
            kinds.append(event.type)
        streamed = await stream.get_final_message()
    assert _told(streamed) == ANSWERS[script]
    assert (streamed.stop_reason, streamed.usage) == (whole.stop_reason, asked_again.usage)
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"
    assert kinds.count("content_block_start") == len(ANSWERS[script])
    assert kinds.count("content_block_delta") > len(ANSWERS[script]) or policy == "chain"


async def test_why_an_answer_ends(client: anthropic.AsyncAnthropic) -> None:
    whole = await client.messages.create(**_fields("text", stop_sequences=["sun", "sky"]))
    assert _told(whole) == [("text", "The ")]
    assert (whole.stop_reason, whole.stop_sequence) == ("stop_sequence", "sky")
    async with client.messages.stream(**_fields("text", stop_sequences=["sky"])) as stream:
        streamed = await stream.get_final_message()
    assert (streamed.stop_reason, streamed.stop_sequence) == ("stop_sequence", "sky")
    cut = await client.messages.create(**_fields("text", max_tokens=2))
    assert (cut.stop_reason, cut.usage.output_tokens) == ("max_tokens", 2)
    endless = _fields("text", max_tokens=9999, extra_body={"ignore_eos": True})
    assert (await client.messages.create(**endless)).stop_reason == "model_context_window_exceeded"
    cut = await client.messages.create(**_fields("call", stop_sequences=['"days"']))
    assert _told(cut) == [("weather", {"city": "Ulm"})]


async def test_a_conversation_with_tools(client: anthropic.AsyncAnthropic, served: Served) -> None:
    """The prompt is that of the same chat in OpenAI's form, and count_tokens counts it."""
    first = await client.messages.create(**_fields("think"))
    call = first.content[-1]
    assert call.type == "tool_use"
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "rain"}
    parts = [{"type": "text", "text": "rain", "cache_control": {"type": "ephemeral"}}]
    billing = {"type": "text", "text": "x-anthropic-billing-header: cch=1f;"}
    conversation: dict[str, Any] = {
        "model": "target",
        "system": [billing, {"type": "text", "text": "Be brief."}],
        "messages": [
            *ASKED,
            {"role": "assistant", "content": first.content},
            {"role": "user", "content": [result, {"type": "text", "text": "And?"}]},
            {"role": "user", "content": "Well?"},
            {"role": "assistant", "content": "Dry"},
            {"role": "user", "content": [dict(result, content=parts, is_error=False)]},
        ],
        "tools": TOOLS,
    }
    counted = await client.messages.count_tokens(**conversation)
    function = {"name": "weather", "arguments": '{"city": "Ulm", "days": [1, 2]}'}
    answered = {"role": "tool", "tool_call_id": call.id, "name": "weather", "content": "rain"}
    weather = {k: v for k, v in WEATHER.items() if k != "input_schema"}
    functions = [
        {"name": "weather", "parameters": WEATHER["input_schema"], **weather},
        {"name": "add", "parameters": {"type": "object"}},
    ]
    chat: dict[str, Any] = {
        "messages": [
            {"role": "system", "content": "Be brief."},
            *ASKED,
            {
                "role": "assistant",
                "content": "It is.\n",
                "reasoning_content": "Is it sunny?",
                "tool_calls": [{"id": call.id, "type": "function", "function": function}],
            },
            answered,
            {"role": "user", "content": "And?\nWell?"},
            {"role": "assistant", "content": "Dry"},
            answered,
        ],
        "tools": [{"type": "function", "function": one} for one in functions],
    }
    told = (await served.http.post("/tokenize", json=chat)).json()
    assert counted.input_tokens == told["count"]
    conversation["extra_body"] = {"chat_template_kwargs": {"script": "text"}}
    whole = await client.messages.create(**conversation, max_tokens=100)
    cached = whole.usage.cache_read_input_tokens
    assert cached is not None
    assert whole.usage.input_tokens + cached == told["count"]
    assert _told(whole) == ANSWERS["text"]


async def test_an_answer_that_was_begun_goes_on(client: anthropic.AsyncAnthropic) -> None:
    begun: Any = [*ASKED, {"role": "assistant", "content": "It says @text@"}]
    whole = await client.messages.create(**_fields("call", messages=begun))
    assert _told(whole) == ANSWERS["text"]


async def test_choices_of_tools_and_a_schema(client: anthropic.AsyncAnthropic) -> None:
    schema = {"type": "object", "properties": {"city": {"enum": ["Bonn"]}}, "required": ["city"]}
    tools = [{**WEATHER, "input_schema": {**schema, "additionalProperties": False}}]
    choices: Any = [{"type": "any"}, {"type": "tool", "name": "weather"}]
    for choice in choices:
        whole = await client.messages.create(**_fields("text", tools=tools, tool_choice=choice))
        assert _told(whole) == [("weather", {"city": "Bonn"})]
    whole = await client.messages.create(**_fields("call", tool_choice={"type": "none"}))
    assert whole.stop_reason == "end_turn"
    one: Any = {"type": "auto", "disable_parallel_tool_use": True}
    whole = await client.messages.create(**_fields("two", tool_choice=one))
    assert [name for name, _ in _told(whole)][:2] == ["text", "weather"]
    assert "add" not in [name for name, _ in _told(whole)]
    wanted: Any = {"format": {"type": "json_schema", "schema": {"const": 7}}}
    whole = await client.messages.create(**_fields("text", tools=[], output_config=wanted))
    assert _told(whole) == [("text", "7")]


_IMAGE = {"type": "image", "source": {"type": "url", "url": "http://example.com/a.png"}}


@pytest.mark.parametrize(
    ("named", "fields"),
    [
        ("max_tokens", {"extra_body": {"max_tokens": None}}),
        ("max_tokens", {"max_tokens": 0}),
        ("temperature", {"extra_body": {"temperature": -1}}),
        ("messages: expected at least one", {"messages": []}),
        ("messages[0].role", {"messages": [{"role": "robot", "content": "a"}]}),
        ("messages[0].content", {"messages": [{"role": "user", "content": 7}]}),
        ("messages[0].content[0].type", {"messages": [{"role": "user", "content": [_IMAGE]}]}),
        ("system[0].type", {"system": [_IMAGE]}),
        ("stop_sequences", {"stop_sequences": ["a"] * 17}),
        ("tools[0].name", {"tools": [{**WEATHER, "name": "a b"}]}),
        ("tools[0].input_schema", {"tools": [{"name": "a"}]}),
        ("tools[0].type", {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}),
        ("tool_choice.type", {"tool_choice": {"type": "some"}}),
        ("tool_choice", {"tool_choice": {"type": "tool", "name": "fly"}}),
        ("output_config.format", {"output_config": {"format": {"type": "json_schema"}}}),
        ("thinking.type", {"thinking": {}}),
        ("speculation.window", {"extra_body": {"speculation": {"window": 65}}}),
    ],
)
async def test_each_violation_names_its_field(
    client: anthropic.AsyncAnthropic, named: str, fields: dict[str, Any]
) -> None:
    with pytest.raises(anthropic.BadRequestError) as caught:
        await client.messages.create(**_fields("text", **fields))
    assert caught.value.type == "invalid_request_error"
    assert caught.value.api_message is not None
    assert caught.value.api_message.startswith(named)


async def test_other_errors_have_the_form(
    client: anthropic.AsyncAnthropic, served: Served, system: System, tmp_path: Path
) -> None:
    with pytest.raises(anthropic.NotFoundError, match="expected one of target") as missing:
        await client.messages.create(**_fields("text") | {"model": "gpt"})
    assert missing.value.type == "not_found_error"
    with pytest.raises(anthropic.BadRequestError, match=r"messages: .*; shorten it"):
        await client.messages.create(
            **_fields("text", messages=[ASKED[0] | {"content": "é" * 9000}])
        )
    wrong = await served.http.get("/v1/messages")
    assert (wrong.status_code, wrong.json()["type"]) == (405, "error")
    keys = keys_in(tmp_path / "keys", alice={"tenant": "a"})
    gate = Gate(KeyFile(tmp_path / "keys"))
    async with running_gateway([system.server.address], gate=gate) as guarded:
        # Its clients send a key in one of two headers, and some in both.
        key, both = keys["alice"], {"x-api-key": keys["alice"]}
        accepted: list[dict[str, Any]] = [
            {"api_key": key},
            {"auth_token": key},
            {"auth_token": key, "default_headers": both},
        ]
        refused: list[dict[str, Any]] = [
            {"api_key": "pk-wrong"},
            {"auth_token": "pk-wrong"},
            {"auth_token": "pk-wrong", "default_headers": both},
        ]
        for given in accepted:
            whole = await _asked_by(guarded, given)
            assert _told(whole) == ANSWERS["text"]
        for given in refused:
            with pytest.raises(anthropic.AuthenticationError) as stranger:
                await _asked_by(guarded, given)
            assert stranger.value.type == "authentication_error"


async def _asked_by(served: Served, given: dict[str, Any]) -> anthropic.types.Message:
    async with anthropic.AsyncAnthropic(base_url=served.url, max_retries=0, **given) as client:
        message: anthropic.types.Message = await client.messages.create(**_fields("text"))
        return message


async def test_leaving_cancels_and_a_broken_stream_says_why(
    client: anthropic.AsyncAnthropic, system: System
) -> None:
    endless = _fields("text", max_tokens=400, extra_body={"ignore_eos": True})
    async with client.messages.stream(**endless) as stream:
        async for event in stream:
            if event.type == "text":
                break
    await system.settle()
    steady = _fields("text", extra_body={"speculation": {"steady": True}})
    async with client.messages.stream(**steady) as stream:
        assert _told(await stream.get_final_message()) == ANSWERS["text"]
    async with (
        running_gateway([system.server.address]) as served,
        anthropic.AsyncAnthropic(base_url=served.url, api_key="none", max_retries=0) as other,
        other.messages.stream(**endless) as stream,
    ):
        async for event in stream:
            if event.type == "text":
                break
        await served.gateway.cut_off()
        with pytest.raises(anthropic.APIStatusError) as broken:
            await stream.get_final_message()
    assert broken.value.type == "overloaded_error"
