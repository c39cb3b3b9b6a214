"""One entry to every rule: logits and candidates in, a Verdict out."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.errors import InternalError
from paceline.rules import Rule
from paceline.sampling import SequenceSpec
from workers.verification.candidates import CandidateTree
from workers.verification.coupled import choose_adjusted, verify_tree
from workers.verification.distribution import probabilities_of
from workers.verification.draft_probs import DraftProbs
from workers.verification.keyed_coins import KeyedCoins
from workers.verification.kseq import KSeqNode
from workers.verification.one_hot import OneHotNode
from workers.verification.rejection import RecursiveNode
from workers.verification.rows import WindowRows
from workers.verification.rules import FACTS
from workers.verification.verdict import Verdict
from workers.verification.walk import Node, walk


def verify(
    rule: Rule,
    logits_RV: torch.Tensor,
    tree: CandidateTree,
    spec: SequenceSpec,
    prefix: Sequence[int],
    draft_probs: DraftProbs | None = None,
) -> Verdict:
    """Accept candidates by a rule, and add the target's next token.

    `logits_RV` is a float32 CPU tensor [1 + candidates, V], not changed: row 0 follows the prefix,
    row i + 1 candidate i and its ancestors. The candidates and their draft probabilities have
    passed rules.check_proposal. A pure function: a repeated call tosses no coin anew. A position
    that had no candidate gets the token of plain decoding, whatever the rule. Raises InternalError
    where logits that decide are NaN or +inf, where every token is masked, or for rows that do not
    fit the candidates.
    """
    if rule is Rule.COUPLED:
        return verify_tree(logits_RV, tree, spec, prefix)
    rows = WindowRows(logits_RV, tree, spec, prefix)

    def begin(node: int, accepted: tuple[int, ...]) -> Node:
        target_probs_V = probabilities_of(rows.adjusted_V(node, accepted), spec.sampling)
        return begin_node(rule, target_probs_V, draft_probs, node, len(tree.copies(node)))

    coins = KeyedCoins(tree, spec, len(prefix))
    accepted, token_id = walk(tree, begin, coins, shuffled=rule is Rule.KSEQ)
    if token_id is None:
        node = accepted[-1] + 1 if accepted else 0
        adjusted_V = rows.adjusted_V(node, accepted)
        token_id = choose_adjusted(adjusted_V, spec, len(prefix) + len(accepted))
    return Verdict(len(accepted), token_id, accepted)


def begin_node(
    rule: Rule,
    target_probs_V: NDArray[np.float64],
    draft_probs: DraftProbs | None,
    node: int,
    num_tests: int,
) -> Node:
    """A rule that tosses coins, at a node whose children it has not tested yet."""
    if rule is Rule.ONE_HOT:
        return OneHotNode(target_probs_V)
    if draft_probs is None or node not in draft_probs.of_node:
        raise InternalError(
            f"expected draft probabilities under node {node} for the rule {rule.value!r}, got "
            "none: check proposals on arrival"
        )
    draft = draft_probs.of_node[node].exact()
    if rule is Rule.KSEQ:
        return KSeqNode.of(target_probs_V, draft, num_tests)
    assert FACTS[rule].needs_draft_probs, f"{rule} tosses no coins"
    return RecursiveNode(target_probs_V, draft, with_replacement=rule is Rule.MCSD)
