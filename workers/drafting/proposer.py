"""The interface of a kind of drafter: what grows trees."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from paceline.rules import Rule
from workers.drafting.nodes import Kept, NewNodes
from workers.drafting.tree import DraftTree

_log = logging.getLogger(__name__)

ANY_POSITION = (1 << 32) - 1
"""The `max_position` of a drafter without memory of positions."""


@dataclass(frozen=True, slots=True)
class DrafterInfo:
    """What a drafter is (drafting.proto, DescribeDrafterResponse)."""

    kind: str
    model: str
    vocab_size: int
    vocabulary_digest: bytes
    max_position: int
    rules: frozenset[Rule]
    wants_top_tokens: bool = False


@dataclass(frozen=True, slots=True)
class TopTokens:
    """The target's likeliest next tokens after a token that it was fed, the likeliest first.

    `previous_id`: the token before that one, None where it was the first.
    """

    token_id: int
    top_ids: tuple[int, ...]
    previous_id: int | None = None


@dataclass(slots=True)
class Draft:
    """What a pass adds to a tree.

    `last`: nothing follows before the next outcome, whatever is granted; then there may be no
    nodes. `grant_used`: nothing follows unless more is granted. (That the grant's nodes are used
    up, or that a chain reached an end token, the desk sees by itself.) `stopping_state`: see
    drafting.proto, Proposal.
    """

    tree: DraftTree
    new: NewNodes
    last: bool = False
    grant_used: bool = False
    stopping_state: Mapping[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class Pass:
    """What one pass gave. `declined`: trees that could not be kept, and why.

    `took_part`: every tree that the pass worked for, those whose prefill goes on included.
    `tokens_fed`: to a model. `prefilled`: some of them were prefill.
    """

    drafts: list[Draft] = field(default_factory=list)
    declined: list[tuple[DraftTree, str]] = field(default_factory=list)
    took_part: list[DraftTree] = field(default_factory=list)
    tokens_fed: int = 0
    prefilled: bool = False

    def fail(self, tree: DraftTree, error: Exception) -> None:
        """Decline a tree whose own drafting raised an error; the others go on."""
        self.declined.append((tree, reason_of_failure(error)))


def reason_of_failure(error: Exception) -> str:
    """Log what went wrong with one sequence; why it is declined."""
    _log.error("drafting for a sequence failed; it is declined", exc_info=error)
    return f"drafting for it failed: {error!r}"


class Proposer(Protocol):
    """Grows open trees. It reads them and leaves their changes to the caller."""

    @property
    def info(self) -> DrafterInfo:
        """What it is."""

    def open(self, tree: DraftTree) -> None:
        """Begin to keep what a tree needs. Raises OverloadedError, keeping nothing, when full.

        What is full only when its turn comes has it declined in that pass.
        """

    def settle(self, tree: DraftTree, count: int) -> None:
        """Take in the next `count` tokens of a long text (NodeTree.settle), which `open` did not.

        Called before the tree itself settles them.
        """

    def close(self, tree: DraftTree) -> None:
        """Free everything kept for a tree."""

    def committed(self, tree: DraftTree, kept: Kept, top_tokens: Sequence[TopTokens]) -> None:
        """Tokens of the tree were committed; `kept` says what is left of its nodes.

        `top_tokens`: what the target told since the last time, for a drafter that wants it.
        """

    def known(self, tree: DraftTree) -> NewNodes:
        """Nodes for a ready tree that need no pass, since what they are drawn from is there.

        They are added before the next pass, which may feed them. None is no reason to stop.
        """

    def promise(self, tree: DraftTree) -> float:
        """The chance that a pass now drafts a token of this tree that will be committed."""

    def run_pass(self, trees: Sequence[DraftTree], *, pass_ms: float) -> Pass:
        """Draft for `trees`, each of which is open and ready, within their grants.

        What goes wrong with one tree alone is noted (Pass.fail); what concerns all is raised.

        A draft adds at most `tree.nodes_left` nodes, none to a parent whose `tree.room` is 0. A
        ready tree for which it can add nothing must be given a draft that says so (`last` or
        `grant_used`), else it is asked for ever. `pass_ms`: what a pass takes at present, 0 when
        that is not known.
        """

    def check_integrity(self, trees: Sequence[DraftTree]) -> None:
        """Assert that what is kept fits `trees`, which are all the open ones."""


class TakesNoTime:
    """Of kinds whose passes take next to no time, so that none is worth saving or preparing."""

    def settle(self, tree: DraftTree, count: int) -> None:
        """Nothing is kept of a text."""

    def known(self, tree: DraftTree) -> NewNodes:
        """None."""
        return NewNodes()

    def promise(self, tree: DraftTree) -> float:
        """Always worth a pass."""
        return 1.0
