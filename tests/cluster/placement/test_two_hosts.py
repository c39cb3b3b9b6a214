"""Shards on two hosts that communicate over a network of their own."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from cluster.driver.driver import DriverOptions
from cluster.driver.service import serve_driver
from paceline import AsyncClient, Chunk, GenerateOptions
from tests.cluster.shard_processes import ShardProcesses
from tests.cluster.system import HOST, start_target
from tests.cluster.two_hosts import HERE, SecondHost
from tests.tiny import make_tiny_checkpoint

pytestmark = pytest.mark.long

PROMPT = "The quick brown fox"
OPTIONS = GenerateOptions(temperature=1.0, seed=3, max_tokens=200, ignore_eos=True)


async def test_the_text_is_that_of_one_host_and_a_cut_cable_costs_a_pause(
    tmp_path: Path, second_host: SecondHost
) -> None:
    folder = make_tiny_checkpoint(tmp_path / "target")
    target = await start_target(folder)
    alone = await text_of(folder, (target.address,))
    await target.stop()
    hosts = [HERE, second_host.host]
    with ShardProcesses([folder, folder], hosts=hosts, collective_seconds=3.0) as shards:
        assert await text_of(folder, shards.addresses) == alone
        assert await text_of(folder, shards.addresses, cut=second_host) == alone
        assert all(process.poll() is None for process in shards.processes)


async def text_of(
    folder: Path, addresses: tuple[str, ...], *, cut: SecondHost | None = None
) -> list[int]:
    """The token ids of a request. `cut`: after a quarter, the cable is pulled for five seconds."""
    _, server = await serve_driver(
        DriverOptions(folder=folder, target_addresses=addresses, target_patience=120), host=HOST
    )
    token_ids: list[int] = []
    mending: asyncio.Task[None] | None = None
    try:
        async with AsyncClient(server.address) as client:
            async for event in client.stream(PROMPT, OPTIONS):
                if isinstance(event, Chunk):
                    token_ids += event.token_ids
                if cut is not None and mending is None and len(token_ids) >= 50:
                    cut.cut()
                    mending = asyncio.create_task(mend_after(cut, 5.0))
    finally:
        await server.stop()
    assert cut is None or mending is not None
    if mending is not None:
        await mending
    return token_ids


async def mend_after(cut: SecondHost, seconds: float) -> None:
    await asyncio.sleep(seconds)
    cut.mend()
