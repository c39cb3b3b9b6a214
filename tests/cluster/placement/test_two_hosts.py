"""Shards on two hosts that communicate over a network of their own."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.driver.driver import DriverOptions
from cluster.driver.service import serve_driver
from paceline import AsyncClient, Chunk, GenerateOptions
from tests.cluster.shard_processes import ShardProcesses
from tests.cluster.system import HOST, start_target
from tests.cluster.two_hosts import HERE, SecondHost
from tests.cluster_faults.ray_nodes import Job, RayNodes
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


@pytest.mark.release
@pytest.mark.ray
async def test_ray_divides_a_target_of_80_layers_between_two_hosts(
    tmp_path: Path, second_host: SecondHost
) -> None:
    """Two shards on each host, in the order of the ranks, and the drafter where its label says."""
    folder = make_tiny_checkpoint(tmp_path / "target", num_layers=80)
    options = replace(OPTIONS, max_tokens=16)
    target = await start_target(folder, kv_memory_mib=64)
    alone = await text_of(folder, (target.address,), options=options)
    await target.stop()
    config = tmp_path / "paceline.toml"
    config.write_text(f"""
        [target]
        model = "{folder}"
        tensor_parallel = 4
        threads = 1
        kv_memory = "64MiB"
        environment = {{ NCCL_DEBUG = "WARN" }}
        [[drafters]]
        model = "{make_tiny_checkpoint(tmp_path / "drafter")}"
        threads = 1
        labels = {{ rack = "b" }}
        [server]
        host = "0.0.0.0"
        grpc_port = 0
        http = false
    """)
    there = second_host.host
    with RayNodes(HERE, num_cpus=2, labels="rack=a") as nodes:
        nodes.add(there, num_cpus=3, labels="rack=b")
        with Job(nodes, config) as job:
            async with AsyncClient(job.next_address()) as client:
                answer = await client.generate(PROMPT, options)
                workers = (await client.stats()).workers
    assert list(answer.token_ids) == alone
    assert answer.stats.drafted > 0
    assert [worker.address.rpartition(":")[0] for worker in workers if worker.name != "driver"] == [
        *[HERE.address] * 2,
        *[there.address] * 3,
    ]


async def text_of(
    folder: Path,
    addresses: tuple[str, ...],
    *,
    cut: SecondHost | None = None,
    options: GenerateOptions = OPTIONS,
) -> list[int]:
    """The token ids of a request. `cut`: after a quarter, the cable is pulled for five seconds."""
    _, server = await serve_driver(
        DriverOptions(folder=folder, target_addresses=addresses, target_patience=120), host=HOST
    )
    token_ids: list[int] = []
    mending: asyncio.Task[None] | None = None
    try:
        async with AsyncClient(server.address) as client:
            async for event in client.stream(PROMPT, options):
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
