"""The entry to every rule: logits and candidates in, a Verdict out; for one window or a batch.

The arithmetic is numpy's, which takes a third of torch's time for the same logarithms on a CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.errors import InternalError
from paceline.sampling import SequenceSpec
from workers.verification.candidates import CandidateTree, DraftProbs
from workers.verification.coupled import choose_tokens, verify_trees
from workers.verification.distribution import probabilities_of
from workers.verification.keyed_coins import KeyedCoins
from workers.verification.rows import WindowRows
from workers.verification.rule import Node, rule_named
from workers.verification.verdict import Verdict
from workers.verification.walk import walk


def verify(
    rule: str,
    logits_RV: torch.Tensor,
    tree: CandidateTree,
    spec: SequenceSpec,
    prefix: Sequence[int],
    draft_probs: DraftProbs | None = None,
) -> Verdict:
    """Accept candidates by a rule, and add the target's next token.

    `logits_RV` is a float32 CPU tensor [1 + candidates, V], which is not changed: row 0 follows the
    prefix, row i + 1 follows candidate i and its ancestors. The candidates and their draft
    probabilities must have passed check_proposal. A pure function: a repeated call uses the same
    coins. A position without candidates gets the token of plain decoding, whatever the rule.

    Raises InternalError if logits that decide are NaN or +inf, if every token is masked, or if rows
    do not fit the candidates.
    """
    return verify_batch([Window(rule, logits_RV, tree, spec, prefix, draft_probs)])[0]


@dataclass(frozen=True, slots=True)
class Window:
    """The arguments of verify for one sequence of a batch."""

    rule: str
    logits_RV: torch.Tensor
    tree: CandidateTree
    spec: SequenceSpec
    prefix: Sequence[int]
    draft_probs: DraftProbs | None = None


def verify_batch(windows: Sequence[Window]) -> list[Verdict]:
    """A verdict for each window: what verify gives for it alone, whatever else is in the batch.

    Raises as verify does if any window cannot be verified.
    """
    verdicts: dict[int, Verdict] = {}
    coupled: dict[int, WindowRows] = {}
    open_ends: dict[int, tuple[WindowRows, tuple[int, ...]]] = {}
    for index, window in enumerate(windows):
        rows = WindowRows(window.logits_RV, window.tree, window.spec, window.prefix)
        if rule_named(window.rule).shares_noise:
            coupled[index] = rows
            continue
        accepted, token_id = _walk_window(window, rows)
        if token_id is None:
            open_ends[index] = rows, accepted
        else:
            verdicts[index] = Verdict(len(accepted), token_id, accepted)
    verdicts.update(zip(coupled, verify_trees(list(coupled.values())), strict=True))
    tokens = choose_tokens(list(open_ends.values()))
    for (index, (_, accepted)), token_id in zip(open_ends.items(), tokens, strict=True):
        verdicts[index] = Verdict(len(accepted), token_id, accepted)
    return [verdicts[index] for index in range(len(windows))]


def _walk_window(window: Window, rows: WindowRows) -> tuple[tuple[int, ...], int | None]:
    """The candidates that a coin-tossing rule accepts, and the token after a refusal or None."""
    tree, spec = window.tree, window.spec

    def begin(node: int, accepted: tuple[int, ...]) -> Node:
        target_probs_V = probabilities_of(rows.adjusted_V(node, accepted), spec.sampling)
        num_tests = len(tree.copies(node))
        return begin_node(window.rule, target_probs_V, window.draft_probs, node, num_tests)

    coins = KeyedCoins(tree, spec, len(window.prefix))
    return walk(tree, begin, coins, shuffled=rule_named(window.rule).counts_paths)


def begin_node(
    rule: str,
    target_probs_V: NDArray[np.float64],
    draft_probs: DraftProbs | None,
    node: int,
    num_tests: int,
) -> Node:
    """A rule that tosses coins, at a node whose children have not been tested yet."""
    facts = rule_named(rule)
    assert facts.begin is not None, f"{rule} tosses no coins"
    if not facts.needs_draft_probs:
        return facts.begin(target_probs_V, None, num_tests)
    if draft_probs is None or node not in draft_probs.of_node:
        raise InternalError(
            f"expected draft probabilities under node {node} for the rule {rule!r}, got none: "
            "check proposals on arrival"
        )
    return facts.begin(target_probs_V, draft_probs.of_node[node].exact(), num_tests)
