"""A request being decoded, seen from its caller: a stream of events that never waits for them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from cluster.decoding.instructions import Emit, Finish, SequenceStats
from cluster.requests import ResolvedRequest
from cluster.text import TextStream
from paceline.errors import PacelineError
from paceline.generation import (
    Chunk,
    Finished,
    GenerateEvent,
    Origin,
    RequestStats,
    Started,
)

_DRAFT: tuple[Origin, ...] = ("draft",)
_TARGET: tuple[Origin, ...] = ("target",)


class Generation:
    """Iterate over its events: `Started`, any number of `Chunk`, `Finished`.

    Or have them passed to a function. A caller who stops early must `cancel`. What is not read is
    kept; max_tokens bounds it.
    """

    def __init__(
        self,
        request: ResolvedRequest,
        sequence_id: int,
        text: TextStream,
        on_cancel: Callable[[int], None],
    ) -> None:
        self.sequence_id = sequence_id
        self.request_id = request.request_id
        self.speculation = request.speculation
        self._text = text
        self._on_cancel = on_cancel
        self._events: asyncio.Queue[GenerateEvent | PacelineError] = asyncio.Queue()
        self._put: Callable[[GenerateEvent | PacelineError], None] = self._events.put_nowait
        self._put(Started(request.request_id, request.spec.seed, request.prompt_token_ids))
        self._num_output = 0
        self._over = False

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> GenerateEvent:
        if self._over:
            raise StopAsyncIteration
        event = await self._events.get()
        if isinstance(event, PacelineError):
            self._over = True
            raise event
        if isinstance(event, Finished):
            self._over = True
        return event

    def pass_to(self, take: Callable[[GenerateEvent | PacelineError], None]) -> None:
        """Give every event to `take` at once rather than to who iterates; an error is the last."""
        while not self._events.empty():
            take(self._events.get_nowait())
        self._put = take

    def cancel(self) -> None:
        """The caller wants no more. No error when it has ended."""
        if not self._over:
            self._over = True
            self._on_cancel(self.sequence_id)

    def fail(self, error: PacelineError) -> None:
        """End the stream with an error."""
        self._put(error)

    def emit(self, emit: Emit, finish: Finish | None) -> None:
        """Committed tokens, and how the sequence ended with them if it did."""
        pieces, rest = self._text.take(emit.token_ids, last=finish is not None)
        if rest:
            pieces[-1] += rest
        count = len(emit.token_ids)
        origins = _DRAFT * emit.num_drafted + _TARGET * (count - emit.num_drafted)
        self._num_output = emit.offset + count
        self._put(Chunk(emit.offset, emit.token_ids, origins, "".join(pieces), tuple(pieces)))
        if finish is not None:
            self._put(_finished(finish))

    def finish(self, finish: Finish) -> None:
        """The sequence ended without further tokens."""
        _, rest = self._text.take((), last=True)
        if rest:
            self._put(Chunk(self._num_output, (), (), rest, ()))
        self._put(_finished(finish))


def _finished(finish: Finish) -> Finished:
    stats: SequenceStats = finish.stats
    return Finished(
        reason=finish.reason.value,
        stats=RequestStats(
            steps=stats.steps,
            drafted=stats.drafted,
            accepted=stats.accepted,
            acceptance_length=stats.output_tokens / stats.steps if stats.steps else 0.0,
            seconds=stats.seconds,
            ttft_seconds=stats.ttft_seconds or 0.0,
            stopping_state=dict(stats.stopping_state),
            speculation=stats.speculation,
        ),
    )
