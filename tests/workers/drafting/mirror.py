"""What a driver knows of a tree from messages alone, and what a drafter without history draws."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from paceline.prefix_hash import hash_prefix
from paceline.sampling import SequenceSpec
from workers.drafting.proposal import Proposal
from workers.drafting.tree import Grant
from workers.engine.cpu.engine import CpuEngine
from workers.engine.slices import Slice
from workers.verification.candidates import CandidateTree, DraftProbs, SparseProbs, check_proposal
from workers.verification.draws import (
    cut_draft_probs,
    draw_independent,
    draw_without_replacement,
    of_node,
    top_children,
)

VOCAB_SIZE = 320
MAX_LEN = 160
BLOCK_BYTES = 2 * 2 * 2 * 128 * 8 * 4  # layers, keys and values, heads, positions, size, float32
MOST_BRANCHES = 4
RULES = ("coupled", "rejection", "kseq", "recursive", "mcsd")


class Computes(Protocol):
    def logits(self, prefix: tuple[int, ...]) -> torch.Tensor:
        """The logits of the token after `prefix`."""


class FreshDrafter:
    """What a drafter without history computes for a prefix."""

    def __init__(self, engine: CpuEngine) -> None:
        self._engine = engine
        self._known: dict[tuple[int, ...], torch.Tensor] = {}

    def logits(self, prefix: tuple[int, ...]) -> torch.Tensor:
        if prefix not in self._known:
            self._known[prefix] = self._engine.step([Slice((0, 1), 0, list(prefix), 1)])[0]
        return self._known[prefix]


@dataclass(eq=False)
class _Node:
    token_id: int
    prefix: tuple[int, ...]
    distribution: SparseProbs | None = None
    multiplicity: int = 1
    children: list[_Node] = field(default_factory=list)

    def all_below(self) -> list[_Node]:
        return [one for child in self.children for one in (child, *child.all_below())]


class Mirror:
    """One sequence as a driver knows it: its tree, built from proposals by content."""

    def __init__(self, spec: SequenceSpec, token_ids: Sequence[int], fresh: Computes) -> None:
        self.spec = spec
        self.fresh = fresh
        self.root = _Node(token_ids[-1], tuple(token_ids))
        self.grant = Grant()
        self.told_last = False
        self.max_branches = 1

    def commit(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            self.root = next(
                (child for child in self.root.children if child.token_id == token_id),
                _Node(token_id, (*self.root.prefix, token_id)),
            )
        self.told_last = False

    def take(self, proposal: Proposal) -> None:
        assert not self.told_last, "more came after `last`"
        self.told_last = proposal.last
        tree = CandidateTree(
            proposal.token_ids,
            proposal.parents or tuple(range(len(proposal.token_ids))),
            proposal.multiplicities,
        )
        pairs = DraftProbs(proposal.distributions) if proposal.distributions else None
        check_proposal(self.spec.rule, tree, pairs, vocab_size=VOCAB_SIZE, max_nodes=1024)
        base = self._base(proposal)
        places = [base]
        used: set[int] = set()
        num_new = 0
        for index, token_id in enumerate(proposal.token_ids):
            parent = places[tree.parents[index]]
            node = next(
                (c for c in parent.children if c.token_id == token_id and id(c) not in used), None
            )
            if node is None:
                node = _Node(token_id, (*parent.prefix, token_id))
                node.multiplicity = tree.multiplicities[index]
                parent.children.append(node)
                self._check_place(node, parent)
                num_new += 1
            assert node.multiplicity == tree.multiplicities[index]
            used.add(id(node))
            places.append(node)
        for number, kept in proposal.distributions.items():
            places[number].distribution = kept
        assert num_new or proposal.last
        if num_new:
            most = self.grant.nodes or self.grant.until_position - len(self.root.prefix)
            assert len(self.root.all_below()) <= most, "more nodes than granted"

    def _base(self, proposal: Proposal) -> _Node:
        for node in (self.root, *self.root.all_below()):
            same_length = len(node.prefix) == proposal.base_length
            if same_length and hash_prefix(node.prefix) == proposal.base_hash:
                return node
        raise AssertionError("a base that is nowhere in the tree")

    def _check_place(self, node: _Node, parent: _Node) -> None:
        assert len(node.prefix) <= min(self.grant.until_position, MAX_LEN), "beyond the grant"
        follows_output = len(parent.prefix) > self.spec.prompt_length
        assert not (follows_output and parent.token_id in self.spec.end_token_ids)

    def check(self) -> None:
        """Check that all children are the draws of a drafter without history."""
        for node in (self.root, *self.root.all_below()):
            if node.children:
                self._check_children(node)

    def _check_children(self, node: _Node) -> None:
        spec, tokens = self.spec, [child.token_id for child in node.children]
        logits_V = self.fresh.logits(node.prefix)
        if spec.rule == "coupled":
            # One more: a tree's sums are made in another order, and may turn a tie.
            best = top_children(logits_V, spec, node.prefix, self.max_branches + 1)
            assert set(tokens) <= set(best)
            assert len(set(tokens)) == len(tokens)
            return
        kept, sent = cut_draft_probs(logits_V, spec, node.prefix), node.distribution
        assert sent is not None
        for token_id, prob in zip(sent.token_ids_M.tolist(), sent.probs_M.tolist(), strict=True):
            assert abs(kept.exact().prob_of(token_id) - prob) < 1e-3
        own, position = of_node(spec, hash_prefix(node.prefix)), len(node.prefix)
        if spec.rule == "kseq":
            drawn = draw_independent(sent, own, position, range(self.max_branches))
            assert set(tokens) <= set(drawn)
            for child in node.children:
                assert child.multiplicity <= drawn.count(child.token_id)
        elif spec.rule == "recursive":
            assert tuple(tokens) == draw_without_replacement(sent, own, position, len(tokens))
        else:
            assert tuple(tokens) == draw_independent(sent, own, position, range(len(tokens)))
