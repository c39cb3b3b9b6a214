"""Limits of a request: the page of limits tells the constants, and each is enforced."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline import (
    Chat,
    GenerateOptions,
    InvalidRequestError,
    Message,
    PromptTooLongError,
    Structure,
    ToolCall,
    limits,
)
from paceline.channel import MAX_REQUEST_BYTES
from paceline.generation import GenerateInput
from paceline.v1 import inference_pb2
from paceline.wire.requests import request_from_wire, request_to_wire

PAGE = Path(__file__).resolve().parents[3] / "docs" / "limits.md"
_ROW = re.compile(r"^\|(?P<fields>[^|]+)\| (?P<limit>[\d,]+) \|.*`(?P<constant>[\w.]+)` \|$", re.M)


def _rows() -> list[re.Match[str]]:
    return list(_ROW.finditer(PAGE.read_text(encoding="utf-8")))


@pytest.mark.parametrize("row", _rows(), ids=lambda row: row["constant"])
def test_the_page_tells_the_constants(row: re.Match[str]) -> None:
    module, _, name = row["constant"].rpartition(".")
    assert getattr(importlib.import_module(module), name) == int(row["limit"].replace(",", ""))


def test_no_limit_of_a_request_is_left_out() -> None:
    told = {row["constant"] for row in _rows()}
    known = {f"paceline.limits.{name}" for name in vars(limits) if name.startswith("MAX_")}
    # Of a drafter's proposal, which no request names.
    assert known - told == {"paceline.limits.MAX_PROPOSED"}


Ask = Callable[[int], tuple[GenerateInput, GenerateOptions]]


def _option(name: str, value: Callable[[int], Any]) -> Ask:
    return lambda count: ("hello", replace(GenerateOptions(), **{name: value(count)}))


LIMITS: dict[str, tuple[str, int, Ask]] = {
    "prompt": ("prompt", limits.MAX_PROMPT_BYTES, lambda n: ("a" * n, GenerateOptions())),
    "messages, text": (
        "messages",
        limits.MAX_PROMPT_BYTES,
        lambda n: ([Message("user", "é" * (n // 2 - 2) + "a" * (n % 2))], GenerateOptions()),
    ),
    "messages": (
        "messages",
        limits.MAX_MESSAGES,
        lambda n: ([Message("user", "a")] * n, GenerateOptions()),
    ),
    "messages, calls": (
        "messages",
        limits.MAX_MESSAGES,
        lambda n: (
            [Message("assistant", "", tool_calls=(ToolCall("", "f", "{}"),) * (n - 1))],
            GenerateOptions(),
        ),
    ),
    "tools": (
        "tools",
        limits.MAX_TOOLS_BYTES,
        lambda n: (Chat([Message("user", "a")], tools="[" * n), GenerateOptions()),
    ),
    "template_kwargs": (
        "template_kwargs",
        limits.MAX_TEMPLATE_KWARGS_BYTES,
        lambda n: (Chat([Message("user", "a")], template_kwargs="{" * n), GenerateOptions()),
    ),
    "prompt_token_ids": (
        "prompt_token_ids",
        limits.MAX_SEQUENCE_TOKENS,
        lambda n: ([2**32 - 1] * n, GenerateOptions()),
    ),
    "logit_bias": (
        "logit_bias",
        limits.MAX_BIASED_TOKENS,
        _option("logit_bias", lambda n: {2**32 - 1 - key: 1.0 for key in range(n)}),
    ),
    "stop": ("stop", limits.MAX_STOP_STRINGS, _option("stop", lambda n: ["x"] * n)),
    "stop, length": ("stop", limits.MAX_STOP_LENGTH, _option("stop", lambda n: ["x", "x" * n])),
    "stop_token_ids": (
        "stop_token_ids",
        limits.MAX_STOP_TOKENS,
        _option("stop_token_ids", lambda n: [7] * n),
    ),
    "bad_words": ("bad_words", limits.MAX_BAD_WORDS, _option("bad_words", lambda n: ["x"] * n)),
    "bad_words, length": (
        "bad_words",
        limits.MAX_BAD_WORD_LENGTH,
        _option("bad_words", lambda n: ["x", "x" * n]),
    ),
    "resume": (
        "resume",
        limits.MAX_RESUMED_TOKENS,
        _option("resume", lambda n: [2**32 - 1] * n),
    ),
    "resume_samples": (
        "resume_samples",
        limits.MAX_RESUMED_TOKENS,
        _option("resume_samples", lambda n: [[7] * (n - 5), [7] * 5]),
    ),
    "samples": ("samples", limits.MAX_SAMPLES, _option("samples", lambda n: n)),
    "structure": (
        "structure",
        limits.MAX_STRUCTURE_BYTES,
        _option("structure", lambda n: Structure.regex("é" * (n // 2 - 1) + "a" * (n % 2 + 2))),
    ),
    "structure, choices": (
        "structure",
        limits.MAX_CHOICE_TEXTS,
        _option("structure", lambda n: Structure.choice(["x"] * n)),
    ),
    "window": ("window", limits.MAX_WINDOW, _option("window", lambda n: n)),
    "logprobs": ("logprobs", limits.MAX_LOGPROBS, _option("logprobs", lambda n: n)),
    "prompt_logprobs": (
        "prompt_logprobs",
        limits.MAX_LOGPROBS,
        _option("prompt_logprobs", lambda n: n),
    ),
    "branches": ("branches", limits.MAX_BRANCHES, _option("branches", lambda n: n)),
    **{
        name: (name, limits.MAX_NAME_LENGTH, _option(name, lambda n: "n" * n))
        for name in ("request_id", "tenant", "drafter")
    },
}
"""By name: the field, its limit, and a function that makes a request with a given amount."""


@pytest.mark.parametrize(("field", "limit", "ask"), LIMITS.values(), ids=LIMITS)
def test_what_is_beyond_a_limit_is_refused_at_both_ends(
    monkeypatch: pytest.MonkeyPatch, field: str, limit: int, ask: Ask
) -> None:
    request_from_wire(request_to_wire(*ask(limit)))  # accepted
    with pytest.raises(InvalidRequestError) as at_the_client:
        request_to_wire(*ask(limit + 1))
    # Another client may send what our client refuses.
    with monkeypatch.context() as unchecked:
        unchecked.setattr("paceline.wire.requests._check_limits", lambda request: None)
        unchecked.setattr("paceline.wire.requests.check_option", lambda name, value: None)
        sent = request_to_wire(*ask(limit + 1)).SerializeToString()
    monkeypatch.undo()
    with pytest.raises(InvalidRequestError) as at_the_server:
        request_from_wire(inference_pb2.GenerateRequest.FromString(sent))
    for caught in (at_the_client, at_the_server):
        assert caught.value.field == field
        assert f"{limit:,}" in str(caught.value)
        assert f"{limit + 1:,}" in str(caught.value)
    long = field in ("prompt", "prompt_token_ids") or (limit == limits.MAX_PROMPT_BYTES)
    assert isinstance(at_the_server.value, PromptTooLongError) == long


def test_the_largest_request_fits_into_a_message() -> None:
    name = "\N{GRINNING FACE}" * limits.MAX_NAME_LENGTH
    options = GenerateOptions(
        logit_bias={2**32 - 1 - key: 1.0 for key in range(limits.MAX_BIASED_TOKENS)},
        stop=["\N{GRINNING FACE}" * limits.MAX_STOP_LENGTH] * limits.MAX_STOP_STRINGS,
        stop_token_ids=[2**32 - 1] * limits.MAX_STOP_TOKENS,
        bad_words=["\N{GRINNING FACE}" * limits.MAX_BAD_WORD_LENGTH] * limits.MAX_BAD_WORDS,
        request_id=name,
        tenant=name,
        drafter=name,
        resume=[2**32 - 1] * limits.MAX_RESUMED_TOKENS,
        seed=2**64 - 1,
        max_tokens=2**32 - 1,
        structure=Structure.choice(["x" * 64] * limits.MAX_CHOICE_TEXTS),
    )
    prompts: list[GenerateInput] = [
        [2**32 - 1] * limits.MAX_SEQUENCE_TOKENS,
        "a" * limits.MAX_PROMPT_BYTES,
        [Message("user", "a" * (limits.MAX_PROMPT_BYTES // limits.MAX_MESSAGES - 4))]
        * limits.MAX_MESSAGES,
    ]
    for prompt in prompts:
        assert request_to_wire(prompt, options).ByteSize() < MAX_REQUEST_BYTES
