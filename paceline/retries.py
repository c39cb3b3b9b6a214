"""How long a caller waits, when a client sends a request again, and how it resumes an answer.

A request that is sent again names what was received: as input the token ids of the prompt, the
seed, and as `resume` the output. So nothing is lost or repeated, at whatever server, and what
follows joins exactly (inference.proto, GenerateRequest.resume).
"""

from __future__ import annotations

import math
import random
import time
from dataclasses import dataclass, replace

from paceline.errors import (
    DeadlineError,
    InvalidRequestError,
    OverloadedError,
    PacelineError,
    UnavailableError,
    WrongServerError,
)
from paceline.generation import CallerInput, Chunk, Finished, GenerateEvent, Started
from paceline.options import GenerateOptions

ATTEMPTS = 8
"""Default of `Retries.attempts`: how often a request may reach a server that then fails it."""

AWAY_SECONDS = 30.0
"""Default of `Retries.away_seconds`. A driver or a gateway that was lost is back in some 5 s."""

AWAY_PAUSE_SECONDS = 0.5
"""Longest pause between two looks whether a server is back: what they add to its absence."""

GROWTH = 2.0
"""Factor from one pause to the next."""

JITTER = 0.5
"""Largest part by which a pause is made shorter at random, so that not all clients return at once.
"""

MOST_TOLD_SECONDS = 60.0
"""Longest pause that a server may ask for. Beyond that its error is raised at once."""

LONGEST_SECONDS = 1e8
"""Longest timeout of a caller, about three years. Python's locks refuse some hundred years."""

_MOST_DOUBLINGS = 32


def checked_seconds(name: str, seconds: float | None) -> float | None:
    """`seconds` as a float, or None. Raises InvalidRequestError, which names the field `name`."""
    if seconds is None:
        return None
    expected = f"expected seconds above 0, at most {LONGEST_SECONDS:.0e}, or None"
    if not isinstance(seconds, int | float) or not 0 < seconds <= LONGEST_SECONDS:
        raise InvalidRequestError(name, f"{expected}; got {seconds!r}")
    return float(seconds)


class Deadline:
    """When a request to `address` must have ended. Without a timeout: never."""

    def __init__(self, address: str, timeout: float | None) -> None:
        self._address = address
        self._timeout = timeout
        self._at = math.inf if timeout is None else time.monotonic() + timeout

    def left(self) -> float | None:
        """Seconds that are left, at least 0; None without a timeout."""
        return None if self._timeout is None else max(0.0, self._at - time.monotonic())

    def or_within(self, seconds: float) -> Deadline:
        """This deadline; without a timeout, one `seconds` from now."""
        return self if self._timeout is not None else Deadline(self._address, seconds)

    def error(self) -> DeadlineError:
        return DeadlineError(
            f"the request to the server at {self._address} did not end within its timeout of "
            f"{self._timeout:g} s, and was cancelled"
        )


@dataclass(frozen=True, slots=True)
class Retries:
    """How often, and after which pauses, a client sends a request again.

    `attempts`: how many further attempts may follow without a new token; then the error is raised.
    0: a request is sent once. Pauses begin with `first_seconds` and double up to `most_seconds`. A
    server that cannot be reached costs no attempt: the client looks for it for `away_seconds`.
    """

    attempts: int = ATTEMPTS
    first_seconds: float = 0.1
    most_seconds: float = 5.0
    away_seconds: float = AWAY_SECONDS

    def __post_init__(self) -> None:
        grows = 0 <= self.first_seconds <= self.most_seconds
        if self.attempts < 0 or not grows or not self.away_seconds >= 0:
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
        self.reached = True
        """Whether the last attempt reached a server."""
        self._away_since: float | None = None
        self._num_looks = 0

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
        if told > MOST_TOLD_SECONDS or self._is_enough():
            raise error
        if self.reached:
            number, longest = self._num_in_vain, retries.most_seconds
            self._num_in_vain += 1
        else:
            number, longest = self._num_looks, min(AWAY_PAUSE_SECONDS, retries.most_seconds)
            self._num_looks += 1
        pause = min(retries.first_seconds * GROWTH ** min(number, _MOST_DOUBLINGS), longest)
        pause = told + pause * (1 - JITTER * random.random())
        left = None if deadline is None else deadline.left()
        if left is not None and left <= pause:
            raise error
        return pause

    def _is_enough(self) -> bool:
        """Whether to try no more. Counts how long no server was reached."""
        if self.reached:
            self._away_since, self._num_looks = None, 0
            return self._num_in_vain >= self._retries.attempts
        now = time.monotonic()
        if self._away_since is None:
            self._away_since = now
        is_over = now - self._away_since > self._retries.away_seconds
        return is_over or self._retries.attempts == 0
