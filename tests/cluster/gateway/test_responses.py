"""`/v1/responses` with the real `openai` client against a real system."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
import pytest_asyncio
from pydantic import BaseModel

from cluster.gateway.app import IGNORED
from tests.cluster.gateway.scripted import ARGUMENTS, SECOND_ARGUMENTS, scripted_checkpoints
from tests.cluster.gateway.serving import Served, running_gateway
from tests.cluster.system import Checkpoints, System

pytestmark = pytest.mark.asyncio(loop_scope="module")

ASKED = "How is the weather?"
WEATHER: Any = {
    "type": "function",
    "name": "weather",
    "description": "The weather of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": False,
}
TOOLS: Any = [WEATHER, {"type": "function", "name": "add", "parameters": {"type": "object"}}]
SPACE: Any = {"type": "namespace", "name": "nature", "description": "What is outside."}
ANSWERS: dict[str, list[tuple[str, str]]] = {
    "text": [("text", "The sky is blue.")],
    "call": [("weather", ARGUMENTS)],
    "two": [("text", "I will look.\n"), ("weather", ARGUMENTS), ("add", SECOND_ARGUMENTS)],
    "think": [("thought", "Is it sunny?"), ("text", "It is.\n"), ("weather", ARGUMENTS)],
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return scripted_checkpoints(tmp_path_factory)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(served: Served) -> AsyncIterator[openai.AsyncOpenAI]:
    url = f"{served.url}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client


def _fields(script: str, **more: Any) -> dict[str, Any]:
    extra = {"chat_template_kwargs": {"script": script}, **more.pop("extra_body", {})}
    return {"model": "target", "input": ASKED, "tools": TOOLS, "extra_body": extra, **more}


def _function(tool: dict[str, Any]) -> Any:
    """What a chat's tool has of one of responses."""
    return {name: value for name, value in tool.items() if name not in ("type", "strict")}


def _told(response: Any) -> list[tuple[str, str]]:
    told = []
    for item in response.output:
        if item.type == "function_call":
            told.append((item.name, item.arguments))
        else:
            (part,) = item.content
            told.append(("thought" if item.type == "reasoning" else "text", part.text))
    return told


@pytest.mark.parametrize("script", ANSWERS)
@pytest.mark.parametrize("policy", ["off", "chain"])
async def test_items_whole_and_streamed(
    client: openai.AsyncOpenAI, script: str, policy: str
) -> None:
    fields = _fields(script, extra_body={"speculation": {"policy": policy}})
    whole = await client.responses.create(**fields)
    assert _told(whole) == ANSWERS[script]
    assert (whole.status, whole.object, whole.model) == ("completed", "response", "target")
    assert [item.status for item in whole.output] == ["completed"] * len(ANSWERS[script])
    assert whole.output_text == "".join(text for kind, text in ANSWERS[script] if kind == "text")
    calls = [item.call_id for item in whole.output if item.type == "function_call"]
    assert len(set(calls)) == len(calls)
    assert whole.usage is not None
    usage = whole.usage
    asked_again = await client.responses.create(**fields)
    assert asked_again.usage is not None
    assert asked_again.usage.input_tokens_details.cached_tokens > 0
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert (usage.output_tokens_details.reasoning_tokens > 0) == (script == "think")
    events = []
    async with client.responses.stream(**fields) as stream:  # It puts the events together.
        async for event in stream:
            events.append(event)
        streamed = await stream.get_final_response()
    assert _told(streamed) == ANSWERS[script]
    assert streamed.usage == asked_again.usage
    assert asked_again.usage.input_tokens == usage.input_tokens
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    assert kinds.count("response.output_item.added") == len(ANSWERS[script])
    assert kinds.count("response.output_item.done") == len(ANSWERS[script])
    texts = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(texts) == whole.output_text


async def test_an_answer_that_is_cut(client: openai.AsyncOpenAI) -> None:
    cut = await client.responses.create(**_fields("text", max_output_tokens=2))
    assert cut.status == "incomplete"
    assert cut.incomplete_details is not None
    assert cut.incomplete_details.reason == "max_output_tokens"
    assert [getattr(item, "status", None) for item in cut.output] == ["incomplete"]
    async with client.responses.stream(**_fields("text", max_output_tokens=2)) as stream:
        kinds = [event.type async for event in stream]
    assert kinds[-1] == "response.incomplete"


@pytest.mark.parametrize("script", ["text", "think"])
async def test_log_probabilities_of_the_text(client: openai.AsyncOpenAI, script: str) -> None:
    """They are a chat's; those of reasoning and calls are not told."""
    chat = await client.chat.completions.create(
        model="target",
        messages=[{"role": "user", "content": ASKED}],
        tools=[{"type": "function", "function": _function(tool)} for tool in TOOLS],
        logprobs=True,
        top_logprobs=2,
        extra_body={"chat_template_kwargs": {"script": script}},
    )
    assert chat.choices[0].logprobs is not None
    of_all = [one.model_dump() for one in chat.choices[0].logprobs.content or []]
    fields = _fields(script, include=["message.output_text.logprobs"], top_logprobs=2)
    whole = await client.responses.create(**fields)
    [text] = [item.content[0] for item in whole.output if item.type == "message"]
    assert text.type == "output_text"
    told = [one.model_dump() for one in text.logprobs or []]
    written = "".join(one["token"] for one in told)
    assert written.lstrip("\n").startswith(text.text.rstrip("\n"))
    assert all(len(one["top_logprobs"]) == 2 for one in told)
    if script == "text":
        assert told == of_all
    else:
        assert 0 < len(told) < len(of_all)
        assert all(one in of_all for one in told)
    deltas = []
    async with client.responses.stream(**fields) as stream:
        async for event in stream:
            if event.type == "response.output_text.delta":
                deltas += [one.token for one in event.logprobs]
            elif event.type == "response.output_text.done":
                assert [one.token for one in event.logprobs] == deltas
    assert deltas == [one["token"] for one in told]
    plain = await client.responses.create(**_fields(script))
    assert [item.content[0].logprobs for item in plain.output if item.type == "message"] == [[]]


async def test_a_conversation_with_tools(client: openai.AsyncOpenAI, served: Served) -> None:
    """What was answered is sent back, and the prompt is that of the same chat."""
    first = await client.responses.create(**_fields("think"))
    call: Any = first.output[-1]
    answered = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    given: Any = [
        {"role": "developer", "content": [{"type": "input_text", "text": "Be "}]},
        {"role": "user", "content": ASKED},
        *first.output,
        answered,
    ]
    whole = await client.responses.create(
        **_fields("text", input=given, instructions="You are kind.")
    )
    assert _told(whole) == ANSWERS["text"]
    function = {"name": call.name, "arguments": call.arguments}
    calls = [{"id": call.call_id, "type": "function", "function": function}]
    said = {"content": "It is.\n", "reasoning_content": "Is it sunny?", "tool_calls": calls}
    functions = map(_function, TOOLS)
    chat = {
        "messages": [
            {"role": "system", "content": "You are kind."},
            {"role": "system", "content": "Be "},
            {"role": "user", "content": ASKED},
            {"role": "assistant", **said},
            {"role": "tool", "tool_call_id": call.call_id, "content": "rain"},
        ],
        "tools": [{"type": "function", "function": one} for one in functions],
    }
    told = (await served.http.post("/tokenize", json=chat)).json()
    assert whole.usage is not None
    assert whole.usage.input_tokens == told["count"]


async def test_choices_of_tools_and_a_schema(client: openai.AsyncOpenAI) -> None:
    schema = {"type": "object", "properties": {"city": {"enum": ["Bonn"]}}, "required": ["city"]}
    tools = [{**WEATHER, "parameters": {**schema, "additionalProperties": False}}]
    choices: Any = ["required", {"type": "function", "name": "weather"}]
    for choice in choices:
        whole = await client.responses.create(**_fields("text", tools=tools, tool_choice=choice))
        assert [(name, json.loads(text)) for name, text in _told(whole)] == [
            ("weather", {"city": "Bonn"})
        ]
    whole = await client.responses.create(**_fields("call", tool_choice="none"))
    assert [item.type for item in whole.output] == ["message"]
    whole = await client.responses.create(**_fields("two", parallel_tool_calls=False))
    assert [item.type for item in whole.output][:2] == ["message", "function_call"]
    assert "add" not in [name for name, _ in _told(whole)]

    class Found(BaseModel):
        ok: bool

    parsed = await client.responses.parse(**_fields("text", tools=[]), text_format=Found)
    assert isinstance(parsed.output_parsed, Found)


_IMAGE = {"type": "input_image", "image_url": "http://example.com/a.png"}


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("input", {"input": []}),
        ("input", {"input": 7}),
        ("input[0].role", {"input": [{"content": "a"}]}),
        ("input", {"input": [{"role": "robot", "content": "a"}]}),
        ("input", {"input": "é" * 9000}),
        ("input[0].content[0].type", {"input": [{"role": "user", "content": [_IMAGE]}]}),
        ("input[0].type", {"input": [{"type": "item_reference", "id": "rs_1"}]}),
        ("input[0].call_id", {"input": [{"type": "function_call_output", "output": "a"}]}),
        ("previous_response_id", {"previous_response_id": "resp_1"}),
        ("conversation", {"conversation": "conv_1"}),
        ("background", {"background": True}),
        ("truncation", {"truncation": "auto"}),
        ("include", {"include": "message.output_text.logprobs"}),
        ("top_logprobs", {"top_logprobs": 21}),
        ("max_output_tokens", {"max_output_tokens": 0}),
        ("temperature", {"temperature": -1}),
        ("text.format.type", {"text": {"format": {"type": "xml"}}}),
        ("text.format", {"text": {"format": {"type": "json_schema", "name": "a"}}}),
        ("tools[0].type", {"tools": [{"type": "mcp"}]}),
        ("tools[0].tools[0].type", {"tools": [{**SPACE, "tools": [{"type": "custom"}]}]}),
        ("tools[0].name", {"tools": [{**WEATHER, "name": "a b"}]}),
        ("tool_choice.type", {"tool_choice": {"type": "allowed_tools"}}),
        ("reasoning.effort", {"reasoning": {"effort": 7}}),
    ],
)
async def test_each_violation_names_its_field(
    client: openai.AsyncOpenAI, param: str, fields: dict[str, Any]
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await client.responses.create(**_fields("text", **fields))
    assert caught.value.param == param
    assert caught.value.message.count(f"{param}: ") >= 1


async def test_functions_in_a_namespace(client: openai.AsyncOpenAI, served: Served) -> None:
    """As Codex has them, beside a tool of OpenAI's servers, which is left out."""
    schema = {"type": "object", "properties": {"city": {"enum": ["Bonn"]}}, "required": ["city"]}
    inner = {**WEATHER, "parameters": {**schema, "additionalProperties": False}}
    tools = [{"type": "web_search"}, WEATHER, {**SPACE, "tools": [inner]}]
    choice = {"type": "function", "name": "weather", "namespace": "nature"}
    fields = _fields("text", tools=tools, tool_choice=choice)
    whole = await client.responses.create(**fields)
    [call] = whole.output
    assert call.type == "function_call"
    assert (call.name, call.namespace) == ("weather", "nature")
    assert json.loads(call.arguments) == {"city": "Bonn"}
    answered = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    given = [{"role": "user", "content": ASKED}, call.model_dump(exclude_none=True), answered]
    body = {"input": given, "tools": tools, "chat_template_kwargs": {"script": "text"}}
    answer = await served.http.post("/v1/responses", json=body)
    assert answer.headers[IGNORED] == "tools[0]"
    assert answer.json()["output"][0]["content"][0]["text"] == ANSWERS["text"][0][1]


async def test_a_broken_stream_says_why(system: System) -> None:
    endless = _fields("text", extra_body={"ignore_eos": True})
    async with running_gateway([system.server.address]) as served:
        url = f"{served.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            stream = await client.responses.create(**endless, stream=True)
            events: list[Any] = []
            async for event in stream:
                events.append(event)
                if event.type == "response.output_text.delta":
                    await served.gateway.cut_off()
    assert events[-1].type == "response.failed"
    assert events[-1].response.error.code == "unavailable"
    await system.settle()
