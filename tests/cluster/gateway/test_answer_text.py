"""Reasoning, content and tool calls in the text of an answer, however it is cut into pieces."""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.gateway.answer_text import (
    MAX_HELD_CHARACTERS,
    AnswerReader,
    Arguments,
    CallBegins,
    Content,
    Part,
    Reasoning,
    delta_of,
    message_of,
)

NAMES = ("weather", "add")


def _reader(**options: Any) -> AnswerReader:
    wanted = {"tool_format": "hermes", "tool_names": NAMES, "reasoning_format": "think"}
    return AnswerReader(**wanted | options)


def _joined(parts: Iterable[Part]) -> list[Part]:
    """Neighbors of one kind as one."""
    joined: list[Part] = []
    for part in parts:
        last = joined[-1] if joined else None
        if isinstance(part, Reasoning | Content) and type(last) is type(part):
            joined[-1] = type(part)(last.text + part.text)
        elif isinstance(part, Arguments) and isinstance(last, Arguments):
            assert last.index == part.index
            joined[-1] = Arguments(part.index, last.text + part.text)
        else:
            joined.append(part)
    return joined


def _read(pieces: Iterable[str], **options: Any) -> list[Part]:
    reader = _reader(**options)
    parts = [part for piece in pieces for part in reader.feed(piece)]
    return _joined(parts + reader.end())


def _call(index: int, name: str, arguments: str) -> list[Part]:
    return [CallBegins(index, name), Arguments(index, arguments)]


HERMES = '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call>'
LLAMA = '{"name": "weather", "parameters": {"city": "Ulm"}}'
ULM = '{"city": "Ulm"}'
NESTED = '{"a": "}\\"]\\\\", "b": [{"c": "</tool_call>"}, {}], "ü": {"d": -1e3}}'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Hello.", [Content("Hello.")]),
        ("", []),
        ("  \n", [Content("  \n")]),
        (HERMES, _call(0, "weather", ULM)),
        (f"\n{HERMES}\n", _call(0, "weather", ULM)),
        (f"Let me see.\n{HERMES}", [Content("Let me see.\n"), *_call(0, "weather", ULM)]),
        (f"{HERMES}\nDone.", [*_call(0, "weather", ULM), Content("\nDone.")]),
        (f"{HERMES}\n{HERMES}", [*_call(0, "weather", ULM), *_call(1, "weather", ULM)]),
        (
            f'<tool_call>{{"name":"add","arguments":{NESTED}}}</tool_call>',
            _call(0, "add", NESTED),
        ),
        # The original Hermes order, and no arguments at all.
        (
            '<tool_call>{"arguments": {"x": "}"}, "name": "add"}</tool_call>',
            _call(0, "add", '{"x": "}"}'),
        ),
        ('<tool_call>\n{"name": "add"}\n</tool_call>', _call(0, "add", "{}")),
        ('<tool_call>{"name": "add", "arguments": null}</tool_call>', _call(0, "add", "{}")),
        # The end of the answer closes what the model left open.
        ('<tool_call>{"name": "add", "arguments": {"x": 1}', _call(0, "add", '{"x": 1}')),
        ('<tool_call>{"name": "add", "arguments": {"x": "1', _call(0, "add", '{"x": "1')),
        # Reasoning.
        ("<think>\nHm.\n</think>\n\nYes.", [Reasoning("Hm."), Content("Yes.")]),
        ("<think>\n\n</think>\n\nYes.", [Content("Yes.")]),
        ("\n<think>a</think>b", [Reasoning("a"), Content("b")]),
        ("<think>a", [Reasoning("a")]),
        ("<think>a</thin", [Reasoning("a</thin")]),
        (f"<think>{HERMES}</think>{HERMES}", [Reasoning(HERMES), *_call(0, "weather", ULM)]),
        ("Well <think>a</think>", [Content("Well <think>a</think>")]),
    ],
)
def test_hermes_and_reasoning(text: str, expected: list[Part]) -> None:
    assert _read([text]) == expected
    assert _read(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>",
        "a < b, <tool",
        "<tool_call>\n{",
        "<tool_call> in words </tool_call>",
        '<tool_call>{"name": "fly", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "fly"}</tool_call>',
        '<tool_call>{"name": "add", "arguments": 5}</tool_call>',
        '<tool_call>{"name": "add", "arguments": [}</tool_call>',
        '<tool_call>{"name": "add" "arguments": {}}</tool_call>',
        '<tool_call>{"size": 5}</tool_call>',
        '<tool_call>{"arguments": {"x": 1}, "name": 5}</tool_call>',
        f"<tool_call>{' ' * 17}{{}}",
        "</tool_call>",
        LLAMA,
    ],
)
def test_what_looks_like_a_call_and_is_none_stays_text(text: str) -> None:
    assert _read([text]) == [Content(text)]
    assert _read(text) == [Content(text)]
    # And calls after it are found.
    calls = _call(0, "weather", ULM)
    assert _read([f"{text} x {HERMES}"]) == [Content(f"{text} x "), *calls]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (LLAMA, _call(0, "weather", ULM)),
        (f"<|python_tag|>{LLAMA}", _call(0, "weather", ULM)),
        (f"\n\n{LLAMA}\n", _call(0, "weather", ULM)),
        (f"{LLAMA}; {LLAMA}", [*_call(0, "weather", ULM), *_call(1, "weather", ULM)]),
        (f"{LLAMA}\n{LLAMA}", [*_call(0, "weather", ULM), *_call(1, "weather", ULM)]),
        (
            '{"type": "function", "name": "add", "parameters": {"x": 1}}',
            _call(0, "add", '{"x": 1}'),
        ),
        ('{"parameters": {"x": 1}, "name": "add"}', _call(0, "add", '{"x": 1}')),
        ('{"name": "add"}', _call(0, "add", "{}")),
        ('{"name": "fly", "parameters": {}}', None),
        ('{"name": "Ulm"}', None),
        ('{"city": "Ulm"}', None),
        (f"Here: {LLAMA}", None),
        ("{", None),
    ],
)
def test_llama(text: str, expected: list[Part] | None) -> None:
    expected = [Content(text)] if expected is None else expected
    assert _read([text], tool_format="llama") == expected
    assert _read(text, tool_format="llama") == expected


def test_a_prompt_that_opened_the_reasoning() -> None:
    expected = [Reasoning("Hm."), Content("Yes.")]
    assert _read(["\nHm.</think>Yes."], in_reasoning=True) == expected
    assert _read("\nHm.\n</think>\n\nYes.", in_reasoning=True) == expected


def test_without_tools_or_formats_all_is_text() -> None:
    text = f"<think>a</think>{HERMES}"
    assert _read(text, tool_format="", reasoning_format="") == [Content(text)]
    assert _read(text, tool_names=(), reasoning_format="") == [Content(text)]
    assert _reader(tool_format="", reasoning_format="").feed("<") == [Content("<")]


def test_calls_beyond_the_most_stay_text() -> None:
    one = _call(0, "weather", ULM)
    assert _read([HERMES + HERMES], most_calls=1) == [*one, Content(HERMES)]
    two = f"{LLAMA}; {LLAMA}"
    assert _read([two], most_calls=1, tool_format="llama") == [*one, Content(f" {LLAMA}")]


_TOKENS = st.sampled_from(
    [
        *("<tool_call>", "</tool_call>", "<think>", "</think>", "<|python_tag|>", "\n", " ", "{"),
        *("}", '"', "\\", "[", "]", ":", ",", ";", "<", "/", "tool", "ü", "x" * 300),
        *('{"name": "', 'add"', ', "arguments": ', '{"x": 1}', '"parameters": {', " " * 70),
        *(HERMES, LLAMA, "<think>\n"),
    ]
)


@settings(max_examples=400, deadline=None)
@given(
    tokens=st.lists(_TOKENS, max_size=12),
    cuts=st.lists(st.integers(0, 2000), max_size=12),
    tool_format=st.sampled_from(["hermes", "llama", ""]),
    in_reasoning=st.booleans(),
)
def test_any_cuts_give_the_same(
    tokens: list[str], cuts: list[int], tool_format: str, in_reasoning: bool
) -> None:
    text = "".join(tokens)
    options = {"tool_format": tool_format, "in_reasoning": in_reasoning}
    whole = _read([text], **options)
    ends = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    assert _read([text[begin:end] for begin, end in pairwise(ends)], **options) == whole
    assert _read(text, **options) == whole
    # Nothing is made up: all but the frames of calls is text of the answer, in its order.
    at = 0
    for part in whole:
        shown = part.name if isinstance(part, CallBegins) else part.text
        if not isinstance(part, Arguments) or shown != "{}":
            at = text.find(shown, at)
            assert at >= 0 or isinstance(part, Arguments | CallBegins)
            at = max(at, 0) + (0 if isinstance(part, CallBegins) else len(shown))


def test_only_what_may_become_a_marker_is_held_back() -> None:
    reader = _reader(in_reasoning=True)
    assert reader.feed("a <b") == [Reasoning("a <b")]
    assert reader.feed(" </th") == [Reasoning(" ")]
    assert reader.feed("e") == [Reasoning("</the")]
    assert reader.feed("</think>Hi <tool") == [Content("Hi ")]
    assert reader.feed("s") == [Content("<tools")]
    assert reader.feed('<tool_call>{"name": "add", "arguments": {') == _call(0, "add", "{")
    assert reader.feed('"x": ') == [Arguments(0, '"x": ')]
    assert reader.feed('"}') == [Arguments(0, '"}')]


def test_a_call_that_is_held_back_has_a_bound() -> None:
    text = '<tool_call>{"arguments": {"x": "' + "y" * MAX_HELD_CHARACTERS
    reader = _reader()
    assert _joined(reader.feed(text[:MAX_HELD_CHARACTERS])) == [
        Content(text[:MAX_HELD_CHARACTERS])
    ] or not _joined(reader.feed(""))
    assert _read([text]) == [Content(text)]
    assert _read(text) == [Content(text)]


def test_messages_and_deltas() -> None:
    parts = [Reasoning("Hm."), *_call(0, "add", "{}"), *_call(1, "add", "{"), Arguments(1, "}")]
    message = message_of(parts, lambda index: f"call-{index}")
    assert message["content"] is None
    assert message["reasoning_content"] == message["reasoning"] == "Hm."
    told = [(one["id"], one["type"], one["function"]) for one in message["tool_calls"]]
    function = {"name": "add", "arguments": "{}"}
    assert told == [("call-0", "function", function), ("call-1", "function", function)]
    assert message_of([], str) == {"role": "assistant", "content": "", "refusal": None}
    assert delta_of([Arguments(1, "}")], str) == {
        "tool_calls": [{"index": 1, "function": {"arguments": "}"}}]
    }
    assert delta_of([], str) == {}
    json.dumps(message)
