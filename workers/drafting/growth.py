"""How one sequence's tree grows: which nodes the next pass feeds, and which candidates are sent.

The rule and the grant decide how, pass by pass: as a chain, as independent paths that grow together
level by level, best first (best_first.py), or along a chain with branches (fanout.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from workers.drafting.best_first import BestFirst
from workers.drafting.chances import RankChances
from workers.drafting.draft_stopping import Stopper, TokenSignal
from workers.drafting.expansions import Children, Expansion, Expansions
from workers.drafting.fanout import RANKS, FanOut
from workers.drafting.kind import Draft
from workers.drafting.tree import ROOT, DraftTree, Kept, NewNodes
from workers.verification.rule import rule_named

if TYPE_CHECKING:
    import torch

_NOTHING = NewNodes()
_GAP_UNKNOWN = (0.0,)


class Growth:
    """The state of one tree's growth. Order in a pass: `to_feed`, `expand` each node, `harvest`."""

    def __init__(self, tree: DraftTree, chances: RankChances, stopper: Stopper) -> None:
        self._tree = tree
        rule = rule_named(tree.spec.rule)
        self._shares_noise, self._counts_paths = rule.shares_noise, rule.counts_paths
        self._chances = chances
        self._stopper = stopper
        # A structure that fails concerns one tree, so its masks are made tree by tree (expand).
        self._draws_tokens = (
            self._shares_noise and not stopper.watches and tree.spec.structure is None
        )
        self._drawn = drawn = Expansions()
        self._best_first = BestFirst(tree, drawn, chances, stopper)
        self._fan_out = FanOut(tree, drawn, stopper)
        self._longest = 0
        self._in_step = 0
        self._was_cut = False
        self._as_chain = True  # In the last pass.

    @property
    def _branching(self) -> BestFirst | FanOut | None:
        """How a tree with branches grows; None: as a chain, or as independent paths."""
        if self._as_chain or self._counts_paths:
            return None
        return self._fan_out if self._tree.grant.fan_out else self._best_first

    def to_feed(self, *, pass_ms: float) -> list[int]:
        """The nodes whose logits the next pass needs; the root if nothing has been drafted yet."""
        tree = self._tree
        self._as_chain = tree.may_go_on_as_chain and tree.end not in self._drawn.of
        if self._stopper.watches:
            self._longest = tree.room(ROOT)
        if self._branching is not None:
            return self._branching.to_feed(pass_ms)
        if not self._as_chain:
            return self._ends_of_paths(pass_ms)
        return [tree.end] if tree.ready and not self._stopper.stops(tree, tree.end, pass_ms) else []

    def _ends_of_paths(self, pass_ms: float) -> list[int]:
        """The ends of independent paths (k-SEQ): each pass extends all of them by one token."""
        tree, drawn = self._tree, self._drawn
        leaves = [
            node
            for node in range(tree.end + 1)
            if node not in drawn.of
            and node not in drawn.copies
            and tree.room(node) > 0
            and not self._stopper.stops(tree, node, pass_ms)
        ]
        needed = sum(len(self._paths_through(leaf)) for leaf in leaves)
        return leaves if needed <= tree.nodes_left else []

    def _paths_through(self, node: int) -> tuple[int, ...]:
        """The numbers of the paths through a node. Under the root all paths begin."""
        if node == ROOT:
            return tuple(range(min(self._tree.grant.branches, self._tree.nodes_left)))
        return self._drawn.paths[node]

    @property
    def needs_token_alone(self) -> bool:
        """Whether this pass needs only the coupled rule's token of a node, and no logits."""
        return self._as_chain and self._draws_tokens

    @property
    def needs_best_tokens(self) -> bool:
        """Whether this pass needs only the coupled rule's `width` best tokens of a node."""
        return self._draws_tokens and not self._as_chain and not self._counts_paths

    @property
    def width(self) -> int:
        """The number of candidates to draw under a node."""
        grant = self._tree.grant
        return max(grant.branches, 1 + RANKS) if grant.fan_out else grant.branches

    def expand_chain(self, node: int, token_id: int) -> None:
        """Take the candidate `token_id` that was drawn elsewhere. Only if needs_token_alone."""
        assert self.needs_token_alone
        chance = self._chances.estimate(0, 0.0)
        self._drawn.of[node] = Expansion(Children((token_id,), _GAP_UNKNOWN), [chance], [None])

    def lengthen(self, leaf: int, token_id: int) -> NewNodes:
        """`expand_chain` and `harvest` in one call, for the leaf that `to_feed` returned."""
        assert self.needs_token_alone
        token_ids, chance, drawn = (token_id,), self._chances.estimate(0, 0.0), self._drawn
        drawn.of[leaf] = Expansion(Children(token_ids, _GAP_UNKNOWN), [chance], [leaf + 1])
        drawn.chance[leaf + 1] = chance
        return NewNodes(token_ids, (leaf,))

    def expand(self, node: int, logits_V: torch.Tensor) -> None:
        """Draw the candidates under a node that was fed, from its CPU logits [V].

        Token ids beyond the target's vocabulary are cut off first: candidates and draft
        probabilities are those of the distribution over the others.
        """
        # Imported here, because torch may be missing where tokens are drawn elsewhere.
        from workers.drafting.draw import draw_children, draw_one, draw_paths

        tree = self._tree
        logits_V = logits_V[: tree.vocab_size]
        prefix, prefix_hash = tree.prefix(node), tree.prefix_hash(node)
        if self._as_chain:
            children = draw_one(logits_V, tree.spec, prefix, prefix_hash=prefix_hash)
        elif self._counts_paths:
            numbers = self._paths_through(node)
            children = draw_paths(logits_V, tree.spec, prefix, numbers, prefix_hash=prefix_hash)
        else:
            children = draw_children(
                logits_V, tree.spec, prefix, self.width, prefix_hash=prefix_hash
            )
        signals: Sequence[TokenSignal] = ()
        if self._stopper.watches:
            signals = self._stopper.signals(logits_V, children.token_ids)
        self.expand_drawn(node, children, signals)

    def expand_best(
        self,
        node: int,
        token_ids_K: NDArray[np.int64],
        scores_K: NDArray[np.float32],
        logits_K: NDArray[np.float32],
    ) -> None:
        """Take the best tokens of a node, the best one first. Only if needs_best_tokens.

        Tokens with a score of -inf are no candidates. `logits_K`: without bias and penalties.
        """
        from workers.drafting.draw import gaps_of

        assert self.needs_best_tokens
        count = min(self.width, int((scores_K > -np.inf).sum()))
        token_ids = tuple(token_ids_K[:count].tolist())
        spec, position = self._tree.spec, len(self._tree.prefix(node))
        self.expand_drawn(
            node, Children(token_ids, gaps_of(logits_K[:count], spec, position, token_ids))
        )

    def expand_drawn(
        self, node: int, children: Children, signals: Sequence[TokenSignal] = ()
    ) -> None:
        """Take the candidates under a node that were drawn elsewhere."""
        chances = [self._chances.estimate(rank, gap) for rank, gap in enumerate(children.gaps)]
        self._drawn.of[node] = Expansion(children, chances, [None] * len(chances), signals)

    def promise(self) -> float:
        """The probability that a pass now drafts a token that will be committed.

        This needs two things: the chain or a branch follows the path that the target takes up to
        its end, and the next token is right too.
        """
        tree, next_one = self._tree, self._chances.mean(0)
        if tree.is_chain:
            return float(next_one ** (tree.end + 1))
        if tree.grant.fan_out:
            return next_one * self._fan_out.chance_of_leaves
        reached, fed = self._drawn.reached(tree), self._drawn.of
        return next_one * min(1.0, sum(one for node, one in enumerate(reached) if node not in fed))

    def harvest(self, fed: Sequence[int], *, pass_ms: float) -> NewNodes:
        """The nodes to add now; the caller adds them. `fed` are the nodes expanded in this pass.

        Candidates with shared noise may be sent later. Under other rules all of them are sent now.
        """
        if self.needs_token_alone:
            return self._lengthen(fed[0]) if fed else _NOTHING
        tokens: list[int] = []
        parents: list[int] = []
        multiplicities: list[int] = []
        watches_chain = self._as_chain and self._stopper.watches
        way, first = self._branching, self._tree.end + 1
        chosen = self._drawn.under(fed) if way is None else way.to_send(fed, pass_ms)
        for number, (node, index) in enumerate(chosen, start=first):
            expansion = self._drawn.of[node]
            children = expansion.children
            tokens.append(children.token_ids[index])
            parents.append(node)
            multiplicities.append(len(children.paths[index]) if children.paths else 1)
            self._drawn.sent(node, index, number)
            if expansion.signals:
                self._stopper.note(number, expansion.signals[index])
            if watches_chain:
                path = [*self._tree.path_to(node), number]
                self._stopper.stops_below(number, path, self._tree.grant, pass_ms=pass_ms)
        distributions = {
            node: kept
            for node in fed
            if (kept := self._drawn.of[node].children.distribution) is not None
        }
        return NewNodes(tokens, parents, distributions, multiplicities)

    def _lengthen(self, leaf: int) -> NewNodes:
        """Extend the chain by the token drawn for its leaf."""
        self._drawn.sent(leaf, 0, leaf + 1)
        return NewNodes(self._drawn.of[leaf].children.token_ids, (leaf,))

    def draft_of(self, fed: Sequence[int], new: NewNodes) -> Draft | None:
        """What a pass that had rows of the nodes `fed` adds; None: nothing yet."""
        if fed and not new.token_ids:
            return None
        is_over = not (fed or new.token_ids)
        return Draft(
            self._tree,
            new,
            last=bool(self._stopper.stopped) and (is_over or self._as_chain),
            grant_used=is_over,
            stopping_state=self._stopper.news(),
        )

    def at_hand(self) -> NewNodes:
        """New branches, which begin with candidates that earlier passes drew.

        There are some only after an outcome: at other times the last pass began all branches that
        were likely enough.
        """
        if not self._was_cut or not self._tree.grant.fan_out:
            return _NOTHING
        self._was_cut = False
        return self.harvest((), pass_ms=0.0)

    def committed(self, kept: Kept) -> None:
        """Follow a cut of the tree: learn from the outcome, and renumber."""
        self._learn(kept)
        self._was_cut = True
        self._fan_out.cut()
        self._best_first.cut()
        self._in_step = len(kept.nodes)
        self._drawn.cut(kept)

    def check_integrity(self) -> None:
        self._drawn.check_integrity(self._tree)
        self._best_first.check_integrity()

    def _learn(self, kept: Kept) -> None:
        above = [ROOT, *kept.path]
        for node, token_id in zip(above, kept.token_ids, strict=False):
            expansion = self._drawn.of.get(node)
            if expansion is None:
                continue
            if len(expansion.chances) == 1:
                accepted = expansion.children.token_ids[0] == token_id
                self._chances.observe_alone(accepted=accepted)
            else:
                self._observe(expansion.children, token_id)
        if not self._stopper.watches:
            return
        refused = [] if kept.agreed else self._drawn.firsts_below(above[-1])
        if self._tree.grant.drafting_is_free:
            # The running step began with the nodes that existed at the last outcome. Nodes drafted
            # since then were in no window, and AdaEDL's acceptance rate is that of verified tokens.
            del refused[max(1, self._in_step - len(kept.path)) :]
        self._stopper.committed(kept, refused, longest=self._longest)

    def _observe(self, children: Children, token_id: int) -> None:
        for rank, (candidate, gap) in enumerate(
            zip(children.token_ids, children.gaps, strict=True)
        ):
            accepted = candidate == token_id
            self._chances.observe(rank, gap, accepted=accepted)
            if accepted and not self._shares_noise:
                return  # candidates after it were not tested
