"""Log probabilities for the real `openai` client: those of the gRPC client, in OpenAI's forms."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import openai
import pytest
import pytest_asyncio
from openai.types.chat import ChatCompletionTokenLogprob

from cluster.gateway.logprobs import TokenTexts, of_chat, of_completion, of_prompt
from paceline import Completion, GenerateOptions, TokenLogprobs
from tests.cluster.gateway.serving import Served
from tests.cluster.system import System

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT = "The quick brown fox jumps, très bien"
CHAT: Any = [{"role": "user", "content": "Write a poem about the sea."}]
OPTIONS = GenerateOptions(
    temperature=1.0, seed=11, max_tokens=24, ignore_eos=True, logprobs=3, prompt_logprobs=3
)
FIELDS: dict[str, Any] = {
    "model": "target",
    "temperature": 1.0,
    "seed": 11,
    "max_tokens": 24,
    "extra_body": {"ignore_eos": True},
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(served: Served) -> AsyncIterator[openai.AsyncOpenAI]:
    url = f"{served.url}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def told(system: System) -> Completion:
    return await system.client.generate(PROMPT, OPTIONS)


async def test_a_completion_has_an_entry_per_token(
    told: Completion, client: openai.AsyncOpenAI
) -> None:
    answer = await client.completions.create(prompt=PROMPT, logprobs=3, **FIELDS)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.token_logprobs == [one.logprob for one in told.logprobs]
    assert logprobs.tokens is not None
    assert logprobs.text_offset is not None
    text = answer.choices[0].text
    for begin, token in zip(logprobs.text_offset, logprobs.tokens, strict=True):
        assert text[begin : begin + len(token)] == token
    assert "".join(logprobs.tokens) == text[: logprobs.text_offset[-1] + len(logprobs.tokens[-1])]
    assert logprobs.top_logprobs is not None
    for one, top in zip(told.logprobs, logprobs.top_logprobs, strict=True):
        assert set(top.values()) <= {one.logprob, *one.top_logprobs}
        assert max(top.values()) == one.top_logprobs[0]


async def test_a_stream_has_each_entry_with_its_token(
    told: Completion, client: openai.AsyncOpenAI
) -> None:
    whole = await client.completions.create(prompt=PROMPT, logprobs=3, echo=True, **FIELDS)
    parts = []
    text = ""
    stream = await client.completions.create(
        prompt=PROMPT, logprobs=3, echo=True, stream=True, **FIELDS
    )
    async for chunk in stream:
        text += chunk.choices[0].text
        if chunk.choices[0].logprobs is not None:
            parts.append(chunk.choices[0].logprobs)
    assert text == whole.choices[0].text == PROMPT + told.text
    expected = whole.choices[0].logprobs
    assert expected is not None
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        joined = [one for part in parts for one in getattr(part, name)]
        assert joined == getattr(expected, name), name
    assert len(parts) > 3


@pytest.mark.parametrize("as_ids", [False, True], ids=["text", "ids"])
@pytest.mark.parametrize("max_tokens", [0, 1])
async def test_echo_has_those_of_the_prompt(
    told: Completion, client: openai.AsyncOpenAI, max_tokens: int, *, as_ids: bool
) -> None:
    """As lm-eval asks. The first token has no log probability."""
    prompt: Any = list(told.prompt_token_ids) if as_ids else PROMPT
    asked = FIELDS | {"max_tokens": max_tokens}
    answer = await client.completions.create(prompt=prompt, logprobs=1, echo=True, **asked)
    [choice] = answer.choices
    assert choice.logprobs is not None
    expected = [one.logprob for one in told.prompt_logprobs]
    expected += [one.logprob for one in told.logprobs[:max_tokens]]
    assert expected[0] is None
    assert choice.logprobs.token_logprobs == expected
    assert choice.logprobs.tokens is not None
    assert "".join(choice.logprobs.tokens[: len(told.prompt_token_ids)]) == PROMPT
    assert choice.text.startswith(PROMPT)
    assert choice.finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == max_tokens
    if not max_tokens:
        assert choice.text == PROMPT


async def test_a_chat_has_tokens_with_bytes(system: System, client: openai.AsyncOpenAI) -> None:
    expected = await system.client.generate(CHAT, replace(OPTIONS, prompt_logprobs=None))
    answer = await client.chat.completions.create(
        messages=CHAT, logprobs=True, top_logprobs=3, **FIELDS
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    for entry, one in zip(logprobs.content, expected.logprobs, strict=True):
        assert entry.logprob == one.logprob
        assert bytes(entry.bytes or ()) == one.token
        assert [top.logprob for top in entry.top_logprobs] == list(one.top_logprobs)
        assert [bytes(top.bytes or ()) for top in entry.top_logprobs] == list(one.top_tokens)
    streamed: list[ChatCompletionTokenLogprob] = []
    stream = await client.chat.completions.create(
        messages=CHAT, logprobs=True, top_logprobs=3, stream=True, **FIELDS
    )
    async for chunk in stream:
        if chunk.choices[0].logprobs is not None:
            streamed += chunk.choices[0].logprobs.content or []
    assert streamed == logprobs.content


async def test_stop_strings_hold_back_text_and_no_entry(
    told: Completion, client: openai.AsyncOpenAI
) -> None:
    """The tokens of the stop string have entries, as with vLLM."""
    stop = told.text[8:12]
    stream = await client.completions.create(
        prompt=PROMPT, logprobs=0, stream=True, stop=[stop], **FIELDS
    )
    text, count = "", 0
    async for chunk in stream:
        text += chunk.choices[0].text
        if chunk.choices[0].logprobs is not None:
            count += len(chunk.choices[0].logprobs.tokens or [])
    assert text == told.text[: told.text.index(stop)]
    named = b"".join(one.token for one in told.logprobs[:count]).decode(errors="replace")
    assert stop in named


async def test_vllms_prompt_logprobs(served: Served, told: Completion) -> None:
    body = {"prompt": PROMPT, "max_tokens": 1, "prompt_logprobs": 3, "seed": 1}
    [choice] = (await served.complete(**body)).json()["choices"]
    assert choice["logprobs"] is None
    first, *others = choice["prompt_logprobs"]
    assert first is None
    rest = zip(others, told.prompt_logprobs[1:], told.prompt_token_ids[1:], strict=True)
    for table, one, token_id in rest:
        assert table.keys() == {str(token_id), *map(str, one.top_ids)}
        assert table[str(token_id)]["logprob"] == one.logprob
        assert table[str(token_id)]["rank"] == one.rank
        for rank, top_id in enumerate(one.top_ids, start=1):
            assert table[str(top_id)]["rank"] == rank
    chat = {"messages": CHAT, "max_tokens": 1, "prompt_logprobs": 0}
    answer = (await served.http.post("/v1/chat/completions", json=chat)).json()
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    ("param", "body"),
    [
        ("logprobs", {"prompt": "a", "logprobs": 21}),
        ("logprobs", {"prompt": "a", "logprobs": True}),
        ("prompt_logprobs", {"prompt": "a", "prompt_logprobs": -1}),
        ("prompt_logprobs", {"prompt": "a", "prompt_logprobs": 1, "stream": True}),
        ("max_tokens", {"prompt": "a", "max_tokens": 0}),
        ("logprobs", {"messages": CHAT, "logprobs": 1}),
        ("top_logprobs", {"messages": CHAT, "logprobs": True, "top_logprobs": 21}),
        ("top_logprobs", {"messages": CHAT, "top_logprobs": 2}),
    ],
)
async def test_a_wrong_field_is_named(served: Served, param: str, body: dict[str, Any]) -> None:
    path = "/v1/completions" if "prompt" in body else "/v1/chat/completions"
    answer = await served.http.post(path, json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


def _entry(token: bytes, *top: bytes) -> TokenLogprobs:
    ids = tuple(range(len(top)))
    return TokenLogprobs(-1.0, 2, ids, tuple(-0.5 - one for one in ids), token, top)


async def test_no_string_has_a_part_of_a_character() -> None:
    euro = "€".encode()
    entries = [_entry(b"a"), _entry(euro[:1]), _entry(euro[1:], b"b", euro[1:]), _entry(b"c")]
    completion = of_completion(TokenTexts(), entries)
    assert completion["tokens"] == ["a", "", "€", "c"]
    assert completion["text_offset"] == [0, 1, 1, 2]
    assert completion["top_logprobs"][2] == {"€": -1.0, "\N{REPLACEMENT CHARACTER}b": -0.5}
    content = of_chat(TokenTexts(), entries)["content"]
    assert [entry["token"] for entry in content] == ["a", "", "€", "c"]
    assert b"".join(bytes(entry["bytes"]) for entry in content).decode() == "a€c"


async def test_numbers_that_json_lacks_have_a_bound() -> None:
    for value in (float("-inf"), float("nan")):
        entry = TokenLogprobs(value, 9, (1,), (value,), b"x", (b"y",))
        told = of_completion(TokenTexts(), [entry])
        assert told["token_logprobs"] == [-9999.0]
        assert told["top_logprobs"] == [{"x": -9999.0, "y": -9999.0}]
        [table] = of_prompt([5], [entry])
        assert table is not None
        assert table["5"]["logprob"] == -9999.0
