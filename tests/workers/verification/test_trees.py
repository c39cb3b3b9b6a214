"""The coupled rule on trees: whatever the tree, the ids are those of plain decoding."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from paceline.sampling import SequenceSpec
from tests.workers.verification.naive import verify_chain, verify_tree
from tests.workers.verification.table_model import SAMPLINGS, TableModel, plain, spec_of
from workers.verification.candidates import CandidateTree
from workers.verification.choice import choose_token
from workers.verification.verify import Verdict

Verifier = Callable[[torch.Tensor, CandidateTree, SequenceSpec, Sequence[int]], Verdict]


def _trees(num_tokens: int, most_nodes: int) -> Iterator[CandidateTree]:
    """Every tree of different siblings up to so many candidates."""
    for size in range(most_nodes + 1):
        for parents in itertools.product(*(range(index + 1) for index in range(size))):
            for token_ids in itertools.product(range(num_tokens), repeat=size):
                siblings = list(zip(parents, token_ids, strict=True))
                if len(set(siblings)) == size:
                    yield CandidateTree(token_ids, parents)


TREES = list(_trees(3, 3))
PROMPT = (2, 1)


def _is_plain(verify: Verifier, tree: CandidateTree, model: TableModel, spec: SequenceSpec) -> bool:
    """Whether the verdict is plain decoding's text, as far as the tree reaches along it."""
    text = plain(model, spec, PROMPT, len(PROMPT) + tree.height + 1)[len(PROMPT) :]
    node, reached = 0, 0
    while (child := tree.child_with(node, text[reached])) is not None:
        node, reached = child + 1, reached + 1
    verdict = verify(model.logits_RV(PROMPT, tree), tree, spec, PROMPT)
    committed = [*tree.tokens_of(verdict.accepted), verdict.token_id]
    return committed == text[: reached + 1]


@pytest.mark.parametrize("name", SAMPLINGS)
def test_every_tree_leads_to_the_text_of_plain_decoding(name: str) -> None:
    """All trees of up to 3 candidates of 3 tokens."""
    assert len(TREES) == 124
    model, spec = TableModel(3, 1), spec_of(name, 2, len(PROMPT))
    assert all(_is_plain(verify_tree, tree, model, spec) for tree in TREES)


def test_thousands_of_noises() -> None:
    """3,000 seeds, a tree each, all samplings in turn."""
    models = [TableModel(3, number) for number in range(20)]
    for seed in range(3_000):
        spec = spec_of(list(SAMPLINGS)[seed % len(SAMPLINGS)], seed * 2**48 + seed, len(PROMPT))
        spec = replace(spec, sample_index=seed % 3)
        tree = TREES[(seed * 31) % len(TREES)]
        assert _is_plain(verify_tree, tree, models[seed % 20], spec), f"seed {seed}"


def _counts_rows(
    logits_RV: torch.Tensor, tree: CandidateTree, spec: SequenceSpec, prefix: Sequence[int]
) -> Verdict:
    """Broken: the noise of a candidate's index, not of its depth."""
    accepted: list[int] = []
    node = 0
    while True:
        before = [*prefix, *tree.token_ids[:node]]
        token_id = choose_token(logits_RV[node], spec, before)
        child = tree.child_with(node, token_id)
        if child is None:
            return Verdict(len(accepted), token_id, tuple(accepted))
        accepted.append(child)
        node = child + 1


def _first_child(
    logits_RV: torch.Tensor, tree: CandidateTree, spec: SequenceSpec, prefix: Sequence[int]
) -> Verdict:
    """Broken: commits the first child where another one is the target's token."""
    token_id = choose_token(logits_RV[0], spec, prefix)
    if tree.child_with(0, token_id) is None:
        return Verdict(0, token_id)
    first = tree.children(0)[0]
    after = [*prefix, tree.token_ids[first]]
    return Verdict(1, choose_token(logits_RV[first + 1], spec, after), (first,))


@pytest.mark.parametrize(
    ("broken", "name"),
    [(_counts_rows, "plain"), (_counts_rows, "greedy penalties"), (_first_child, "plain")],
)
def test_broken_verifiers_are_noticed(broken: Verifier, name: str) -> None:
    """Negative controls."""
    model = TableModel(3, 1)
    specs = [spec_of(name, seed, len(PROMPT)) for seed in range(5)]
    assert not all(_is_plain(broken, tree, model, spec) for tree in TREES for spec in specs)


def test_a_chain_is_a_tree() -> None:
    """The same verdict, path included."""
    model, spec = TableModel(4, 2), spec_of("plain", 5, 1)
    text = plain(model, spec, [3], 6)[1:]
    for chain in (text[:3], [text[0], 3 - text[1]], []):
        logits_TV = model.logits_TV([3], chain)
        verdict = verify_chain(logits_TV, chain, spec, [3])
        assert verify_tree(logits_TV, CandidateTree.chain(chain), spec, [3]) == verdict
        assert verdict.accepted == tuple(range(verdict.num_accepted))


def test_rows_off_the_path_are_not_looked_at() -> None:
    """A NaN there harms nothing."""
    spec = spec_of("greedy", 0, 1)
    tree = CandidateTree((0, 1, 1), (0, 0, 2))
    logits_RV = torch.tensor([[0.0, 1.0], [np.nan, 0.0], [0.0, 2.0], [3.0, 0.0]])
    assert verify_tree(logits_RV, tree, spec, [0]) == Verdict(2, 0, (1, 2))
