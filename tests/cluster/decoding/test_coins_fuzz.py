"""Random schedules under rules that toss coins, with drafters that lie about what they drew.

Each proposal alone is as its rule asks (others are dropped when read). Together they contradict
each other: another distribution under the same node, more draws than were granted, more of k-SEQ's
paths below a node than reach it. A shard would refuse a step made of these, and end its stream for
all requests. World checks each step with a real TargetSession.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cluster.decoding.events import Proposal, Proposed
from cluster.decoding.token_tree import TokenTree
from cluster.driver.fitting import Speculation
from cluster.driver.worker_messages import proposal_from_wire
from paceline.errors import ProtocolError
from paceline.v1 import drafting_pb2
from tests.cluster.decoding.pretended_drafter import evenly
from tests.cluster.decoding.schedules import FewThatGoWell
from tests.cluster.decoding.true_text import VOCAB_SIZE
from workers.drafting.desk import DraftingDesk, SessionNews
from workers.drafting.kinds.ngram import NgramProposer
from workers.drafting.wire import to_responses
from workers.verification.rule import RULES

pytestmark = pytest.mark.long

WITH_DRAWS = ("kseq", "recursive", "mcsd")


class HonestCoins(FewThatGoWell):
    """Drafters do not lie. A late message is late on its stream."""

    policies = ("chain", "lockstep")
    rules = frozenset(RULES)

    def choose_rule(self) -> str:
        return WITH_DRAWS[self.tape.choose(len(WITH_DRAWS))]

    def decline(self, name: str, victim: int) -> None:
        """A drafter that declines has delivered all earlier messages."""

    def send_garbage(self, name: str) -> None:
        """No drafter sends garbage."""

    def come_or_go(self, name: str) -> None:
        super().come_or_go(name)
        self.sent = [(sender, told) for sender, told in self.sent if sender != name]


class LyingCoins(HonestCoins):
    """Now and then a drafter proposes a node again, with other contents."""

    def send_garbage(self, name: str) -> None:
        world, tape = self.world, self.tape
        told = [(sender, one) for sender, all_ in self.sent[-6:] for one in all_]
        if not told:
            return
        sender, one = told[tape.choose(len(told))]
        other = 1 + tape.choose(VOCAB_SIZE - 1)
        lie = one
        match tape.choose(4):
            case 0:
                lie = replace(one, distributions={0: evenly({*one.token_ids, other})})
            case 1:
                lie = replace(
                    one,
                    token_ids=(other,),
                    parents=(0,),
                    multiplicities=(),
                    distributions={0: evenly({other, (other + 1) % VOCAB_SIZE})},
                )
            case 2:
                drawn = one.distributions[0].token_ids_M.tolist()
                token_id = drawn[tape.choose(len(drawn))]
                lie = replace(one, token_ids=(token_id,), parents=(0,), multiplicities=())
            case 3:
                counts = tuple(1 + tape.choose(2) for _ in one.token_ids)
                lie = replace(one, multiplicities=counts)
        if not self.is_well_formed(lie):
            return
        before = world.scheduler.totals.malformed_proposals
        for _ in range(1 + 3 * tape.choose(2)):
            world.send(Proposed(world.now, sender, (lie,)))
        blamed = world.scheduler.totals.malformed_proposals > before
        self.seen["blamed" if blamed else "no contradiction"] += 1
        for suspect in world.suspects:
            self.seen["suspect"] += 1
            self.far.pop(suspect, None)
            world.drafters.pop(suspect, None)
            self.sent = [(one, told) for one, told in self.sent if one != suspect]
        world.suspects.clear()

    def is_well_formed(self, proposal: Proposal) -> bool:
        """Whether a proposal passes the checks with which the driver reads it."""
        asked = self.world.requests[proposal.sequence_id]
        session = DraftingDesk(NgramProposer(), max_sequences=1).open_session()
        (response,) = to_responses(SessionNews(session, 0, [proposal]), 0.0)
        raw = response.proposals.SerializeToString()
        (message,) = drafting_pb2.ProposalBatch.FromString(raw).proposals
        speculation = Speculation(
            policy=asked.policy, rule=asked.spec.rule, branches=asked.branches
        )
        try:
            proposal_from_wire(message, speculation, vocab_size=VOCAB_SIZE)
        except ProtocolError:
            return False
        return True


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.binary(min_size=40, max_size=240))
def test_lies_build_no_step_that_a_shard_refuses(tape: bytes) -> None:
    LyingCoins.run(tape)


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.binary(min_size=40, max_size=240))
def test_nobody_is_blamed_who_does_not_lie(tape: bytes) -> None:
    assert HonestCoins.run(tape).world.scheduler.totals.malformed_proposals == 0


def _run_many(count: int) -> Counter[str]:
    return LyingCoins.run_many(count, num_bytes=200, seed=7)


def test_schedules_reach_what_they_are_for() -> None:
    seen = _run_many(150)
    assert min(seen[key] for key in ("blamed", "suspect", "no contradiction")) >= 5, seen


def test_a_driver_that_believes_all_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: proposals about the same draws are not compared."""
    monkeypatch.setattr(TokenTree, "_check_draws", lambda *args: None)
    with pytest.raises(ProtocolError):
        _run_many(150)
