"""The gRPC service of a target shard (target.proto): meetings of shards, and Step streams.

Everything runs on one event loop, including the forward pass: a shard has no other work that could
overlap with a step, and a thread for the step gained nothing in measurements. gRPC's core answers
pings without Python, so a long pass does not look like a dead process.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc

from paceline.errors import PacelineError
from paceline.v1 import target_pb2, target_pb2_grpc, types_pb2
from workers.engine.engine import Engine, group_of
from workers.engine.parallel.weight_cuts import Place
from workers.process.handshake import Reception
from workers.process.server import status_code
from workers.process.threads import Begun, WorkerClock, in_own_thread
from workers.target.faults import StepFailures
from workers.target.stepper import StepEngine, StepParts, Stepper, VerdictsOf
from workers.target.verdicts import verdicts_of
from workers.verification.grammars import Grammars
from workers.verification.rule import RULES

SERVICE_NAME = target_pb2.DESCRIPTOR.services_by_name["TargetService"].full_name
TAKE_OVER_SECONDS = 0.5
"""Seconds that a second Step stream waits for the first one to end before it is refused."""

_LONGEST_SESSION = 64
_log = logging.getLogger(__name__)
_Context = grpc.aio.ServicerContext[Any, Any]
_END = grpc.aio.EOF  # type: ignore[attr-defined]  # the stubs lack it


class TargetShard(target_pb2_grpc.TargetServiceServicer):
    """Answers UNAVAILABLE until `begin`. `threads`: the engine's CPU threads."""

    def __init__(
        self,
        *,
        threads: int = 1,
        clock: WorkerClock | None = None,
        reception: Reception | None = None,
    ) -> None:
        self.reception = reception or Reception("target shard")
        self._engine: StepEngine | None = None
        self._verdicts_of: VerdictsOf = verdicts_of
        self._grammars: Grammars | None = None
        self._threads = threads
        self._clock = clock or WorkerClock()
        self.on_broken: Callable[[str], None] | None = None
        """Called with the reason when this process cannot work any more and should end."""
        self._failures = StepFailures(self._give_up, self._check)
        # Held by the stream that may step: the KV blocks belong to it.
        self._live = asyncio.Lock()
        self._held_by = ""
        self.on_serving: Callable[[bool], None] = lambda serving: None
        """Called with False when a step fails by our own fault, with True when one succeeds."""

    def add_to(self, server: grpc.aio.Server) -> tuple[str]:
        """Add this servicer to a server. Returns the names of its services."""
        target_pb2_grpc.add_TargetServiceServicer_to_server(self, server)
        return (SERVICE_NAME,)

    def begin(
        self,
        engine: StepEngine,
        verdicts_of: VerdictsOf = verdicts_of,
        grammars: Grammars | None = None,
    ) -> None:
        """Start serving. `verdicts_of` takes what the engine's `step` returns.

        `grammars`: compiles structures, where tokens are chosen; None: a sequence with a structure
        gets an error for a verdict.
        """
        self._engine, self._verdicts_of, self._grammars = engine, verdicts_of, grammars

    async def DescribeTarget(
        self, request: target_pb2.DescribeTargetRequest, context: _Context
    ) -> target_pb2.DescribeTargetResponse:
        if request.HasField("hello"):
            self.reception.check(request.hello, context.peer())
        return self._describe(await self._loaded(context))

    async def Meet(
        self, request: target_pb2.MeetRequest, context: _Context
    ) -> target_pb2.MeetResponse:
        engine, peer = await self._loaded(context), context.peer()
        hello = await self.reception.hear(_hello_of_meeting(request), peer)
        if not 0 < len(request.session) <= _LONGEST_SESSION:
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"session: expected 1 to {_LONGEST_SESSION} characters, got {len(request.session)}",
            )
        with self.reception.entered(hello, lambda replaced: None, peer):
            if isinstance(engine, Engine) and engine.group is not None:
                await self._take(context, hello, else_status=grpc.StatusCode.UNAVAILABLE)
                try:
                    await in_own_thread(lambda: _meet(engine, request), threads=self._threads)
                except PacelineError as error:
                    await context.abort(status_code(error), str(error))
                finally:
                    self._live.release()
        return target_pb2.MeetResponse(description=self._describe(engine))

    async def _take(
        self, context: _Context, hello: types_pb2.Hello, *, else_status: grpc.StatusCode
    ) -> None:
        """Take the shard for a meeting or a stream; the caller must release it."""
        try:
            async with asyncio.timeout(TAKE_OVER_SECONDS):
                await self._live.acquire()
        except TimeoutError:
            await context.abort(
                else_status,
                f"this shard is stepping for the driver {self._held_by!r}; end its stream first",
            )
        self._held_by = hello.driver

    # It reads and writes by the context instead of iterating and yielding. A generator that is
    # cancelled at a yield is closed only when it is garbage-collected, and until then the next
    # stream would find the shard taken. The next step is read while the answer is being written.
    async def Step(  # type: ignore[override]
        self, request_iterator: AsyncIterator[target_pb2.StepRequest], context: _Context
    ) -> None:
        engine, peer = await self._loaded(context), context.peer()
        hello = await self.reception.hear(_hello_of_stream(context), peer)
        stepping, replaced = asyncio.current_task(), list[PacelineError]()
        assert stepping is not None

        def end(error: PacelineError) -> None:
            replaced.append(error)
            stepping.cancel()  # It stops at its next wait. That is cheaper than to ask each step.

        try:
            with self.reception.entered(hello, end, peer):
                await self._steps(engine, context, hello)
        except asyncio.CancelledError:
            if not replaced:
                raise
            stepping.uncancel()
            await context.abort(status_code(replaced[0]), str(replaced[0]))

    async def _steps(self, engine: StepEngine, context: _Context, hello: types_pb2.Hello) -> None:
        await self._take(context, hello, else_status=grpc.StatusCode.FAILED_PRECONDITION)
        reading: Begun[Any] | None = None
        try:
            await context.send_initial_metadata(self.reception.welcome)
            stepper = Stepper(engine, self._verdicts_of, self._clock, self._grammars)
            reading = Begun(context.read())
            parts = StepParts()
            while (message := await reading) is not _END:
                request = parts.add(message)
                if request is None:
                    reading = Begun(context.read())
                    continue
                writing = Begun(context.write(self._step(stepper, request)))
                reading = Begun(context.read())
                await writing
        except PacelineError as error:
            await context.abort(status_code(error), str(error))
        except Exception as error:
            _log.exception("a defect ended a Step stream")
            await context.abort(
                grpc.StatusCode.INTERNAL, f"a defect ended the stream: {type(error).__name__}"
            )
        finally:
            if (group := group_of(engine)) is not None:
                group.leave()  # a rank that waits for this one fails at once
            self._live.release()
            if reading is not None:
                reading.cancel()

    def _step(self, stepper: Stepper, request: target_pb2.StepRequest) -> target_pb2.StepResponse:
        """Run a step. Failures are counted. Raises every exception as a PacelineError."""
        try:
            response = stepper.step(request)
        except Exception as error:
            failure = self._failures.step_failed(request.step, error)
            if failure is None:
                raise
            self.on_serving(False)
            raise failure from error
        if request.slices:
            self._failures.step_answered()
            self.on_serving(True)
        return response

    def _check(self) -> None:
        """Raise if the engine cannot compute. The live stream loses its KV."""
        engine = self._engine
        if isinstance(engine, Engine):
            if engine.group is not None:
                engine.group.leave()  # a rank that waits for this one fails at once
            engine.check_computes()

    def _give_up(self, reason: str) -> None:
        if self.on_broken is not None:
            self.on_broken(reason)

    def _describe(self, engine: StepEngine) -> target_pb2.DescribeTargetResponse:
        place, rendezvous = Place(), None
        if (group := group_of(engine)) is not None:
            place, rendezvous = group.place, group.rendezvous
        return target_pb2.DescribeTargetResponse(
            model=engine.info.name,
            vocab_size=engine.info.vocab_size,
            vocabulary_digest=engine.info.vocabulary_digest,
            max_model_len=engine.max_model_len,
            block_size=engine.block_size,
            num_blocks=engine.num_blocks,
            rank=place.rank,
            tensor_parallel=place.degree,
            end_token_ids=engine.info.end_token_ids,
            pid=os.getpid(),
            batch_invariant=bool(engine.batch_invariant),
            rendezvous=rendezvous or "",
            checkpoint_digest=engine.info.digest,
            dtype=engine.dtype,
            rules=RULES,
            version=self.reception.version,
            life=self.reception.life,
        )

    async def _loaded(self, context: _Context) -> StepEngine:
        if self._engine is None:
            await context.abort(
                grpc.StatusCode.UNAVAILABLE, "the checkpoint is still being loaded; try again"
            )
        assert self._engine is not None
        return self._engine


async def _hello_of_meeting(
    request: target_pb2.MeetRequest,
) -> tuple[str, types_pb2.Hello | None]:
    return "a meeting", request.hello if request.HasField("hello") else None


async def _hello_of_stream(context: _Context) -> tuple[str, types_pb2.Hello | None]:
    """What the first message of a stream is, and its hello, if it has one."""
    message = await context.read()
    if message is _END:
        return "the end of the stream", None
    return f"step {message.step}", message.hello if message.HasField("hello") else None


def _meet(engine: Engine, request: target_pb2.MeetRequest) -> None:
    """Meet the other ranks. Raises WorkerLostError; CheckpointError if their checkpoints differ."""
    assert engine.group is not None
    engine.group.meet(request.session, request.rendezvous)
    try:
        engine.agree()
    except PacelineError:
        engine.group.leave()
        raise
