"""The entry to every rule: logits and candidates in, a Verdict out; for one window or a batch.

`follow` verifies under the rules that compare tokens, `walk` under the rules that toss coins: these
accept a candidate with some probability. The coins are an argument of `walk`. Production code draws
them from keyed noise (`KeyedCoins`). Tests enumerate all outcomes of the coins and sum their
probabilities. numpy does the arithmetic: for the same logarithms on a CPU it needs a third of
torch's time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from paceline.errors import InternalError
from paceline.sampling import SequenceSpec
from workers.verification.candidates import CandidateTree, DraftProbs, end_of
from workers.verification.choice import choose_tokens, draw
from workers.verification.distribution import Logits, WindowRows, probabilities_of
from workers.verification.noise import Purpose, uniforms_N
from workers.verification.rule import RuleNode, rule_named


@dataclass(frozen=True, slots=True)
class Verdict:
    """The accepted candidates are committed, and after them `token_id`.

    `token_id` is the target's own token: the recovered one if candidates were refused, the bonus
    token if a path was accepted to its end. `accepted` are the indices of the accepted candidates,
    each the child of the one before. If omitted, they are the first `num_accepted`.
    """

    num_accepted: int
    token_id: int
    accepted: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.accepted:
            object.__setattr__(self, "accepted", tuple(range(self.num_accepted)))
        assert len(self.accepted) == self.num_accepted, "a path and its length disagree"


@dataclass(frozen=True, slots=True)
class Window:
    """The arguments of verify for one sequence of a batch."""

    rule: str
    logits_RV: Logits
    tree: CandidateTree
    spec: SequenceSpec
    prefix: Sequence[int]
    draft_probs: DraftProbs | None = None


def verify(
    rule: str,
    logits_RV: Logits,
    tree: CandidateTree,
    spec: SequenceSpec,
    prefix: Sequence[int],
    draft_probs: DraftProbs | None = None,
) -> Verdict:
    """Accept candidates by a rule, and add the target's next token.

    `logits_RV` are float32 [1 + candidates, V], an array or a CPU tensor, and are not changed: row
    0 follows the prefix, row i + 1 follows candidate i and its ancestors. The candidates and their
    draft probabilities must have passed check_proposal. A pure function: a repeated call uses the
    same coins. A position without candidates gets the token of plain decoding, whatever the rule.

    Raises InternalError if logits that decide are NaN or +inf, if every token is masked, or if rows
    do not fit the candidates.
    """
    return verify_batch([Window(rule, logits_RV, tree, spec, prefix, draft_probs)])[0]


def verify_batch(windows: Sequence[Window]) -> list[Verdict]:
    """A verdict for each window. It equals that of `verify`, whatever else is in the batch.

    Raises as `verify` does if any window cannot be verified.
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
    verdicts.update(zip(coupled, _verify_coupled(list(coupled.values())), strict=True))
    tokens = choose_tokens(list(open_ends.values()))
    for (index, (_, accepted)), token_id in zip(open_ends.items(), tokens, strict=True):
        verdicts[index] = Verdict(len(accepted), token_id, accepted)
    return [verdicts[index] for index in range(len(windows))]


def _verify_coupled(windows: Sequence[WindowRows]) -> list[Verdict]:
    return follow(
        [window.tree for window in windows],
        lambda places: choose_tokens([(windows[index], path) for index, path in places]),
    )


WindowPath = tuple[int, Sequence[int]]
"""The number of a window, and the accepted candidates from its root down."""


def follow(
    trees: Sequence[CandidateTree], tokens_after: Callable[[Sequence[WindowPath]], Sequence[int]]
) -> list[Verdict]:
    """Accept candidates of each tree while they equal the target's own tokens.

    `tokens_after` returns the target's token after each given path. It is called once per depth,
    with one path of each tree that has no verdict yet.
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


def _walk_window(window: Window, rows: WindowRows) -> tuple[tuple[int, ...], int | None]:
    """The candidates that a coin-tossing rule accepts, and the token after a refusal, or None."""
    tree, spec = window.tree, window.spec

    def begin(node: int, accepted: tuple[int, ...]) -> RuleNode:
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
) -> RuleNode:
    """A rule that tosses coins, at a node whose children have not been tested yet."""
    begin = rule_named(rule).begin
    assert begin is not None, f"{rule} tosses no coins"
    draft = None
    if rule_named(rule).needs_draft_probs:
        if draft_probs is None or node not in draft_probs.of_node:
            raise InternalError(
                f"expected draft probabilities under node {node} for the rule {rule!r}, got none: "
                "check proposals on arrival"
            )
        draft = draft_probs.of_node[node].exact()
    return begin(target_probs_V, draft, num_tests)


class Coins(Protocol):
    """All random choices of a walk. `depth`: how many candidates it has accepted before."""

    def order(self, depth: int, num_tests: int) -> Sequence[int]:
        """A uniformly random permutation of `num_tests` tests."""
        ...

    def accepts(self, depth: int, number: int, probability: float) -> bool:
        """True with this probability, independent of all else. `number` counts a node's tests."""
        ...

    def token(self, depth: int, residual_V: NDArray[np.float64]) -> int:
        """A token drawn from these probabilities, which need not be normalized."""
        ...


NodeAt = Callable[[int, tuple[int, ...]], RuleNode]
"""Maps a node's number, and the accepted candidates up to it, to the rule at that node."""


def walk(
    tree: CandidateTree, begin: NodeAt, coins: Coins, *, shuffled: bool
) -> tuple[tuple[int, ...], int | None]:
    """The accepted candidates, and the token after them; None if the last one has no children.

    A node's children are tested in the order of their indices, each once per path through it. With
    `shuffled` the order is random. A tree of merged independent draws does not keep their order,
    and any fixed order would favor tokens that were drawn twice.
    """
    accepted: list[int] = []
    node = 0
    while tests := tree.copies(node):
        depth = len(accepted)
        if shuffled and len(tests) > 1:
            tests = tuple(tests[i] for i in coins.order(depth, len(tests)))
        at_node = begin(node, tuple(accepted))
        for number, child in enumerate(tests):
            token_id = tree.token_ids[child]
            if coins.accepts(depth, number, at_node.acceptance(token_id)):
                break
            at_node = at_node.refused(token_id)
        else:
            return tuple(accepted), coins.token(depth, at_node.residual_V())
        accepted.append(child)
        node = child + 1
    return tuple(accepted), None


_FIRST_ORDER_NUMBER = 1 << 16
"""Candidate numbers from this one on are for the order of a node's tests, lower ones for tests."""


class KeyedCoins:
    """The coins of one window: a function of the request's seed and the position, so a retry gets
    the same ones. `first_position` is the position of the token after the prefix.
    """

    def __init__(self, tree: CandidateTree, spec: SequenceSpec, first_position: int) -> None:
        self._spec = spec
        self._first_position = first_position
        most_tests = max((len(tree.copies(node)) for node in range(len(tree) + 1)), default=0)
        depths = np.arange(tree.height, dtype=np.int64)
        numbers = np.arange(most_tests, dtype=np.int64)
        # One call for all tests of the window: a call costs more than the numbers that it makes.
        self._uniforms_DN = self._uniforms(
            np.repeat(depths, most_tests), np.tile(numbers, tree.height)
        ).reshape(tree.height, most_tests)

    def order(self, depth: int, num_tests: int) -> Sequence[int]:
        numbers = np.arange(_FIRST_ORDER_NUMBER, _FIRST_ORDER_NUMBER + num_tests, dtype=np.int64)
        keys = self._uniforms(np.full(num_tests, depth, dtype=np.int64), numbers)
        order: list[int] = np.argsort(keys, kind="stable").tolist()
        return order

    def accepts(self, depth: int, number: int, probability: float) -> bool:
        return bool(self._uniforms_DN[depth, number] < probability)

    def token(self, depth: int, residual_V: NDArray[np.float64]) -> int:
        return draw(residual_V, self._spec, self._first_position + depth, purpose=Purpose.RESIDUAL)

    def _uniforms(
        self, depths_N: NDArray[np.int64], numbers_N: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        return uniforms_N(
            self._first_position + depths_N,
            numbers_N,
            seed=self._spec.seed,
            purpose=Purpose.ACCEPTANCE,
            sample_index=self._spec.sample_index,
        )
