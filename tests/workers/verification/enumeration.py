"""The exact law of what a rule commits: the sum over every draft and every fall of every coin.

It runs production's walk, with coins that fall on each side in turn.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from workers.verification.candidates import (
    CandidateTree,
    DraftProbs,
    SparseProbs,
    merge_paths,
)
from workers.verification.rule import DraftDistribution, RuleNode
from workers.verification.verify import begin_node, walk

TOLERANCE = 1e-12

Prefix = tuple[int, ...]
NodeOf = Callable[[NDArray[np.float64], DraftProbs, int, int], RuleNode]
"""Makes a rule's node from target probabilities, draft probabilities, node and number of tests."""

Draft = tuple[CandidateTree, float]
"""Candidates, and the probability that the drafter draws them."""

# A node's children, each with its own children: ((), ()) is a pair of leaves.
Shape = tuple["Shape", ...]

KINDS = ("random", "other", "disjoint", "zeros", "one-hot target", "one-hot draft", "equal")


class TinyModels:
    """A target and a drafter over a tiny vocabulary, with their own distributions after each
    prefix.
    """

    def __init__(self, vocab_size: int, kind: str) -> None:
        self.vocab_size = vocab_size
        self.kind = kind
        self._known: dict[Prefix, tuple[NDArray[np.float64], SparseProbs]] = {}
        self._laws: dict[tuple[Prefix, int], NDArray[np.float64]] = {}

    def target_V(self, prefix: Prefix) -> NDArray[np.float64]:
        return self._at(prefix)[0]

    def draft(self, prefix: Prefix) -> SparseProbs:
        return self._at(prefix)[1]

    def law(self, prefix: Prefix, length: int) -> NDArray[np.float64]:
        """The target's law of the next `length` tokens: [V] * length."""
        if length == 0:
            return np.ones(())
        if (prefix, length) not in self._laws:
            self._laws[prefix, length] = np.stack(
                [
                    prob * self.law((*prefix, token_id), length - 1)
                    for token_id, prob in enumerate(self.target_V(prefix))
                ]
            )
        return self._laws[prefix, length]

    def draft_probs(self, tree: CandidateTree) -> DraftProbs:
        """The distributions from which each node's children were drawn."""
        paths: list[Prefix] = [()]
        for token_id, parent in zip(tree.token_ids, tree.parents, strict=True):
            paths.append((*paths[parent], token_id))
        return DraftProbs(
            {node: self.draft(path) for node, path in enumerate(paths) if tree.children(node)}
        )

    def _at(self, prefix: Prefix) -> tuple[NDArray[np.float64], SparseProbs]:
        if prefix not in self._known:
            self._known[prefix] = self._made(
                np.random.default_rng([KINDS.index(self.kind), *prefix])
            )
        return self._known[prefix]

    def _made(self, rng: np.random.Generator) -> tuple[NDArray[np.float64], SparseProbs]:
        size = self.vocab_size
        target_V, draft_V = rng.dirichlet(np.full(size, 0.7), 2)
        order = rng.permutation(size)
        if self.kind == "disjoint":
            target_V[order[: size // 2]] = 0
            draft_V[order[size // 2 :]] = 0
        elif self.kind == "zeros":
            target_V[order[0]] = draft_V[order[1]] = 0
        elif self.kind == "one-hot target":
            target_V = np.eye(size)[order[0]]
        elif self.kind == "one-hot draft":
            draft_V = np.eye(size)[order[0]]
        ids = np.flatnonzero(draft_V > 0)
        sparse = SparseProbs(ids, (draft_V[ids] / draft_V.sum()).astype(np.float32))
        if self.kind == "equal":
            target_V = np.zeros(size)
            target_V[ids] = sparse.exact().probs_M
        return target_V / target_V.sum(), sparse


@dataclass
class Coins:
    """Coins that fall as a tape says, and on their first side after its end; see `outcomes`."""

    tape: list[list[float]] = field(default_factory=list)
    sides: list[int] = field(default_factory=list)
    tossed: int = 0
    probability: float = 1.0

    def toss(self, probs: Sequence[float]) -> int:
        """Choose a side. Over all tapes, each possible side is chosen."""
        if self.tossed == len(self.tape):
            self.tape.append(list(probs))
            self.sides.append(-1)
            self.turn()
        side = self.sides[self.tossed]
        self.probability *= self.tape[self.tossed][side]
        self.tossed += 1
        return side

    def turn(self) -> bool:
        """Let the last coin fall on its next possible side. Remove coins that have none."""
        while self.tape:
            rest = range(self.sides[-1] + 1, len(self.tape[-1]))
            side = next((i for i in rest if self.tape[-1][i] > 0), None)
            if side is not None:
                self.sides[-1] = side
                return True
            self.tape.pop()
            self.sides.pop()
        return False

    def restart(self) -> None:
        self.tossed, self.probability = 0, 1.0

    def order(self, depth: int, num_tests: int) -> Sequence[int]:
        orders = list(itertools.permutations(range(num_tests)))
        return orders[self.toss([1 / len(orders)] * len(orders))]

    def accepts(self, depth: int, number: int, probability: float) -> bool:
        return self.toss([probability, 1 - probability]) == 0

    def token(self, depth: int, residual_V: NDArray[np.float64]) -> int:
        return self.toss((residual_V / residual_V.sum()).tolist())


def committed_law(
    models: TinyModels,
    drafts: Iterable[Draft],
    length: int,
    node_of: NodeOf,
    *,
    shuffled: bool = False,
    coins_of: Callable[[], Coins] = Coins,
) -> NDArray[np.float64]:
    """The law [V] * length of the first tokens; the target's own tokens follow the verdict's."""
    law = np.zeros((models.vocab_size,) * length)
    for tree, drafted in drafts:
        for tokens, prob in _verdicts(models, tree, node_of, shuffled, coins_of()):
            missing = length - len(tokens)
            law[tokens[:length]] += drafted * prob * models.law(tokens, max(missing, 0))
    return law


def _verdicts(
    models: TinyModels, tree: CandidateTree, node_of: NodeOf, shuffled: bool, coins: Coins
) -> Iterator[tuple[Prefix, float]]:
    """The tokens that the walk commits, with their probability; a bonus is left to the target."""
    draft_probs = models.draft_probs(tree)
    known: dict[int, RuleNode] = {}

    def begin(node: int, accepted: tuple[int, ...]) -> RuleNode:
        if node not in known:
            target_V = models.target_V(tuple(tree.tokens_of(accepted)))
            known[node] = node_of(target_V, draft_probs, node, len(tree.copies(node)))
        return known[node]

    while True:
        coins.restart()
        accepted, token_id = walk(tree, begin, coins, shuffled=shuffled)
        after = () if token_id is None else (token_id,)
        yield (*tree.tokens_of(accepted), *after), coins.probability
        if not coins.turn():
            return


def rule_node(rule: str) -> NodeOf:
    """The node of an unbroken rule."""
    return lambda target_V, draft_probs, node, num_tests: begin_node(
        rule, target_V, draft_probs, node, num_tests
    )


def is_exact(models: TinyModels, law: NDArray[np.float64]) -> bool:
    """Whether a law is the target's own, to 1e-12."""
    return bool(np.abs(law - models.law((), law.ndim)).max() < TOLERANCE)


# A node's children, each with what is below it.
_Nested = tuple[tuple[int, "_Nested"], ...]


def drawn_trees(models: TinyModels, shape: Shape, *, with_replacement: bool) -> Iterator[Draft]:
    """All trees of a shape; without replacement, smaller where the drafter has too few tokens."""
    for nested, prob in _grown(models, (), shape, with_replacement):
        numbered: list[tuple[int, int]] = []
        _number(nested, 0, numbered)
        token_ids = tuple(token_id for token_id, _ in numbered)
        yield CandidateTree(token_ids, tuple(parent for _, parent in numbered)), prob


def _number(children: _Nested, parent: int, numbered: list[tuple[int, int]]) -> None:
    """Append (token id, parent) of the candidates below a node, each before its children."""
    for token_id, below in children:
        numbered.append((token_id, parent))
        _number(below, len(numbered), numbered)


def _grown(
    models: TinyModels, prefix: Prefix, shape: Shape, with_replacement: bool
) -> list[tuple[_Nested, float]]:
    grown: list[tuple[_Nested, float]] = []
    for tokens, prob in _draws(models.draft(prefix).exact(), len(shape), with_replacement):
        below = [
            _grown(models, (*prefix, token_id), child, with_replacement)
            for token_id, child in zip(tokens, shape, strict=False)
        ]
        for choice in itertools.product(*below):
            nested = tuple((t, one[0]) for t, one in zip(tokens, choice, strict=True))
            grown.append((nested, prob * float(np.prod([one[1] for one in choice]))))
    return grown


def _draws(
    draft: DraftDistribution, num: int, with_replacement: bool
) -> Iterator[tuple[Prefix, float]]:
    possible = [(int(t), p) for t, p in zip(draft.token_ids_M, draft.probs_M, strict=True) if p > 0]
    if num == 0 or not possible:
        yield (), 1.0
        return
    for token_id, prob in possible:
        rest = draft if with_replacement else draft.without(token_id)
        for others, others_prob in _draws(rest, num - 1, with_replacement):
            yield (token_id, *others), float(prob) * others_prob


def drawn_paths(models: TinyModels, depth: int) -> list[tuple[Prefix, float]]:
    """All paths that a drafter can draw, one token after the other."""
    paths: list[tuple[Prefix, float]] = [((), 1.0)]
    for _ in range(depth):
        paths = [
            ((*path, token_id), prob * token_prob)
            for path, prob in paths
            for (token_id,), token_prob in _draws(models.draft(path).exact(), 1, True)
        ]
    return paths


def drawn_chains(models: TinyModels, length: int) -> Iterator[Draft]:
    """All chains of a length."""
    for path, prob in drawn_paths(models, length):
        yield CandidateTree.chain(path), prob


def merged_trees(models: TinyModels, num_paths: int, depth: int) -> Iterator[Draft]:
    """Trees of independent paths, separately for each order of drawing."""
    for drawn in itertools.product(drawn_paths(models, depth), repeat=num_paths):
        yield merge_paths([path for path, _ in drawn]), math.prod(prob for _, prob in drawn)


def unordered_trees(models: TinyModels, num_paths: int, depth: int) -> Iterator[Draft]:
    """As merged_trees, but equal multisets of paths count once, for rules that ignore order."""
    for drawn in itertools.combinations_with_replacement(drawn_paths(models, depth), num_paths):
        counts = Counter(path for path, _ in drawn).values()
        orders = math.factorial(num_paths) / math.prod(math.factorial(n) for n in counts)
        tree = merge_paths([path for path, _ in drawn])
        yield tree, orders * math.prod(prob for _, prob in drawn)
