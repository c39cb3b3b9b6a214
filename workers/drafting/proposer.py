"""The interface of a kind of drafter: what extends paths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from workers.drafting.path import DraftPath


@dataclass(frozen=True, slots=True)
class DrafterInfo:
    """What a drafter is (drafting.proto, DescribeDrafterResponse)."""

    kind: str
    model: str
    vocab_size: int
    vocabulary_digest: bytes
    max_position: int


@dataclass(frozen=True, slots=True)
class Draft:
    """Tokens that continue a path. `last`: nothing follows them; then there may be none."""

    path: DraftPath
    token_ids: Sequence[int]
    last: bool = False


@dataclass(slots=True)
class Pass:
    """What one pass gave. `declined`: paths that could not be kept, and why.

    `took_part`: every path that the pass worked for, those whose prefill goes on included.
    """

    drafts: list[Draft] = field(default_factory=list)
    declined: list[tuple[DraftPath, str]] = field(default_factory=list)
    took_part: list[DraftPath] = field(default_factory=list)
    tokens_fed: int = 0


class Proposer(Protocol):
    """Extends open paths. It reads them and leaves their changes to the caller."""

    @property
    def info(self) -> DrafterInfo:
        """What it is."""

    def open(self, path: DraftPath) -> None:
        """Begin to keep what a path needs. Raises OverloadedError, keeping nothing, when full."""

    def close(self, path: DraftPath) -> None:
        """Free everything kept for a path."""

    def committed(self, path: DraftPath, *, kept: int) -> None:
        """Tokens of the path were committed; those from `kept` on are not what they were."""

    def run_pass(self, paths: Sequence[DraftPath]) -> Pass:
        """Draft for `paths`, each of which is open and has room, and at most its room."""

    def check_integrity(self, paths: Sequence[DraftPath]) -> None:
        """Assert that what is kept fits `paths`, which are all the open ones."""
