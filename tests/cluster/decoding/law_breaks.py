"""Ways to break the law. The checks of law_cases.py must notice each."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from cluster.decoding import step_answers
from cluster.decoding.events import SequenceVerdict
from cluster.decoding.sequence import Sequence
from cluster.decoding.step_answers import gives_up_bonus
from cluster.decoding.token_tree import Node, TokenTree


def bonus_where_it_agrees(patch: pytest.MonkeyPatch) -> None:
    """Take the bonus only where the run-ahead begins with it, and give it up elsewhere."""
    commit = step_answers._commit
    bonus: list[int] = []

    def noting(*args: Any) -> None:
        bonus[:] = [one.token_id for one in args if isinstance(one, SequenceVerdict)]
        commit(*args)

    def by_value(sequence: Sequence, accepted: tuple[int, ...]) -> bool:
        tree = sequence.tree
        leaf = tree._pinned[accepted[-1]] if accepted else tree.root
        agrees = bonus[0] in [child.token_id for child in leaf.children]
        return gives_up_bonus(sequence, accepted) and not agrees

    patch.setattr(step_answers, "_commit", noting)
    patch.setattr("cluster.decoding.step_answers.gives_up_bonus", by_value)


def forget_some_of_what_was_lost(patch: pytest.MonkeyPatch) -> None:
    """When a sequence loses its KV, keep candidates only if they are of a certain token."""
    forget = Sequence.forget_kv

    def by_value(self: Sequence) -> None:
        tree: TokenTree = self.tree
        forget(self)
        keep(tree, [node for node in tree._nodes if node.token_id == 0])

    patch.setattr(Sequence, "forget_kv", by_value)


def keep_the_run_ahead(patch: pytest.MonkeyPatch) -> None:
    """Put another drafter's draws beside those of the drafter before."""
    patch.setattr(TokenTree, "drop_run_ahead", lambda tree: None)


def drop_some_of_the_run_ahead(patch: pytest.MonkeyPatch) -> None:
    """When another drafter begins, keep candidates only if they are of a certain token."""

    def by_value(tree: TokenTree) -> None:
        pinned = {id(node) for node in tree._pinned}
        keep(tree, [n for n in tree._nodes if n.token_id == 0 or id(n) in pinned])

    patch.setattr(TokenTree, "drop_run_ahead", by_value)


def keep_the_window_in_the_tree(patch: pytest.MonkeyPatch) -> None:
    """Keep the window that is being verified in the tree, to which another drafter then adds."""
    patch.setattr(TokenTree, "drop_run_ahead", lambda tree: keep(tree, tree._pinned))


def keep(tree: TokenTree, nodes: Iterable[Node]) -> None:
    """Keep those of `nodes` that are under the root, and nothing else."""
    held = [tree.root]
    for node in nodes:
        if node.parent in held:
            held.append(node)
    for node in held:
        node.children = [child for child in node.children if child in held]
        if not node.children:
            node.distribution = None
    tree._nodes = held[1:]
    tree._by_hash = {node.prefix_hash: node for node in reversed(held)}
