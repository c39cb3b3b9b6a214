"""Drafters whose vocabulary is padded to another size than their target's, in both directions."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from paceline.sampling import SamplingParams, SequenceSpec
from paceline.v1 import drafting_pb2
from paceline.wire.sequences import spec_to_wire
from tests.workers.drafting.mirror import RULES, VOCAB_SIZE, FreshDrafter, Mirror
from workers.drafting.desk import DraftingDesk, DraftingSession
from workers.drafting.kind import Proposer, TopTokens
from workers.drafting.kinds.model.proposer import ModelProposer
from workers.drafting.kinds.recycling import RecyclingProposer
from workers.drafting.proposal import Proposal
from workers.drafting.tree import Grant
from workers.drafting.wire import apply_request
from workers.engine.cpu.engine import CpuEngine

PROMPT = [5, 6, 7, 8]
FOREIGN = VOCAB_SIZE + 7
"""A token id that the target has and the drafter lacks."""


def spec(rule: str = "coupled", **sampling: Any) -> SequenceSpec:
    params = replace(SamplingParams(temperature=1.0), **sampling)
    return SequenceSpec(params, seed=3, prompt_length=len(PROMPT), rule=rule)


def session_of(proposer: Proposer) -> tuple[DraftingDesk, DraftingSession]:
    desk = DraftingDesk(proposer, max_sequences=4)
    return desk, desk.open_session()


def drafted(desk: DraftingDesk) -> list[Proposal]:
    found: list[Proposal] = []
    while desk.has_work:
        found += [one for news in desk.run_pass() for one in news.proposals]
    desk.check_integrity()
    return found


def test_a_sequence_with_an_id_that_the_drafter_lacks_is_declined_and_no_other(
    engine: CpuEngine,
) -> None:
    desk, session = session_of(ModelProposer(engine))
    assert session.open(1, spec(), PROMPT) is None
    assert session.open(2, spec(), PROMPT) is None
    in_prompt = session.open(3, spec(), [*PROMPT, FOREIGN])
    in_outcome = session.outcome(2, len(PROMPT), [9, FOREIGN])
    for declined, number in ((in_prompt, 3), (in_outcome, 2)):
        assert declined is not None
        assert (declined.sequence_id, declined.for_good) == (number, True)
        assert f"{FOREIGN} is not in the drafter's vocabulary" in declined.reason
    # Messages that cross the refusal are of no account.
    assert session.outcome(2, len(PROMPT) + 2, [FOREIGN]) is None
    session.grant(2, Grant(99))
    session.grant(1, Grant(len(PROMPT) + 3))
    assert {one.sequence_id for one in drafted(desk)} == {1}


def test_what_a_request_says_of_ids_that_the_drafter_lacks_is_left_out(engine: CpuEngine) -> None:
    def opened(number: int, asked: SequenceSpec) -> drafting_pb2.DraftRequest:
        return drafting_pb2.DraftRequest(
            open=drafting_pb2.OpenSequence(
                sequence_id=number, spec=spec_to_wire(asked), token_ids=PROMPT
            )
        )

    desk, session = session_of(ModelProposer(engine))
    asked = spec(logit_bias={FOREIGN: 50.0, 9: 1.0}, min_tokens=2)
    words = ((FOREIGN,), (FOREIGN, 11), (12,), (12, FOREIGN))
    asked = replace(asked, end_token_ids=(FOREIGN, 9), bad_words=words)
    plain = spec(logit_bias={9: 1.0}, min_tokens=2)
    plain = replace(plain, end_token_ids=(9,), bad_words=((12,),))
    assert apply_request(session, opened(1, asked)) == []
    assert apply_request(session, opened(2, plain)) == []
    session.grant(1, Grant(len(PROMPT) + 9))
    session.grant(2, Grant(len(PROMPT) + 9))
    texts: dict[int, list[int]] = {1: [], 2: []}
    for one in drafted(desk):
        texts[one.sequence_id] += one.token_ids
    assert texts[1] == texts[2] != []


@dataclass(frozen=True)
class CutDrafter:
    """Computes a drafter's logits for the first `size` token ids."""

    whole: FreshDrafter
    size: int

    def logits(self, prefix: tuple[int, ...]) -> torch.Tensor:
        return self.whole.logits(prefix)[: self.size]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_draws_are_of_the_distribution_over_what_the_target_has(
    engine: CpuEngine, fresh: FreshDrafter, rule: str, temperature: float
) -> None:
    """Under every rule, the draws equal those of a model whose vocabulary ends there
    (Mirror.check).
    """
    size = 40
    desk, session = session_of(ModelProposer(engine))
    branches = 1 if rule == "rejection" else 3
    grant = Grant(len(PROMPT) + 5, branches=branches, nodes=24)
    mirrors = {}
    for number, limit in ((1, size), (2, None)):
        asked = spec(rule, temperature=temperature)
        assert session.open(number, asked, PROMPT, vocab_size=limit) is None
        mirror = Mirror(asked, PROMPT, CutDrafter(fresh, limit or VOCAB_SIZE))
        mirror.grant, mirror.max_branches = grant, branches
        mirrors[number] = mirror
        session.grant(number, grant)
    tokens: dict[int, set[int]] = {1: set(), 2: set()}
    for proposal in drafted(desk):
        mirrors[proposal.sequence_id].take(proposal)
        tokens[proposal.sequence_id] |= set(proposal.token_ids)
        for pairs in proposal.distributions.values():
            tokens[proposal.sequence_id] |= set(pairs.token_ids_M.tolist())
    for mirror in mirrors.values():
        mirror.check()
    assert max(tokens[1]) < size <= max(tokens[2])


def test_targets_of_different_vocabularies_share_no_rows() -> None:
    desk, session = session_of(RecyclingProposer())
    for number, size in ((1, 100), (2, 50), (3, 100)):
        assert session.open(number, spec(), PROMPT, vocab_size=size) is None
    session.outcome(1, len(PROMPT), [5], [TopTokens(PROMPT[-1], (70, 8))])
    for number in (2, 3):
        session.grant(number, Grant(len(PROMPT) + 6))
    texts = {one.sequence_id: one.token_ids for one in drafted(desk)}
    assert texts == {2: (), 3: (70,)}
