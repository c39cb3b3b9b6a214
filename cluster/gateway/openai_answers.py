"""Answers as OpenAI's clients read them: one JSON object, or a stream of server-sent events."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, Literal, cast

from cluster.gateway.answer_text import (
    AnswerReader,
    Content,
    Part,
    ReasoningFormat,
    ToolFormat,
    delta_of,
    message_of,
)
from cluster.gateway.drivers import DriverPool
from cluster.gateway.errors import http_error
from cluster.gateway.logprobs import TokenTexts, of_chat, of_completion, of_prompt, text_of
from cluster.gateway.metrics import RequestWatch
from cluster.gateway.requests import CompletionRequest
from paceline.errors import InvalidRequestError
from paceline.generation import (
    Chunk,
    Completion,
    Finished,
    GenerateEvent,
    ModelDescription,
    RequestStats,
    SampleBuilder,
    Started,
    TokenLogprobs,
    samples_of,
)

Json = dict[str, Any]

Event = tuple[int, GenerateEvent]
"""An event of the choice with this index."""

_DONE = b"data: [DONE]\n\n"

PADDED_TO = 512
"""The size of an event of a steady answer is a multiple of this many bytes. A usual one has 200."""


@dataclass(frozen=True, slots=True)
class Formats:
    """How chats write tool calls and reasoning. "auto": as their model's chat template shows it."""

    tool: ToolFormat | Literal["auto"] = "auto"
    reasoning: ReasoningFormat | Literal["auto"] = "auto"

    @classmethod
    def named(cls, tool: str, reasoning: str) -> Formats:
        names: dict[str, Any] = {"none": ""}
        return cls(names.get(tool, tool), names.get(reasoning, reasoning))

    def of(self, described: ModelDescription) -> tuple[ToolFormat, ReasoningFormat]:
        """The formats of a model. One that this gateway does not know is none."""
        tool = described.tool_format if self.tool == "auto" else self.tool
        reasoning = described.reasoning_format if self.reasoning == "auto" else self.reasoning
        return (
            cast("ToolFormat", tool if tool in ("hermes", "llama") else ""),
            cast("ReasoningFormat", reasoning if reasoning == "think" else ""),
        )


@dataclass(frozen=True, slots=True)
class Begun:
    """The driver has taken a request."""

    num_prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of an answer. `reason`: as OpenAI's `finish_reason`.

    `stop`: the stop string that ended it; "" for none.
    """

    reason: str
    stop: str
    num_prompt_tokens: int
    num_tokens: int
    num_reasoning_tokens: int
    num_cached_tokens: int


class Answer:
    """The answer to one request. Use one of `whole`, `completed`, `stream` and `pieces`, once.

    `described`: what the drivers say of the model, whose name to the caller is `model`. `watch`
    hears of all events. `id_prefix` begins `id`; None: as OpenAI's paths have it.
    """

    def __init__(
        self,
        pool: DriverPool,
        request: CompletionRequest,
        *,
        model: str,
        described: ModelDescription,
        watch: RequestWatch,
        formats: Formats | None = None,
        id_prefix: str | None = None,
    ) -> None:
        self._pool = pool
        self._watch = watch
        self._request = request
        self._model = model
        self._described = described
        self._is_chat = request.kind == "chat"
        self._number = uuid.uuid4().hex
        if id_prefix is None:
            id_prefix = "chatcmpl-" if self._is_chat else "cmpl-"
        self.id = f"{id_prefix}{self._number}"
        self._created = int(time.time())
        self._tool_format, self._reasoning_format = (formats or Formats()).of(described)
        self._readers: dict[int, AnswerReader] = {}
        """By choice."""
        if request.tools is not None and not self._tool_format:
            why = "this model's chat template shows no format of tool calls that is known here"
            raise InvalidRequestError("tools", f"{why}; see `paceline gateway --tool-format`")
        tools = request.tools
        self._forced = None if tools is None else tools.structure(self._tool_format)
        self._has_structure = self._forced is not None or any(
            prompt.options.structure is not None for prompt in request.prompts
        )
        """The whole answer fits it, so none of it is reasoning that the prompt has opened."""
        self.is_steady = any(prompt.options.steady for prompt in request.prompts)
        """Each event has one token, and hides its size."""
        watch.request_id = self.id

    async def whole(self) -> bytes:
        """The answer as one JSON object. Raises the error of the first choice that fails."""
        told, stats = await self.completed()
        return _dumped(told | self._metrics(stats))

    async def completed(self) -> tuple[Json, list[RequestStats]]:
        """The answer without `metrics`, and the counts of each choice. Raises as `whole` does."""
        builders = [SampleBuilder() for _ in range(self._request.num_choices)]
        async with aclosing(self._events()) as events:
            async for index, event in events:
                if isinstance(event, Started):
                    self._readers[index] = self._reader(event)
                builders[index].add(event)
        completions = [builder.build() for builder in builders]
        usage = _Usage(self._request.n)
        choices = []
        for index, one in enumerate(completions):
            usage.add_prompt(index, len(one.prompt_token_ids))
            if not self._request.is_prompt_only:
                usage.completion_tokens += len(one.token_ids)
            usage.add_stats(index, one.stats)
            choices.append(self._choice(index, one))
        told = self._object("", choices) | {"usage": usage.told()}
        if self._is_chat and self._request.tells_prompt_logprobs:
            first = completions[0]
            told["prompt_logprobs"] = of_prompt(first.prompt_token_ids, first.prompt_logprobs)
        if self._is_chat and self._request.tells_token_ids:
            told["prompt_token_ids"] = completions[0].prompt_token_ids
        return told, [one.stats for one in completions]

    async def stream(self) -> AsyncGenerator[bytes]:
        """The answer as server-sent events, each a complete one in ASCII. Raises as `whole` does.

        Once the first is sent, `failed` makes the last one of an error.
        """
        request = self._request
        usage, stats = _Usage(request.n), []
        # The log probabilities of each prompt, and the strings of each choice's tokens.
        prompts: list[list[TokenLogprobs]] = [[] for _ in range(request.num_choices)]
        texts = [TokenTexts() for _ in range(request.num_choices)]
        prompt_ids: dict[int, Sequence[int]] = {}
        opened: set[int] = set()
        async with aclosing(self._events()) as events:
            async for index, event in events:
                if isinstance(event, Started):
                    self._readers[index] = self._reader(event)
                    usage.add_prompt(index, len(event.prompt_token_ids))
                    if request.tells_token_ids:
                        prompt_ids[index] = event.prompt_token_ids
                    continue
                if isinstance(event, Chunk) and event.prompt_logprobs:
                    prompts[index] += event.prompt_logprobs
                    continue
                told = []
                if index not in opened:
                    opened.add(index)
                    opening = self._opening(index, prompts[index])
                    if opening or index in prompt_ids:
                        logprobs = self._logprobs(index, texts[index], prompts[index])
                        opening = opening or self._no_delta()
                        ids = prompt_ids.get(index)
                        told.append(self._chunk(index, opening, logprobs=logprobs, prompt_ids=ids))
                if isinstance(event, Finished):
                    stats.append(event.stats)
                    usage.add_stats(index, event.stats)
                    if rest := self._delta(index, None):
                        told.append(self._chunk(index, rest))
                    reason = self._finish_reason(index, event.reason)
                    told.append(self._chunk(index, self._no_delta(), reason))
                elif not request.is_prompt_only:
                    usage.completion_tokens += len(event.token_ids)
                    logprobs = self._logprobs(index, texts[index], event.logprobs)
                    delta = self._delta(index, event.text)
                    more: Json = {}
                    if request.tells_origins:
                        more["token_origins"] = _origins(event)
                    if request.tells_token_ids:
                        more["token_ids"] = event.token_ids
                    if delta or logprobs or any(more.values()) or self.is_steady:
                        delta = delta or self._no_delta()
                        told.append(self._chunk(index, delta, logprobs=logprobs, more=more))
                for chunk in told:
                    yield padded(chunk) if self.is_steady else chunk
        if request.include_usage:
            whole = self._object(".chunk", []) | {"usage": usage.told()} | self._metrics(stats)
            last = _event(whole)
            yield padded(last) if self.is_steady else last
        yield _DONE

    def failed(self, error: Exception) -> bytes:
        """The events that end a stream with an error."""
        return b"data: " + http_error(error).body() + b"\n\n" + _DONE

    async def pieces(self) -> AsyncGenerator[Begun | Sequence[Part] | Ended]:
        """The answer to a chat with one choice: its parts as they come, between two others.

        A sequence of parts may be empty. Raises the request's error.
        """
        begun, num_tokens, num_reasoning = Begun(0), 0, 0
        pending: list[TokenLogprobs] = []  # Of tokens whose text is held back.
        in_text = False
        async with aclosing(self._events()) as events:
            async for index, event in events:
                if isinstance(event, Started):
                    self._readers[index] = self._reader(event)
                    begun = Begun(len(event.prompt_token_ids))
                    yield begun
                elif isinstance(event, Finished):
                    parts = self._readers[index].end()
                    if in_text and not parts and pending:  # What ended it has no text.
                        parts = [Content("")]
                    yield _with_logprobs(parts, pending)
                    reason = self._finish_reason(index, event.reason)
                    counts = (begun.num_prompt_tokens, num_tokens, num_reasoning)
                    yield Ended(reason, event.stop, *counts, event.stats.cached_prompt_tokens)
                else:
                    num_tokens += len(event.token_ids)
                    reader, parts = self._readers[index], []
                    for number, piece in enumerate(event.pieces or (event.text,)):
                        if not reader.in_reasoning:
                            pending += event.logprobs[number : number + 1]
                        if new := reader.feed(piece):
                            parts += _with_logprobs(new, pending)
                            in_text, pending = isinstance(new[-1], Content), []
                        num_reasoning += reader.in_reasoning
                    yield parts

    async def _events(self) -> AsyncGenerator[Event]:
        """The events of all choices as they come. Raises the error of the first that fails.

        What is about a prompt comes for each of its choices.
        """
        queue: asyncio.Queue[Event | Exception] = asyncio.Queue(maxsize=1)
        tasks = []
        try:
            for number in range(len(self._request.prompts)):
                tasks.append(asyncio.create_task(self._feed(number, queue)))
                await asyncio.sleep(0)  # Other requests go on between two large prompts.
            left = self._request.num_choices
            while left:
                item = await queue.get()
                if isinstance(item, Exception):
                    raise item
                yield item
                left -= isinstance(item[1], Finished)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _feed(self, number: int, queue: asyncio.Queue[Event | Exception]) -> None:
        prompt, n = self._request.prompts[number], self._request.n
        # The name of the request in the driver's log.
        options = replace(prompt.options, request_id=f"{self.id}-{number}")
        if self._forced is not None:
            options = replace(options, structure=self._forced)
        watches = [self._watch.choice(self._model) for _ in range(n)]
        try:
            async with aclosing(self._pool.stream(self._model, prompt.input, options)) as events:
                async for event in events:
                    for sample in samples_of(event, n):
                        watches[sample].note(event)
                        await queue.put((number * n + sample, event))
        except Exception as error:  # Whoever reads the queue gets it.
            for watch in watches:
                watch.fail()
            if isinstance(error, InvalidRequestError):
                error = error.renamed(self._request.field_names)
            await queue.put(error)
        finally:
            for watch in watches:
                watch.end()

    def _choice(self, index: int, completion: Completion) -> Json:
        echo = self._echo(index, completion.prompt_logprobs)
        text, logprobs = completion.text, completion.logprobs
        if self._request.is_prompt_only:
            text, logprobs = "", ()
        if self._request.prompt_of(index).echo != "":
            logprobs = completion.prompt_logprobs + logprobs
        content: Json = {"text": echo + text}
        if self._is_chat:
            reader = self._readers[index]
            parts = [*reader.feed(text), *reader.end()]
            content = {"message": message_of(parts, partial(self._call_id, index))}
        told: Json = {
            "index": index,
            **content,
            "logprobs": self._logprobs(index, TokenTexts(), logprobs),
            "finish_reason": self._finish_reason(index, completion.finish_reason),
        }
        if self._request.tells_prompt_logprobs and not self._is_chat:
            told["prompt_logprobs"] = of_prompt(
                completion.prompt_token_ids, completion.prompt_logprobs
            )
        if self._request.tells_token_ids:
            told["token_ids"] = () if self._request.is_prompt_only else completion.token_ids
            if not self._is_chat:
                told["prompt_token_ids"] = completion.prompt_token_ids
        return told

    def _echo(self, index: int, prompt: Sequence[TokenLogprobs]) -> str:
        """The text of the prompt that a choice repeats; "" for none."""
        echo = self._request.prompt_of(index).echo
        return text_of(prompt) if echo is None else echo

    def _logprobs(
        self, index: int, texts: TokenTexts, logprobs: Sequence[TokenLogprobs]
    ) -> Json | None:
        """`logprobs` of tokens of a choice; None if there are none or they were not asked for."""
        if not logprobs or self._request.prompt_of(index).options.logprobs is None:
            return None
        return of_chat(texts, logprobs) if self._is_chat else of_completion(texts, logprobs)

    def _opening(self, index: int, prompt: Sequence[TokenLogprobs]) -> Json:
        """What comes before the first text of a choice; empty for nothing."""
        if self._is_chat:
            return {"role": "assistant", "content": ""}
        echo = self._echo(index, prompt)
        return {"text": echo} if echo or prompt else {}

    def _delta(self, index: int, text: str | None) -> Json:
        """What more text adds to a choice; {} for nothing. None: no text follows."""
        if not self._is_chat:
            return {"text": text} if text else {}
        reader = self._readers[index]
        parts = reader.end() if text is None else reader.feed(text)
        return delta_of(parts, partial(self._call_id, index))

    def _no_delta(self) -> Json:
        return {} if self._is_chat else {"text": ""}

    def _reader(self, started: Started) -> AnswerReader:
        tools, reasons = self._request.tools, bool(self._reasoning_format)
        return AnswerReader(
            # A call that is forced leaves no room for reasoning.
            reasoning_format="" if self._forced is not None else self._reasoning_format,
            in_reasoning=reasons and started.in_reasoning and not self._has_structure,
            tool_format=self._tool_format if tools is not None else "",
            tool_names=() if tools is None else tools.names,
            most_calls=None if tools is None else tools.most_calls,
        )

    def _call_id(self, index: int, number: int) -> str:
        """The id of a call of a choice. A caller sends it back with the tool's answer."""
        return f"call_{self._number[:24]}_{index}_{number}"

    def _finish_reason(self, index: int, reason: str) -> str:
        if self._request.is_prompt_only:
            return "length"
        has_calls = self._is_chat and self._readers[index].num_calls
        return "tool_calls" if has_calls and reason == "stop" else reason

    def _chunk(
        self,
        index: int,
        delta: Json,
        finish_reason: str | None = None,
        *,
        logprobs: Json | None = None,
        more: Json | None = None,
        prompt_ids: Sequence[int] | None = None,
    ) -> bytes:
        """An event of one choice. `more`: other fields of the choice."""
        choice = {
            "index": index,
            **({"delta": delta} if self._is_chat else delta),
            "logprobs": logprobs,
            "finish_reason": finish_reason,
            **(more or {}),
        }
        told = self._object(".chunk", [choice])
        if prompt_ids is not None:
            (told if self._is_chat else choice)["prompt_token_ids"] = prompt_ids
        if self._request.include_usage:
            told["usage"] = None
        return _event(told)

    def _object(self, suffix: str, choices: list[Json]) -> Json:
        kind = f"chat.completion{suffix}" if self._is_chat else "text_completion"
        return {
            "id": self.id,
            "object": kind,
            "created": self._created,
            "model": self._model,
            "choices": choices,
        }

    def _metrics(self, stats: list[RequestStats]) -> Json:
        """`metrics`, as vLLM has it: for a single choice, if a step verified candidates."""
        if len(stats) != 1:
            return {}
        window = self._request.prompts[0].options.window or self._described.default_window
        told = speculative_decoding(stats[0], window)
        return {"metrics": {"speculative_decoding": told}} if told else {}


def _origins(chunk: Chunk) -> list[Json]:
    """`token_origins`: for each token its id, the text that it made certain, and who found it.

    The last one may have `refused`: the texts of candidates that it is in place of.
    """
    told: list[Json] = [
        {"token_id": token_id, "text": text, "origin": origin}
        for token_id, text, origin in zip(chunk.token_ids, chunk.pieces, chunk.origins, strict=True)
    ]
    if told and chunk.refused:
        told[-1]["refused"] = chunk.refused
    return told


def _with_logprobs(parts: Sequence[Part], logprobs: Sequence[TokenLogprobs]) -> list[Part]:
    """The same parts; the first that is content gets the log probabilities."""
    told = [*parts]
    for place, part in enumerate(told):
        if isinstance(part, Content):
            told[place] = Content(part.text, tuple(logprobs))
            break
    return told


class _Usage:
    """Counts the tokens of a request. A prompt counts once for its `n` choices: in the first."""

    def __init__(self, n: int) -> None:
        self._n = n
        self._prompt_tokens = self._cached_tokens = 0
        self.completion_tokens = 0
        self._predicted: tuple[int, int] | None = None

    def add_prompt(self, index: int, num_tokens: int) -> None:
        if index % self._n == 0:
            self._prompt_tokens += num_tokens

    def add_stats(self, index: int, stats: RequestStats) -> None:
        """Count the cached tokens of a choice's prompt, and those of its prediction."""
        if index % self._n == 0:
            self._cached_tokens += stats.cached_prompt_tokens
        accepted, rejected = stats.accepted_prediction_tokens, stats.rejected_prediction_tokens
        if accepted or rejected:
            before = self._predicted or (0, 0)
            self._predicted = before[0] + accepted, before[1] + rejected

    def told(self) -> Json:
        told: dict[str, Any] = {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self._prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self._cached_tokens},
        }
        if self._predicted is not None:
            told["completion_tokens_details"] = {
                "accepted_prediction_tokens": self._predicted[0],
                "rejected_prediction_tokens": self._predicted[1],
            }
        return told


def speculative_decoding(stats: RequestStats, window: int) -> Json | None:
    """Counts of drafting under vLLM's names; None if no step verified a candidate.

    As there, a step without candidates does not count, and each step that counts gives one token
    besides those that it accepted. `window` is the most candidates of a step that was asked for;
    policy `auto` may choose more.
    """
    drafting = stats.speculation
    num_steps = next(iter(drafting.drafted_at), 0)
    if not num_steps:
        return None
    num_tokens = max(window, len(drafting.drafted_at))
    # reached[j]: the number of steps that accepted at least j candidates.
    reached = [num_steps, *drafting.accepted_at]
    reached += [0] * (num_tokens + 2 - len(reached))
    return {
        "mean_acceptance_length": 1 + stats.accepted / num_steps,
        "draft_acceptance_rate": stats.accepted / stats.drafted,
        "acceptance_histogram": [at_least - more for at_least, more in pairwise(reached)],
        "num_spec_steps": num_steps,
        "num_accepted_draft_tokens": stats.accepted,
        "num_draft_tokens": stats.drafted,
        "num_spec_tokens": num_tokens,
    }


def padded(event: bytes) -> bytes:
    """Events behind a comment, which clients skip, so that its size does not tell its text."""
    missing = -(len(event) + 2) % PADDED_TO
    return b":" + b" " * missing + b"\n" + event


def _event(told: Mapping[str, Any]) -> bytes:
    return b"data: " + _dumped(told) + b"\n\n"


def _dumped(told: Mapping[str, Any]) -> bytes:
    """JSON in ASCII. No division of the bytes divides a character, and no client takes another line
    end of Unicode for the end of an event.
    """
    return json.dumps(told, separators=(",", ":")).encode()
