"""Drivers over gRPC share a drafter: a flood and its end, and drivers that do not behave."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

from paceline.v1 import drafting_pb2
from paceline.wire.sequences import spec_to_wire
from tests.workers.drafting.flood import SPEC
from tests.workers.grpc_peers import DEADLINE, DraftStream, open_channel
from workers.drafting import service
from workers.drafting.desk import DraftingDesk
from workers.drafting.kinds.model.proposer import ModelProposer
from workers.drafting.kinds.ngram import NgramProposer
from workers.drafting.service import Drafter
from workers.drafting.wire import PARTY_KEY
from workers.engine.cpu.engine import CpuEngine
from workers.process.server import start_server

FLOOD = 48
PROMPT = [5, 17, 101, 42]


@asynccontextmanager
async def _serving(desk: DraftingDesk) -> AsyncIterator[str]:
    drafter = Drafter()
    server = await start_server(drafter.add_to, host="127.0.0.1")
    server.on_stop(drafter.end)
    drafter.begin(desk)
    try:
        yield server.address
    finally:
        await server.stop()


def _desk(checkpoint: Path) -> DraftingDesk:
    engine = CpuEngine(checkpoint, threads=1, kv_memory_bytes=64 << 20)
    return DraftingDesk(ModelProposer(engine), max_sequences=64)


async def _draft_beside_a_flood(checkpoint: Path, count: int) -> tuple[list[int], float]:
    """What one stream drafts while another process floods the drafter, and its part of the time.

    The flood is then killed, and the stream goes on.
    """
    desk = _desk(checkpoint)
    async with _serving(desk) as address:
        command = (sys.executable, "-m", "tests.workers.drafting.flood", address, str(FLOOD))
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        try:
            assert process.stdout is not None
            async with asyncio.timeout(DEADLINE), open_channel(address) as channel:
                assert (await process.stdout.readline()).strip() == b"flooding"
                while desk.num_open < FLOOD:
                    await asyncio.sleep(0.01)
                (flood,) = desk.shares.all
                stream = DraftStream(channel)
                await stream.call.greet()
                await stream.call.initial_metadata()  # It is let in.
                before = flood.milliseconds
                await stream.open(1, SPEC, PROMPT)
                await stream.grant(1, len(PROMPT) + count)
                drafted = [
                    token for one in await stream.proposals(count) for token in one.token_ids
                ]
                own = next(one for one in desk.shares.all if one is not flood)
                part = own.milliseconds / (own.milliseconds + flood.milliseconds - before)
                process.kill()
                await process.wait()
                while desk.num_open > 1:
                    await asyncio.sleep(0.01)
                assert desk.shares.all == [own]
                desk.check_integrity()
                await stream.grant(1, len(PROMPT) + count + 20)
                more = await stream.proposals(20)
                return drafted + [token for one in more for token in one.token_ids], part
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()


async def _draft_alone(checkpoint: Path, count: int) -> list[int]:
    async with _serving(_desk(checkpoint)) as address, open_channel(address) as channel:
        stream = DraftStream(channel)
        await stream.open(1, SPEC, PROMPT)
        await stream.grant(1, len(PROMPT) + count)
        return [token for one in await stream.proposals(count) for token in one.token_ids]


async def test_a_flood_costs_a_driver_neither_its_text_nor_its_share(checkpoint: Path) -> None:
    """The drafter's own accounts say who got its time, so a busy host does not matter."""
    drafted, part = await _draft_beside_a_flood(checkpoint, 120)
    assert part >= 0.9 * 0.5
    assert drafted == await _draft_alone(checkpoint, 140)


async def test_streams_of_a_party_have_one_share_and_tenants_of_their_own() -> None:
    desk = DraftingDesk(NgramProposer(), max_sequences=8)
    async with _serving(desk) as address, open_channel(address) as channel:
        streams = [
            DraftStream(channel, metadata=metadata)
            for metadata in [((PARTY_KEY, "one"),)] * 2 + [((PARTY_KEY, "other"),), ()]
        ]
        for stream in streams:
            await stream.open(1, SPEC, PROMPT)
            await stream.grant(1, 8)
            await stream.read()
        assert sorted(share.name for share in desk.shares.all) == ["", "one", "other"]
        tenants = {tree.tenant for share in desk.shares.all for tree in share.queue}
        assert len(tenants) == 3


async def test_a_stream_too_many_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "MAX_STREAMS", 2)
    desk = DraftingDesk(NgramProposer(), max_sequences=8)
    async with _serving(desk) as address, open_channel(address) as channel:
        streams = [DraftStream(channel) for _ in range(2)]
        for stream in streams:
            await stream.open(1, SPEC, PROMPT)
            await stream.grant(1, 8)
            await stream.read()
        third = DraftStream(channel)
        with pytest.raises(grpc.aio.AioRpcError, match="2 streams of drivers are open") as refusal:
            await third.read()
        assert refusal.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_driver_that_does_not_read_loses_its_stream_only(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(service, "MAX_UNREAD", 50)
    desk = DraftingDesk(NgramProposer(), max_sequences=1)
    async with (
        _serving(desk) as address,
        open_channel(address) as channel,
        open_channel(address) as other_channel,
    ):
        deaf, other = DraftStream(channel), DraftStream(other_channel)
        await other.open(1, SPEC, PROMPT)
        await other.grant(1, 8)
        await other.read()

        opened = drafting_pb2.OpenSequence(sequence_id=1, spec=spec_to_wire(SPEC), token_ids=PROMPT)
        many = drafting_pb2.DraftRequestBatch(
            requests=[drafting_pb2.DraftRequest(open=opened)] * 1000
        )

        async def write_on() -> None:
            while True:  # All are declined, since there is one place.
                await deaf.call.write(drafting_pb2.DraftRequest(batch=many))

        writing = asyncio.create_task(write_on())
        async with asyncio.timeout(DEADLINE):
            while "left 50 answers unread" not in caplog.text or len(desk.shares.all) > 1:
                await asyncio.sleep(0.01)
        writing.cancel()
        await asyncio.gather(writing, return_exceptions=True)
        await other.outcome(1, len(PROMPT), [9])
        await other.grant(1, 12)
        await other.read()
