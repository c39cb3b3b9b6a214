"""Small clients of the worker services, in place of a driver."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc

from paceline.channel import client_options
from paceline.sampling import SequenceSpec
from paceline.v1 import drafting_pb2, drafting_pb2_grpc, target_pb2, target_pb2_grpc, types_pb2
from paceline.wire.sequences import spec_to_wire
from workers.process.handshake import DriverIdentity

DEADLINE = 120.0
"""Seconds after which a test's call fails."""

END = grpc.aio.EOF  # type: ignore[attr-defined]  # the stubs lack it
"""What a stream reads after its last message."""


@asynccontextmanager
async def open_channel(address: str) -> AsyncIterator[grpc.aio.Channel]:
    """A channel with the options of our clients."""
    async with grpc.aio.insecure_channel(address, options=client_options()) as channel:
        yield channel


def call_of_bytes(
    channel: grpc.aio.Channel, path: str, metadata: Sequence[tuple[str, str]] = ()
) -> Any:
    """A call with streams of any bytes, in place of messages, in both directions."""
    return channel.stream_stream(path, None, None)(None, metadata=tuple(metadata))


class GreetedCall:
    """A stream to a worker. It says hello before the first message."""

    def __init__(self, call: Any, hello: Callable[[], Awaitable[Any]]) -> None:
        self._call, self._hello = call, hello
        self._said = False

    async def write(self, message: Any) -> None:
        await self.greet()
        await self._call.write(message)

    async def read(self) -> Any:
        await self.greet()
        return await self._call.read()

    async def greet(self) -> None:
        """Say hello, unless it was said."""
        if not self._said:
            self._said = True
            await self._call.write(await self._hello())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._call, name)


async def hello_to_shard(
    stub: Any, identity: DriverIdentity | None = None
) -> target_pb2.StepRequest:
    """The first message of a Step stream to the shard's present life."""
    life = (await stub.DescribeTarget(target_pb2.DescribeTargetRequest(), timeout=DEADLINE)).life
    return target_pb2.StepRequest(hello=(identity or DriverIdentity()).hello("shard", life))


async def hello_to_drafter(
    stub: Any, identity: DriverIdentity | None = None
) -> drafting_pb2.DraftRequest:
    """The first message of a Draft stream to the drafter's present life."""
    request = drafting_pb2.DescribeDrafterRequest()
    life = (await stub.DescribeDrafter(request, timeout=DEADLINE)).life
    return drafting_pb2.DraftRequest(hello=(identity or DriverIdentity()).hello("drafter", life))


class Stepper:
    """One Step stream and one sequence (number 1) on it."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        stub = target_pb2_grpc.TargetServiceStub(channel)
        self.call = GreetedCall(stub.Step(None, timeout=DEADLINE), lambda: hello_to_shard(stub))
        self.step_number = 0

    async def send(self, **fields: Any) -> target_pb2.StepResponse:
        """Send a step with the next number, and await the answer."""
        self.step_number += 1
        await self.call.write(target_pb2.StepRequest(step=self.step_number, **fields))
        response = await self.call.read()
        assert isinstance(response, target_pb2.StepResponse), "the stream ended too early"
        return response

    async def open(
        self, spec: SequenceSpec, token_ids: Sequence[int], blocks: Sequence[int], *, chunk: int
    ) -> int:
        """Open sequence 1 and prefill it in chunks. Returns the first token after the prompt."""
        await self.send(open=[target_pb2.TargetSequence(sequence_id=1, spec=spec_to_wire(spec))])
        for start in range(0, len(token_ids), chunk):
            fed = token_ids[start : start + chunk]
            piece = target_pb2.Slice(
                sequence_id=1,
                start=start,
                token_ids=fed,
                verdict=start + chunk >= len(token_ids),
                new_blocks=blocks if start == 0 else (),
            )
            response = await self.send(slices=[piece])
        return response.verdicts[0].token_id

    async def verify(
        self, start: int, last_token: int, candidates: Sequence[int], **fields: Any
    ) -> target_pb2.Verdict:
        """Run one decoding step of sequence 1. `more`: further fields of the slice."""
        piece = target_pb2.Slice(
            sequence_id=1,
            start=start,
            token_ids=[last_token, *candidates],
            window=len(candidates),
            verdict=True,
            **fields,
        )
        response = await self.send(slices=[piece])
        return response.verdicts[0]

    async def end(self) -> None:
        """End the stream in good order."""
        await self.call.done_writing()
        assert await self.call.read() is END


class DraftStream:
    """One Draft stream."""

    def __init__(
        self, channel: grpc.aio.Channel, *, metadata: Sequence[tuple[str, str]] = ()
    ) -> None:
        stub = drafting_pb2_grpc.DraftingServiceStub(channel)
        call = stub.Draft(None, timeout=DEADLINE, metadata=tuple(metadata))
        self.call = GreetedCall(call, lambda: hello_to_drafter(stub))

    async def open(self, sequence_id: int, spec: SequenceSpec, token_ids: Sequence[int]) -> None:
        await self.call.write(
            drafting_pb2.DraftRequest(
                open=drafting_pb2.OpenSequence(
                    sequence_id=sequence_id, spec=spec_to_wire(spec), token_ids=token_ids
                )
            )
        )

    async def grant(self, sequence_id: int, until_position: int) -> None:
        await self.call.write(
            drafting_pb2.DraftRequest(
                grant=drafting_pb2.Grant(
                    sequence_id=sequence_id, until_position=until_position, branches=1
                )
            )
        )

    async def outcome(self, sequence_id: int, position: int, token_ids: Sequence[int]) -> None:
        await self.call.write(
            drafting_pb2.DraftRequest(
                outcome=drafting_pb2.Outcome(
                    sequence_id=sequence_id, position=position, token_ids=token_ids
                )
            )
        )

    async def close(self, sequence_id: int) -> None:
        await self.call.write(
            drafting_pb2.DraftRequest(close=drafting_pb2.CloseSequence(sequence_id=sequence_id))
        )

    async def read(self) -> drafting_pb2.DraftResponse:
        """The next message. The stream must not have ended."""
        response = await self.call.read()
        assert isinstance(response, drafting_pb2.DraftResponse), "the stream ended too early"
        return response

    async def proposals(self, num_tokens: int) -> list[drafting_pb2.Proposal]:
        """Collect proposals until they hold `num_tokens` tokens."""
        found: list[drafting_pb2.Proposal] = []
        while sum(len(proposal.token_ids) for proposal in found) < num_tokens:
            found += proposals_in((await self.read()).proposals)
        return found


def proposals_in(batch: drafting_pb2.ProposalBatch) -> list[drafting_pb2.Proposal]:
    """All proposals of a pass, including those in columns."""
    found = list(batch.proposals)
    for tips in batch.tips:
        sequence_ids = list(tips.sequence_ids) or [tips.sequence_id] * len(tips.token_ids)
        told = [
            drafting_pb2.Proposal(
                sequence_id=sequence_id,
                base=types_pb2.Base(length=length, hash=prefix_hash),
                token_ids=[token_id],
            )
            for sequence_id, length, prefix_hash, token_id in zip(
                sequence_ids, tips.base_lengths, tips.base_hashes, tips.token_ids, strict=True
            )
        ]
        for sequence_id in tips.last_of:
            next(one for one in reversed(told) if one.sequence_id == sequence_id).last = True
        found += told
    return found
