"""A drafter with more token ids than the target keeps the law exactly, under rules with coins."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from paceline.errors import ProtocolError
from tests.cluster.decoding.law_cases import CHAIN, LOCKSTEP, Case
from tests.cluster.decoding.law_drafter import PROMPT, EnumeratedProposer
from tests.cluster.decoding.law_world import Timing
from workers.drafting.tree import DraftTree

pytestmark = pytest.mark.long

CASES = (
    Case("rejection", CHAIN, 1, 2, Timing(3, 1), 2),
    Case("kseq", CHAIN, 2, 4, Timing(3, 1), 2),
    Case("recursive", LOCKSTEP, 2, 3, Timing(0), 3),
    Case("recursive", CHAIN, 2, 3, Timing(3), 2),
    Case("mcsd", LOCKSTEP, 2, 3, Timing(0), 3),
    Case("mcsd", CHAIN, 2, 3, Timing(3), 2),
)


@pytest.fixture
def _larger_drafter(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the first token, two further ids are likelier than all that the target has."""
    known_V = EnumeratedProposer._logits_V

    def padded_V(proposer: EnumeratedProposer, prefix: Sequence[int]) -> torch.Tensor:
        foreign = torch.full((2,), 1.5)
        return torch.cat((known_V(proposer, prefix), foreign))

    assert len(PROMPT) == 1
    monkeypatch.setattr(EnumeratedProposer, "_logits_V", padded_V)


@pytest.mark.usefixtures("_larger_drafter")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_law_is_the_targets(case: Case) -> None:
    case.check_exact()


@pytest.mark.usefixtures("_larger_drafter")
def test_a_drafter_that_is_not_told_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: it draws ids that the target lacks."""
    init = DraftTree.__init__

    def untold(tree: DraftTree, *args: Any, **options: Any) -> None:
        init(tree, *args, **(options | {"vocab_size": None}))

    monkeypatch.setattr(DraftTree, "__init__", untold)
    with pytest.raises(ProtocolError, match="token ids below 2"):
        CASES[0].serve()
