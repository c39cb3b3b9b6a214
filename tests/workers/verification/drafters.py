"""Drafting with a TableModel for each rule, as a drafter draws with the keyed noise."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from paceline.sampling import SequenceSpec
from tests.workers.verification.table_model import TableModel
from workers.verification.candidates import CandidateTree, DraftProbs, SparseProbs, merge_paths
from workers.verification.draws import (
    cut_draft_probs,
    draw_chain_token,
    draw_independent,
    draw_without_replacement,
    top_children,
)

NUM_KEPT = 2
"""Of three tokens or more: so the cut distribution is not the whole one."""

Children = Callable[[SparseProbs, SequenceSpec, list[int]], Sequence[int]]
Drafted = tuple[CandidateTree, DraftProbs | None]


def _cut(model: TableModel, spec: SequenceSpec, tokens: Sequence[int]) -> SparseProbs:
    return cut_draft_probs(model.logits_V(tokens), spec, tokens, num_kept=NUM_KEPT)


def draft_chain(model: TableModel, spec: SequenceSpec, prefix: Sequence[int]) -> Drafted:
    """Two tokens, one draw each."""
    tokens = list(prefix)
    of_node: dict[int, SparseProbs] = {}
    for node in range(2):
        of_node[node] = _cut(model, spec, tokens)
        tokens.append(draw_chain_token(of_node[node], spec, len(tokens)))
    return CandidateTree.chain(tokens[len(prefix) :]), DraftProbs(of_node)


def draft_paths(model: TableModel, spec: SequenceSpec, prefix: Sequence[int]) -> Drafted:
    """Three independent paths of two tokens."""
    paths: list[list[int]] = []
    for number in range(3):
        tokens = list(prefix)
        for _ in range(2):
            cut = _cut(model, spec, tokens)
            tokens.append(draw_independent(cut, spec, len(tokens), (number,))[0])
        paths.append(tokens[len(prefix) :])
    tree = merge_paths(paths)
    return tree, _probs_of(model, spec, prefix, tree)


def _draft_pairs(
    model: TableModel, spec: SequenceSpec, prefix: Sequence[int], children_of: Children
) -> Drafted:
    """Two children, and two again under the first of them."""
    first = children_of(_cut(model, spec, prefix), spec, list(prefix))
    below = [*prefix, first[0]]
    second = children_of(_cut(model, spec, below), spec, below)
    parents = (0,) * len(first) + (1,) * len(second)
    tree = CandidateTree((*first, *second), parents)
    return tree, _probs_of(model, spec, prefix, tree)


def draft_without_replacement(
    model: TableModel, spec: SequenceSpec, prefix: Sequence[int]
) -> Drafted:
    return _draft_pairs(
        model, spec, prefix, lambda cut, s, at: draw_without_replacement(cut, s, len(at), 2)
    )


def draft_with_replacement(model: TableModel, spec: SequenceSpec, prefix: Sequence[int]) -> Drafted:
    return _draft_pairs(
        model, spec, prefix, lambda cut, s, at: draw_independent(cut, s, len(at), (0, 1))
    )


def draft_fixed(model: TableModel, spec: SequenceSpec, prefix: Sequence[int]) -> Drafted:
    """No draw at all."""
    return CandidateTree((0, 2, 1), (0, 0, 1)), None


def draft_coupled(model: TableModel, spec: SequenceSpec, prefix: Sequence[int]) -> Drafted:
    """The children likeliest under the target's noise."""
    first = top_children(model.logits_V(prefix), spec, prefix, 2)
    below = [*prefix, first[0]]
    second = top_children(model.logits_V(below), spec, below, 2)
    parents = (0,) * len(first) + (1,) * len(second)
    return CandidateTree((*first, *second), parents), None


def _probs_of(
    model: TableModel, spec: SequenceSpec, prefix: Sequence[int], tree: CandidateTree
) -> DraftProbs:
    paths = [list(prefix)]
    for token_id, parent in zip(tree.token_ids, tree.parents, strict=True):
        paths.append([*paths[parent], token_id])
    return DraftProbs(
        {node: _cut(model, spec, path) for node, path in enumerate(paths) if tree.children(node)}
    )


def pretends_to_be_uniform(drafted: Drafted) -> Drafted:
    """Broken: sends other probabilities than it drew from."""
    tree, probs = drafted
    assert probs is not None
    return tree, DraftProbs(
        {
            node: SparseProbs(
                pairs.token_ids_M,
                np.full(pairs.token_ids_M.size, 1 / pairs.token_ids_M.size, np.float32),
            )
            for node, pairs in probs.of_node.items()
        }
    )


DRAFTERS: Mapping[str, Callable[[TableModel, SequenceSpec, Sequence[int]], Drafted]] = {
    "coupled": draft_coupled,
    "rejection": draft_chain,
    "kseq": draft_paths,
    "recursive": draft_without_replacement,
    "mcsd": draft_with_replacement,
    "one-hot": draft_fixed,
}
