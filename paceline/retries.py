"""When a client sends a request again, and how it resumes an answer that broke off.

A request that is sent again names what was received: as input the token ids of the prompt, the
seed, and as `resume` the output so far. So nothing is lost or repeated, at whatever server, and
what follows joins exactly (inference.proto, GenerateRequest.resume).
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from paceline.deadline import Deadline
from paceline.errors import (
    InvalidRequestError,
    OverloadedError,
    PacelineError,
    UnavailableError,
    WrongServerError,
)
from paceline.generation import CallerInput, Chunk, Finished, GenerateEvent, Started
from paceline.options import GenerateOptions

ATTEMPTS = 8
"""Default of `Retries.attempts`. With the pauses between them they take some 12 s, in which a
driver is restarted."""

GROWTH = 2.0
"""Factor from one pause to the next."""

JITTER = 0.5
"""Largest part by which a pause is made shorter at random, so that not all clients return at once.
"""

MOST_TOLD_SECONDS = 60.0
"""Longest pause that a server may ask for. Beyond that its error is raised at once."""


@dataclass(frozen=True, slots=True)
class Retries:
    """How often, and after which pauses, a client sends a request again.

    `attempts`: how many further attempts may follow without a new token; then the error is raised.
    0: a request is sent once. Pauses begin with `first_seconds` and double up to `most_seconds`.
    """

    attempts: int = ATTEMPTS
    first_seconds: float = 0.1
    most_seconds: float = 5.0

    def __post_init__(self) -> None:
        if self.attempts < 0 or not 0 <= self.first_seconds <= self.most_seconds:
            raise InvalidRequestError(
                "retries", f"expected attempts and seconds of at least 0, growing, got {self}"
            )


DEFAULT_RETRIES = Retries()


class Answering:
    """One request until its answer is whole. `input` and `options`: what to send next.

    Only UnavailableError is followed by another attempt, and OverloadedError if the server says
    when to come back. Others would come again.
    """

    def __init__(
        self, generate_input: CallerInput, options: GenerateOptions, retries: Retries
    ) -> None:
        self.input = generate_input
        self._options = options
        self._retries = retries
        self._has_started = False
        self._has_prompt_logprobs = False
        self._token_ids: list[list[int]] = []
        """The output of each sample that the caller has; empty before `Started`."""
        self._finished: set[int] = set()
        """Samples whose ends the caller has."""
        self._num_in_vain = 0

    @property
    def options(self) -> GenerateOptions:
        """The options of the next attempt."""
        if not self.has_tokens:
            return self._options
        # The caller has the log probabilities of the prompt, which come before the first token.
        options = replace(self._options, prompt_logprobs=None)
        if self._options.samples in (None, 1):
            return replace(options, resume=tuple(self._token_ids[0]), resume_samples=())
        return replace(options, resume_samples=tuple(map(tuple, self._token_ids)))

    @property
    def has_tokens(self) -> bool:
        """Whether the caller has part of the output."""
        return any(self._token_ids)

    def take(self, event: GenerateEvent) -> bool:
        """Note an event. Returns whether it is new to the caller."""
        if isinstance(event, Started):
            if self._has_started:
                return False
            self._has_started = True
            options = self._options
            resumed = [*map(list, options.resume_samples)] or [list(options.resume)]
            missing = (options.samples or 1) - len(resumed)
            self._token_ids = resumed + [[] for _ in range(missing)]
            self.input = event.prompt_token_ids
            self._options = replace(options, seed=event.seed, request_id=event.request_id)
        elif isinstance(event, Chunk) and event.prompt_logprobs:
            self._has_prompt_logprobs = True
        elif isinstance(event, Chunk) and event.token_ids:
            self._token_ids[event.sample] += event.token_ids
            self._num_in_vain = 0
        elif isinstance(event, Finished):
            if event.sample in self._finished:
                return False
            self._finished.add(event.sample)
        return True

    def pause_after(self, error: PacelineError, deadline: Deadline | None = None) -> float:
        """Seconds to wait before the next attempt. Raises `error` if there is to be none."""
        retries = self._retries
        told = 0.0
        if isinstance(error, OverloadedError) and error.retry_seconds is not None:
            told = error.retry_seconds
        elif not isinstance(error, UnavailableError) or isinstance(error, WrongServerError):
            raise error
        if self._has_prompt_logprobs and not self.has_tokens:
            raise error  # Another attempt would tell them again.
        if self._num_in_vain >= retries.attempts or told > MOST_TOLD_SECONDS:
            raise error
        pause = min(retries.first_seconds * GROWTH**self._num_in_vain, retries.most_seconds)
        self._num_in_vain += 1
        pause = told + pause * (1 - JITTER * random.random())
        left = None if deadline is None else deadline.left()
        if left is not None and left <= pause:
            raise error
        return pause
