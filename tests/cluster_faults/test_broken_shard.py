"""On a real Ray cluster, a shard whose device is broken ends its process, which is noticed."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import pytest

from tests.cluster_faults.killing import eventually

pytestmark = [pytest.mark.ray, pytest.mark.long]


async def is_heard() -> bool:
    return True


def test_the_process_of_a_broken_shard_ends_and_the_controller_sees_it(ray_address: str) -> None:
    """The shard answers pings, and the driver could reach its server."""
    import ray

    from cluster.placement.actors import ShardActor
    from cluster.placement.ledger import Serving
    from cluster.placement.lives import until_lost
    from workers.process.server import RunningServer, start_server

    class Shard(ShardActor):
        """Serves nothing, and learns that its device is broken as from a servicer."""

        async def open(self) -> Serving:
            return self.hold(await start_server(lambda _: (), host="127.0.0.1"))

        async def break_down(self) -> None:
            assert isinstance(self._server, RunningServer)
            self._server.report_broken("the device does not work any more")

    async def watch(shard: Any) -> tuple[int, str]:
        serving = await shard.open.remote()
        watching = asyncio.create_task(until_lost(shard, hung_after=60.0, is_heard=is_heard))
        await shard.ping.remote()
        assert not watching.done()
        with contextlib.suppress(ray.exceptions.RayActorError):  # the answer races the end
            await shard.break_down.remote()
        return serving.pid, await asyncio.wait_for(watching, 60)

    shard: Any = ray.remote(Shard).options(num_cpus=0, max_concurrency=10).remote()
    try:
        pid, why = asyncio.run(watch(shard))
        assert why
        eventually(lambda: not Path(f"/proc/{pid}").exists())
    finally:
        ray.kill(shard)
