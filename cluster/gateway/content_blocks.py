"""Answers as rows of blocks, for interfaces that have them: Anthropic's, and OpenAI's responses.

A block is a text, reasoning, or a call. `BlockAnswer` has an `Answer` to a chat written by a
`BlockWriter`, whole or as events: one writer an interface.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Literal, Protocol

from cluster.gateway.answer_text import Arguments, CallBegins, Content, Part, Reasoning
from cluster.gateway.errors import HttpError, http_error
from cluster.gateway.logprobs import TokenTexts, of_chat
from cluster.gateway.openai_answers import Answer, Begun, Ended, padded
from cluster.gateway.requests import Body, CompletionRequest, chat_request
from paceline.errors import InvalidRequestError

Json = dict[str, Any]
BlockKind = Literal["text", "reasoning", "call"]
_KINDS: Mapping[type[Part], BlockKind] = {Content: "text", Reasoning: "reasoning"}


@dataclass(slots=True)
class Block:
    """A block of an answer. `number` counts from 0. `text`: of a call, the JSON of its arguments.

    `name` and `call` are a call's: the function, and the number of the call in the answer.
    `logprobs`: of a text's tokens, as a chat has them; empty if they were not asked for.
    """

    number: int
    kind: BlockKind
    text: str = ""
    name: str = ""
    call: int = 0
    logprobs: list[Json] = field(default_factory=list)
    token_texts: TokenTexts = field(default_factory=TokenTexts)


class BlockWriter(Protocol):
    """Writes one answer in the form of an interface. Each event has its name in `type`."""

    def begin(self, num_prompt_tokens: int) -> list[Json]:
        """The events before the first block."""

    def open(self, block: Block) -> list[Json]:
        """A block begins."""

    def more(self, block: Block, text: str, logprobs: list[Json]) -> list[Json]:
        """More text of the block that is open. `logprobs`: those that came with it."""

    def close(self, block: Block, *, is_cut: bool) -> list[Json]:
        """The block ends. `is_cut`: since the answer has as many tokens as it may have."""

    def end(self, blocks: Sequence[Block], ended: Ended) -> list[Json]:
        """The events after the last block."""

    def whole(self, blocks: Sequence[Block], ended: Ended) -> Json:
        """The answer as one object, after `begin`."""

    def failed(self, error: HttpError) -> list[Json]:
        """The events that end an answer with an error."""


@dataclass(frozen=True, slots=True)
class BlockRequest:
    """A request for an answer in blocks: that of a chat, and who writes the answer.

    `writer` makes a writer of the answer's id and of the model's name. `id_prefix` begins the id.
    `numbers_events`: each event has a `sequence_number`, from 0.
    """

    chat: CompletionRequest
    id_prefix: str
    writer: Callable[[str, str], BlockWriter]
    numbers_events: bool = False

    @property
    def model(self) -> str | None:
        """The model's name; None: the body names none."""
        return self.chat.model

    @property
    def stream(self) -> bool:
        return self.chat.stream


class BlockAnswer:
    """The answer to a BlockRequest. Use one of `whole` and `stream`, once."""

    def __init__(self, answer: Answer, request: BlockRequest, model: str) -> None:
        self._answer = answer
        self._writer = request.writer(answer.id, model)
        self._numbers = count() if request.numbers_events else None
        self._blocks: list[Block] = []
        self._is_open = False
        """Whether the last block is."""

    async def whole(self) -> bytes:
        """The answer as one JSON object. Raises the request's error."""
        async with aclosing(self._answer.pieces()) as pieces:
            async for piece in pieces:
                self._written(piece)
                if isinstance(piece, Ended):
                    return json.dumps(self._writer.whole(self._blocks, piece)).encode()
        raise AssertionError("an answer without an end")

    async def stream(self) -> AsyncGenerator[bytes]:
        """The answer as server-sent events, each a complete one in ASCII. Raises as `whole` does.

        Once the first is sent, `failed` makes the last one of an error.
        """
        held: list[Json] = []  # What begins the answer waits for its first token, or its error.
        async with aclosing(self._answer.pieces()) as pieces:
            async for piece in pieces:
                events = held + self._written(piece)
                if isinstance(piece, Begun):
                    held = events
                    continue
                held = []
                sent = self._sent(events)
                if self._answer.is_steady:
                    sent = padded(sent)
                if sent:
                    yield sent

    def failed(self, error: Exception) -> bytes:
        """The events that end a stream with an error."""
        return self._sent(self._writer.failed(http_error(error)))

    def _sent(self, events: list[Json]) -> bytes:
        if self._numbers is not None:
            events = [one | {"sequence_number": next(self._numbers)} for one in events]
        return b"".join(
            f"event: {one['type']}\ndata: {json.dumps(one)}\n\n".encode() for one in events
        )

    def _written(self, piece: Begun | Ended | Sequence[Part]) -> list[Json]:
        if isinstance(piece, Begun):
            return self._writer.begin(piece.num_prompt_tokens)
        if isinstance(piece, Ended):
            closed = self._close(is_cut=piece.reason == "length")
            return closed + self._writer.end(self._blocks, piece)
        events = []
        for part in piece:
            events += self._add(part)
        return events

    def _add(self, part: Part) -> list[Json]:
        if isinstance(part, CallBegins):
            return self._open("call", name=part.name, call=part.index)
        kind: BlockKind = "call" if isinstance(part, Arguments) else _KINDS[type(part)]
        events = []
        if not self._is_open or self._blocks[-1].kind != kind:
            events = self._open(kind)
        block = self._blocks[-1]
        block.text += part.text
        logprobs = part.logprobs if isinstance(part, Content) else ()
        told = of_chat(block.token_texts, logprobs)["content"]
        block.logprobs += told
        return events + self._writer.more(block, part.text, told)

    def _open(self, kind: BlockKind, *, name: str = "", call: int = 0) -> list[Json]:
        events = self._close()
        block = Block(len(self._blocks), kind, name=name, call=call)
        self._blocks.append(block)
        self._is_open = True
        return events + self._writer.open(block)

    def _close(self, *, is_cut: bool = False) -> list[Json]:
        if not self._is_open:
            return []
        self._is_open = False
        return self._writer.close(self._blocks[-1], is_cut=is_cut)


def chat_as(body: Body, names: Mapping[str, str]) -> CompletionRequest:
    """The request in a chat's body that was translated from another interface's.

    `names`: what fields of the chat are called there. Raises InvalidRequestError with that name.
    """
    with renamed(names):
        return chat_request(body).with_names(names)


@contextmanager
def renamed(names: Mapping[str, str]) -> Iterator[None]:
    """Errors name fields of a chat as another interface does. Functions of tools are flat there."""
    try:
        yield
    except InvalidRequestError as error:
        flat = {error.field: error.field.replace(".function", "")}
        raise error.renamed({**flat, **names}) from None


def refusal(name: str, expected: str, came: object) -> InvalidRequestError:
    """The error of a field that has another value than was expected."""
    shown = came if isinstance(came, str) else type(came).__name__
    return InvalidRequestError(name, f"expected {expected}, got {shown!r:.100}")


def table_in(name: str, value: object) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise refusal(name, "an object", value)
    return value


def list_in(name: str, value: object, expected: str) -> list[Any]:
    if not isinstance(value, list):
        raise refusal(name, expected, value)
    return value


def tables_in(name: str, value: object, expected: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The objects of a value that must be a list of them, each with its name."""
    for number, item in enumerate(list_in(name, value, expected)):
        where = f"{name}[{number}]"
        yield where, table_in(where, item)


def text_in(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise refusal(name, "a string", value)
    return value
