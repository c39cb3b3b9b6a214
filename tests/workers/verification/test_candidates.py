"""Trees, paths merged into trees, draft probabilities, and proposals that are refused."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import ProtocolError
from workers.verification.candidates import (
    CandidateTree,
    DraftProbs,
    SparseProbs,
    check_proposal,
    merge_paths,
)
from workers.verification.rule import RULES, CandidateKind, Promise, rule_named


def _pairs(*probs: float, first: int = 0) -> SparseProbs:
    ids = np.arange(first, first + len(probs))
    return SparseProbs(ids, np.array(probs, dtype=np.float32))


def test_numbering() -> None:
    """Node 0 is the last committed token, node i + 1 candidate i; children in order of index."""
    tree = CandidateTree((7, 8, 7, 9), (0, 1, 0, 1))
    assert tree.children(0) == (0, 2)
    assert tree.children(1) == (1, 3)
    assert [tree.children(node) for node in (2, 3, 4)] == [(), (), ()]
    assert tree.height == 2
    assert tree.child_with(1, 9) == 3
    assert tree.child_with(1, 7) is None
    assert tree.tokens_of((0, 3)) == [7, 9]
    assert not tree.is_chain
    chain = CandidateTree.chain([5, 5, 6])
    assert chain == CandidateTree((5, 5, 6), (0, 1, 2))
    assert chain.is_chain
    assert CandidateTree.chain([]).height == 0


@settings(max_examples=200, deadline=None)
@given(
    st.integers(0, 4).flatmap(
        lambda depth: st.lists(
            st.lists(st.integers(0, 2), min_size=depth, max_size=depth), max_size=6
        )
    )
)
def test_merged_paths(paths: list[list[int]]) -> None:
    """Every beginning of a path is one candidate, with the number of paths that begin so."""
    tree = merge_paths(paths)
    tree.check(vocab_size=3, max_nodes=24)
    beginnings = Counter(tuple(path[:n]) for path in paths for n in range(1, len(path) + 1))
    found: dict[tuple[int, ...], int] = {}
    walks: list[tuple[int, ...]] = [()]
    for index, parent in enumerate(tree.parents):
        walks.append((*walks[parent], tree.token_ids[index]))
        found[walks[-1]] = tree.multiplicities[index]
    assert found == beginnings
    assert len(found) == len(tree)


@pytest.mark.parametrize(
    ("token_ids", "parents", "multiplicities", "said"),
    [
        ((1, 2), (0,), (), "2 parents"),
        ((1, 2), (0, 2), (), "candidate 1 to have a parent from 0 to 1, got 2"),
        ((1,), (-1,), (), "got -1"),
        ((1, 2), (0, 0), (1,), "2 multiplicities"),
    ],
)
def test_what_is_no_tree(
    token_ids: tuple[int, ...], parents: tuple[int, ...], multiplicities: tuple[int, ...], said: str
) -> None:
    with pytest.raises(ProtocolError, match=said):
        CandidateTree(token_ids, parents, multiplicities)


@pytest.mark.parametrize(
    ("tree", "said"),
    [
        (CandidateTree((1, 9), (0, 1)), "below 9, got 9 for candidate 1"),
        (CandidateTree((1, -1), (0, 1)), "got -1 for candidate 1"),
        (CandidateTree((1, 1), (0, 0)), "different tokens under node 0"),
        (CandidateTree.chain(range(6)), "at most 5 candidates, got 6"),
        (CandidateTree((1, 2), (0, 1), (1, 2)), "at most 1 paths below candidate 0, got 2"),
        (CandidateTree((1, 2), (0, 1), (1, 0)), "at least one path through candidate 1"),
        (CandidateTree((1,), (0,), (10**12,)), "at most 5 paths"),
    ],
)
def test_trees_that_are_refused(tree: CandidateTree, said: str) -> None:
    for rule in ("coupled", "kseq"):
        with pytest.raises(ProtocolError, match=said):
            check_proposal(rule, tree, None, vocab_size=9, max_nodes=5)


@pytest.mark.parametrize(
    ("of_node", "said"),
    [
        ({}, r"for the nodes \[0, 1\], got them for \[\]"),
        ({0: _pairs(1.0), 1: _pairs(1.0), 2: _pairs(1.0)}, r"got them for \[0, 1, 2\]"),
        ({0: _pairs(0.5, 0.4), 1: _pairs(1.0)}, "sum to 1 under node 0"),
        ({0: _pairs(1.0), 1: _pairs(math.nan, 1.0)}, "finite draft probabilities .* node 1"),
        ({0: _pairs(1.0), 1: _pairs(math.inf)}, "finite draft probabilities .* node 1"),
        ({0: _pairs(1.5, -0.5), 1: _pairs(1.0)}, "at least 0 under node 0"),
        ({0: _pairs(0.5, 0.5, first=3), 1: _pairs(1.0)}, "ids below 4 .* got 3 to 4"),
        ({0: _pairs(1.0, first=-1), 1: _pairs(1.0)}, "ids below 4"),
        ({0: _pairs(), 1: _pairs(1.0)}, "as many draft probabilities as token ids"),
        ({0: _pairs(0.0, 1.0), 1: _pairs(1.0)}, "above 0 for candidate 0"),
        ({0: _pairs(1.0), 1: _pairs(1.0, first=1)}, r"above 0 for candidate 1 \(token 0\)"),
        (
            {0: SparseProbs(np.array([1, 0]), np.full(2, 0.5, np.float32)), 1: _pairs(1.0)},
            "ascending token ids",
        ),
    ],
)
def test_draft_probabilities_that_are_refused(of_node: dict[int, SparseProbs], said: str) -> None:
    tree = CandidateTree.chain([0, 0])
    with pytest.raises(ProtocolError, match=said):
        check_proposal("rejection", tree, DraftProbs(of_node), vocab_size=4, max_nodes=9)


def test_proposals_that_pass() -> None:
    """The test also shows what each rule alone refuses."""
    chain = CandidateTree.chain([0, 1])
    probs = DraftProbs({0: _pairs(0.5, 0.5), 1: _pairs(0.5, 0.5)})
    for rule in RULES:
        check_proposal(rule, chain, probs, vocab_size=4, max_nodes=9)
        check_proposal(rule, CandidateTree((), ()), None, vocab_size=4, max_nodes=9)
        if rule_named(rule).needs_draft_probs:
            with pytest.raises(ProtocolError, match=f"{rule}.*got none"):
                check_proposal(rule, chain, None, vocab_size=4, max_nodes=9)
    twins = CandidateTree((1, 1), (0, 0))
    check_proposal("mcsd", twins, DraftProbs({0: _pairs(0.5, 0.5)}), vocab_size=4, max_nodes=9)
    with pytest.raises(ProtocolError, match="different tokens"):
        check_proposal(
            "recursive", twins, DraftProbs({0: _pairs(0.5, 0.5)}), vocab_size=4, max_nodes=9
        )
    fork = CandidateTree((0, 1), (0, 0))
    with pytest.raises(ProtocolError, match="a chain for the rule 'rejection'"):
        check_proposal(
            "rejection", fork, DraftProbs({0: _pairs(0.5, 0.5)}), vocab_size=4, max_nodes=9
        )
    with pytest.raises(ProtocolError, match="without multiplicities for the rule 'one-hot'"):
        check_proposal("one-hot", merge_paths([[1], [1]]), None, vocab_size=4, max_nodes=9)


def test_what_the_rules_are_exact_for() -> None:
    def exact_for(kind: CandidateKind) -> set[str]:
        return {name for name, rule in RULES.all().items() if kind in rule.exact_for}

    assert exact_for(CandidateKind.DETERMINISTIC) == {"coupled", "one-hot"}
    assert exact_for(CandidateKind.SAMPLED_CHAIN) == set(RULES)
    assert {rule for rule in RULES if rule_named(rule).promise is Promise.TEXT} == {"coupled"}
