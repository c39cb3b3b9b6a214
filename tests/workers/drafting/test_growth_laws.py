"""What is drawn under a node follows its distribution, given that anything was drawn there.

Earlier draws decide where a tree's nodes go. If that revealed something about later draws, a rule
that tosses coins would test tokens of another law than it assumes, and the text would not follow
the target's law.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from paceline.options import Stopping
from paceline.sampling import SamplingParams, SequenceSpec
from tests.workers.verification import chi_square
from workers.drafting import draw
from workers.drafting.chances import RankChances, drawn_prior
from workers.drafting.draft_stopping import DrafterStopping, Stopper
from workers.drafting.growth import Growth
from workers.drafting.tree import ROOT, DraftTree, Grant

pytestmark = pytest.mark.long

PROMPT = (1, 2)
LOGITS_V = torch.tensor([1.8, 0.6, 0.2, -0.4])
"""Logits after any prefix, so equal noise under two nodes draws equal tokens."""
NUM_SEEDS = 1_500


def _grown(rule: str, seed: int) -> DraftTree:
    spec = SequenceSpec(SamplingParams(), seed=seed, prompt_length=len(PROMPT), rule=rule)
    tree = DraftTree(spec, PROMPT, max_position=100)
    tree.set_grant(Grant(until_position=5, branches=2, nodes=6))
    growth = Growth(tree, RankChances(drawn_prior), Stopper(Stopping.FIXED, DrafterStopping()))
    while fed := growth.to_feed(pass_ms=1.0)[:1]:  # a node a pass, so that the order tells most
        for node in fed:
            growth.expand(node, LOGITS_V)
        tree.extend(growth.harvest(fed, pass_ms=1.0))
    growth.check_integrity()
    return tree


def _first_tokens_below_the_second_child(rule: str) -> NDArray[np.int64]:
    counts = np.zeros(LOGITS_V.numel(), dtype=np.int64)
    for seed in range(NUM_SEEDS):
        tree = _grown(rule, seed)
        below = tree.children(tree.children(ROOT)[1])
        if below:
            counts[tree.tokens[below[0]]] += 1
    return counts


def _follow_the_draft(counts: NDArray[np.int64]) -> bool:
    assert NUM_SEEDS / 100 < counts.sum() < NUM_SEEDS, "both must happen"
    return chi_square.follows(counts, torch.softmax(LOGITS_V.double(), dim=0).numpy())


@pytest.mark.parametrize("rule", ["recursive", "mcsd"])
def test_where_nodes_are_spent_tells_nothing_of_what_is_drawn_there(rule: str) -> None:
    """The second child gets children of its own only where the first one's are poor.

    3 degrees of freedom; wrongly fails once in a million choices of the seeds.
    """
    assert _follow_the_draft(_first_tokens_below_the_second_child(rule))


@pytest.mark.parametrize("rule", ["recursive", "mcsd"])
def test_noise_that_nodes_share_is_noticed(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: nodes of one depth share their noise."""
    monkeypatch.setattr(draw, "of_node", lambda spec, prefix_hash: spec)
    assert not _follow_the_draft(_first_tokens_below_the_second_child(rule))


def _next_tokens(rule: str, branches: int, seed: int) -> list[int]:
    """The first token drafted at the same position after each of two prefixes."""
    spec = SequenceSpec(SamplingParams(), seed=seed, prompt_length=1, rule=rule)
    tokens: list[int] = []
    for prompt in ((1, 2), (1, 3)):
        tree = DraftTree(spec, prompt, max_position=100)
        tree.set_grant(Grant(until_position=3, branches=branches, nodes=branches))
        growth = Growth(tree, RankChances(drawn_prior), Stopper(Stopping.FIXED, DrafterStopping()))
        fed = growth.to_feed(pass_ms=1.0)
        growth.expand(ROOT, LOGITS_V[:3])
        tree.extend(growth.harvest(fed, pass_ms=1.0))
        tokens.append(tree.tokens[tree.children(ROOT)[0]])
    return tokens


def _are_independent(rule: str, branches: int) -> bool:
    counts = np.zeros((3, 3), dtype=np.int64)
    for seed in range(NUM_SEEDS):
        counts[tuple(_next_tokens(rule, branches, seed))] += 1
    probs_V = torch.softmax(LOGITS_V[:3].double(), dim=0).numpy()
    return chi_square.follows(counts.ravel(), np.outer(probs_V, probs_V).ravel())


WAYS_TO_DRAW = [("rejection", 1), ("kseq", 2), ("recursive", 2), ("mcsd", 2)]


@pytest.mark.parametrize(("rule", "branches"), WAYS_TO_DRAW)
def test_a_discarded_draft_tells_nothing_of_the_next_one(rule: str, branches: int) -> None:
    """Draws under a refused token may have moved a stopping rule's threshold.

    8 degrees of freedom; wrongly fails once in a million choices of the seeds.
    """
    assert _are_independent(rule, branches)


@pytest.mark.parametrize(("rule", "branches"), WAYS_TO_DRAW)
def test_noise_that_prefixes_share_is_noticed(
    rule: str, branches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: noise that depends only on the position."""
    monkeypatch.setattr(draw, "of_node", lambda spec, prefix_hash: spec)
    assert not _are_independent(rule, branches)
