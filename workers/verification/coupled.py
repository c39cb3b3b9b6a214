"""Coupled verification: target and drafter share the noise of a position.

This is Gumbel coupling (Daliri et al. 2024). The token at a position is argmax(log target_probs +
noise): an exact sample of the target's distribution that depends only on the tokens before it and
on the request's seed. A candidate is accepted while it equals that token. So the text is that of
plain decoding, whatever was proposed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from paceline.sampling import SequenceSpec
from workers.verification.candidates import CandidateTree
from workers.verification.choice import Draw, choose_all
from workers.verification.distribution import distribution_of, likeliest_token
from workers.verification.noise import Stream
from workers.verification.rows import WindowRows
from workers.verification.verdict import Verdict

_LOGITS_AT_ONCE = 100_000
"""Maximum number of logits in one call. With more, intermediate results leave the caches."""


def choose_token(logits_V: torch.Tensor, spec: SequenceSpec, prefix: Sequence[int]) -> int:
    """The token after `prefix`, which is all token ids before it, prompt included.

    `logits_V` is a float32 CPU tensor [V], the target's or a drafter's own; it is not changed.
    Raises InternalError if a logit is NaN or +inf, or if every token is masked.
    """
    return verify_chain(logits_V[None], (), spec, prefix).token_id


def verify_chain(
    logits_TV: torch.Tensor,
    candidates: Sequence[int],
    spec: SequenceSpec,
    prefix: Sequence[int],
) -> Verdict:
    """Accept candidates while they are the target's tokens, and add the target's next one.

    `logits_TV` is a float32 CPU tensor [1 + window, V]; row i follows prefix + candidates[:i]. Rows
    after the first mismatch are not read. Raises as choose_token does.
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
    follows candidate i and its ancestors. Rows off the accepted path are not read. Raises as
    choose_token does.
    """
    return verify_trees([WindowRows(logits_RV, tree, spec, prefix)])[0]


def verify_trees(windows: Sequence[WindowRows]) -> list[Verdict]:
    """verify_tree for several windows. A verdict depends on its own window only."""
    return follow(
        [window.tree for window in windows],
        lambda places: choose_tokens([(windows[index], path) for index, path in places]),
    )


Place = tuple[int, Sequence[int]]
"""The number of a window, and accepted candidates from its root down."""


def follow(
    trees: Sequence[CandidateTree], tokens_after: Callable[[Sequence[Place]], Sequence[int]]
) -> list[Verdict]:
    """Accept candidates of each tree while they are the target's own tokens.

    `tokens_after` returns the target's tokens after places of different trees, depth by depth.
    """
    verdicts: dict[int, Verdict] = {}
    paths: dict[int, list[int]] = {index: [] for index in range(len(trees))}
    while paths:
        places = list(paths.items())
        for (index, path), token_id in zip(places, tokens_after(places), strict=True):
            child = trees[index].child_with(end_of(path), token_id)
            if child is None:
                verdicts[index] = Verdict(len(path), token_id, tuple(paths.pop(index)))
            else:
                path.append(child)
    return [verdicts[index] for index in range(len(trees))]


def end_of(path: Sequence[int]) -> int:
    """The node at which a path of candidates ends."""
    return path[-1] + 1 if path else 0


def choose_tokens(places: Sequence[tuple[WindowRows, Sequence[int]]]) -> list[int]:
    """The target's own token after each path of accepted candidates."""
    tokens: list[int] = []
    begin = 0
    while begin < len(places):
        end = begin + max(_LOGITS_AT_ONCE // places[begin][0].vocab_size, 1)
        tokens += _choose_together(places[begin:end])
        begin = end
    return tokens


def _choose_together(places: Sequence[tuple[WindowRows, Sequence[int]]]) -> list[int]:
    tokens: dict[int, int] = {}
    draws: dict[int, Draw] = {}
    for index, (window, path) in enumerate(places):
        adjusted_V = window.adjusted_V(end_of(path), path)
        if window.spec.sampling.greedy:
            tokens[index] = likeliest_token(adjusted_V)
        else:
            kept = distribution_of(adjusted_V, window.spec.sampling)
            stream = Stream(window.spec.seed, window.position(path), window.spec.sample_index)
            draws[index] = Draw(kept, adjusted_V.size, stream)
    tokens.update(zip(draws, choose_all(list(draws.values())), strict=True))
    return [tokens[index] for index in range(len(places))]
