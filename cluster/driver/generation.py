"""Running requests as their callers see them: streams of events that never wait for a caller."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from cluster.decoding.instructions import Emit, Finish, FinishReason, Refuse
from cluster.driver.requests import ResolvedRequest
from cluster.driver.steady import Answer, Pace, size_of
from paceline.errors import OverloadedError, PacelineError
from paceline.generation import (
    Chunk,
    Finished,
    GenerateEvent,
    Origin,
    RequestStats,
    Started,
    TokenLogprobs,
)
from workers.process.server import unexpected

MAX_UNREAD_BYTES = 32 * 1024
"""Bytes of an answer (`size_of`), some 600 tokens, that its caller may leave unread before the
request is paused; with several samples, that many times. 1,000 sequences that nobody reads then
cost the driver some 100 MB."""

MAX_UNREAD_SECONDS = 60.0
"""Seconds that a caller may leave any part of an answer unread. The request ends within twice this
time. The connection of a suspended laptop ends sooner (`paceline.channel.CALLERS`)."""

_PROMPT_TOKENS_PER_CHUNK = 256
"""Prompt tokens whose log probabilities are in one message. With tokens of 100 bytes and the 20
likeliest of each, it has 600 KB."""

NOTHING_DECODED = RequestStats(0, 0, 0, 0.0, 0.0, 0.0)
"""Statistics of a request whose output had ended before it began."""

_DRAFT: tuple[Origin, ...] = ("draft",)
_TARGET: tuple[Origin, ...] = ("target",)


class CallerListener(Protocol):
    """Hears what callers do, by sequence id. Calls for sequences that have ended are allowed."""

    def cancel(self, sequence_id: int) -> None:
        """The caller wants no more."""

    def pause(self, sequence_id: int) -> None:
        """The caller leaves too much unread."""

    def resume(self, sequence_id: int) -> None:
        """The caller has read most of it again."""


class Generation:
    """A request with all its samples. Iterate over its events: `Started`, `Chunk`, `Finished`.

    Or call `take` whenever `on_told` reports an event. A caller who stops early must `cancel`.
    Unread events are kept, but not many. Beyond MAX_UNREAD_BYTES per sample, the request is paused
    until half of that is read. Events that stay unread for too long end it with OverloadedError.
    The prompt's log probabilities do not count, since MAX_PROMPT_LOGPROBS bounds them: a pause
    would lose the KV of a prompt that must then be computed again. An error of a sample ends the
    request.
    """

    def __init__(
        self,
        request: ResolvedRequest,
        sequence_ids: Sequence[int],
        listener: CallerListener,
        pace: Pace,
        *,
        max_unread_seconds: float = MAX_UNREAD_SECONDS,
    ) -> None:
        self.request_id = request.request_id
        self._listener = listener
        self.unread: deque[tuple[Answer, int]] = deque()
        """Events that `take` would return, each with its size (`size_of`)."""
        self._unread_bytes = 0
        self._num_taken = 0
        self._must_be_taken = 0
        """The number of answers that the caller must have taken by the next look."""
        self._paused = False
        self._most_bytes = MAX_UNREAD_BYTES * len(sequence_ids)
        self._num_open = len(sequence_ids)
        """Samples whose `Finished` was not given yet."""
        self._over = False
        """Whether the last answer was given."""
        self._when_over: Callable[[], None] = lambda: None
        self._woken = asyncio.Event()
        self._on_told: Callable[[], None] = self._woken.set
        self._loop = asyncio.get_running_loop()
        self._max_unread_seconds = max_unread_seconds
        self._looks: asyncio.TimerHandle | None = None
        self._is_steady = request.steady
        self.samples: tuple[Sample, ...] = ()
        self.give(
            Started(
                request.request_id,
                request.spec.seed,
                request.prompt_token_ids,
                request.in_reasoning,
            )
        )
        self.samples = tuple(
            Sample(self, request, number, sequence_id, pace)
            for number, sequence_id in enumerate(sequence_ids)
        )

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> GenerateEvent:
        while not self.unread:
            if self._over:
                raise StopAsyncIteration
            await self._woken.wait()
            self._woken.clear()
        answer = self.take()
        if isinstance(answer, PacelineError):
            raise answer
        return answer

    def take(self) -> Answer:
        """Take the first unread answer. There must be one."""
        answer, size = self.unread.popleft()
        self._num_taken += 1
        if not _is_of_prompt(answer):
            self._unread_bytes -= size
        self._go_on_if_read()
        if self._over and not self.unread:
            self._look_no_more()
        return answer

    def on_told(self, told: Callable[[], None]) -> None:
        """Call `told` whenever there is something to take, and at once if there is already."""
        self._on_told = told
        if self.unread:
            told()

    def call_when_over(self, over: Callable[[], None]) -> None:
        """Call `over` once the request has ended in any way, and at once if it has already."""
        if self._over:
            over()
        else:
            self._when_over = over

    @property
    def is_over(self) -> bool:
        """Whether the last answer was given."""
        return self._over

    @property
    def is_done(self) -> bool:
        """Whether the last answer was taken."""
        return self._over and not self.unread

    def cancel(self) -> None:
        """The caller wants no more. No error if the request has ended."""
        self.unread.clear()
        self._unread_bytes = 0
        self._look_no_more()
        self._end()

    def _end(self) -> None:
        """Decode nothing more, if the request has not ended."""
        for sample in self.samples:
            sample.hold_nothing()
        if not self._over:
            self._over = True
            self._when_over()
            for sample in self.samples:
                self._listener.cancel(sample.sequence_id)

    def fail(self, error: PacelineError) -> None:
        if not self._over:
            self._end()
            self._append(error)

    @property
    def _bytes(self) -> int:
        """Bytes that are unread, or wait for their turn."""
        held = sum(sample.held_bytes for sample in self.samples) if self._is_steady else 0
        return self._unread_bytes + held

    def pause_if_unread(self) -> None:
        if not (self._paused or self._over) and self._bytes > self._most_bytes:
            self._paused = True
            for sample in self.samples:
                self._listener.pause(sample.sequence_id)

    def _go_on_if_read(self) -> None:
        if self._paused and self._bytes <= self._most_bytes // 2:
            self._paused = False
            for sample in self.samples:
                self._listener.resume(sample.sequence_id)

    def give(self, answer: GenerateEvent) -> None:
        if self._over:
            return
        if isinstance(answer, Finished):
            self._num_open -= 1
            if not self._num_open:
                self._over = True
                self._when_over()
        self._append(answer)
        self.pause_if_unread()

    def _append(self, answer: Answer) -> None:
        if self._looks is None:
            self._looks = self._loop.call_later(self._max_unread_seconds, self._look)
        size = size_of(answer)
        self.unread.append((answer, size))
        if not _is_of_prompt(answer):
            self._unread_bytes += size
        self._on_told()

    def _look(self) -> None:
        """End the request if an answer is unread that was there at the last look."""
        if self._num_taken >= self._must_be_taken:
            self._must_be_taken = self._num_taken + len(self.unread)
            self._looks = self._loop.call_later(self._max_unread_seconds, self._look)
            return
        unread = self._unread_bytes
        self.cancel()
        error = OverloadedError(
            f"the caller left {unread:,} bytes of the answer unread for "
            f"{self._max_unread_seconds:g} s; read answers as they come"
        )
        self.unread.append((error, 0))
        self._on_told()

    def _look_no_more(self) -> None:
        if self._looks is not None:
            self._looks.cancel()
            self._looks = None


class Sample:
    """A sequence of a request, and what the caller gets of it. Implements events.StopScanner."""

    def __init__(
        self,
        generation: Generation,
        request: ResolvedRequest,
        number: int,
        sequence_id: int,
        pace: Pace,
    ) -> None:
        own = request.samples[number]
        self.number = number
        self.sequence_id = sequence_id
        self.request_id = request.request_id
        self.speculation = request.speculation
        self.generation = generation
        self.on_prompt_told: Callable[[], None] = lambda: None
        """Called once the caller was given all log probabilities of the prompt."""
        self._text = own.text
        self._text_error: Exception | None = None
        self._pace = pace
        self._pacer = pace.pacer(generation.give) if request.steady else None
        self._num_output = len(own.output_token_ids)
        self._prompt_token_ids = request.prompt_token_ids
        self._num_prompt_told = 0
        if request.spec_of(number).prompt_logprobs is not None:
            self._put_prompt((TokenLogprobs(None),))  # The first token has no probability.

    @property
    def lacks_prompt(self) -> bool:
        """Whether the caller still gets log probabilities of the prompt."""
        return 0 < self._num_prompt_told < len(self._prompt_token_ids)

    @property
    def held_bytes(self) -> int:
        return 0 if self._pacer is None else self._pacer.held_bytes

    def hold_nothing(self) -> None:
        if self._pacer is not None:
            self._pacer.cancel()

    def first_stop(self, token_ids: Sequence[int]) -> int | None:
        """Implements events.StopScanner. If this fails, `emit` raises the error."""
        try:
            return self._text.first_stop(token_ids)
        except Exception as error:  # It fails this request only.
            self._text_error = error
            return None

    def emit(self, emit: Emit, finish: Finish | None) -> None:
        """Give the caller committed tokens, and the end of the sequence if it ended with them."""
        if self._text_error is not None:
            raise self._text_error
        if emit.prompt_logprobs:
            self._put_prompt(emit.prompt_logprobs)
            if finish is not None:
                self.finish(finish)
            return
        pieces, rest = self._text.take(emit.token_ids, last=finish is not None)
        if rest:
            pieces[-1] += rest
        count = len(emit.token_ids)
        origins = _DRAFT * emit.num_drafted + _TARGET * (count - emit.num_drafted)
        self._num_output = emit.offset + count
        logprobs = self._text.named(emit.token_ids, emit.logprobs) if emit.logprobs else ()
        self._put(
            Chunk(
                emit.offset,
                emit.token_ids,
                origins,
                "".join(pieces),
                tuple(pieces),
                logprobs,
                sample=self.number,
                refused=self._text.texts_of(emit.refused) if emit.refused else (),
            )
        )
        if finish is not None:
            self._pace.observe(finish)
            self.end(finish)

    def _put_prompt(self, logprobs: tuple[TokenLogprobs, ...]) -> None:
        """Give the caller log probabilities of the next prompt tokens, in chunks of some size."""
        for first in range(0, len(logprobs), _PROMPT_TOKENS_PER_CHUNK):
            some = logprobs[first : first + _PROMPT_TOKENS_PER_CHUNK]
            begin = self._num_prompt_told
            self._num_prompt_told = begin + len(some)
            named = self._text.named(self._prompt_token_ids[begin : self._num_prompt_told], some)
            self._put(Chunk(self._num_output, (), (), "", (), prompt_logprobs=named))
        if not self.lacks_prompt:
            self.on_prompt_told()

    def finish(self, finish: Finish) -> None:
        """The sequence ended without further tokens."""
        _, rest = self._text.take((), last=True)
        if rest:
            self._put(Chunk(self._num_output, (), (), rest, (), sample=self.number))
        self.end(finish)

    def end(self, finish: Finish) -> None:
        """The sequence ended, and its caller has all the text."""
        stop = self._text.stopped_by if finish.reason is FinishReason.STOP else ""
        self._put(Finished(finish.reason.value, finish.stats, sample=self.number, stop=stop))

    def _put(self, event: Chunk | Finished) -> None:
        """Give the caller an event, in its turn if the answers are paced."""
        if self._pacer is None or self.generation.is_over or _is_of_prompt(event):
            self.generation.give(event)
        else:
            self._pacer.put(event)
            self.generation.pause_if_unread()


def _is_of_prompt(answer: Answer) -> bool:
    return isinstance(answer, Chunk) and bool(answer.prompt_logprobs)


class Callers:
    """The sequences of open requests, and instructions that were not delivered yet."""

    def __init__(self) -> None:
        self._samples: dict[int, Sample] = {}
        self._untold: deque[Emit | Finish | Refuse] = deque()

    def __len__(self) -> int:
        return len(self._samples)

    def add(self, sample: Sample) -> None:
        self._samples[sample.sequence_id] = sample

    def get(self, sequence_id: int) -> Sample | None:
        return self._samples.get(sequence_id)

    def drop(self, sequence_id: int) -> bool:
        """Deliver nothing more for a sequence. Returns whether there was one."""
        return self._samples.pop(sequence_id, None) is not None

    def fail_all(self, error: PacelineError) -> Mapping[int, Sample]:
        """End all requests with an error. Returns their sequences."""
        failed, self._samples = self._samples, {}
        for sample in failed.values():
            sample.generation.fail(error)
        return failed

    def later(self, instruction: Emit | Finish | Refuse) -> None:
        """Deliver this instruction at the next `tell`."""
        self._untold.append(instruction)

    def tell(self) -> None:
        """Deliver everything that waits. A sequence's last tokens and its end go together.

        If delivery fails, that request ends with InternalError, and its sequences are cancelled.
        """
        waiting = self._untold
        while waiting:
            instruction, finish = waiting.popleft(), None
            if isinstance(instruction, Emit) and waiting:
                follows = waiting[0]
                if isinstance(follows, Finish) and follows.sequence_id == instruction.sequence_id:
                    finish = follows
                    waiting.popleft()
            sample = self._samples.get(instruction.sequence_id)
            if sample is None:
                continue  # Its caller has gone.
            if finish is not None or not isinstance(instruction, Emit):
                del self._samples[instruction.sequence_id]
            try:
                _tell(sample, instruction, finish)
            except Exception:  # It fails this request only.
                sample.generation.fail(unexpected(sample.request_id))


def _tell(sample: Sample, instruction: Emit | Finish | Refuse, finish: Finish | None) -> None:
    match instruction:
        case Emit():
            sample.emit(instruction, finish)
        case Finish():
            sample.finish(instruction)
        case Refuse():
            sample.generation.fail(instruction.error)
