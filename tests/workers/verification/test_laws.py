"""Every rule that tosses coins commits the target's law exactly, by enumeration.

test_broken_rules.py has broken variants that the same check rejects.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from tests.workers.verification.enumeration import (
    KINDS,
    Shape,
    TinyModels,
    committed_law,
    drawn_chains,
    drawn_trees,
    is_exact,
    merged_trees,
    rule_node,
    unordered_trees,
)
from workers.verification.candidates import CandidateTree
from workers.verification.rule import DraftDistribution, RuleNode
from workers.verification.rules.kseq import KSeqNode, accepted_mass, smallest_ratio, some_accepted
from workers.verification.rules.one_hot import OneHotNode
from workers.verification.rules.rejection import RejectionNode

SIZES = [(v, k) for v in (3, 4, 5) for k in (1, 2, 3, 4)]

PAIR_OF_PAIRS: Shape = (((), ()), ((), ()))
SPINE: Shape = ((((), ()), ()), ())  # two children thrice, always under the first
FORK: Shape = (((),), (((),),))  # one child each, to depth 2 and 3
SHAPES = {"pair of pairs": PAIR_OF_PAIRS, "spine": SPINE, "fork": FORK}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [1, 2, 3])
def test_rejection(kind: str, length: int) -> None:
    """Chains over 3 to 5 tokens, with the bonus."""
    for vocab_size in (3, 4, 5) if length < 3 else (3,):
        models = TinyModels(vocab_size, kind)
        chains = drawn_chains(models, length)
        assert is_exact(models, committed_law(models, chains, length + 1, rule_node("rejection")))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rule", ["recursive", "mcsd"])
def test_recursive_at_one_position(rule: str, kind: str) -> None:
    """Up to 4 children of 3 to 5 tokens; with replacement, all 625 orders of 4 of 5."""
    for vocab_size, num_children in SIZES:
        models = TinyModels(vocab_size, kind)
        shape: Shape = ((),) * num_children
        drafts = drawn_trees(models, shape, with_replacement=rule == "mcsd")
        assert is_exact(models, committed_law(models, drafts, 1, rule_node(rule)))


@pytest.mark.parametrize("kind", ["random", "zeros", "one-hot draft", "equal"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rule", ["recursive", "mcsd"])
def test_recursive_in_trees(rule: str, shape: str, kind: str) -> None:
    """3 tokens, up to 2 children, to depth 3, with the bonus after each leaf."""
    models = TinyModels(3, kind)
    drafts = drawn_trees(models, SHAPES[shape], with_replacement=rule == "mcsd")
    assert is_exact(models, committed_law(models, drafts, 3, rule_node(rule)))


@pytest.mark.parametrize("kind", KINDS)
def test_kseq_at_one_position(kind: str) -> None:
    """Up to 4 draws of 3 to 5 tokens."""
    for vocab_size, num_paths in SIZES:
        models = TinyModels(vocab_size, kind)
        drafts = unordered_trees(models, num_paths, 1)
        law = committed_law(models, drafts, 1, rule_node("kseq"), shuffled=True)
        assert is_exact(models, law)


@pytest.mark.parametrize("kind", ["random", "zeros", "one-hot draft", "equal"])
@pytest.mark.parametrize(("num_paths", "depth"), [(3, 1), (2, 2), (2, 3)])
def test_kseq_paths(num_paths: int, depth: int, kind: str) -> None:
    """Every order of drawing the paths of a tree, over 3 tokens."""
    models = TinyModels(3, kind)
    drafts = merged_trees(models, num_paths, depth)
    law = committed_law(models, drafts, depth + 1, rule_node("kseq"), shuffled=True)
    assert is_exact(models, law)


@pytest.mark.parametrize("kind", ["random", "zeros", "one-hot target"])
def test_one_hot(kind: str) -> None:
    """All trees of up to 4 nodes over 3 tokens. Each has the law, however it was chosen."""
    models = TinyModels(3, kind)
    for parents in [(0,), (0, 0), (0, 0, 0), (0, 1), (0, 1, 2), (0, 0, 1, 1), (0, 0, 2, 3)]:
        for token_ids in itertools.product(range(3), repeat=len(parents)):
            siblings = list(zip(parents, token_ids, strict=True))
            if len(set(siblings)) == len(siblings):
                tree = CandidateTree(token_ids, parents)
                law = committed_law(models, [(tree, 1.0)], 3, rule_node("one-hot"))
                assert is_exact(models, law)
    models = TinyModels(5, kind)
    for token_ids in itertools.permutations(range(5), 4):
        tree = CandidateTree(token_ids, (0,) * 4)
        assert is_exact(models, committed_law(models, [(tree, 1.0)], 1, rule_node("one-hot")))


# Acceptance is what the papers say.


@pytest.mark.parametrize("kind", KINDS)
def test_acceptance_rates(kind: str) -> None:
    """Rejection: 1 - TV. k-SEQ: 1 - (1 - b)^K with the ratio where that is r b."""
    models = TinyModels(5, kind)
    target_V, draft = models.target_V(()), models.draft(()).exact()
    draft_V = np.zeros(5)
    draft_V[draft.token_ids_M] = draft.probs_M
    overlap = np.minimum(target_V, draft_V).sum()
    node = RejectionNode(target_V, draft, with_replacement=False)
    rate = sum(draft.prob_of(t) * node.acceptance(t) for t in draft.token_ids_M.tolist())
    assert rate == pytest.approx(overlap, abs=1e-12)
    previous = overlap
    for num_draws in (1, 2, 3, 4):
        target_M = target_V[draft.token_ids_M]
        ratio = smallest_ratio(target_M, draft.probs_M, num_draws)
        assert 1 <= ratio <= num_draws
        one = float(accepted_mass(target_M, draft.probs_M, ratio).sum())
        some = some_accepted(one, num_draws)
        assert some == pytest.approx(1 - (1 - one) ** num_draws, abs=1e-12)
        assert some == pytest.approx(ratio * one, abs=1e-5)  # the bisection's tolerance
        assert some >= previous - 1e-5, "another draw may not lower the acceptance"
        previous = some


def test_edges_of_the_arithmetic() -> None:
    """Disjoint supports, p = q and certainty leave finite distributions that sum to 1."""
    target_V = np.array([0.5, 0.5, 0.0, 0.0])
    other = DraftDistribution(np.array([2, 3]), np.array([0.5, 0.5]))
    same = DraftDistribution(np.array([0, 1]), np.array([0.5, 0.5]))
    for draft in (other, same):
        for node in (
            RejectionNode(target_V, draft, with_replacement=False),
            RejectionNode(target_V, draft, with_replacement=True),
            KSeqNode.of(target_V, draft, 3),
            OneHotNode(np.array([0.0, 0.0, 1.0, 0.0])),
        ):
            left: RuleNode = node
            for token_id in draft.token_ids_M.tolist():
                assert 0 <= left.acceptance(token_id) <= 1
                left = left.refused(token_id)
                assert left.residual_V().sum() == pytest.approx(1)
                assert (left.residual_V() >= 0).all()
                if isinstance(left, RejectionNode) and not left.draft.probs_M.any():
                    break
