"""Fields that vLLM has and OpenAI has not, what is said of unknown ones, and pages of others."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import openai
import pytest
import pytest_asyncio

from cluster.gateway.app import IGNORED, MAX_IGNORED
from paceline import GenerateOptions
from tests.cluster.gateway.serving import Served, running_gateway
from tests.cluster.system import System

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT = "The quick brown fox jumps over the lazy dog"
CHAT: Any = [{"role": "user", "content": "Write a poem about the sea."}]
FIELDS: dict[str, Any] = {"temperature": 1.0, "seed": 11, "max_tokens": 24}
MORE: dict[str, Any] = {"ignore_eos": True}
OPTIONS = GenerateOptions(temperature=1.0, seed=11, max_tokens=24, ignore_eos=True)
END = "<|im_end|>"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(served: Served) -> AsyncIterator[openai.AsyncOpenAI]:
    url = f"{served.url}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client


async def _text(client: openai.AsyncOpenAI, stream: bool, **more: Any) -> str:
    extra = {**FIELDS, **MORE, **more}
    if not stream:
        whole = await client.completions.create(model="target", prompt=PROMPT, extra_body=extra)
        return whole.choices[0].text
    chunks = await client.completions.create(
        model="target", prompt=PROMPT, extra_body=extra, stream=True
    )
    return "".join([chunk.choices[0].text async for chunk in chunks])


@pytest.mark.parametrize("stream", [False, True])
async def test_a_text_with_what_ended_it(
    system: System, client: openai.AsyncOpenAI, stream: bool
) -> None:
    plain = (await system.client.generate(PROMPT, OPTIONS)).text
    stop, begin = plain[5:8], plain.index(plain[5:8])
    assert await _text(client, stream, stop=stop) == plain[:begin]
    told = await _text(client, stream, stop=stop, include_stop_str_in_output=True)
    assert told == plain[: begin + 3]
    # An end token has a text only if special tokens have one.
    ending = {"logit_bias": {"2": 100}, "ignore_eos": False, "min_tokens": 3}
    assert END not in await _text(client, stream, **ending)
    assert END not in await _text(client, stream, include_stop_str_in_output=True, **ending)
    named = {**ending, "skip_special_tokens": False}
    assert END not in await _text(client, stream, **named)
    told = await _text(client, stream, include_stop_str_in_output=True, **named)
    assert told == (await _text(client, stream, **ending)) + END


@pytest.mark.parametrize("stream", [False, True])
async def test_special_tokens_have_names(
    system: System, client: openai.AsyncOpenAI, stream: bool
) -> None:
    """Here the output is nothing else, so all of it would be left out."""
    only = {"logit_bias": {"1": 100}, "max_tokens": 3}
    assert await _text(client, stream, **only) == ""
    told = await _text(client, stream, skip_special_tokens=False, **only)
    assert told == "<|im_start|>" * 3
    # They can be a stop string then.
    stopped = await _text(client, stream, skip_special_tokens=False, stop="start|><|", **only)
    assert stopped == "<|im_"


async def test_prompts_that_are_cut(system: System, client: openai.AsyncOpenAI) -> None:
    prompt_ids = (await system.client.generate(PROMPT, OPTIONS)).prompt_token_ids
    cut = (await system.client.generate(prompt_ids[-4:], OPTIONS)).text
    assert cut != (await system.client.generate(PROMPT, OPTIONS)).text
    assert await _text(client, stream=False, truncate_prompt_tokens=4) == cut
    room = (await system.client.describe()).max_model_len
    long = "word " * 30 * room
    asked: dict[str, Any] = {"model": "target", "prompt": long, "max_tokens": 9}
    with pytest.raises(openai.BadRequestError, match="shorten it"):
        await client.completions.create(**asked)
    told = await client.completions.create(**asked, extra_body={"truncate_prompt_tokens": -1})
    assert told.usage is not None
    assert told.usage.prompt_tokens == room - 9
    for wrong, named in (
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 4, "echo": True}, "echo"),
        ({"skip_special_tokens": 1}, "skip_special_tokens"),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            await client.completions.create(**asked, extra_body=wrong)
        assert caught.value.param == named


@pytest.mark.parametrize("stream", [False, True])
async def test_words_that_never_come(
    system: System, client: openai.AsyncOpenAI, stream: bool
) -> None:
    """A word of one token, and one of two. What comes is what the target alone would choose."""
    plain = await system.client.generate(PROMPT, OPTIONS)
    words = {}
    for length in (1, 2):
        for start in range(5, 20):
            run = plain.token_ids[start : start + length]
            word = await system.client.detokenize(run)
            if word.strip() == word:
                told = await system.client.tokenize(word, add_special_tokens=False)
                if told.token_ids == run:
                    words[word] = run
    assert {len(run) for run in words.values()} == {1, 2}
    alone = await system.client.generate(PROMPT, replace(OPTIONS, bad_words=[*words], policy="off"))
    for run in words.values():
        assert run not in {*zip(*(alone.token_ids[one:] for one in range(len(run))), strict=False)}
    assert alone.token_ids[:5] == plain.token_ids[:5]
    assert await _text(client, stream, bad_words=[*words]) == alone.text
    assert await _text(client, stream, bad_words=[]) == plain.text
    with pytest.raises(openai.BadRequestError, match=r"bad_words: .* 128 strings, got 200"):
        await _text(client, stream, bad_words=["x"] * 200)


async def test_ids_of_tokens(system: System, client: openai.AsyncOpenAI) -> None:
    body = {**FIELDS, **MORE, "return_token_ids": True}
    for is_chat in (True, False):
        expected = await system.client.generate(CHAT if is_chat else PROMPT, OPTIONS)

        async def ask(is_chat: bool = is_chat, **more: Any) -> Any:
            if is_chat:
                return await client.chat.completions.create(
                    model="target", messages=CHAT, extra_body=body, **more
                )
            return await client.completions.create(
                model="target", prompt=PROMPT, extra_body=body, **more
            )

        whole = await ask()
        [choice] = whole.choices
        assert choice.token_ids == list(expected.token_ids)
        of_prompt = whole if is_chat else choice
        assert of_prompt.prompt_token_ids == list(expected.prompt_token_ids)
        token_ids: list[int] = []
        of_prompts: list[list[int]] = []
        async for chunk in await ask(stream=True):
            [choice] = chunk.choices
            token_ids += getattr(choice, "token_ids", None) or []
            of_prompt = chunk if is_chat else choice
            if (given := getattr(of_prompt, "prompt_token_ids", None)) is not None:
                of_prompts.append(given)
        assert token_ids == list(expected.token_ids)
        assert of_prompts == [list(expected.prompt_token_ids)]


async def test_messages_and_values_that_clients_send(client: openai.AsyncOpenAI) -> None:
    """A refusal in place of a content, and one answer as the best of one."""
    refused: list[Any] = [
        {"role": "assistant", "content": None, "refusal": "I will not."},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "I will not."}]},
        {"role": "assistant", "content": "I will not.", "refusal": None},
    ]
    asked: dict[str, Any] = {"model": "target", **FIELDS}
    told = {
        (await client.chat.completions.create(**asked, messages=[*CHAT, message, *CHAT]))
        .choices[0]
        .message.content
        for message in refused
    }
    assert len(told) == 1
    wrong: list[Any] = [{"role": "user", "content": None, "refusal": "no"}, {"role": "assistant"}]
    for message in wrong:
        with pytest.raises(openai.BadRequestError, match="messages"):
            await client.chat.completions.create(**asked, messages=[message])
    assert (await client.completions.create(prompt="a", best_of=1, **asked)).choices
    with pytest.raises(openai.BadRequestError, match="best_of"):
        await client.completions.create(prompt="a", best_of=2, **asked)


async def test_fields_without_an_effect_are_named(served: Served) -> None:
    async def ignored(path: str, **fields: Any) -> str | None:
        answer = await served.http.post(path, json={"max_tokens": 1, **fields})
        assert answer.status_code == 200, answer.text
        named: str | None = answer.headers.get(IGNORED)
        return named

    assert await ignored("/v1/completions", prompt="a", n=1, speculation="off") is None
    told = await ignored(
        "/v1/completions", prompt="a", user="me", frobnicate=[1], service_tier=None
    )
    assert told == "user, frobnicate"
    assert await ignored("/v1/completions", prompt="a", stream=True, store=True) == "store"
    chat = {"messages": CHAT, "top_logprobs": 0, "tool_choice": "none", "reasoning_effort": "low"}
    assert await ignored("/v1/chat/completions", **chat) == "reasoning_effort"
    assert await ignored("/v1/messages", messages=CHAT, metadata={}) == "metadata"
    told = await ignored("/v1/responses", input="a", store=False, max_output_tokens=1)
    assert told == "max_tokens, store"
    hostile = {"a\r\nset-cookie: b": 1, "é" * 2000: 1}
    told = await ignored("/v1/completions", prompt="a", **hostile)
    assert told is not None
    assert told.startswith("a%0D%0Aset-cookie%3A%20b, %C3%A9")
    assert len(told) == MAX_IGNORED


async def test_pages_of_other_origins(
    system: System, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A browser asks first whether a page of an origin may call."""
    origin = "https://chat.example.com"
    asking = {
        "origin": origin,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type",
    }
    body = json.dumps({"prompt": "a", "max_tokens": 1, "user": "me"})
    allowed, exposed = "access-control-allow-origin", "access-control-expose-headers"
    before = await served.http.options("/v1/completions", headers=asking)
    assert before.status_code == 405
    answer = await served.http.post("/v1/completions", content=body, headers={"origin": origin})
    assert allowed not in answer.headers
    async with running_gateway([system.server.address], cors_origins=[origin]) as open_one:
        before = await open_one.http.options("/v1/completions", headers=asking)
        assert before.status_code == 200
        assert before.headers[allowed] == origin
        assert "authorization" in before.headers["access-control-allow-headers"]
        answer = await open_one.http.post(
            "/v1/completions", content=body, headers={"origin": origin}
        )
        assert answer.headers[allowed] == origin
        assert IGNORED in answer.headers[exposed]
        refused = await open_one.http.post("/v1/completions", content="{", headers=asking)
        assert (refused.status_code, refused.headers[allowed]) == (400, origin)
        other = {**asking, "origin": "https://other.example.com"}
        before = await open_one.http.options("/v1/completions", headers=other)
        assert allowed not in before.headers
        # A page can also read how a defect is answered.
        monkeypatch.setattr("cluster.gateway.app.version", None)
        defect = await open_one.http.get("/version", headers={"origin": origin})
        assert (defect.status_code, defect.headers[allowed]) == (500, origin)
        assert defect.json()["error"]["code"] == "internal_error"
