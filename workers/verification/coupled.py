"""Coupled verification (ALGORITHMS.md section 3): target and drafter share the noise of a position.

The token at a position is argmax(log target_probs + noise): an exact sample of the target's
distribution that depends on nothing but the tokens before it and the request's seed. A candidate
is accepted while it is that token. So the text is that of plain decoding, whatever was proposed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.sampling import SequenceSpec
from workers.verification.candidates import CandidateTree
from workers.verification.choice import choose_from
from workers.verification.distribution import distribution_of, likeliest_token
from workers.verification.rows import WindowRows
from workers.verification.verdict import Verdict


def choose_token(logits_V: torch.Tensor, spec: SequenceSpec, prefix: Sequence[int]) -> int:
    """The token after `prefix`, which is all token ids so far, prompt included.

    `logits_V` is a float32 CPU tensor [V], the target's or a drafter's own; it is not changed.
    Raises InternalError where a logit is NaN or +inf, or where every token is masked.
    """
    return verify_chain(logits_V[None], (), spec, prefix).token_id


def verify_chain(
    logits_TV: torch.Tensor,
    candidates: Sequence[int],
    spec: SequenceSpec,
    prefix: Sequence[int],
) -> Verdict:
    """Accept candidates while they are the target's tokens, and add the target's next one.

    `logits_TV` is a float32 CPU tensor [1 + window, V]; row i follows prefix + candidates[:i].
    Rows after the first mismatch are not looked at. Raises as choose_token does.
    """
    return verify_tree(logits_TV, CandidateTree.chain(candidates), spec, prefix)


def verify_tree(
    logits_RV: torch.Tensor,
    tree: CandidateTree,
    spec: SequenceSpec,
    prefix: Sequence[int],
) -> Verdict:
    """Follow the children that are the target's tokens, and add the target's next one.

    `logits_RV` is a float32 CPU tensor [1 + candidates, V]; row 0 follows the prefix, row i + 1
    candidate i and its ancestors. Rows off the accepted path are not looked at. Raises as
    choose_token does.
    """
    rows = WindowRows(logits_RV, tree, spec, prefix)

    def token_of(node: int, accepted: Sequence[int]) -> int:
        adjusted_V = rows.adjusted_V(node, accepted)
        return choose_adjusted(adjusted_V, spec, len(prefix) + len(accepted))

    return follow(tree, token_of)


def follow(tree: CandidateTree, token_of: Callable[[int, Sequence[int]], int]) -> Verdict:
    """Accept candidates while they are the target's own tokens.

    `token_of` gives the target's token after a node, whose path of candidates it gets too.
    """
    accepted: list[int] = []
    node = 0
    while True:
        token_id = token_of(node, accepted)
        child = tree.child_with(node, token_id)
        if child is None:
            return Verdict(len(accepted), token_id, tuple(accepted))
        accepted.append(child)
        node = child + 1


def choose_adjusted(adjusted_V: NDArray[np.float32], spec: SequenceSpec, position: int) -> int:
    """The target's own token at a position, from logits after bias and penalties."""
    if spec.sampling.greedy:
        return likeliest_token(adjusted_V)
    kept = distribution_of(adjusted_V, spec.sampling)
    return choose_from(kept, adjusted_V.size, spec, position)
