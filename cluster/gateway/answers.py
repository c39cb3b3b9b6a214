"""Answers as OpenAI's clients read them: one JSON object, or a stream of server-sent events."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import replace
from itertools import pairwise
from typing import Any

from cluster.gateway.drivers import DriverPool
from cluster.gateway.errors import http_error
from cluster.gateway.requests import Choice, CompletionRequest
from paceline.errors import InvalidRequestError
from paceline.generation import (
    Completion,
    CompletionBuilder,
    Finished,
    GenerateEvent,
    ModelDescription,
    RequestStats,
    Started,
)

Json = dict[str, Any]

Event = tuple[int, GenerateEvent]
"""An event of the choice with this index."""

_DONE = b"data: [DONE]\n\n"


class Answer:
    """The answer to one request. Use either `whole` or `stream`, once.

    `described`: what the drivers say of the model, whose name to the caller is `model`.
    """

    def __init__(
        self,
        pool: DriverPool,
        request: CompletionRequest,
        *,
        model: str,
        described: ModelDescription,
    ) -> None:
        self._pool = pool
        self._request = request
        self._model = model
        self._described = described
        self._is_chat = request.kind == "chat"
        self._id = f"{'chatcmpl' if self._is_chat else 'cmpl'}-{uuid.uuid4().hex}"
        self._created = int(time.time())

    async def whole(self) -> bytes:
        """The answer as one JSON object. Raises the error of the first choice that fails."""
        builders = [CompletionBuilder() for _ in self._request.choices]
        async with aclosing(self._events()) as events:
            async for index, event in events:
                builders[index].add(event)
        completions = [builder.build() for builder in builders]
        usage = _Usage(self._request.n)
        choices = []
        for index, one in enumerate(completions):
            usage.add_prompt(index, len(one.prompt_token_ids))
            usage.completion_tokens += len(one.token_ids)
            choices.append(self._choice(index, one))
        told = self._object("", choices) | {"usage": usage.told()}
        return _dumped(told | self._metrics([one.stats for one in completions]))

    async def stream(self) -> AsyncGenerator[bytes]:
        """The answer as server-sent events, each a complete one in ASCII.

        Until the first is yielded, the request's error is raised. Later an error is an event
        itself, after which the stream ends.
        """
        request = self._request
        usage, stats = _Usage(request.n), []
        opened: set[int] = set()
        has_begun = False
        async with aclosing(self._events()) as events:
            try:
                async for index, event in events:
                    if isinstance(event, Started):
                        usage.add_prompt(index, len(event.prompt_token_ids))
                        continue
                    told = []
                    if index not in opened:
                        opened.add(index)
                        if opening := self._opening(index):
                            told.append(self._chunk(index, opening))
                    if isinstance(event, Finished):
                        stats.append(event.stats)
                        told.append(self._chunk(index, self._delta(""), event.reason))
                    else:
                        usage.completion_tokens += len(event.token_ids)
                        if event.text:
                            told.append(self._chunk(index, self._delta(event.text)))
                    for chunk in told:
                        has_begun = True
                        yield chunk
            except Exception as error:
                if not has_begun:
                    raise
                yield b"data: " + http_error(error).body() + b"\n\n" + _DONE
                return
        if request.include_usage:
            whole = self._object(".chunk", []) | {"usage": usage.told()} | self._metrics(stats)
            yield _event(whole)
        yield _DONE

    async def _events(self) -> AsyncGenerator[Event]:
        """The events of all choices as they come. Raises the error of the first that fails."""
        queue: asyncio.Queue[Event | Exception] = asyncio.Queue(maxsize=1)
        tasks = []
        try:
            for index, choice in enumerate(self._request.choices):
                tasks.append(asyncio.create_task(self._feed(index, choice, queue)))
                await asyncio.sleep(0)  # Other requests go on between two large prompts.
            left = len(tasks)
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

    async def _feed(
        self, index: int, choice: Choice, queue: asyncio.Queue[Event | Exception]
    ) -> None:
        # The name of the request in the driver's log.
        options = replace(choice.options, request_id=f"{self._id}-{index}")
        try:
            async with aclosing(self._pool.stream(self._model, choice.input, options)) as events:
                async for event in events:
                    await queue.put((index, event))
        except InvalidRequestError as error:
            await queue.put(self._request.named(error))
        except Exception as error:
            await queue.put(error)

    def _choice(self, index: int, completion: Completion) -> Json:
        """A choice of a whole answer."""
        text = self._request.choices[index].echo + completion.text
        message = {"role": "assistant", "content": text, "refusal": None}
        return {
            "index": index,
            **({"message": message} if self._is_chat else {"text": text}),
            "logprobs": None,
            "finish_reason": completion.finish_reason,
        }

    def _opening(self, index: int) -> Json:
        """What comes before the first text of a choice; empty for nothing."""
        if self._is_chat:
            return {"role": "assistant", "content": ""}
        echo = self._request.choices[index].echo
        return {"text": echo} if echo else {}

    def _delta(self, text: str) -> Json:
        if self._is_chat:
            return {"content": text} if text else {}
        return {"text": text}

    def _chunk(self, index: int, delta: Json, finish_reason: str | None = None) -> bytes:
        """An event of one choice."""
        choice = {
            "index": index,
            **({"delta": delta} if self._is_chat else delta),
            "logprobs": None,
            "finish_reason": finish_reason,
        }
        told = self._object(".chunk", [choice])
        if self._request.include_usage:
            told["usage"] = None
        return _event(told)

    def _object(self, suffix: str, choices: list[Json]) -> Json:
        kind = f"chat.completion{suffix}" if self._is_chat else "text_completion"
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._model,
            "choices": choices,
        }

    def _metrics(self, stats: list[RequestStats]) -> Json:
        """`metrics`, as vLLM has it: for a single choice, if a step verified candidates."""
        if len(stats) != 1:
            return {}
        window = self._request.choices[0].options.window or self._described.default_window
        told = speculative_decoding(stats[0], window)
        return {"metrics": {"speculative_decoding": told}} if told else {}


class _Usage:
    """Counts the tokens of a request. A prompt counts once for its `n` choices."""

    def __init__(self, n: int) -> None:
        self._n = n
        self._prompt_tokens = 0
        self.completion_tokens = 0

    def add_prompt(self, index: int, num_tokens: int) -> None:
        """Count the prompt of the choice with this index."""
        if index % self._n == 0:
            self._prompt_tokens += num_tokens

    def told(self) -> Json:
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self._prompt_tokens + self.completion_tokens,
        }


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


def _event(told: Mapping[str, Any]) -> bytes:
    return b"data: " + _dumped(told) + b"\n\n"


def _dumped(told: Mapping[str, Any]) -> bytes:
    """JSON in ASCII. No division of the bytes divides a character, and no client takes another line
    end of Unicode for the end of an event.
    """
    return json.dumps(told, separators=(",", ":")).encode()
