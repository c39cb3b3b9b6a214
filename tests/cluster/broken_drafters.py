"""Drafters with a defect of our own: the real service around a proposer that raises."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from paceline.errors import OverloadedError
from tests.cluster.system import HOST
from workers.drafting.desk import DraftingDesk
from workers.drafting.drafter import serve_once_loaded
from workers.drafting.kind import Pass, TopTokens
from workers.drafting.kinds.ngram import NgramProposer
from workers.drafting.service import Drafter
from workers.drafting.tree import DraftTree, Kept
from workers.process.server import RunningServer

BAD = "bad"
"""Tenant whose sequences have the defect, in drafters that fail for one sequence only."""


class DefectError(Exception):
    """An exception that is not one of our errors, as a bug in the code raises."""


class BreaksAtCommit(NgramProposer):
    """Raises when tokens are committed to a sequence of the tenant BAD."""

    def committed(self, tree: DraftTree, kept: Kept, top_tokens: Sequence[TopTokens]) -> None:
        if tree.tenant.endswith(BAD):
            raise DefectError("at a commit")
        super().committed(tree, kept, top_tokens)


class BreaksAtOpen(NgramProposer):
    """Raises when a sequence of the tenant BAD is opened."""

    def open(self, tree: DraftTree) -> None:
        if tree.tenant.endswith(BAD):
            raise DefectError("at an open")
        super().open(tree)


class BreaksAtClose(NgramProposer):
    """Raises in the stream's reader, so the fault cannot be reported to one sequence."""

    def close(self, tree: DraftTree) -> None:
        super().close(tree)
        if tree.tenant.endswith(BAD):
            raise DefectError("at a close")


class BreaksInPasses(NgramProposer):
    """Its shared pass raises a given number of times in a row, once it is armed."""

    def __init__(self) -> None:
        super().__init__()
        self.left = 0

    def run_pass(self, trees: Sequence[DraftTree], *, pass_ms: float) -> Pass:
        if self.left:
            self.left -= 1
            raise DefectError("in a pass")
        return super().run_pass(trees, pass_ms=pass_ms)


class BreaksBetweenPasses(BreaksInPasses):
    """As BreaksInPasses, but between passes (`BrokenDesk`)."""

    def run_pass(self, trees: Sequence[DraftTree], *, pass_ms: float) -> Pass:
        return NgramProposer.run_pass(self, trees, pass_ms=pass_ms)


class BrokenDesk(DraftingDesk):
    """Raises when asked what to do next, while its proposer says so."""

    def hold_until(self, now: float) -> float | None:
        if isinstance(self.proposer, BreaksBetweenPasses) and self.proposer.left:
            self.proposer.left -= 1
            raise DefectError("between passes")
        return super().hold_until(now)


class Reluctant(NgramProposer):
    """Declines as if it were full, while `is_full` is set. Counts how often it was asked."""

    def __init__(self, is_full: Callable[[int], bool]) -> None:
        super().__init__()
        self.is_full = is_full
        self.asked = 0

    def open(self, tree: DraftTree) -> None:
        self.asked += 1
        if self.is_full(self.asked):
            raise OverloadedError("for now")
        super().open(tree)


async def serve_proposer(proposer: NgramProposer, *, max_sequences: int = 64) -> RunningServer:
    """Serve a proposer through the real drafter service."""
    drafter = Drafter()

    async def load() -> None:
        drafter.begin(BrokenDesk(proposer, max_sequences=max_sequences))

    return await serve_once_loaded(drafter, load, host=HOST, port=0)
