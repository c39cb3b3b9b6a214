"""The results of a pass fit into messages that a driver reads quickly."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from paceline.v1 import drafting_pb2
from workers.drafting.desk import DraftingDesk, SessionNews
from workers.drafting.kinds.ngram import NgramProposer
from workers.drafting.proposal import Proposal
from workers.drafting.wire import MAX_ENTRIES, MAX_RESPONSE_BYTES, count_entries, to_responses
from workers.verification.candidates import SparseProbs

PAIRS = SparseProbs(np.arange(200_000, 200_064), np.full(64, 1 / 64, dtype=np.float32))


def _chains(count: int) -> list[Proposal]:
    return [Proposal(number, 1000, 1 << 60, (5,) * 17) for number in range(count)]


def _tips(count: int) -> list[Proposal]:
    return [Proposal(1 << 40, 100_000, 1 << 60, (150_000,)) for _ in range(count)]


def _trees(count: int) -> list[Proposal]:
    size = 129
    parents = tuple(max(0, number - 1) for number in range(size))
    held = dict.fromkeys(range(size), PAIRS)
    return [
        Proposal(number, 1000, 1 << 60, (200_001,) * size, parents=parents, distributions=held)
        for number in range(count)
    ]


@pytest.mark.parametrize(
    "proposals", [_chains(1000), _tips(5000), _trees(8), [], [*_chains(300), *_tips(3000)]]
)
def test_every_message_is_within_the_limits_and_nothing_is_lost(
    proposals: Sequence[Proposal],
) -> None:
    session = DraftingDesk(NgramProposer(), max_sequences=1).open_session()
    responses = to_responses(SessionNews(session, 7, list(proposals)), 0.25)
    batches = [response.proposals for response in responses]
    assert all(count_entries(batch) <= MAX_ENTRIES for batch in batches)
    assert all(response.ByteSize() <= MAX_RESPONSE_BYTES for response in responses)
    told = [one.sequence_id for batch in batches for one in batch.proposals]
    assert told == [one.sequence_id for one in proposals][: len(told)]
    num_tips = sum(len(tips.token_ids) for batch in batches for tips in batch.tips)
    assert len(told) + num_tips == len(proposals)
    first, *others = batches
    assert (first.pass_seconds, first.tokens_fed) == (0.25, 7)
    assert all(batch.pass_seconds == batch.tokens_fed == 0 for batch in others)


def test_counting_a_crowd_ends_early() -> None:
    """The count does not look at the proposals, of which there may be 100,000."""
    crowd = drafting_pb2.ProposalBatch.FromString(b"\x0a\x00" * 100_000)
    assert count_entries(crowd) == 100_000
