"""The interface of a kind of drafter: a proposer grows trees."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from workers.drafting.nodes import Kept, NewNodes
from workers.drafting.tree import DraftTree

_log = logging.getLogger(__name__)

ANY_POSITION = (1 << 32) - 1
"""The `max_position` of a drafter whose memory does not depend on positions."""


@dataclass(frozen=True, slots=True)
class DrafterInfo:
    """A drafter's properties (drafting.proto, DescribeDrafterResponse)."""

    kind: str
    model: str
    vocab_size: int
    vocabulary_digest: bytes
    max_position: int
    rules: frozenset[str]
    wants_top_tokens: bool = False


@dataclass(frozen=True, slots=True)
class TopTokens:
    """The target's likeliest next tokens after a token that it was fed, the likeliest first.

    `previous_id`: the token before that one; None if it was the first.
    """

    token_id: int
    top_ids: tuple[int, ...]
    previous_id: int | None = None


@dataclass(slots=True)
class Draft:
    """What a pass adds to a tree.

    `last`: nothing follows before the next outcome, whatever is granted; `new` may be empty.
    `grant_used`: nothing follows unless more is granted. (The desk itself notices when the grant's
    nodes are used up, or when a chain reaches an end token.) `stopping_state`: see drafting.proto,
    Proposal.
    """

    tree: DraftTree
    new: NewNodes
    last: bool = False
    grant_used: bool = False
    stopping_state: Mapping[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class Pass:
    """The result of one pass.

    `declined`: trees that could not be kept, and why. `took_part`: every tree that the pass worked
    for, including those whose prefill continues. `tokens_fed`: the number of tokens that a model
    was fed. `prefilled`: whether some of them were prefill.
    """

    drafts: list[Draft] = field(default_factory=list)
    declined: list[tuple[DraftTree, str]] = field(default_factory=list)
    took_part: list[DraftTree] = field(default_factory=list)
    tokens_fed: int = 0
    prefilled: bool = False

    def fail(self, tree: DraftTree, error: Exception) -> None:
        """Decline a tree because drafting for it raised an error; the others continue."""
        self.declined.append((tree, reason_of_failure(error)))


def reason_of_failure(error: Exception) -> str:
    """Log an error that concerns one sequence. Returns why the sequence is declined."""
    _log.error("drafting for a sequence failed; it is declined", exc_info=error)
    return f"drafting for it failed: {error!r}"


class Proposer(Protocol):
    """Grows open trees. It reads the trees; the caller changes them."""

    @property
    def info(self) -> DrafterInfo:
        """The drafter's properties."""

    def open(self, tree: DraftTree) -> None:
        """Begin to keep what a tree needs. If memory is full, raises OverloadedError and keeps
        nothing.

        A tree for which memory runs out later is declined in that pass.
        """

    def settle(self, tree: DraftTree, count: int) -> None:
        """Process the next `count` tokens of a long text (NodeTree.settle), beyond those at `open`.

        The caller calls this before it calls the tree's own `settle`.
        """

    def close(self, tree: DraftTree) -> None:
        """Free everything kept for a tree."""

    def committed(self, tree: DraftTree, kept: Kept, top_tokens: Sequence[TopTokens]) -> None:
        """Follow an outcome of a tree; `kept` says what is left of its nodes.

        `top_tokens`: what the target told since the last call, for a drafter that wants it.
        """

    def known(self, tree: DraftTree) -> NewNodes:
        """Nodes for a ready tree that need no pass, because their logits are there already.

        The caller adds them before the next pass, which may feed them. An empty result does not end
        the draft.
        """

    def promise(self, tree: DraftTree) -> float:
        """The probability that a pass now drafts a token of this tree that will be committed."""

    def run_pass(self, trees: Sequence[DraftTree], *, pass_ms: float) -> Pass:
        """Draft for `trees`, all of which are open and ready, within their grants.

        An error that concerns one tree is noted (Pass.fail); an error that concerns all is raised.
        A draft adds at most `tree.nodes_left` nodes, and none to a parent whose `tree.room` is 0. A
        ready tree to which nothing can be added must get a draft that says so (`last` or
        `grant_used`), else it stays ready and is asked again without end. `pass_ms`: the present
        duration of a pass in milliseconds, 0 if unknown.
        """

    def check_integrity(self, trees: Sequence[DraftTree]) -> None:
        """Assert that what is kept matches `trees`, which are all the open ones."""


class TakesNoTime:
    """Base of kinds whose passes take so little time that none is worth avoiding or preparing."""

    def settle(self, tree: DraftTree, count: int) -> None:
        """Do nothing: no state is kept of a text."""

    def known(self, tree: DraftTree) -> NewNodes:
        """No nodes."""
        return NewNodes()

    def promise(self, tree: DraftTree) -> float:
        """1: a pass is always worth its time."""
        return 1.0
