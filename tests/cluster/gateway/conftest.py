"""A tiny system and a gateway in front of it. A module that uses them runs in one event loop."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.cluster.gateway.serving import Served, running_gateway
from tests.cluster.system import Checkpoints, System, make_checkpoints, running_system


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return make_checkpoints(tmp_path_factory.mktemp("gateway"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def system(checkpoints: Checkpoints) -> AsyncIterator[System]:
    async with running_system(checkpoints, drafters={"d0": checkpoints.drafter}) as system:
        yield system


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(system: System) -> AsyncIterator[Served]:
    async with running_gateway([system.server.address]) as served:
        yield served
