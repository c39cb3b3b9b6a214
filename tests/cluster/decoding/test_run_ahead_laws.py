"""Rules that toss coins keep the law exactly through scheduler and drafter, with run-ahead.

Windows begin with what was drafted while the window before was being verified: cut at a step's
size, narrowed to the accepted paths, late, or given up for the bonus token. The sum runs over every
draw and every coin.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from cluster.decoding.events import Request
from cluster.decoding.sequence import Sequence
from cluster.decoding.token_tree import TokenTree, Window
from tests.cluster.decoding.law_breaks import bonus_where_it_agrees
from tests.cluster.decoding.law_cases import CHAIN, LOCKSTEP, PEARL, Case
from tests.cluster.decoding.law_coins import NamedCoins
from tests.cluster.decoding.law_windows import attach, verify_window
from tests.cluster.decoding.law_world import Timing, request
from tests.workers.verification.enumeration import (
    Coins,
    TinyModels,
    is_exact,
    merged_trees,
    unordered_trees,
)
from workers.drafting.draw import draw_children
from workers.drafting.expansions import Children
from workers.verification.candidates import CandidateTree
from workers.verification.rules.kseq import KSeqNode

pytestmark = pytest.mark.long

CASES = (
    Case("rejection", LOCKSTEP, 1, 2, Timing(0), 3),
    Case("rejection", CHAIN, 1, 1, Timing(2), 3),
    Case("rejection", CHAIN, 1, 2, Timing(4), 2),
    Case("rejection", CHAIN, 1, 2, Timing(3, 1), 2),
    Case("rejection", PEARL, 1, 1, Timing(2), 3),
    Case("rejection", PEARL, 1, 2, Timing(3, 1), 2),
    Case("kseq", LOCKSTEP, 2, 4, Timing(0), 2),
    Case("kseq", CHAIN, 2, 2, Timing(2), 2),
    Case("kseq", CHAIN, 2, 4, Timing(4), 2),
    Case("kseq", CHAIN, 2, 4, Timing(3, 1), 2),
    Case("recursive", LOCKSTEP, 2, 3, Timing(0), 3),
    Case("recursive", CHAIN, 2, 2, Timing(2), 2),
    Case("recursive", CHAIN, 2, 3, Timing(3), 2),
    Case("recursive", CHAIN, 2, 3, Timing(3, 1), 2),
    Case("mcsd", LOCKSTEP, 2, 3, Timing(0), 3),
    Case("mcsd", CHAIN, 2, 2, Timing(2), 2),
    Case("mcsd", CHAIN, 2, 3, Timing(3), 2),
)
KSEQ = next(case for case in CASES if case.rule == "kseq" and case.policy is CHAIN)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_law_is_the_targets(case: Case) -> None:
    case.check_exact()


def test_what_is_served_begins_with_run_ahead_of_all_shapes() -> None:
    """So the test above reaches its case: windows with fewer paths than were drawn."""
    windows = KSEQ.serve().windows
    assert {part.multiplicities for part in windows} >= {(2,), (1, 1), (1,)}


def _in_windows(
    models: TinyModels, num_paths: int, depth: int, limit: int, *, ordered: bool
) -> NDArray[np.float64]:
    """The law of what one tree of paths commits, window after window, and then the target."""
    asked = request("kseq", policy=CHAIN, branches=num_paths, window=limit, max_tokens=9)
    drafts = merged_trees if ordered else unordered_trees
    law = np.zeros((models.vocab_size,) * (depth + 1))
    for tree, drawn in drafts(models, num_paths, depth):
        coins = Coins()
        while True:
            coins.restart()
            tokens = _committed(models, asked, tree, coins)
            left = models.law(tokens, depth + 1 - len(tokens))
            law[tokens] += drawn * coins.probability * left
            if not coins.turn():
                break
    return law


def _committed(
    models: TinyModels, asked: Request, tree: CandidateTree, coins: Coins
) -> tuple[int, ...]:
    """The tokens that the windows of one tree commit, until none of it is left."""
    sequence = Sequence.admitted(asked, 0.0)
    attach(sequence, models, tree)
    while verify_window(sequence, models, coins):
        pass
    return tuple(sequence.tree.token_ids[1:])


@pytest.mark.parametrize(
    ("vocab_size", "num_paths", "depth", "limit"),
    [(3, 2, 2, 2), (2, 2, 3, 2), (2, 3, 2, 3), (2, 3, 2, 4)],
)
@pytest.mark.parametrize("kind", ["random", "zeros"])
def test_paths_that_are_left_of_a_window_are_verified_as_so_many(
    kind: str, vocab_size: int, num_paths: int, depth: int, limit: int
) -> None:
    """Given the accepted tokens, the paths through them are still independent, and fewer."""
    models = TinyModels(vocab_size, kind)
    assert is_exact(models, _in_windows(models, num_paths, depth, limit, ordered=False))


# Negative controls: each is wrong by more than rounding.


def test_windows_cut_by_merged_nodes_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three draws fit into a window of four if two of them are equal, and else do not."""
    _cut_by_merged_nodes(monkeypatch)
    models = TinyModels(2, "random")
    law = _in_windows(models, 3, 2, 4, ordered=True)
    assert law.sum() == pytest.approx(1)
    assert np.abs(law - models.law((), 3)).max() > 1e-4


def _cut_by_merged_nodes(patch: pytest.MonkeyPatch) -> None:
    """Broken: k-SEQ's windows end by merged nodes, so equal draws fit where others do not."""
    pin = TokenTree.pin

    def cut(tree: TokenTree, limit: int, *, num_paths: int = 0) -> Window:
        window = pin(tree, limit)
        return replace(window, multiplicities=tuple(node.multiplicity for node in tree._pinned))

    patch.setattr(TokenTree, "pin", cut)


def _forget_multiplicities(patch: pytest.MonkeyPatch) -> None:
    """Broken: every candidate counts as one path."""
    pin = TokenTree.pin

    def once(tree: TokenTree, limit: int, *, num_paths: int = 0) -> Window:
        window = pin(tree, limit, num_paths=num_paths)
        return replace(window, multiplicities=(1,) * len(window.token_ids))

    patch.setattr(TokenTree, "pin", once)


def _count_paths_that_are_gone(patch: pytest.MonkeyPatch) -> None:
    """Broken: k-SEQ's ratio counts all drawn paths, though fewer lead to this node."""
    made = KSeqNode.of
    patch.setattr(KSeqNode, "of", lambda target_V, draft, num_draws: made(target_V, draft, 2))


def _keep_the_likelier_sibling(patch: pytest.MonkeyPatch) -> None:
    """Broken: the drafter prunes what it drew."""

    def pruned(*args: Any, **options: Any) -> Children:
        children = draw_children(*args, **options)
        best = min(range(len(children.gaps)), key=children.gaps.__getitem__)
        return replace(children, token_ids=(children.token_ids[best],), gaps=(children.gaps[best],))

    patch.setattr("workers.drafting.draw.draw_children", pruned)


def _one_uniform_a_position(patch: pytest.MonkeyPatch) -> None:
    """Broken: all tests of a position share a uniform."""
    below = NamedCoins.below

    def shared(coins: NamedCoins, name: tuple[object, ...], probability: float) -> bool:
        return below(coins, name[:2], probability)

    patch.setattr(NamedCoins, "below", shared)


def _one_uniform_for_all(patch: pytest.MonkeyPatch) -> None:
    """Broken: pre-verify, post-verify and every position share a uniform."""
    below = NamedCoins.below

    def shared(coins: NamedCoins, name: tuple[object, ...], probability: float) -> bool:
        return below(coins, ("test",), probability)

    patch.setattr(NamedCoins, "below", shared)


RECURSIVE = next(case for case in CASES if case.rule == "recursive")
REJECTION = next(case for case in CASES if case.policy is CHAIN)
PRE_AND_POST = next(case for case in CASES if case.policy is PEARL)


@pytest.mark.parametrize(
    ("case", "broken"),
    [
        (KSEQ, _forget_multiplicities),
        (KSEQ, _count_paths_that_are_gone),
        (KSEQ, bonus_where_it_agrees),
        (KSEQ, _one_uniform_a_position),
        (RECURSIVE, _keep_the_likelier_sibling),
        (REJECTION, bonus_where_it_agrees),
        (PRE_AND_POST, bonus_where_it_agrees),
        (PRE_AND_POST, _one_uniform_for_all),
    ],
    ids=lambda value: str(value) if isinstance(value, Case) else value.__name__,
)
def test_what_is_broken_is_noticed(
    case: Case, broken: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken(monkeypatch)
    case.check_noticed()
