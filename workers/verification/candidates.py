"""The candidates of one window, and the distributions that they were drawn from.

Candidates are a tree of token ids; a chain is the simplest tree. Nodes are numbered as on the wire:
node 0 is the last committed token, node i + 1 is candidate i. Row n of a window's logits follows
node n, so a node's number is also that of its row.

A drafter cuts its distribution to the likeliest tokens and samples from the rest, so the few pairs
of token id and probability that it sends are exactly what it sampled from, not an approximation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import le

import numpy as np
from numpy.typing import NDArray

from paceline.errors import ProtocolError
from workers.verification.rule import DraftDistribution, rule_named


class WrongProposalError(ProtocolError):
    """Candidates that cannot be verified. `field`: the field of target.proto that is wrong."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(reason)
        self.field = field


def depths_of(parents: Sequence[int]) -> list[int]:
    """The depth of node 0, which is 0, and of each candidate of a tree."""
    depths = [0]
    for parent in parents:
        depths.append(depths[parent] + 1)
    return depths


@dataclass(frozen=True, slots=True)
class CandidateTree:
    """Candidate i is `token_ids[i]`, a child of node `parents[i]`; parents precede children.

    `multiplicities[i]`: the number of independently drawn paths through candidate i (k-SEQ). If
    omitted, each has one. Raises ProtocolError if the three do not make a tree.
    """

    token_ids: tuple[int, ...]
    parents: tuple[int, ...]
    multiplicities: tuple[int, ...] = ()
    # Made on first use: trees that are checked but never verified do not need them.
    _children: tuple[tuple[int, ...], ...] | None = field(
        init=False, repr=False, compare=False, default=None
    )

    def __post_init__(self) -> None:
        size = len(self.token_ids)
        if not self.multiplicities:
            object.__setattr__(self, "multiplicities", (1,) * size)
        for name, values in (("parents", self.parents), ("multiplicities", self.multiplicities)):
            if len(values) != size:
                raise ProtocolError(
                    f"expected {size} {name}, one per candidate, got {len(values)}: send as many "
                    f"{name} as token ids"
                )
        if size and not (min(self.parents) >= 0 and all(map(le, self.parents, range(size)))):
            self._name_wrong_parent()

    def _name_wrong_parent(self) -> None:
        """Raise ProtocolError for the first parent that does not come before its child."""
        for index, parent in enumerate(self.parents):
            if not 0 <= parent <= index:
                raise ProtocolError(
                    f"expected candidate {index} to have a parent from 0 to {index}, got {parent}: "
                    "number parents before their children (0 is the last committed token)"
                )

    @classmethod
    def chain(cls, token_ids: Sequence[int]) -> CandidateTree:
        """A chain: each candidate continues the one before."""
        return cls(tuple(token_ids), tuple(range(len(token_ids))))

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def is_chain(self) -> bool:
        """Whether no node has more than one child, drawn once."""
        return self._in_order and max(self.multiplicities, default=1) == 1

    @property
    def _in_order(self) -> bool:
        """Whether each candidate continues the one before."""
        return self.parents == tuple(range(len(self)))

    @property
    def height(self) -> int:
        """The number of candidates on the longest path."""
        if self._in_order:
            return len(self)
        return max(depths_of(self.parents))

    def children(self, node: int) -> tuple[int, ...]:
        """The candidates under a node, in the order of their indices."""
        if self._children is None:
            object.__setattr__(self, "_children", self._grouped())
            assert self._children is not None
        return self._children[node]

    def _grouped(self) -> tuple[tuple[int, ...], ...]:
        if self._in_order:
            return (*((index,) for index in range(len(self))), ())
        children: list[list[int]] = [[] for _ in range(len(self) + 1)]
        for index, parent in enumerate(self.parents):
            children[parent].append(index)
        return tuple([tuple(one) for one in children])

    def copies(self, node: int) -> tuple[int, ...]:
        """The candidates under a node, each repeated for every path through it."""
        return tuple(i for i in self.children(node) for _ in range(self.multiplicities[i]))

    def child_with(self, node: int, token_id: int) -> int | None:
        """The first candidate under a node with this token, or None."""
        return next((i for i in self.children(node) if self.token_ids[i] == token_id), None)

    def tokens_of(self, accepted: Sequence[int]) -> list[int]:
        return [self.token_ids[i] for i in accepted]

    def check(self, *, vocab_size: int, max_nodes: int, equal_siblings: bool = False) -> None:
        """Raise ProtocolError if a proposal with these candidates is not acceptable.

        `equal_siblings` allows two children of one node to be the same token.
        """
        if len(self) > max_nodes:
            raise WrongProposalError(
                "window",
                f"expected at most {max_nodes} candidates, got {len(self)}: draft no further than "
                "the grant",
            )
        if self.token_ids and not 0 <= min(self.token_ids) <= max(self.token_ids) < vocab_size:
            index, wrong = next(
                (i, one) for i, one in enumerate(self.token_ids) if not 0 <= one < vocab_size
            )
            raise WrongProposalError(
                "token_ids",
                f"expected token ids below {vocab_size}, got {wrong} for candidate {index}: "
                "drafter and target must share one vocabulary",
            )
        # A step checks each tree that it verifies, and most trees have no equal siblings.
        if not equal_siblings and len(set(zip(self.parents, self.token_ids, strict=True))) < len(
            self
        ):
            self._name_equal_siblings()
        self._check_multiplicities(max_nodes)

    def _name_equal_siblings(self) -> None:
        """Raise ProtocolError for the first node with two children that are the same token."""
        for node in range(len(self) + 1):
            tokens = self.tokens_of(self.children(node))
            if len(set(tokens)) < len(tokens):
                raise WrongProposalError(
                    "parents",
                    f"expected different tokens under node {node}, got {tokens}: merge equal "
                    "siblings, or draw without replacement",
                )

    def _check_multiplicities(self, max_paths: int) -> None:
        if min(self.multiplicities, default=1) < 1:
            index, count = next((i, n) for i, n in enumerate(self.multiplicities) if n < 1)
            raise WrongProposalError(
                "multiplicities",
                f"expected at least one path through candidate {index}, got {count}: leave "
                "out candidates that no path visits",
            )
        if max(self.multiplicities, default=1) == 1:
            return
        num_paths = sum(self.multiplicities[child] for child in self.children(0))
        if num_paths > max_paths:
            raise WrongProposalError(
                "multiplicities",
                f"expected at most {max_paths} paths, got {num_paths}: draw no more of them than "
                "candidates are granted",
            )
        for index, count in enumerate(self.multiplicities):
            below = sum(self.multiplicities[child] for child in self.children(index + 1))
            if below > count:
                raise WrongProposalError(
                    "multiplicities",
                    f"expected at most {count} paths below candidate {index}, got {below}: a path "
                    "passes through its parents",
                )


def end_of(path: Sequence[int]) -> int:
    """The node at which a path of candidates ends."""
    return path[-1] + 1 if path else 0


def merge_paths(paths: Sequence[Sequence[int]]) -> CandidateTree:
    """The tree of independently drawn paths, with equal prefixes merged and counted.

    Candidates are in the order in which the paths first reach them, level by level.
    """
    node_of: dict[tuple[int, ...], int] = {(): 0}
    token_ids: list[int] = []
    parents: list[int] = []
    multiplicities: list[int] = []
    for depth in range(1, max(map(len, paths), default=0) + 1):
        for path in paths:
            if len(path) < depth:
                continue
            beginning = tuple(path[:depth])
            if beginning not in node_of:
                token_ids.append(beginning[-1])
                parents.append(node_of[beginning[:-1]])
                multiplicities.append(0)
                node_of[beginning] = len(token_ids)
            multiplicities[node_of[beginning] - 1] += 1
    return CandidateTree(tuple(token_ids), tuple(parents), tuple(multiplicities))


SUM_TOLERANCE = 1e-5
"""Largest difference from 1 that the sum of a node's float32 probabilities may have."""


@dataclass(frozen=True, slots=True, eq=False)
class SparseProbs:
    """M pairs that a drafter draws from: ascending token ids, and float32 probabilities."""

    token_ids_M: NDArray[np.int64]
    probs_M: NDArray[np.float32]

    def exact(self) -> DraftDistribution:
        """The exact distribution of a draw from these pairs: float64, divided by their sum.

        A Gumbel argmax over their logs ignores a common factor, so the draw follows the normalized
        distribution, however the float32 values were rounded.
        """
        probs_M = self.probs_M.astype(np.float64)
        return DraftDistribution(self.token_ids_M, probs_M / probs_M.sum())

    def equals(self, other: SparseProbs) -> bool:
        return self is other or (
            np.array_equal(self.token_ids_M, other.token_ids_M)
            and np.array_equal(self.probs_M, other.probs_M)
        )

    def check(self, *, vocab_size: int, node: int) -> None:
        """Raise ProtocolError if these are not the probabilities of some tokens."""
        ids, probs = self.token_ids_M, self.probs_M
        if ids.ndim != 1 or ids.shape != probs.shape or ids.size == 0:
            raise ProtocolError(
                f"expected as many draft probabilities as token ids under node {node}, got "
                f"{list(probs.shape)} for {list(ids.shape)}: send pairs"
            )
        if ids[0] < 0 or ids[-1] >= vocab_size or bool((np.diff(ids) <= 0).any()):
            raise ProtocolError(
                f"expected ascending token ids below {vocab_size} for the draft probabilities "
                f"under node {node}, got {ids[0]} to {ids[-1]}: sort them, each once"
            )
        if not np.isfinite(probs).all() or bool((probs < 0).any()):
            raise ProtocolError(
                f"expected finite draft probabilities of at least 0 under node {node}, got "
                f"{float(probs.min())} to {float(probs.max())}: send probabilities, not logits"
            )
        total = float(probs.sum(dtype=np.float64))
        if abs(total - 1) > SUM_TOLERANCE:
            raise ProtocolError(
                f"expected draft probabilities that sum to 1 under node {node}, got {total}: "
                "normalize them after the cut"
            )


@dataclass(frozen=True, slots=True, eq=False)
class DraftProbs:
    """For each node that has children, the pairs that they were drawn from (see CandidateTree)."""

    of_node: Mapping[int, SparseProbs]

    def check(self, tree: CandidateTree, *, vocab_size: int) -> None:
        """Raise ProtocolError if a node's pairs are absent, wrong, or lack one of its children.

        Pairs of nodes without children are an error too, since nothing could use them.
        """
        expected = {node for node in range(len(tree) + 1) if tree.children(node)}
        if expected != set(self.of_node):
            raise ProtocolError(
                f"expected draft probabilities for the nodes {sorted(expected)}, got them for "
                f"{sorted(self.of_node)}: send them for every node that has children"
            )
        for node, pairs in self.of_node.items():
            pairs.check(vocab_size=vocab_size, node=node)
            exact = pairs.exact()
            for index in tree.children(node):
                if exact.prob_of(tree.token_ids[index]) <= 0:
                    raise ProtocolError(
                        f"expected a draft probability above 0 for candidate {index} (token "
                        f"{tree.token_ids[index]}), got none under node {node}: send the "
                        "distribution that it was drawn from"
                    )


def check_proposal(
    rule: str,
    tree: CandidateTree,
    draft_probs: DraftProbs | None,
    *,
    vocab_size: int,
    max_nodes: int,
) -> None:
    """Raise ProtocolError if candidates are malformed, or the rule cannot verify them.

    This cannot check that they were drawn as their drafter says.
    """
    facts = rule_named(rule)
    tree.check(vocab_size=vocab_size, max_nodes=max_nodes, equal_siblings=facts.equal_siblings)
    if facts.chain_only and not tree.is_chain:
        raise WrongProposalError(
            "parents",
            f"expected a chain for the rule {rule!r}, got the parents {list(tree.parents)}: "
            "draft one candidate per position",
        )
    if not facts.counts_paths and max(tree.multiplicities, default=1) > 1:
        raise WrongProposalError(
            "multiplicities",
            f"expected candidates without multiplicities for the rule {rule!r}, got "
            f"{list(tree.multiplicities)}: only rules of independent paths test a candidate "
            "several times",
        )
    if not facts.needs_draft_probs:
        return
    if draft_probs is None:
        if len(tree):
            raise ProtocolError(
                f"expected draft probabilities for the rule {rule!r}, got none: send what "
                "the candidates were drawn from"
            )
        return
    draft_probs.check(tree, vocab_size=vocab_size)
