"""Rules that toss coins, through drafter, driver and shard: the served law is the target's own.

A bias leaves a random checkpoint with three tokens, so all texts can be enumerated. Each case
serves NUM_REQUESTS requests with the seeds 0, 1, ..., under policies that wait for drafts, and
under chain, whose windows begin with run-ahead and which gives up the bonus for it. Pearson's test
with 26 degrees of freedom wrongly fails for one in a million choices of these seeds
(chi_square.bound). tests/cluster/decoding/test_run_ahead_laws.py shows the same by enumeration.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import pytest_asyncio
from numpy.typing import NDArray

from cluster.decoding.policies.chain import Chain
from cluster.decoding.policy import POLICIES, DraftView, Wait, await_candidates
from cluster.decoding.sequence import Sequence as Decoded
from cluster.decoding.step_answers import gives_up_bonus
from tests.cluster.served_laws import (
    Case,
    ask,
    disagreeing_models,
    draws_the_likeliest,
    follows,
    law_of,
    serve,
)
from tests.cluster.system import Checkpoints, System, running_system
from tests.release import at_release
from workers.verification.rules.kseq import KSeqNode
from workers.verification.rules.one_hot import OneHotNode
from workers.verification.rules.rejection import RejectionNode

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.long]

TARGET_RTT_MS = 30.0

CASES = (
    Case("rejection", "model", 1),
    Case("rejection", "model", 1, policy="pearl"),
    Case("kseq", "model", 3),
    Case("recursive", "model", 2),
    Case("mcsd", "model", 2),
    Case("one-hot", "ngram", 2),
)
RUN_AHEAD = tuple(replace(one, policy="chain") for one in CASES if one.policy == "lockstep")


class PatientChain(Chain):
    """As chain, but a step waits for its window. So no busy host keeps run-ahead out of windows."""

    name = "patient-chain"
    waits = True
    place_in_auto = None

    def window(self, view: DraftView, now: float, wait_seconds: float) -> int | Wait:
        return await_candidates(view, min(view.window, view.useful_candidates), now, wait_seconds)


@pytest.fixture(scope="module", autouse=True)
def _patient_chain() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(POLICIES.all(), PatientChain.name, PatientChain())
        yield


PATIENT = tuple(replace(one, policy=PatientChain.name) for one in RUN_AHEAD[:2])


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return disagreeing_models(tmp_path_factory.mktemp("laws"))


@pytest.fixture(scope="module")
def law(checkpoints: Checkpoints) -> NDArray[np.float64]:
    return law_of(checkpoints.target)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def system(checkpoints: Checkpoints) -> AsyncIterator[System]:
    """A system whose target answers so late that drafters run ahead of it."""
    async with running_system(
        checkpoints,
        drafters={"model": checkpoints.drafter, "ngram": None},
        target_rtt_ms=TARGET_RTT_MS,
    ) as system:
        yield system


@pytest.mark.parametrize("case", CASES, ids=str)
async def test_the_served_law_is_the_targets(
    system: System, law: NDArray[np.float64], case: Case
) -> None:
    served = await serve(system, case, partial(ask, system))
    assert 0 < served.accepted < served.drafted
    assert follows(served, law)


@pytest.mark.parametrize(
    "case", [RUN_AHEAD[0], PATIENT[0], *at_release([*RUN_AHEAD[1:], *PATIENT[1:]])], ids=str
)
async def test_the_served_law_is_the_targets_with_run_ahead(
    system: System, law: NDArray[np.float64], case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafters run ahead, and the bonus is given up now and then."""
    given_up: list[bool] = []

    def noting(sequence: Decoded, accepted: tuple[int, ...]) -> bool:
        given_up.append(gives_up_bonus(sequence, accepted))
        return given_up[-1]

    monkeypatch.setattr("cluster.decoding.step_answers.gives_up_bonus", noting)
    served = await serve(system, case, partial(ask, system))
    assert 0 < served.accepted < served.drafted
    # On a busy host, a drafter does not get ahead of a window that is waited for.
    assert any(given_up) or case.drafter == "ngram" or case in PATIENT
    assert follows(served, law)


Break = Callable[[pytest.MonkeyPatch], None]


def forgets_what_was_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: every rule continues with the target's whole distribution after a refusal."""
    for node in (OneHotNode, RejectionNode, KSeqNode):
        monkeypatch.setattr(node, "refused", lambda self, token_id: self)
    monkeypatch.setattr(KSeqNode, "residual_V", lambda self: self.target_probs_V)


@pytest.mark.parametrize(
    ("case", "broken"),
    [
        (CASES[0], draws_the_likeliest),
        (CASES[5], forgets_what_was_refused),
        (PATIENT[0], draws_the_likeliest),
        *at_release((case, draws_the_likeliest) for case in (*CASES[1:5], *PATIENT[1:])),
    ],
    ids=lambda value: str(value) if isinstance(value, Case) else value.__name__,
)
async def test_what_is_broken_does_not_pass(
    system: System,
    law: NDArray[np.float64],
    monkeypatch: pytest.MonkeyPatch,
    case: Case,
    broken: Break,
) -> None:
    """The same check with one part broken on purpose, under policies that wait for drafts.

    Under chain, a busy host gets few drafts in time, and what is broken in them may not show.
    """
    broken(monkeypatch)
    assert not follows(await serve(system, case, partial(ask, system)), law)
