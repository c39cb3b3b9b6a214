"""Rules that toss coins keep the law when the target is lost, through all the parts.

Once for every batch of requests, the target's server is stopped and started again at its port,
after a number of verdicts that no token influences. tests/cluster/decoding/test_failover_laws.py
shows the same by enumeration.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import pytest_asyncio
from numpy.typing import NDArray

from cluster.decoding.sequence import Sequence as Decoded
from paceline import Completion
from tests.cluster.served_laws import (
    AT_ONCE,
    NUM_REQUESTS,
    PROMPT,
    Case,
    Served,
    ask,
    disagreeing_models,
    follows,
    law_of,
    serve,
    trusts_what_was_drafted,
)
from tests.cluster.system import Checkpoints, System, eventually, running_system, start_target
from tests.release import at_release
from workers.process.server import RunningServer

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.long]

TARGET_RTT_MS = 60.0
LOST_AFTER = AT_ONCE + 1
"""Verdicts of a batch before the loss: those of the prompts, and of one more step.

It counts verdicts, not steps: the batch before leaves a step without verdicts that ends its
sequences.
"""
REJECTION = Case("rejection", "model", 1)
CASES = (
    REJECTION,
    replace(REJECTION, policy="chain"),
    Case("kseq", "model", 3, policy="chain"),
    Case("mcsd", "model", 2, policy="chain"),
)


@dataclass
class Faulty:
    """A system whose target is lost now and then. `again` counts sequences computed again."""

    system: System
    folder_of: Checkpoints
    target: RunningServer
    again: list[int] = field(default_factory=list)

    async def lose_target(self) -> None:
        """Lose the target after some verdicts. It is back at once."""
        before = self.system.driver.stats().verdicts
        await eventually(lambda: self.system.driver.stats().verdicts >= before + LOST_AFTER)
        port = int(self.target.address.rpartition(":")[2])
        await self.target.stop()
        self.target = await start_target(self.folder_of.target, port=port)

    async def batch(self, case: Case, first_seed: int, *, lose: bool = True) -> list[Completion]:
        """Answer AT_ONCE requests."""
        losing = self.lose_target() if lose else asyncio.sleep(0)
        completions, _ = await asyncio.gather(ask(self.system, case, first_seed), losing)
        return completions

    async def with_and_without_loss(
        self, case: Case, first_seed: int
    ) -> tuple[list[tuple[int, ...]], ...]:
        """Texts of AT_ONCE requests, first undisturbed, then with the target lost meanwhile."""
        batches = [await self.batch(case, first_seed, lose=lose) for lose in (False, True)]
        return tuple([one.token_ids for one in batch] for batch in batches)

    async def serve(self, case: Case) -> Served:
        """Serve NUM_REQUESTS requests."""
        return await serve(self.system, case, self.batch)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return disagreeing_models(tmp_path_factory.mktemp("failover"))


@pytest.fixture(scope="module")
def law(checkpoints: Checkpoints) -> NDArray[np.float64]:
    return law_of(checkpoints.target)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def faulty(checkpoints: Checkpoints) -> AsyncIterator[Faulty]:
    async with running_system(
        checkpoints, drafters={"model": checkpoints.drafter}, target_rtt_ms=TARGET_RTT_MS
    ) as system:
        await eventually(lambda: "model" in system.connected())
        faulty = Faulty(system, checkpoints, system.target)
        with pytest.MonkeyPatch.context() as patch:
            forget = Decoded.forget_kv

            def noting(sequence: Decoded) -> None:
                if sequence.kv.in_flight is not None:
                    faulty.again.append(sequence.tree.num_committed - len(PROMPT))
                forget(sequence)

            patch.setattr(Decoded, "forget_kv", noting)
            yield faulty
        await faulty.target.stop()


@pytest.mark.parametrize("case", [REJECTION, CASES[2], *at_release([CASES[1], CASES[3]])], ids=str)
async def test_the_served_law_is_the_targets_though_the_target_is_lost(
    faulty: Faulty, law: NDArray[np.float64], case: Case
) -> None:
    faulty.again.clear()
    served = await faulty.serve(case)
    half_way = sum(0 < committed < 3 for committed in faulty.again)
    assert half_way > NUM_REQUESTS / 20, "it was lost between the tokens that are looked at"
    assert 0 < served.accepted < served.drafted
    assert follows(served, law)


async def test_what_is_broken_does_not_pass(
    faulty: Faulty, law: NDArray[np.float64], monkeypatch: pytest.MonkeyPatch
) -> None:
    trusts_what_was_drafted(monkeypatch)
    assert not follows(await faulty.serve(REJECTION), law)


async def test_with_a_seed_the_text_stays_under_the_coupled_rule_alone(faulty: Faulty) -> None:
    """There are several batches, because a busy machine may lose the target after a batch has
    ended.
    """
    coupled = replace(REJECTION, rule="coupled")
    changed = False
    for first_seed in range(0, 5 * AT_ONCE, AT_ONCE):
        kept, lost = await faulty.with_and_without_loss(coupled, first_seed)
        assert kept == lost
        kept, lost = await faulty.with_and_without_loss(REJECTION, first_seed)
        changed = kept != lost
        if changed:
            break
    assert changed
