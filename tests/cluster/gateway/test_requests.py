"""What of a body is refused before anything is sent to a driver, and which field is named."""

from __future__ import annotations

import gc
import re
from contextlib import suppress
from typing import Any

import pytest

from cluster.gateway.requests import body_in, chat_request, completion_request
from paceline.errors import InvalidRequestError, PromptTooLongError
from paceline.limits import MAX_BIASED_TOKENS, MAX_MESSAGES, MAX_PROMPT_BYTES, MAX_SEQUENCE_TOKENS

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}]}


def _chat_of(num_characters: int) -> dict[str, Any]:
    """With its role, a message of four bytes more."""
    return {"messages": [{"role": "user", "content": "a" * num_characters}]}


TEXT = MAX_PROMPT_BYTES // 4
TOKENS = MAX_SEQUENCE_TOKENS // 4


@pytest.mark.parametrize(
    ("read", "most", "more"),
    [
        (completion_request, {"prompt": "a" * TEXT, "n": 4}, {"n": 5}),
        (completion_request, {"prompt": "a" * TEXT, "n": 4, "echo": True}, {"n": 5}),
        (completion_request, {"prompt": ["a" * TEXT] * 2, "n": 2}, {"prompt": ["a" * TEXT] * 3}),
        (completion_request, {"prompt": "é" * (TEXT // 2), "n": 4}, {"prompt": "é" * TEXT}),
        (completion_request, {"prompt": [7] * TOKENS, "n": 4}, {"n": 5}),
        (completion_request, {"prompt": [[7] * TOKENS] * 2, "n": 2}, {"n": 3}),
        (chat_request, _chat_of(TEXT - 4) | {"n": 4}, _chat_of(TEXT - 3)),
    ],
    ids=["text", "echo", "texts", "bytes", "tokens", "lists of tokens", "chat"],
)
def test_the_prompts_of_all_choices_have_one_limit(
    read: Any, most: dict[str, Any], more: dict[str, Any]
) -> None:
    assert read(most).num_choices == 4
    with pytest.raises(PromptTooLongError, match="times n") as caught:
        read(most | more)
    assert caught.value.field == ("messages" if read is chat_request else "prompt")


def test_messages_are_counted_before_they_are_read() -> None:
    messages: list[Any] = [*CHAT["messages"] * MAX_MESSAGES, "no message at all"]
    with pytest.raises(InvalidRequestError, match=f"{MAX_MESSAGES:,} messages"):
        chat_request({"messages": messages})


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_tokens": 5, "max_completion_tokens": 0}, "max_completion_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"logit_bias": {str(key): 1 for key in range(MAX_BIASED_TOKENS + 1)}}, "logit_bias"),
    ],
)
def test_options_are_checked_once_under_the_names_of_the_body(
    fields: dict[str, Any], named: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        chat_request(CHAT | {"n": 128} | fields)
    assert caught.value.field == named


def test_an_error_of_a_driver_names_the_field_that_was_sent() -> None:
    asked = chat_request(CHAT | {"max_completion_tokens": 5})
    told = [
        PromptTooLongError(field, "why").renamed(asked.field_names)
        for field in ("prompt", "prompt_token_ids", "max_tokens", "seed")
    ]
    fields = ["messages", "messages", "max_completion_tokens", "seed"]
    assert [error.field for error in told] == fields
    assert {type(error) for error in told} == {PromptTooLongError}
    assert str(told[0]) == "messages: why"
    asked = completion_request({"prompt": "a", "max_tokens": 5})
    assert PromptTooLongError("max_tokens", "why").renamed(asked.field_names).field == "max_tokens"


@pytest.mark.parametrize(
    ("harmless", "asking"),
    [
        ({"allowed_token_ids": None}, {"allowed_token_ids": [1]}),
        ({"prompt_embeds": None}, {"prompt_embeds": "AAAA"}),
        ({"structural_tag": None}, {"structural_tag": "{}"}),
    ],
)
@pytest.mark.parametrize("read", [chat_request, completion_request])
def test_fields_of_vllm_that_change_the_answer_are_refused(
    read: Any, harmless: dict[str, Any], asking: dict[str, Any]
) -> None:
    body = CHAT | {"prompt": "a"}
    read(body | harmless)
    with pytest.raises(InvalidRequestError) as caught:
        read(body | asking)
    assert [caught.value.field] == list(asking)


def test_chats_and_completions_have_other_defaults() -> None:
    chat_request(CHAT | {"add_special_tokens": False, "echo": False})
    completion_request({"prompt": "a", "add_special_tokens": True, "echo": True})
    for name in ("add_special_tokens", "echo"):
        with pytest.raises(InvalidRequestError, match=name):
            chat_request(CHAT | {name: True})
    with pytest.raises(InvalidRequestError, match="add_special_tokens"):
        completion_request({"prompt": "a", "add_special_tokens": False})


def test_a_message_without_content_is_told_as_json_has_it() -> None:
    with pytest.raises(InvalidRequestError, match="got null"):
        chat_request({"messages": [{"role": "assistant", "content": None}]})


@pytest.mark.parametrize(
    ("fields", "named", "said"),
    [
        ({"logprobs": -1}, "logprobs", "expected an integer from 0 to 20, got -1"),
        (
            {"structured_outputs": {"json": {}, "regex": "a"}},
            "structured_outputs",
            "got structured_outputs.json and structured_outputs.regex",
        ),
        (
            {"structured_outputs": {"regex": "a"}, "guided_choice": ["a"]},
            "guided_choice",
            "got structured_outputs.regex and guided_choice",
        ),
        (
            {"speculation": "chain"},
            "speculation",
            'expected "off" or an object such as {"policy": "chain"}, got a string',
        ),
        ({"speculation": ["chain"]}, "speculation", "expected an object, got a list"),
    ],
)
def test_what_is_wrong_is_said(fields: dict[str, Any], named: str, said: str) -> None:
    with pytest.raises(InvalidRequestError, match=re.escape(said)) as caught:
        completion_request({"prompt": "sea"} | fields)
    assert caught.value.field == named


@pytest.mark.parametrize("ending", [b"0]}", b"0]"], ids=["JSON", "no JSON"])
def test_a_body_of_many_lists_is_read_without_a_look_for_garbage(ending: bytes) -> None:
    """Each look would go through all lists that have come. Meanwhile other callers wait."""
    collections: list[str] = []

    def note(phase: str, info: dict[str, int]) -> None:
        collections.append(phase)

    raw = b'{"prompt":[' + b"[]," * 100_000 + ending
    gc.callbacks.append(note)
    try:
        with suppress(InvalidRequestError):
            body_in("body", raw)
        assert not collections
        assert gc.isenabled()
    finally:
        gc.callbacks.remove(note)


def test_openais_newer_name_of_the_system_is_the_system() -> None:
    """Its SDKs send it; no template of an open model knows it."""
    told, asked = (
        chat_request({"messages": [{"role": role, "content": "Be brief."}, *CHAT["messages"]]})
        for role in ("system", "developer")
    )
    assert asked.prompts == told.prompts


def test_seeds_have_a_sign_as_openais() -> None:
    seeds = [0, 2**64 - 1, -2, -(2**63), -1, None]
    read = [completion_request({"prompt": "a", "seed": one}).prompts[0].options for one in seeds]
    assert [one.seed for one in read] == [0, 2**64 - 1, 2**64 - 2, 2**63, None, None]
    with pytest.raises(InvalidRequestError, match="seed"):
        completion_request({"prompt": "a", "seed": -(2**63) - 1})
