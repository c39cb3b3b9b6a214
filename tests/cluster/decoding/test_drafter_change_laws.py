"""Rules that toss coins keep the law when the drafter changes in the middle of a window: exactly.

The drafter is lost, declines, or starts again while its candidates are being verified, and another
one, whose distributions are others, goes on from the committed tokens. Every draw of both and
every coin is summed over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import pytest
from numpy.typing import NDArray

from cluster.decoding.sequence import Sequence
from cluster.decoding.token_tree import TokenTree
from tests.cluster.decoding.law_breaks import (
    drop_some_of_the_run_ahead,
    keep_the_run_ahead,
    keep_the_window_in_the_tree,
)
from tests.cluster.decoding.law_cases import (
    CHAIN,
    FANOUT,
    LOCKSTEP,
    MODEL,
    OTHER_MODEL,
    PEARL,
    Case,
)
from tests.cluster.decoding.law_faults import DrafterFault, Way
from tests.cluster.decoding.law_windows import attach, verify_window
from tests.cluster.decoding.law_world import Timing, request
from tests.workers.verification.enumeration import (
    Coins,
    Draft,
    TinyModels,
    drawn_chains,
    drawn_trees,
    is_exact,
    unordered_trees,
)
from workers.verification.candidates import CandidateTree
from workers.verification.rules import kseq

pytestmark = pytest.mark.long

TWO_MODELS = (MODEL, OTHER_MODEL)

# Steps, and passes of each before it: with nothing drafted beside the window, with some, with all.
MOMENTS = [(2, 0), (2, 1), (2, 3), (3, 1)]


def _moments(way: Way, *, target_away: bool = False) -> list[DrafterFault]:
    return [DrafterFault(step, passes, way, target_away) for step, passes in MOMENTS]


CASES = [
    Case("rejection", CHAIN, 1, window, Timing(3, late), 2, fault, 3, TWO_MODELS)
    for window in (1, 2)
    for late, way in ((0, Way.LOST), (1, Way.DECLINES), (0, Way.RESTARTS))
    for fault in _moments(way)
]
CASES += [
    Case("rejection", CHAIN, 1, 2, Timing(3), 2, fault, 3, TWO_MODELS)
    for fault in _moments(Way.LOST, target_away=True)
]
CASES += [
    Case("recursive", CHAIN, 2, 3, Timing(3), 2, DrafterFault(*moment, way), 3, TWO_MODELS)
    for moment, way in (((2, 1), Way.LOST), ((2, 3), Way.DECLINES), ((2, 1), Way.RESTARTS))
]
CASES += [
    Case("rejection", policy, 1, 2, Timing(3), 2, DrafterFault(2, 1, way), 3, TWO_MODELS)
    for policy in (LOCKSTEP, PEARL)
    for way in Way
]
CASES += [
    Case("one-hot", policy, 2, 3, Timing(3), 3, fault, 4, ("branching", "recycling"))
    for policy in (CHAIN, FANOUT)
    for way in Way
    for fault in _moments(way)
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_law_is_the_targets_though_the_drafter_changes(case: Case) -> None:
    case.check_exact()


# The same without scheduler and drafting desk, where more shapes can be enumerated.

LENGTH = 3
SPINE = (((), ()), ())  # two children, and two under the first of them
DRAFTS: dict[str, Callable[[TinyModels], Iterable[Draft]]] = {
    "rejection": lambda models: drawn_chains(models, 2),
    "kseq": lambda models: unordered_trees(models, 2, 2),
    "recursive": lambda models: _by_level(models, with_replacement=False),
    "mcsd": lambda models: _by_level(models, with_replacement=True),
    "one-hot": lambda models: [(CandidateTree((1, 0, 1), (0, 0, 1)), 1.0)],
}


def _by_level(models: TinyModels, *, with_replacement: bool) -> Iterable[Draft]:
    """Trees of the shape SPINE, numbered as they grow: siblings first, then what is below them."""
    for tree, drawn in drawn_trees(models, SPINE, with_replacement=with_replacement):
        depths = [0]
        for parent in tree.parents:
            depths.append(depths[parent] + 1)
        order = sorted(range(1, len(depths)), key=depths.__getitem__)
        number = {0: 0} | {node: index for index, node in enumerate(order, start=1)}
        token_ids = tuple(tree.token_ids[node - 1] for node in order)
        yield CandidateTree(token_ids, tuple(number[tree.parents[n - 1]] for n in order)), drawn


def _law(rule: str, window: int, *, vocab_size: int, late: bool) -> NDArray[np.float64]:
    """The law of the first tokens, where another drafter begins while a window is verified.

    `late`: its proposal comes after the verdict.
    """
    models, other = TinyModels(vocab_size, "random"), TinyModels(vocab_size, "other")
    law = np.zeros((vocab_size,) * LENGTH)
    for tree, drawn in DRAFTS[rule](models):
        for next_tree, next_drawn in DRAFTS[rule](other):
            coins = Coins()
            while True:
                coins.restart()
                tokens = _committed(rule, window, models, tree, other, next_tree, coins, late=late)
                left = models.law(tokens, LENGTH - len(tokens))
                law[tokens] += drawn * next_drawn * coins.probability * left
                if not coins.turn():
                    break
    return law


def _committed(
    rule: str,
    window: int,
    models: TinyModels,
    tree: CandidateTree,
    other: TinyModels,
    next_tree: CandidateTree,
    coins: Coins,
    *,
    late: bool,
) -> tuple[int, ...]:
    """The first tokens, as many as either drafter's candidates bring."""
    branches = 1 if rule == "rejection" else 2
    asked = request(rule, policy=CHAIN, branches=branches, window=window, max_tokens=9)
    sequence = Sequence.admitted(asked, 0.0)
    attach(sequence, models, tree)

    def change() -> None:
        sequence.tree.drop_run_ahead()
        if not late:
            attach(sequence, other, next_tree)

    verify_window(sequence, models, coins, beside=change)
    if late:
        attach(sequence, other, next_tree)
    while sequence.tree.num_committed < 1 + LENGTH and verify_window(sequence, models, coins):
        pass
    return tuple(sequence.tree.token_ids[1 : 1 + LENGTH])


SHAPES = [
    ("rejection", 1, 3),
    ("rejection", 2, 3),
    ("kseq", 2, 2),
    ("kseq", 4, 2),
    ("recursive", 2, 3),
    ("mcsd", 2, 2),
    ("mcsd", 3, 2),
    ("one-hot", 2, 3),
]


@pytest.mark.parametrize("late", [False, True], ids=["in-time", "late"])
@pytest.mark.parametrize(("rule", "window", "vocab_size"), SHAPES)
def test_what_two_drafters_drew_is_not_mixed(
    rule: str, window: int, vocab_size: int, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under k-SEQ with a loose ratio, too: it is exact as well, and a refused token comes again.

    With the exact ratio that has probability 1e-6, and hides what is wrong below the token.
    """
    monkeypatch.setattr(kseq, "_TOLERANCE", 0.5)
    law = _law(rule, window, vocab_size=vocab_size, late=late)
    assert is_exact(TinyModels(vocab_size, "random"), law)


# Negative controls: each is wrong by more than rounding.


def test_run_ahead_that_is_dropped_by_its_value_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    fault = DrafterFault(2, 3, Way.LOST)
    drop_some_of_the_run_ahead(monkeypatch)
    Case("rejection", CHAIN, 1, 1, Timing(3), 2, fault, 3, TWO_MODELS).check_noticed()


@pytest.mark.parametrize(
    ("rule", "window", "vocab_size", "broken"),
    [
        ("kseq", 4, 2, keep_the_window_in_the_tree),
        ("mcsd", 2, 2, drop_some_of_the_run_ahead),
        ("rejection", 1, 3, keep_the_run_ahead),
        ("rejection", 1, 3, drop_some_of_the_run_ahead),
    ],
)
def test_draws_that_are_mixed_are_noticed(
    rule: str,
    window: int,
    vocab_size: int,
    broken: Callable[[pytest.MonkeyPatch], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kseq, "_TOLERANCE", 0.5)
    # Else the mixed draws are taken for a lie of the drafter's, and dropped.
    monkeypatch.setattr(TokenTree, "_check_draws", lambda tree, proposal, base: None)
    broken(monkeypatch)
    law = _law(rule, window, vocab_size=vocab_size, late=False)
    assert law.sum() == pytest.approx(1)
    assert np.abs(law - TinyModels(vocab_size, "random").law((), LENGTH)).max() > 1e-4
