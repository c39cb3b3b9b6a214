"""Tool calls, reasoning and chat templates with the real `openai` client, and tokens over HTTP.

The checkpoint answers with known texts (scripted.py).
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from importlib.metadata import version
from typing import Any

import openai
import pytest
import pytest_asyncio

from cluster.gateway.openai_answers import Formats
from paceline import Chat, InvalidRequestError, Message, ToolCall
from paceline.limits import MAX_TEMPLATE_KWARGS_BYTES, MAX_TOOLS, MAX_TOOLS_BYTES
from tests.cluster.gateway.scripted import (
    ARGUMENTS,
    CALL,
    CHAT,
    SCRIPTS,
    SECOND_ARGUMENTS,
    scripted_checkpoints,
)
from tests.cluster.gateway.serving import Served, running_gateway
from tests.cluster.system import Checkpoints, System

pytestmark = pytest.mark.asyncio(loop_scope="module")


def _tool(name: str) -> dict[str, Any]:
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


TOOLS: Any = [_tool("weather"), _tool("add")]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return scripted_checkpoints(tmp_path_factory)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(served: Served) -> AsyncIterator[openai.AsyncOpenAI]:
    url = f"{served.url}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client


def _fields(script: str, **more: Any) -> dict[str, Any]:
    kwargs = {"script": script} | more.pop("kwargs", {})
    extra = {"chat_template_kwargs": kwargs, **more.pop("extra_body", {})}
    return {"model": "target", "messages": CHAT, "tools": TOOLS, "extra_body": extra} | more


async def _whole(client: openai.AsyncOpenAI, script: str, **more: Any) -> Any:
    [choice] = (await client.chat.completions.create(**_fields(script, **more))).choices
    return choice


async def _streamed(client: openai.AsyncOpenAI, script: str, **more: Any) -> dict[str, Any]:
    """A stream put together as clients do."""
    told: dict[str, Any] = {"content": "", "reasoning": "", "calls": [], "pieces": 0, "reason": ""}
    fields = _fields(script, **more)
    async for chunk in await client.chat.completions.create(**fields, stream=True):
        [choice] = chunk.choices
        told["content"] += choice.delta.content or ""
        told["reasoning"] += getattr(choice.delta, "reasoning_content", None) or ""
        told["reason"] = choice.finish_reason or told["reason"]
        for call in choice.delta.tool_calls or []:
            if call.index == len(told["calls"]):
                assert call.id
                assert call.type == "function"
                told["calls"].append([call.function.name, ""])
            told["calls"][call.index][1] += call.function.arguments or ""
            told["pieces"] += 1
    return told


@pytest.mark.parametrize(
    ("script", "content", "reasoning", "calls"),
    [
        ("text", "The sky is blue.", "", []),
        ("call", "", "", [["weather", ARGUMENTS]]),
        ("two", "I will look.\n", "", [["weather", ARGUMENTS], ["add", SECOND_ARGUMENTS]]),
        ("think", "It is.\n", "Is it sunny?", [["weather", ARGUMENTS]]),
    ],
)
@pytest.mark.parametrize("policy", ["off", "chain"])
async def test_calls_and_reasoning_whole_and_streamed(
    client: openai.AsyncOpenAI,
    script: str,
    content: str,
    reasoning: str,
    calls: list[list[str]],
    policy: str,
) -> None:
    more = {"extra_body": {"speculation": {"policy": policy}}}
    whole = await _whole(client, script, **more)
    message = whole.message
    assert (message.content or "") == content
    assert (message.content is None) == (not content)
    assert getattr(message, "reasoning_content", "") == reasoning
    given = message.tool_calls or []
    assert [[one.function.name, one.function.arguments] for one in given] == calls
    assert len({one.id for one in given}) == len(calls)
    assert whole.finish_reason == ("tool_calls" if calls else "stop")
    streamed = await _streamed(client, script, **more)
    assert streamed["pieces"] > len(calls) or policy == "chain" or not calls
    assert streamed["calls"] == calls
    assert (streamed["content"], streamed["reasoning"]) == (content, reasoning)
    assert streamed["reason"] == whole.finish_reason


async def test_windows_are_accepted(client: openai.AsyncOpenAI) -> None:
    """Otherwise no call would begin or end inside an accepted window."""
    fields = _fields("two", extra_body={"speculation": {"policy": "lockstep"}})
    answer = await client.chat.completions.create(**fields)
    drafting = (answer.model_extra or {})["metrics"]["speculative_decoding"]
    assert drafting["mean_acceptance_length"] > 4
    assert len(answer.choices[0].message.tool_calls or []) == 2


async def test_a_prompt_that_opens_the_reasoning(client: openai.AsyncOpenAI) -> None:
    more = {"kwargs": {"open_think": True}}
    message = (await _whole(client, "text", **more)).message
    assert message.content == "Done."
    assert message.reasoning_content == message.reasoning == "So the prompt thinks."
    streamed = await _streamed(client, "text", **more)
    assert (streamed["content"], streamed["reasoning"]) == ("Done.", "So the prompt thinks.")


async def test_a_structure_leaves_no_room_for_reasoning(client: openai.AsyncOpenAI) -> None:
    """It holds from the first token on, though the prompt has opened the reasoning."""
    body = {"structured_outputs": {"choice": ["So it is."]}}
    fields = _fields("text", kwargs={"open_think": True}, extra_body=body)
    [choice] = (await client.chat.completions.create(**fields)).choices
    assert choice.message.content == "So it is."
    assert getattr(choice.message, "reasoning_content", None) is None


async def test_an_answer_cut_inside_a_call(client: openai.AsyncOpenAI) -> None:
    choice = await _whole(client, "call", stop=['"days"'])
    assert choice.message.tool_calls[0].function.arguments == '{"city": "Ulm", '
    choice = await _whole(client, "call", max_tokens=2)
    assert choice.finish_reason == "length"
    assert choice.message.tool_calls is None
    assert CALL.startswith(choice.message.content)


async def test_tool_choice_none_and_no_tools_leave_text(client: openai.AsyncOpenAI) -> None:
    without: list[dict[str, Any]] = [{"tool_choice": "none"}, {"tools": []}]
    for more in without:
        choice = await _whole(client, "call", **more)
        assert (choice.message.content, choice.finish_reason) == (CALL, "stop")
    choice = await _whole(client, "two", parallel_tool_calls=False)
    assert len(choice.message.tool_calls) == 1


@pytest.mark.parametrize("policy", ["off", "chain"])
async def test_a_call_that_is_forced(client: openai.AsyncOpenAI, policy: str) -> None:
    """The model would say something else."""
    city = {"enum": ["Ulm", "Bonn"]}
    schema = {"properties": {"city": city}, "required": ["city"], "additionalProperties": False}
    tools = [_tool("weather"), _tool("add")]
    tools[0]["function"]["parameters"] = {"type": "object", **schema}
    named = {"type": "function", "function": {"name": "weather"}}
    more: dict[str, Any] = {"tools": tools, "max_tokens": 200}
    more["extra_body"] = {"speculation": {"policy": policy}}
    choice = await _whole(client, "text", tool_choice=named, **more)
    [call] = choice.message.tool_calls
    assert (call.function.name, choice.finish_reason) == ("weather", "tool_calls")
    assert json.loads(call.function.arguments)["city"] in city["enum"]
    assert choice.message.content is None
    streamed = await _streamed(client, "text", tool_choice=named, **more)
    assert streamed["calls"] == [["weather", call.function.arguments]]
    more["tools"] = tools[:1]
    choice = await _whole(client, "think", tool_choice="required", **more)
    assert choice.message.tool_calls[0].function.name == "weather"
    text = {"type": "json_object"}
    with pytest.raises(openai.BadRequestError, match="tool_choice"):
        await _whole(client, "text", tool_choice=named, response_format=text, **more)
    more["tools"][0]["function"]["parameters"] = {"type": "nonsense"}
    with pytest.raises(openai.BadRequestError) as caught:
        await _whole(client, "text", tool_choice=named, **more)
    assert caught.value.param == "tools"


async def test_flags_replace_what_the_template_shows(system: System) -> None:
    formats = Formats.named("llama", "none")
    async with running_gateway([system.server.address], formats=formats) as served:
        url = f"{served.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none") as client:
            choice = await _whole(client, "llama")
            [call] = choice.message.tool_calls
            assert call.function.arguments == '{"city": "Bonn"}'
            choice = await _whole(client, "think")
            assert choice.message.content == SCRIPTS["@think@"]
            assert not hasattr(choice.message, "reasoning_content")
    formats = Formats.named("none", "auto")
    async with running_gateway([system.server.address], formats=formats) as served:
        asked = {"messages": CHAT, "tools": TOOLS}
        answer = await served.http.post("/v1/chat/completions", json=asked)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "tools"


async def test_the_template_gets_calls_and_answers(served: Served, system: System) -> None:
    """A conversation with tools, as tokens and back."""
    call: dict[str, Any] = {
        "id": "c1",
        "type": "function",
        "function": {"name": "add", "arguments": '{"x":1}'},
    }
    messages = [
        *CHAT,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "2", "tool_call_id": "c1", "name": "add"},
    ]
    asked = {"messages": messages, "tools": TOOLS, "return_token_strs": True}
    told = (await served.http.post("/tokenize", json=asked)).json()
    assert told["count"] == len(told["tokens"]) == len(told["token_strs"])
    assert told["max_model_len"] == (await system.client.describe()).max_model_len
    text = (await served.http.post("/detokenize", json={"tokens": told["tokens"]})).json()["prompt"]
    assert '<|im_start|>assistant\n<tool_call>{"name": "add", "arguments": {"x": 1}}' in text
    assert "<|im_start|>tool\n2<|im_end|>\n" in text
    assert text.count('"name": "weather"') == 1
    assert text.endswith("<|im_start|>assistant\n@text@")
    call["function"]["arguments"] = '{"x":'  # As of an answer that was cut.
    refused = (await served.http.post("/v1/chat/completions", json=asked)).json()["error"]
    assert refused["param"] == "messages"
    assert "the arguments of a call of 'add': expected JSON" in refused["message"]
    # The gRPC client says the same.
    chat = Chat(
        [
            *CHAT,
            Message("assistant", "", tool_calls=(ToolCall("c1", "add", '{"x":1}'),)),
            Message("tool", "2", tool_call_id="c1", name="add"),
        ],
        tools=TOOLS,
    )
    tokens = await system.client.tokenize(chat)
    assert list(tokens.token_ids) == told["tokens"]
    completion = await system.client.generate(chat)
    assert completion.prompt_token_ids == tokens.token_ids
    assert completion.text == "The sky is blue."


async def test_prompts_that_are_open_or_closed(system: System) -> None:
    client = system.client

    async def text(**options: Any) -> str:
        chat = Chat([Message("user", "Hi"), Message("assistant", "Ho <think>a")], **options)
        return await client.detokenize((await client.tokenize(chat)).token_ids)

    closed = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHo <think>a<|im_end|>\n"
    assert await text(add_generation_prompt=False) == closed
    opened = await text(continue_final_message=True)
    assert opened == closed.removesuffix("<|im_end|>\n")
    with pytest.raises(InvalidRequestError, match="continue_final_message"):
        await text(continue_final_message=True, add_generation_prompt=True)


async def test_tokens_of_a_text(served: Served, system: System) -> None:
    told = (await served.http.post("/tokenize", json={"prompt": "Hällo you"})).json()
    assert told["token_strs"] is None
    assert tuple(told["tokens"]) == (await system.client.tokenize("Hällo you")).token_ids
    answer = await served.http.post("/detokenize", json={"tokens": told["tokens"]})
    assert answer.json() == {"prompt": "Hällo you"}


async def test_the_layout_of_the_deployment(system: System) -> None:
    layout = await system.client.describe_topology()
    stats, described = await system.client.stats(), await system.client.describe()
    [[shard]] = layout.target_groups
    [drafter] = layout.drafters
    assert (shard.name, shard.kind, shard.model) == ("shard-0", "target", described.model)
    assert (drafter.name, drafter.kind, drafter.model) == ("d0", "model", "target")
    assert {one.address for one in (shard, drafter)} == {one.address for one in stats.workers}
    assert shard.connected
    assert drafter.connected
    assert layout.version == version("paceline")
    assert layout.policies == described.policies
    assert {"coupled", "rejection"} <= set(layout.rules)
    default = layout.default_speculation
    assert (default.policy, default.rule, default.stopping) == ("chain", "coupled", "fixed")
    assert (described.tool_format, described.reasoning_format) == ("hermes", "think")


def _deep(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


def _named_tool(**changes: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": {}} | changes}


_BAD_CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "[1]"}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": {}}, "tools"),
        ({"tools": [7]}, "tools[0]"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"tools": [_named_tool(), _named_tool(name="a b")]}, "tools[1].function.name"),
        ({"tools": [_named_tool(name="n" * 65)]}, "tools[0].function.name"),
        ({"tools": [_named_tool(parameters="{}")]}, "tools[0].function.parameters"),
        ({"tools": [_named_tool(description=7)]}, "tools[0].function.description"),
        ({"tools": [_named_tool()] * 2}, "tools"),
        ({"tools": [_named_tool(name=f"f{n}") for n in range(MAX_TOOLS + 1)]}, "tools"),
        ({"tools": [_named_tool(description="d" * MAX_TOOLS_BYTES)]}, "tools"),
        ({"tools": [_named_tool(parameters={"a": _deep(40)})]}, "tools"),
        ({"tools": TOOLS, "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tool_choice": "auto"}, "tool_choice"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "fly"}}},
            "tool_choice",
        ),
        ({"tools": TOOLS, "parallel_tool_calls": 1}, "parallel_tool_calls"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"eos_token": "x"}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"a": _deep(40)}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"a": "x" * MAX_TEMPLATE_KWARGS_BYTES}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"a": "x" * 9_900_000}}, "chat_template_kwargs"),
        ({"add_generation_prompt": 1}, "add_generation_prompt"),
        (
            {"continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
        ),
        ({"messages": [{"role": "tool"}]}, "messages"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "messages"),
        ({"messages": [{"role": "assistant", "tool_calls": 7}]}, "messages"),
        ({"messages": [{"role": "assistant", "tool_calls": [7]}]}, "messages"),
        ({"messages": [{"role": "assistant", "tool_calls": [_BAD_CALL]}]}, "messages"),
        ({"messages": [{"role": "user", "content": "a", "name": 7}]}, "messages"),
    ],
)
async def test_each_violation_names_its_field(
    served: Served, fields: dict[str, Any], param: str
) -> None:
    for path in ("/v1/chat/completions", "/tokenize"):
        answer = await served.http.post(path, content=json.dumps({"messages": CHAT} | fields))
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == param


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": CHAT}, "prompt"),
        ("/tokenize", {"prompt": ""}, "prompt"),
        ("/tokenize", {"prompt": ["a"]}, "prompt"),
        ("/tokenize", {"prompt": "a", "add_special_tokens": 1}, "add_special_tokens"),
        ("/tokenize", {"prompt": "a" * (8 * 1024 * 1024 + 1)}, "prompt"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens"),
        ("/detokenize", {"tokens": [10**6]}, "tokens"),
        ("/detokenize", {"tokens": [1] * (2 * 1024 * 1024 + 1)}, "tokens"),
    ],
)
async def test_bad_texts_and_tokens(
    served: Served, path: str, fields: dict[str, Any], param: str
) -> None:
    answer = await served.http.post(path, content=json.dumps(fields))
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    answer = await served.http.post(path, json=fields | {"model": "none", "tokens": [1]})
    assert answer.status_code in (400, 404)


async def test_an_answer_that_is_no_message_is_refused(
    system: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cluster.driver.service.MAX_MESSAGE_BYTES", 4_000)
    tokens = (await system.client.tokenize("é" * 1_000)).token_ids
    with pytest.raises(InvalidRequestError, match="bytes of answer"):
        await system.client.tokenize("é" * 1_000, return_token_strings=True)
    with pytest.raises(InvalidRequestError, match="bytes of answer"):
        await system.client.detokenize(tokens * 3)
    await system.settle()
