"""The links to target groups: one Step stream for each shard, opened and lost as a whole.

Groups may come and go while requests run.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Collection, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, Protocol

import grpc

from cluster.decoding.events import TargetJoined
from cluster.decoding.instructions import RunStep
from cluster.driver.connections import (
    DESCRIBE_SECONDS,
    Outbox,
    keep_open,
    named_mismatch,
    one_line,
    open_channel,
    open_stream,
    run_until_one_ends,
    say_hello,
    start_heard,
)
from cluster.driver.meters import WorkerMeter, shard_name
from cluster.driver.target_groups import joined_by
from cluster.driver.worker_messages import step_messages
from paceline.errors import (
    CheckpointError,
    ProtocolError,
    UnavailableError,
    VersionMismatchError,
    VocabularyMismatchError,
    WorkerLostError,
)
from paceline.v1 import target_pb2, target_pb2_grpc, types_pb2
from workers.process.handshake import DriverIdentity, split_life
from workers.process.mutual_tls import WorkerTls
from workers.verification.rule import RULES

MEET_SECONDS = 90.0
"""Deadline for a meeting of shards. It covers the shards' own deadline, and the test that a group
makes at its first meeting."""

_LOOK_SECONDS = 0.02
"""Interval at which a group that joins or leaves is looked at."""

_log = logging.getLogger(__name__)


class TargetListener(Protocol):
    """Hears of the target's groups, by number. Its methods do not wait."""

    def target_joined(self, joined: TargetJoined) -> None:
        """Every shard has a fresh stream. Raises CheckpointError for another model."""

    def target_lost(self, group: int, reason: str) -> None:
        """A stream broke."""

    def note_target(self, trouble: str) -> None:
        """The server at the target's addresses was not accepted. It is asked again later."""

    def step_answered(self, group: int, response: target_pb2.StepResponse) -> None:
        """Rank 0 answered a step. Raises ProtocolError if it does not answer the last one."""

    def target_scaled(self, num_groups: int) -> None:
        """The target is to have this number of groups. Groups with higher numbers let nobody in."""

    def is_busy(self, group: int) -> bool:
        """Whether sequences run in a group."""

    def break_down(self, error: BaseException) -> None:
        """A link ended by a defect, so the target would not be connected again."""


@dataclass(frozen=True, slots=True)
class StepTimeout:
    """How long an answer may take. A hung shard answers pings but no steps."""

    seconds: float = 60.0
    seconds_per_token: float = 0.25

    def of(self, tokens: int) -> float:
        """Seconds for a step that feeds `tokens` tokens."""
        return self.seconds + self.seconds_per_token * tokens


class TargetLink:
    """Keeps the streams to all shards of a group open, as far as possible."""

    def __init__(
        self,
        addresses: Sequence[str],
        listener: TargetListener,
        identity: DriverIdentity,
        *,
        group: int,
        vocabulary_digest: bytes,
        step_timeout: StepTimeout,
        tls: WorkerTls | None = None,
    ) -> None:
        """`group`: number of this group.

        An address may tell the life of the shard that is meant (handshake.with_life).
        """
        self._identity = identity
        self._tls = tls
        self.meters = [
            WorkerMeter(shard_name(rank, group=group), "target", "")
            for rank in range(len(addresses))
        ]
        self._lives: list[int | None] = []
        self.move(addresses)
        self._group = group
        self.retires = False
        """Whether the group leaves the target: it is not connected again once it is lost."""
        self.last_error = "no shard has answered yet"
        self._listener = listener
        self._vocabulary_digest = vocabulary_digest
        self._step_timeout = step_timeout
        self._outboxes: list[Outbox[target_pb2.StepRequest]] = []
        self._answer_by: float | None = None
        self._has_asked = False  # Over the present streams.
        self._in_answer = False
        self.refused: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Fails with VocabularyMismatchError if the target is the wrong one, with CheckpointError
        if its shards do not belong together, and with VersionMismatchError."""

    @property
    def is_refused(self) -> bool:
        """Whether it is to join, and was refused. It tries again."""
        return self.refused.done() and not self.retires and not self.meters[0].connected

    def move(self, addresses: Sequence[str]) -> None:
        """Look for the shards at these addresses from the next connection on."""
        told = [split_life(address) for address in addresses]
        for meter, (address, _) in zip(self.meters, told, strict=True):
            meter.address = address
        self._lives = [life for _, life in told]

    def send(self, step: RunStep) -> None:
        """Send a step to every shard. The target must be joined."""
        self._has_asked = True
        try:
            requests = step_messages(step)
        except Exception:  # It costs this step only.
            _log.exception("a defect kept step %d from being sent", step.step)
            self._answer_by = 0.0  # Treat the step as lost with the target.
            return
        for request in requests:
            for outbox in self._outboxes:
                outbox.put(request)
        # While the reader of rank 0 handles an answer, it writes for itself.
        if self._in_answer:
            self._outboxes[0].begin()
        for outbox in self._outboxes[1:] if self._in_answer else self._outboxes:
            outbox.wake()
        tokens = sum([len(part.token_ids) for part in step.slices])
        self._answer_by = asyncio.get_running_loop().time() + self._step_timeout.of(tokens)
        for meter in self.meters:
            meter.tokens += tokens

    async def run(self) -> None:
        """Connect and serve, again whenever a stream breaks, until it is cancelled or retires."""
        await keep_open(
            self._serve,
            self.meters,
            f"target group {self._group}",
            self._failed,
            is_over=lambda: self.retires,
        )

    def _failed(self, error: Exception, reason: str) -> float:
        self.last_error = reason
        if isinstance(error, VocabularyMismatchError | CheckpointError | VersionMismatchError):
            if not self.refused.done():
                self.refused.set_exception(error)
                self.refused.exception()  # Marks it as seen, in case no task waits for it.
            self._listener.note_target(reason)
        return 0.0

    async def _serve(self) -> None:
        async with AsyncExitStack() as stack:
            stubs = [
                target_pb2_grpc.TargetServiceStub(
                    await stack.enter_async_context(open_channel(meter.address, self._tls))
                )
                for meter in self.meters
            ]
            expected = list(self._lives)
            descriptions = await self._describe(stubs)
            self._check(descriptions, expected)
            lives = [shard.life for shard in descriptions]
            if len(stubs) > 1:
                try:
                    descriptions = await self._meet(stubs, descriptions)
                except grpc.aio.AioRpcError:
                    for meter in self.meters:
                        meter.failed()
                    raise
            calls = [open_stream(stub.Step) for stub in stubs]
            greetings = [
                say_hello(call, target_pb2.StepRequest(hello=hello), hello.worker)
                for call, hello in zip(calls, self._hellos(lives), strict=True)
            ]
            await asyncio.gather(*greetings)
            if self.retires:
                raise WorkerLostError("the group leaves the target")
            self._outboxes = [Outbox(call.write) for call in calls]
            self._answer_by, self._has_asked = None, False
            for meter, shard in zip(self.meters, descriptions, strict=True):
                meter.join(kind="target", pid=shard.pid, model=shard.model)
            try:
                self._listener.target_joined(joined_by(self._group, descriptions))
                await run_until_one_ends(
                    self._read_answers(calls[0]),
                    *[self._drain(rank, call) for rank, call in enumerate(calls) if rank],
                    *[outbox.run() for outbox in self._outboxes],
                    self._watch(),
                )
            except BaseException as error:
                reason = one_line(error)
                raise
            else:
                reason = "a stream was ended"
            finally:
                self._outboxes = []
                for meter in self.meters:
                    meter.leave(asked=self._has_asked)
                self._listener.target_lost(self._group, reason)

    def _hellos(self, lives: Sequence[int | None], *, stream: bool = True) -> list[types_pb2.Hello]:
        return [
            self._identity.hello(meter.name, life, stream=stream)
            for meter, life in zip(self.meters, lives, strict=True)
        ]

    async def _describe(
        self, stubs: Sequence[target_pb2_grpc.TargetServiceAsyncStub]
    ) -> list[target_pb2.DescribeTargetResponse]:
        """Ask all shards. Raises VersionMismatchError if one refuses the driver for its version."""

        async def describe(
            stub: target_pb2_grpc.TargetServiceAsyncStub, hello: types_pb2.Hello, address: str
        ) -> target_pb2.DescribeTargetResponse:
            request = target_pb2.DescribeTargetRequest(hello=hello)
            with named_mismatch(address):
                return await stub.DescribeTarget(request, timeout=DESCRIBE_SECONDS)

        hellos = self._hellos(self._lives, stream=False)
        return await asyncio.gather(
            *[
                describe(stub, hello, meter.address)
                for stub, hello, meter in zip(stubs, hellos, self.meters, strict=True)
            ]
        )

    async def _meet(
        self,
        stubs: Sequence[target_pb2_grpc.TargetServiceAsyncStub],
        descriptions: Sequence[target_pb2.DescribeTargetResponse],
    ) -> list[target_pb2.DescribeTargetResponse]:
        """Bring the shards of the group together. Raises CheckpointError if they do not fit."""
        session = uuid.uuid4().hex

        async def meet(
            stub: target_pb2_grpc.TargetServiceAsyncStub, hello: types_pb2.Hello
        ) -> target_pb2.DescribeTargetResponse:
            request = target_pb2.MeetRequest(
                session=session, rendezvous=descriptions[0].rendezvous, hello=hello
            )
            return (await stub.Meet(request, timeout=MEET_SECONDS)).description

        hellos = self._hellos([shard.life for shard in descriptions])
        try:
            return await asyncio.gather(*map(meet, stubs, hellos))
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
                raise CheckpointError(error.details() or "the shards do not fit") from error
            raise

    def _check(
        self,
        descriptions: Sequence[target_pb2.DescribeTargetResponse],
        expected_lives: Sequence[int | None],
    ) -> None:
        """Raise VocabularyMismatchError, ProtocolError if a shard is of another group,
        CheckpointError if it lacks a rule of the driver, or what DriverIdentity.check raises.
        """
        degree = len(self.meters)
        for rank, (meter, shard) in enumerate(zip(self.meters, descriptions, strict=True)):
            self._identity.check(shard, f"{meter.name} at {meter.address}", expected_lives[rank])
            if shard.vocabulary_digest != self._vocabulary_digest:
                raise VocabularyMismatchError(
                    f"{meter.name} at {meter.address} serves {shard.model!r}, whose vocabulary is "
                    "not that of the driver's checkpoint; start both with the same one"
                )
            if (shard.rank, shard.tensor_parallel) != (rank, degree):
                raise ProtocolError(
                    f"{meter.name} at {meter.address} is shard {shard.rank} of "
                    f"{shard.tensor_parallel}; expected shard {rank} of {degree}"
                )
            if lacking := [name for name in RULES if name not in shard.rules]:
                raise CheckpointError(
                    f"{meter.name} at {meter.address} lacks the verification rules "
                    f"{', '.join(map(repr, lacking))}, which the driver has: install the packages "
                    "that add them on the shard's host too, in the same versions"
                )

    async def _read_answers(self, call: Any) -> None:
        outbox = self._outboxes[0]
        meter = self.meters[0]
        async for response in call:
            self._answer_by = None
            self._in_answer = True
            try:
                self._listener.step_answered(self._group, response)
            finally:
                self._in_answer = False
            await outbox.flush()
            meter.passed(response.forward_seconds, response.overrun_seconds)
        raise WorkerLostError(f"{meter.name} ended its stream")

    async def _drain(self, rank: int, call: Any) -> None:
        meter = self.meters[rank]
        async for response in call:
            meter.passed(response.forward_seconds, response.overrun_seconds)
        raise WorkerLostError(f"{meter.name} ended its stream")

    async def _watch(self) -> None:
        """Raise WorkerLostError when an answer is overdue."""
        loop = asyncio.get_running_loop()
        while self._answer_by is None or loop.time() < self._answer_by:
            left = 1.0 if self._answer_by is None else self._answer_by - loop.time()
            await asyncio.sleep(min(max(left, 0.01), 1.0))
        raise WorkerLostError(
            f"the target did not answer a step within {self._step_timeout.seconds:g} s plus the "
            "time for its tokens; it counts as hung"
        )


class TargetPool:
    """One link for each group. All groups have the same number of shards.

    Groups may be added and removed while others serve. A group that leaves stays connected until
    its sequences have ended or moved to other groups. `addresses`: of all shards, group by group,
    each by rank. `new_link` makes a link, of the addresses and the number of a `group`.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        num_groups: int,
        listener: TargetListener,
        new_link: Callable[..., TargetLink],
    ) -> None:
        if len(addresses) % num_groups:
            raise ValueError(f"{len(addresses)} shards are not {num_groups} groups alike")
        self._degree = len(addresses) // num_groups
        self._listener = listener
        self._addresses = tuple(addresses)
        self._new_link = new_link
        self._links: dict[int, TargetLink] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._leaving: set[asyncio.Task[None]] = set()
        self._connect()

    @property
    def groups(self) -> list[list[WorkerMeter]]:
        """The meters of the shards of each group, by rank."""
        return [self._links[number].meters for number in sorted(self._links)]

    @property
    def meters(self) -> list[WorkerMeter]:
        """The meters of all shards, group by group."""
        return [meter for group in self.groups for meter in group]

    async def start(self, seconds: float, joined: asyncio.Event) -> None:
        """Wait at most `seconds` until every group has joined, which sets `joined`.

        Raises UnavailableError, VocabularyMismatchError, or CheckpointError.
        """
        waiting = asyncio.create_task(joined.wait())
        refused = [link.refused for link in self._links.values()]
        either: list[asyncio.Future[Any]] = [waiting, *refused]
        try:
            await asyncio.wait(either, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()
        for one in refused:
            if one.done():
                one.result()
        for link in self._links.values():
            if not link.meters[0].joins:
                raise UnavailableError(
                    f"the target at {', '.join(meter.address for meter in link.meters)} could not "
                    f"be reached within {seconds:g} s: {link.last_error}; check that every shard "
                    "is up"
                )

    async def stop(self) -> None:
        tasks = [*self._leaving, *self._tasks.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def send(self, step: RunStep) -> None:
        self._links[step.group].send(step)

    def move(self, addresses: Sequence[str]) -> None:
        """Look for the shards at these addresses from the next connection on.

        There may be more groups than before, or fewer.
        """
        self._addresses = tuple(addresses)
        self._listener.target_scaled(len(addresses) // self._degree)
        self._connect()

    async def until_settled(self, groups: Collection[int], seconds: float) -> str | None:
        """Wait at most `seconds` until these groups have joined or left, as they should.

        Returns which one has not, and why, in words; None: all have. Does not wait on if one that
        should join is refused.
        """
        give_up = time.monotonic() + seconds
        while troubles := [one for one in map(self._trouble_of, groups) if one is not None]:
            links = [self._links[number] for number in groups if number in self._links]
            if time.monotonic() > give_up or any(one.is_refused for one in links):
                return troubles[0]
            await asyncio.sleep(_LOOK_SECONDS)
        return None

    def _trouble_of(self, number: int) -> str | None:
        link = self._links.get(number)
        if link is None:
            is_wanted = number < len(self._addresses) // self._degree
            return f"target group {number} waits until others have left" if is_wanted else None
        if link.retires:
            return f"target group {number} still has sequences"
        if link.meters[0].connected:
            return None
        return f"target group {number} has not joined: {link.last_error}"

    def _connect(self) -> None:
        """Have a link for each group that there should be. Others end once nothing runs there."""
        degree, addresses = self._degree, self._addresses
        num_groups = len(addresses) // degree
        for number, link in self._links.items():
            if number >= num_groups and not link.retires:
                link.retires = True
                self._leaving.add(start_heard(self._see_off(number), self._listener.break_down))
        has_retiring = any(link.retires for link in self._links.values())
        for number in range(num_groups):
            part = addresses[number * degree : (number + 1) * degree]
            if number not in self._links and not has_retiring:
                link = self._links[number] = self._new_link(part, group=number)
                self._tasks[number] = start_heard(link.run(), self._listener.break_down)
            elif number in self._links:
                self._links[number].move(part)

    async def _see_off(self, number: int) -> None:
        """End the link to a group once nothing runs there. Then its number is free."""
        while self._listener.is_busy(number):
            await asyncio.sleep(_LOOK_SECONDS)
        task = self._tasks.pop(number)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        del self._links[number]
        self._leaving = {one for one in self._leaving if one is not asyncio.current_task()}
        if not any(link.retires for link in self._links.values()):
            self.move(self._addresses)
