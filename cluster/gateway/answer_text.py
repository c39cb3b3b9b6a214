"""Divides the text of a chat's answer, as it arrives, into reasoning, content and tool calls.

However the text is cut into pieces, the parts concatenate to the same. Text is held back only while
what follows decides what it is. Text that looks like a call and is none stays text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import regex

from paceline.generation import TokenLogprobs

MAX_HELD_CHARACTERS = 64 * 1024
"""Longest call that is held back as a whole, since its arguments come before its name. A longer one
stays text."""

ToolFormat = Literal["hermes", "llama", ""]
ReasoningFormat = Literal["think", ""]


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text between `<think>` and `</think>`."""

    text: str


@dataclass(frozen=True, slots=True)
class Content:
    """Text of the answer itself, and of its tokens as far as they are known by their text."""

    text: str
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class CallBegins:
    """A call begins, the first with index 0. Its arguments follow."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """More of the JSON text of a call's arguments."""

    index: int
    text: str


Part = Reasoning | Content | CallBegins | Arguments

# The number of spaces and line breaks is bounded, so that no text is matched again and again.
_HEAD = r"""
    \{ \s{0,16} (?: "type" \s{0,16} : \s{0,16} "function" \s{0,16} , \s{0,16} )?
    "name" \s{0,16} : \s{0,16} "(?P<name>[^"\\]{1,128})" \s{0,16} , \s{0,16}
    "(?: arguments | parameters )" \s{0,16} : \s{0,16} \{
"""
"""A call up to the brace that opens its arguments."""
_OTHER_HEAD = r'\{ \s{0,16} "(?: name | arguments | parameters | type | id )" \s{0,16} :'
"""A call that names its parts in another order."""


@dataclass(frozen=True, slots=True)
class _Format:
    """How calls are written. `marker`: what every call begins with, wherever it is in an answer.

    Without one, calls stand at the beginning of an answer, or after another call.
    """

    marker: str
    head: regex.Pattern[str]
    other_head: regex.Pattern[str]
    end: regex.Pattern[str]


def _format(marker: str, before: str, end: str) -> _Format:
    return _Format(
        marker,
        regex.compile(before + _HEAD, regex.VERBOSE),
        regex.compile(before + _OTHER_HEAD, regex.VERBOSE),
        regex.compile(end, regex.VERBOSE),
    )


_FORMATS = {
    "hermes": _format("<tool_call>", r"<tool_call> \s{0,16}", r"\s{0,16} </tool_call>"),
    "llama": _format("", r"(?: <\|python_tag\|> )? \s{0,16}", r"\s{0,16} ;"),
}
_CLOSING = regex.compile(r"\s{0,16}\}")
_THINK = regex.compile(r"\s{0,16}<think>")
_END_OF_THINK = regex.compile(r"\n{0,2}</think>")
_STRUCTURE = regex.compile(r'["\\{}\[\]]')
_MAX_GAP = 64
"""Most spaces and line breaks beside a call that are dropped."""
_DROPPED_BREAKS = 2
"""Line breaks dropped after `<think>` and after `</think>`, as templates write them."""


class AnswerReader:
    """Reads the text of one answer: `feed` it in pieces, then `end` it.

    `in_reasoning`: the prompt has opened `<think>` already. `tool_names`: the functions that the
    answer may call. `most_calls`: calls beyond these stay text.
    """

    def __init__(
        self,
        *,
        reasoning_format: ReasoningFormat = "",
        in_reasoning: bool = False,
        tool_format: ToolFormat = "",
        tool_names: Collection[str] = (),
        most_calls: int | None = None,
    ) -> None:
        self.num_calls = 0
        """Calls that have begun."""
        self._format = _FORMATS.get(tool_format) if tool_names else None
        self._tool_names = tool_names
        self._most_calls = most_calls
        self._text = ""  # Not decided yet.
        self._parts: list[Part] = []
        self._is_last = False
        self._breaks_left = 0
        self._scan = _Scan()
        begin = self._may_think if reasoning_format else self._gap
        self._state: Callable[[], bool] = begin
        if in_reasoning:
            self._drop_breaks_then(self._think)

    @property
    def in_reasoning(self) -> bool:
        """Whether what comes next is reasoning: `<think>` was opened and is not closed yet."""
        return self._state == self._think

    def feed(self, text: str) -> list[Part]:
        """The parts that became certain with more text."""
        self._text += text
        while self._state():
            pass
        parts, self._parts = self._parts, []
        return parts

    def end(self) -> list[Part]:
        """The parts that were held back. No text follows."""
        self._is_last = True
        return self.feed("")

    # The states. Each takes text from the front of `_text` and returns whether to go on: not, if
    # the next state, or the same one, needs more text.

    def _may_think(self) -> bool:
        match = _THINK.match(self._text, partial=True)
        if match is not None and not match.partial:
            self._text = self._text[match.end() :]
            self._drop_breaks_then(self._think)
            return True
        if match is not None and not self._is_last:
            return False
        self._state = self._gap
        return True

    def _drop_breaks_then(self, state: Callable[[], bool]) -> None:
        self._breaks_left = _DROPPED_BREAKS

        def drop() -> bool:
            while self._breaks_left and self._text.startswith("\n"):
                self._text = self._text[1:]
                self._breaks_left -= 1
            if not self._text and not self._is_last:
                return False
            self._state = state
            return True

        self._state = drop

    def _think(self) -> bool:
        match = _END_OF_THINK.search(self._text, partial=not self._is_last)
        self._take(Reasoning, len(self._text) if match is None else match.start())
        if match is None or match.partial:
            return False
        self._text = self._text[len(match.group()) :]
        self._drop_breaks_then(self._gap)
        return True

    def _gap(self) -> bool:
        """At the beginning of the content, or after a call."""
        if self._format is None:
            self._state = self._plain
            return True
        size = len(self._text) - len(self._text.lstrip())
        if size <= _MAX_GAP and size == len(self._text):
            if self._is_last and self.num_calls:
                self._text = ""
            if not self._is_last:
                return False
            size = 0
        if size <= _MAX_GAP and self._text[size:].startswith(self._format.marker):
            return self._call(size)
        marker_begins = self._format.marker.startswith(self._text[size:])
        if size <= _MAX_GAP and marker_begins and self._text and not self._is_last:
            return False
        self._state = self._content if self._format.marker else self._plain
        return True

    def _plain(self) -> bool:
        self._take(Content, len(self._text))
        return False

    def _content(self) -> bool:
        """After content, in a format with a marker."""
        assert self._format is not None
        marker = self._format.marker
        begin = self._text.find(marker)
        if begin >= 0:
            self._take(Content, begin)
            return self._call(0)
        held = 0
        if not self._is_last:
            held = next(
                n for n in range(len(marker) - 1, -1, -1) if self._text.endswith(marker[:n])
            )
        self._take(Content, len(self._text) - held)
        return False

    def _call(self, size: int) -> bool:
        """After `size` spaces the text may be a call."""
        assert self._format is not None
        is_full = self._most_calls is not None and self.num_calls >= self._most_calls
        text = self._text[size : size + 1024]
        match = None if is_full else self._format.head.match(text, partial=True)
        if match is not None and not match.partial:
            if match["name"] not in self._tool_names:
                return self._no_call(size + match.end())
            self._begin_call(match["name"])
            self._text = self._text[size + match.end() - 1 :]
            self._scan = _Scan()
            self._state = self._arguments
            return True
        if match is not None and not self._is_last:
            return False
        match = None if is_full else self._format.other_head.match(text, partial=True)
        if match is not None and not match.partial:
            self._text = self._text[size:]
            self._scan = _Scan(at=match.group().index("{"))
            self._state = self._whole
            return True
        if match is not None and not self._is_last:
            return False
        return self._no_call(size + len(self._format.marker))

    def _no_call(self, size: int) -> bool:
        """The first `size` characters are text, and what follows may begin with a call."""
        assert self._format is not None
        self._take(Content, size)
        self._state = self._content if self._format.marker else self._plain
        return True

    def _begin_call(self, name: str) -> None:
        self._parts.append(CallBegins(self.num_calls, name))
        self.num_calls += 1

    def _arguments(self) -> bool:
        end = self._scan.end_of_object(self._text)
        if text := self._text[:end]:
            self._parts.append(Arguments(self.num_calls - 1, text))
        self._text = "" if end is None else self._text[end:]
        self._scan.at = 0
        if end is None:
            return False
        self._state = self._close
        return True

    def _close(self) -> bool:
        """After the arguments: the brace of the call."""
        return self._skip(_CLOSING, self._after)

    def _after(self) -> bool:
        """After the call: what ends it, or divides it from the next."""
        assert self._format is not None
        return self._skip(self._format.end, self._gap)

    def _skip(self, pattern: regex.Pattern[str], state: Callable[[], bool]) -> bool:
        match = pattern.match(self._text, partial=not self._is_last)
        if match is not None and match.partial:
            return False
        if match is not None:
            self._text = self._text[match.end() :]
        self._state = state
        return True

    def _whole(self) -> bool:
        """A call that is held back until it is complete."""
        end = self._scan.end_of_object(self._text, most=MAX_HELD_CHARACTERS)
        if end is None:
            if self._scan.at < MAX_HELD_CHARACTERS and not self._is_last:
                return False
            return self._no_call(self._scan.at)
        called = _called(self._text[self._text.index("{") : end], self._tool_names)
        if called is None:
            return self._no_call(end)
        name, arguments = called
        self._begin_call(name)
        self._parts.append(Arguments(self.num_calls - 1, arguments))
        self._text = self._text[end:]
        self._state = self._after
        return True

    def _take(self, kind: type[Reasoning | Content], size: int) -> None:
        if size:
            self._parts.append(kind(self._text[:size]))
            self._text = self._text[size:]


class _Scan:
    """Looks for the end of a JSON object in text that grows. `at`: how far it has looked."""

    def __init__(self, at: int = 0) -> None:
        self.at = at
        self._open: list[str] = []  # What closes the open objects and lists.
        self._in_string = False
        self._is_escaped = False  # The next character is.

    def end_of_object(self, text: str, most: int | None = None) -> int | None:
        """Where the object has ended; None: not yet, within the first `most` characters.

        It also ends where a bracket closes that does not fit.
        """
        end = len(text) if most is None else min(len(text), most)
        while self.at < end:
            if self._is_escaped:
                self._is_escaped = False
                self.at += 1
                continue
            match = _STRUCTURE.search(text, self.at, end)
            if match is None:
                self.at = end
                return None
            self.at = match.end()
            character = match.group()
            if self._in_string:
                self._is_escaped = character == "\\"
                self._in_string = character != '"'
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._open.append("}" if character == "{" else "]")
            elif character in "}]":
                fits = self._open.pop() == character
                if not self._open or not fits:
                    return self.at
        return None


def _called(text: str, tool_names: Collection[str]) -> tuple[str, str] | None:
    """Name and arguments of a call in JSON text; None: it is no call of a tool."""
    try:
        call = json.loads(text)
    except (ValueError, RecursionError):
        return None
    name = call.get("name")
    arguments = call.get("arguments", call.get("parameters"))
    if not isinstance(name, str) or name not in tool_names:
        return None
    if arguments is not None and not isinstance(arguments, dict):
        return None
    return name, json.dumps(arguments or {}, ensure_ascii=False)


def delta_of(parts: Sequence[Part], call_id: Callable[[int], str]) -> dict[str, Any]:
    """What parts add to a message, as OpenAI's streams have it; {} for nothing.

    `call_id`: the id of the call with an index. The reasoning has vLLM's two names.
    """
    texts: dict[type[Part], str] = {
        kind: "".join(one.text for one in parts if isinstance(one, kind))
        for kind in (Reasoning, Content)
    }
    calls: dict[int, dict[str, Any]] = {}
    for part in parts:
        if isinstance(part, CallBegins):
            function = {"name": part.name, "arguments": ""}
            begun = {"id": call_id(part.index), "type": "function", "function": function}
            calls[part.index] = {"index": part.index, **begun}
        elif isinstance(part, Arguments):
            call = calls.setdefault(
                part.index, {"index": part.index, "function": {"arguments": ""}}
            )
            call["function"]["arguments"] += part.text
    delta: dict[str, Any] = {}
    if texts[Reasoning]:
        delta |= dict.fromkeys(("reasoning_content", "reasoning"), texts[Reasoning])
    if texts[Content]:
        delta["content"] = texts[Content]
    if calls:
        delta["tool_calls"] = list(calls.values())
    return delta


def message_of(parts: Sequence[Part], call_id: Callable[[int], str]) -> dict[str, Any]:
    """A whole message of parts. Its content is null if there is none beside calls or reasoning."""
    delta = delta_of(parts, call_id)
    content = delta.pop("content", None if delta else "")
    for call in delta.get("tool_calls", ()):
        del call["index"]
    return {"role": "assistant", "content": content, "refusal": None, **delta}
