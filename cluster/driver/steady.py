"""Steady answers: one token at a time, at a pace that does not follow acceptance.

Sizes and times of a stream's packets show how many candidates each step accepted, and that can tell
what the text is about (Carlini and Nasr, 2024; Wei et al., 2024). So a steady answer's pace comes
from earlier requests, never from its own steps. When no token is ready in time, the interval
doubles, as in the predictive mitigation of timing channels by Askarov, Zhang and Myers (2010): all
that times reveal is when that happened. docs/steady.md says what remains visible.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from cluster.decoding.instructions import Finish
from paceline.errors import PacelineError
from paceline.generation import Chunk, Finished, GenerateEvent

FIRST_INTERVAL = 0.05
"""Seconds from one token to the next before any request has ended: faster than people read."""

LONGEST_INTERVAL = 1.0
SHORTEST_INTERVAL = 0.001

SLACK = 1.25
"""The pace is slower than earlier requests by this factor, so that tokens are mostly ready."""

LEAD = 16
"""Intervals that the first token waits. Steps bring several tokens at a time, up to a window."""

CALM = 64
"""Tokens in a row that were ready, after which a doubled interval is halved again."""

_MEMORY = 1 / 16
"""Weight of one request in the pace."""

_FEWEST = 16
"""Fewest tokens of a request that tell about the pace."""

Answer = GenerateEvent | PacelineError
"""What a caller gets. An error is the last."""


def size_of(answer: Answer) -> int:
    """An upper bound of a chunk's bytes on the wire, cheap to compute; 0 for other answers."""
    if isinstance(answer, Chunk):
        # A token has an id, an origin and a piece's length. Characters come in text and in pieces.
        padding = 128 if answer.padded else 0
        size = 64 + 16 * len(answer.token_ids) + 8 * len(answer.text) + padding
        size += sum(8 + 4 * len(one) for one in answer.refused)
        for one in (*answer.logprobs, *answer.prompt_logprobs):
            # Each entry has an id, a number, and the length of the token's bytes.
            size += 32 + 16 * len(one.top_ids) + len(one.token) + sum(map(len, one.top_tokens))
        return size
    return 0


class Pace:
    """The pace of new steady answers. All requests that end tell about it."""

    def __init__(self) -> None:
        self._seconds: float | None = None
        """Mean time from one token of a request to the next."""
        self._open: set[Pacer] = set()

    @property
    def num_open(self) -> int:
        """Steady answers of which some tokens wait for their turn."""
        return sum(pacer.held_bytes > 0 for pacer in self._open)

    @property
    def interval(self) -> float:
        """Seconds from one token to the next for an answer that begins now.

        It is rounded up to a power of the square root of 2, so that it tells little about others.
        """
        if self._seconds is None:
            return FIRST_INTERVAL
        exact = min(max(self._seconds * SLACK, SHORTEST_INTERVAL), LONGEST_INTERVAL)
        rounded: float = 2.0 ** (math.ceil(2 * math.log2(exact)) / 2)
        return rounded

    def observe(self, finish: Finish) -> None:
        if finish.output_tokens < _FEWEST:
            return
        stats = finish.stats
        seconds = (stats.seconds - stats.ttft_seconds) / (finish.output_tokens - 1)
        before = seconds if self._seconds is None else self._seconds
        self._seconds = before + _MEMORY * (seconds - before)

    def pacer(self, give: Callable[[GenerateEvent], None]) -> Pacer:
        """The pacer of a new answer, which calls `give` with each event in its turn."""
        pacer = Pacer(give, self.interval, on_end=self._open.discard)
        self._open.add(pacer)
        return pacer


class Pacer:
    """Holds the events of one answer, and gives them one token at a time."""

    def __init__(
        self,
        give: Callable[[GenerateEvent], None],
        interval: float,
        on_end: Callable[[Pacer], None],
    ) -> None:
        self.held_bytes = 0
        """Size of the events that wait for their turn (`size_of`)."""
        self._give = give
        self._on_end = on_end
        self._least = self._interval = interval
        self._held: deque[Chunk | Finished] = deque()
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._turn = 0.0
        """The loop's time of the next turn."""
        self._calm = 0

    def put(self, event: GenerateEvent) -> None:
        """Give an event later. The tokens of a chunk are given one by one."""
        if isinstance(event, Chunk):
            for one in _single(event):
                self._held.append(one)
                self.held_bytes += size_of(one)
        elif isinstance(event, Finished):
            self._held.append(event)
        if self._timer is None:
            self._turn = self._loop.time() + LEAD * self._interval
            self._timer = self._loop.call_at(self._turn, self._take_turn)

    def cancel(self) -> None:
        self._held.clear()
        self.held_bytes = 0
        if self._timer is not None:
            self._timer.cancel()
        self._on_end(self)

    def _take_turn(self) -> None:
        if not self._held:
            self._interval = min(2 * self._interval, LONGEST_INTERVAL)
            self._calm = 0
        else:
            self._calm += 1
            if self._calm == CALM:
                self._interval = max(self._interval / 2, self._least)
                self._calm = 0
            event = self._held.popleft()
            if isinstance(event, Chunk):
                self.held_bytes -= size_of(event)
                self._give(event)
            if self._held and isinstance(self._held[0], Finished):
                event = self._held.popleft()
            if isinstance(event, Finished):
                self._give(event)
                self._on_end(self)
                return
        # A late turn delays those after it: two tokens never come together.
        self._turn = max(self._turn, self._loop.time() - self._interval) + self._interval
        self._timer = self._loop.call_at(self._turn, self._take_turn)


def _single(chunk: Chunk) -> list[Chunk]:
    """A chunk for each token. A chunk without tokens stays as it is."""
    if len(chunk.token_ids) < 2:
        return [replace(chunk, padded=True)]
    return [
        Chunk(
            chunk.offset + index,
            (token_id,),
            (origin,),
            piece,
            (piece,),
            logprobs=chunk.logprobs[index : index + 1],
            padded=True,
            sample=chunk.sample,
        )
        for index, (token_id, origin, piece) in enumerate(
            zip(chunk.token_ids, chunk.origins, chunk.pieces, strict=True)
        )
    ]
