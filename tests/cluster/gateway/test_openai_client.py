"""The real `openai` client against a real system: the answers are those of the gRPC client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import httpx2
import openai
import pytest
import pytest_asyncio

from cluster.gateway.openai_answers import PADDED_TO
from paceline import Completion, GenerateOptions
from paceline.generation import CallerInput
from tests.cluster.gateway.serving import Served
from tests.cluster.system import System, eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT = "The quick brown fox"
CHAT: Any = [{"role": "user", "content": "Write a poem about the sea."}]
OPTIONS = GenerateOptions(temperature=1.0, seed=11, max_tokens=24, ignore_eos=True)
FIELDS: dict[str, Any] = {"temperature": 1.0, "seed": 11, "max_tokens": 24}
MORE: dict[str, Any] = {"ignore_eos": True}
"""Fields that OpenAI does not have, and which vLLM has too."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(served: Served) -> AsyncIterator[openai.AsyncOpenAI]:
    url = f"{served.url}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client


async def _told(system: System, given: CallerInput, **changes: Any) -> Completion:
    """What the gRPC client gets."""
    return await system.client.generate(given, replace(OPTIONS, **changes))


async def _samples(system: System, given: CallerInput) -> list[str]:
    """The texts of two samples that the gRPC client gets."""
    return [one.text for one in await system.client.generate(given, OPTIONS, samples=2)]


async def test_a_completion_is_the_grpc_clients(system: System, client: openai.AsyncOpenAI) -> None:
    expected = await _told(system, PROMPT)
    answer = await client.completions.create(
        model="target", prompt=PROMPT, **FIELDS, extra_body=MORE
    )
    assert answer.object == "text_completion"
    assert answer.model == "target"
    [choice] = answer.choices
    assert choice.text == expected.text
    assert choice.finish_reason == expected.finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 24
    assert answer.usage.prompt_tokens == len(expected.prompt_token_ids)
    assert answer.usage.total_tokens == 24 + len(expected.prompt_token_ids)
    assert answer.usage.prompt_tokens_details is not None
    cached = answer.usage.prompt_tokens_details.cached_tokens
    assert cached == (await _told(system, PROMPT)).stats.cached_prompt_tokens


async def test_a_chat_is_the_grpc_clients(system: System, client: openai.AsyncOpenAI) -> None:
    expected = await _told(system, CHAT)
    answer = await client.chat.completions.create(
        model="target", messages=CHAT, **FIELDS, extra_body=MORE
    )
    assert answer.object == "chat.completion"
    [choice] = answer.choices
    assert choice.message.role == "assistant"
    assert choice.message.content == expected.text
    assert choice.finish_reason == "length"


async def test_a_stream_of_a_completion_adds_up_to_the_whole(
    system: System, client: openai.AsyncOpenAI
) -> None:
    expected = await _told(system, PROMPT)
    stream = await client.completions.create(
        model="target",
        prompt=PROMPT,
        **FIELDS,
        stream=True,
        stream_options={"include_usage": True},
        extra_body=MORE,
    )
    *chunks, last = [chunk async for chunk in stream]
    assert len(chunks) > 5
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected.text
    assert [chunk.choices[0].finish_reason for chunk in chunks[-2:]] == [None, "length"]
    assert all(chunk.usage is None for chunk in chunks)
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == 24


async def test_a_stream_of_a_chat_adds_up_to_the_whole(
    system: System, client: openai.AsyncOpenAI
) -> None:
    expected = await _told(system, CHAT)
    stream = await client.chat.completions.create(
        model="target", messages=CHAT, **FIELDS, stream=True, extra_body=MORE
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected.text
    assert chunks[-1].choices[0].finish_reason == "length"
    assert len({chunk.id for chunk in chunks}) == 1


async def test_the_client_without_asyncio(system: System, served: Served) -> None:
    expected = await _told(system, CHAT)

    def ask() -> tuple[str | None, str]:
        url = f"{served.url}/v1"
        with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
            asked: dict[str, Any] = {"model": "target", "messages": CHAT, **FIELDS}
            whole = client.chat.completions.create(**asked, extra_body=MORE)
            stream = client.chat.completions.create(**asked, stream=True, extra_body=MORE)
            parts = [chunk.choices[0].delta.content or "" for chunk in stream]
            return whole.choices[0].message.content, "".join(parts)

    assert await asyncio.to_thread(ask) == (expected.text, expected.text)


async def test_every_field_reaches_the_driver(system: System, client: openai.AsyncOpenAI) -> None:
    """Each changes the text or ends it, and the gRPC client's option does the same."""
    plain = await _told(system, PROMPT)
    first = plain.token_ids[0]
    cases: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "temperature": ({"temperature": 0}, {"temperature": 0.0}),
        "top_p": ({"top_p": 0.1}, {"top_p": 0.1}),
        "top_k": ({"top_k": 1}, {"top_k": 1}),
        "min_p": ({"min_p": 0.9}, {"min_p": 0.9}),
        "repetition_penalty": ({"repetition_penalty": 9.0}, {"repetition_penalty": 9.0}),
        "presence_penalty": ({"presence_penalty": 2}, {"presence_penalty": 2.0}),
        "frequency_penalty": ({"frequency_penalty": 2}, {"frequency_penalty": 2.0}),
        "logit_bias": ({"logit_bias": {str(first): -100}}, {"logit_bias": {first: -100.0}}),
        "seed": ({"seed": 12}, {"seed": 12}),
        "stop": ({"stop": plain.text[5:8]}, {"stop": [plain.text[5:8]]}),
        "stop_token_ids": ({"stop_token_ids": [first]}, {"stop_token_ids": [first]}),
        "max_completion_tokens": ({"max_completion_tokens": 7}, {"max_tokens": 7}),
    }
    for name, (fields, changes) in cases.items():
        expected = await _told(system, PROMPT, **changes)
        answer = await client.completions.create(
            model="target", prompt=PROMPT, extra_body=FIELDS | MORE | fields
        )
        assert answer.choices[0].text == expected.text, name
        assert answer.choices[0].finish_reason == expected.finish_reason, name
        assert expected.token_ids != plain.token_ids, name


async def test_prompts_of_all_forms_and_n(system: System, client: openai.AsyncOpenAI) -> None:
    token_ids = list((await _told(system, PROMPT)).prompt_token_ids)
    seeds = await _samples(system, PROMPT)
    other = await _samples(system, "sea")
    assert seeds[0] == (await _told(system, PROMPT)).text != seeds[1]
    texts: list[tuple[Any, int, list[str]]] = [
        (token_ids, 1, seeds[:1]),
        ([token_ids], 1, seeds[:1]),
        ([PROMPT, "sea"], 2, seeds + other),
    ]
    for prompt, n, expected in texts:
        answer = await client.completions.create(
            model="target", prompt=prompt, n=n, **FIELDS, extra_body=MORE
        )
        assert [choice.text for choice in answer.choices] == expected
        assert [choice.index for choice in answer.choices] == list(range(len(expected)))
    stream = await client.completions.create(
        model="target", prompt=PROMPT, n=2, **FIELDS, stream=True, extra_body=MORE
    )
    got = ["", ""]
    async for chunk in stream:
        got[chunk.choices[0].index] += chunk.choices[0].text
    assert got == seeds


async def test_echo_repeats_the_prompt(system: System, client: openai.AsyncOpenAI) -> None:
    expected = PROMPT + (await _told(system, PROMPT)).text
    asked: dict[str, Any] = {"model": "target", "prompt": PROMPT, "echo": True, **FIELDS}
    answer = await client.completions.create(**asked, extra_body=MORE)
    assert answer.choices[0].text == expected
    stream = await client.completions.create(**asked, stream=True, extra_body=MORE)
    assert "".join([chunk.choices[0].text async for chunk in stream]) == expected


async def test_speculation_changes_how_and_not_what(
    system: System, client: openai.AsyncOpenAI
) -> None:
    expected = await _told(system, PROMPT)
    kinds: list[Any] = [
        "off",
        {"policy": "lockstep", "window": 3, "verification": "coupled"},
        {"policy": "lockstep", "window": 4, "branches": 2, "drafter": "model"},
    ]
    for speculation in kinds:
        answer: Any = await client.completions.create(
            model="target", prompt=PROMPT, **FIELDS, extra_body=MORE | {"speculation": speculation}
        )
        assert answer.choices[0].text == expected.text
        if speculation == "off":
            assert not hasattr(answer, "metrics")
            continue
        told = answer.metrics["speculative_decoding"]
        histogram = told["acceptance_histogram"]
        accepted = told["num_accepted_draft_tokens"]
        assert told["num_spec_tokens"] == speculation["window"] == len(histogram) - 1
        assert sum(histogram) == told["num_spec_steps"] > 0
        assert sum(j * count for j, count in enumerate(histogram)) == accepted > 0
        assert told["draft_acceptance_rate"] == accepted / told["num_draft_tokens"]
        assert told["mean_acceptance_length"] == 1 + accepted / told["num_spec_steps"]


async def test_a_stream_tells_its_metrics_with_its_usage(client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model="target",
        messages=CHAT,
        **FIELDS,
        stream=True,
        stream_options={"include_usage": True},
        extra_body=MORE | {"speculation": {"policy": "lockstep"}},
    )
    *chunks, last = [chunk async for chunk in stream]
    assert not any(hasattr(chunk, "metrics") for chunk in chunks)
    told: Any = last
    assert told.metrics["speculative_decoding"]["num_spec_steps"] > 0


@contextmanager
def _refused(kind: type[openai.APIStatusError], param: str | None) -> Iterator[None]:
    with pytest.raises(kind) as caught:
        yield
    assert isinstance(caught.value.body, dict)
    assert caught.value.body.keys() == {"message", "type", "param", "code"}
    assert caught.value.body["param"] == param
    if param is not None:
        assert param in caught.value.body["message"]


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("temperature", {"temperature": -1}),
        ("temperature", {"temperature": "warm"}),
        ("temperature", {"temperature": 10**400}),
        ("seed", {"seed": 2**64}),
        ("max_tokens", {"max_tokens": 0}),
        ("max_tokens", {"max_tokens": True}),
        ("stop", {"stop": ["a"] * 17}),
        ("logit_bias", {"logit_bias": {"a": 1}}),
        ("logit_bias", {"logit_bias": {"5000": 1}}),
        ("prompt", {"prompt": [5000]}),
        ("prompt", {"prompt": "word " * 2000}),
        ("prompt", {"prompt": ["a", 1]}),
        ("prompt", {"prompt": None}),
        ("n", {"n": 0}),
        ("echo", {"prompt": [5], "echo": True}),
        ("stream_options.include_usage", {"stream_options": {"include_usage": 1}}),
        ("suffix", {"suffix": "end"}),
        ("speculation", {"speculation": {"windw": 3}}),
        ("speculation", {"speculation": []}),
        ("speculation.window", {"speculation": {"window": 65}}),
        ("speculation.policy", {"speculation": {"policy": "best"}}),
        ("speculation.verification", {"speculation": {"verification": "hope"}}),
        ("speculation.drafter", {"speculation": {"drafter": "oracle"}}),
    ],
)
async def test_a_wrong_field_is_named(
    client: openai.AsyncOpenAI, param: str, fields: dict[str, Any]
) -> None:
    body = {"prompt": PROMPT} | fields
    prompt = body.pop("prompt")
    with _refused(openai.BadRequestError, param):
        await client.completions.create(model="target", prompt=prompt, extra_body=body)


async def test_a_chat_refuses_what_is_not_possible_yet(client: openai.AsyncOpenAI) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    refused: list[tuple[str, dict[str, Any]]] = [
        ("tools", {"tools": tools}),
        ("messages", {"messages": [{"role": "robot", "content": "a"}]}),
        ("messages", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
        ("messages", {"messages": []}),
    ]
    for param, fields in refused:
        asked: Any = {"model": "target", "messages": CHAT} | fields
        with _refused(openai.BadRequestError, param):
            await client.chat.completions.create(**asked)


async def test_unknown_fields_are_ignored(client: openai.AsyncOpenAI) -> None:
    await client.completions.create(
        model="target", prompt="a", max_tokens=1, user="me", extra_body={"frobnicate": [1]}
    )


async def test_an_unknown_model_is_404_with_the_list(client: openai.AsyncOpenAI) -> None:
    with _refused(openai.NotFoundError, "model"):
        await client.chat.completions.create(model="gpt", messages=CHAT)
    with pytest.raises(openai.NotFoundError, match="expected one of target"):
        await client.models.retrieve("gpt")
    assert [model.id async for model in client.models.list()] == ["target"]


async def test_a_closed_stream_ends_the_request_at_the_driver(
    system: System, client: openai.AsyncOpenAI
) -> None:
    stream = await client.completions.create(
        model="target", prompt=PROMPT, max_tokens=450, stream=True, extra_body=MORE
    )
    await anext(aiter(stream))
    assert system.driver.scheduler.num_running == 1
    await stream.close()
    before = system.driver.stats().committed_tokens
    await system.settle()
    # Of 450 tokens; what is committed while the news travels is far less.
    assert system.driver.stats().committed_tokens - before < 100


async def test_a_caller_that_leaves_ends_a_request_that_is_not_streamed(
    system: System, served: Served, client: openai.AsyncOpenAI
) -> None:
    asking = asyncio.create_task(
        client.completions.create(model="target", prompt=PROMPT, max_tokens=450, extra_body=MORE)
    )
    await eventually(lambda: system.driver.scheduler.num_running == 1)
    before = system.driver.stats().committed_tokens
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await system.settle()
    assert system.driver.stats().committed_tokens - before < 100
    await eventually(lambda: served.gateway.num_open == 0)


async def test_other_paths(served: Served) -> None:
    async def get(path: str) -> httpx2.Response:
        return await served.http.get(path)

    assert (await get("/health")).status_code == 200
    assert (await get("/ready")).json() == {"models": ["target"], "troubles": []}
    assert (await get("/version")).json()["version"]
    assert (await get("/v1/embeddings")).status_code == 404
    assert (await get("/v1/embeddings")).json()["error"]["code"] == "not_found"
    assert (await get("/v1/completions")).status_code == 405


async def test_an_event_is_ascii_whatever_the_text(served: Served) -> None:
    """The tiny model's random bytes give characters of all kinds."""
    asked = {"prompt": "Ça va", "stream": True, "max_tokens": 60, "ignore_eos": True}
    answer = await served.complete(**asked, temperature=1.0, seed=3)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.content.isascii()
    assert b"\\u" in answer.content
    events = answer.text.split("\n\n")
    assert all(event.startswith("data: ") for event in events[:-1])
    assert events[-2:] == ["data: [DONE]", ""]


async def test_a_steady_stream_has_an_event_for_each_token_and_one_size(
    system: System, served: Served, client: openai.AsyncOpenAI
) -> None:
    expected = await _told(system, PROMPT)
    speculation = {"speculation": {"steady": True}}
    stream = await client.completions.create(
        model="target", prompt=PROMPT, **FIELDS, stream=True, extra_body=MORE | speculation
    )
    texts = [chunk.choices[0].text async for chunk in stream]
    assert "".join(texts) == expected.text
    assert len(texts) == 24 + 1  # The last one has the reason of the end.
    assert "" in texts[:-1]  # A token without text of its own has an event too.
    asked = {"prompt": PROMPT, "stream": True, **FIELDS, **MORE, **speculation}
    async with served.http.stream("POST", "/v1/completions", json=asked) as answer:
        body = await answer.aread()
    *events, done, rest = body.split(b"\n\n")
    assert (done, rest) == (b"data: [DONE]", b"")
    assert {len(event) + 2 for event in events} == {PADDED_TO}


async def test_a_prediction_is_used_and_its_tokens_are_told(
    system: System, client: openai.AsyncOpenAI
) -> None:
    # Whole words alone: else the text would have other tokens than the answer had.
    words = [await system.client.tokenize(one, add_special_tokens=False) for one in (" the", " in")]
    bias = {one.token_ids[0]: 100.0 for one in words}
    expected = await _told(system, CHAT, logit_bias=bias)
    fields: dict[str, Any] = {**FIELDS, "logit_bias": {str(one): 100 for one in bias}}
    prediction: Any = {"type": "content", "content": [{"type": "text", "text": expected.text}]}
    answer = await client.chat.completions.create(
        model="target", messages=CHAT, prediction=prediction, **fields, extra_body=MORE
    )
    assert answer.choices[0].message.content == expected.text
    assert answer.usage is not None
    details = answer.usage.completion_tokens_details
    assert details is not None
    assert details.accepted_prediction_tokens is not None
    assert details.rejected_prediction_tokens is not None
    assert details.accepted_prediction_tokens > details.rejected_prediction_tokens
    stream = await client.chat.completions.create(
        model="target",
        messages=CHAT,
        prediction={"type": "content", "content": expected.text},
        stream=True,
        stream_options={"include_usage": True},
        **fields,
        extra_body=MORE,
    )
    usages = [chunk.usage async for chunk in stream if chunk.usage is not None]
    assert [one.completion_tokens_details for one in usages] == [details]
    for wrong in ("a text", {"type": "content"}, {"type": "image", "content": "x"}):
        with pytest.raises(openai.BadRequestError, match="prediction"):
            await client.chat.completions.create(
                model="target", messages=CHAT, extra_body={"prediction": wrong}
            )
