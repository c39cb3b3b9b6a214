"""Drafters whose distributions come from TinyModels."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from tests.workers.verification.enumeration import Prefix, TinyModels
from workers.drafting.chances import RankChances, drawn_prior
from workers.drafting.draft_stopping import DrafterStopping, Stopper
from workers.drafting.growth import Growth
from workers.drafting.kind import Draft, DrafterInfo, Pass, TakesNoTime, TopTokens
from workers.drafting.kinds.model import MODEL
from workers.drafting.tree import ROOT, DraftTree, Kept, NewNodes
from workers.verification.candidates import SparseProbs

PROMPT = (0,)


class BegunModels(TinyModels):
    """Target and drafter are sure of the first token, so the sum need not include the prompt's
    step.
    """

    def target_V(self, prefix: Prefix) -> NDArray[np.float64]:
        return super().target_V(prefix) if prefix else np.eye(self.vocab_size)[0]

    def draft(self, prefix: Prefix) -> SparseProbs:
        sure = SparseProbs(np.array([0]), np.ones(1, dtype=np.float32))
        return super().draft(prefix) if prefix else sure


class EnumeratedProposer:
    """Drafts as a model drafter does, with production's growth and stopping."""

    def __init__(self, models: TinyModels) -> None:
        self._models = models
        self._grown: dict[DraftTree, Growth] = {}
        self._chances = RankChances(drawn_prior)

    @property
    def info(self) -> DrafterInfo:
        return DrafterInfo("model", MODEL.rules, "tiny", self._models.vocab_size, b"", 1000)

    def open(self, tree: DraftTree) -> None:
        self._grown[tree] = Growth(tree, self._chances, Stopper(tree.stopping, DrafterStopping()))

    def settle(self, tree: DraftTree, count: int) -> None:
        pass

    def close(self, tree: DraftTree) -> None:
        del self._grown[tree]

    def committed(self, tree: DraftTree, kept: Kept, top_tokens: Sequence[TopTokens]) -> None:
        self._grown[tree].committed(kept)

    def at_hand(self, tree: DraftTree) -> NewNodes:
        return self._grown[tree].at_hand()

    def promise(self, tree: DraftTree) -> float:
        return self._grown[tree].promise()

    def run_pass(self, trees: Sequence[DraftTree], *, pass_ms: float) -> Pass:
        result = Pass(took_part=list(trees), tokens_fed=1)
        for tree in trees:
            growth = self._grown[tree]
            fed = growth.to_feed(pass_ms=pass_ms)
            for node in fed:
                growth.expand(node, self._logits_V(tree.prefix(node)))
            new = growth.harvest(fed, pass_ms=pass_ms)
            if (draft := growth.draft_of(fed, new)) is not None:
                result.drafts.append(draft)
        return result

    def check_integrity(self, trees: Sequence[DraftTree]) -> None:
        assert set(self._grown) == set(trees)

    def _logits_V(self, prefix: Sequence[int]) -> torch.Tensor:
        sparse = self._models.draft(tuple(prefix[len(PROMPT) :]))
        logits_V = torch.full((self._models.vocab_size,), -torch.inf)
        logits_V[torch.from_numpy(sparse.token_ids_M)] = torch.from_numpy(sparse.probs_M).log()
        return logits_V


class BranchingProposer(TakesNoTime):
    """Drafts without drawing: the chain of the likeliest tokens, and beside each the next one.

    So under `fanout` there are branches that no step verifies before the chain is refused.
    """

    def __init__(self, models: TinyModels) -> None:
        self._models = models

    @property
    def info(self) -> DrafterInfo:
        rules = frozenset({"one-hot"})
        return DrafterInfo("branching", rules, "tiny", self._models.vocab_size, b"", 1000)

    def open(self, tree: DraftTree) -> None:
        pass

    def close(self, tree: DraftTree) -> None:
        pass

    def committed(self, tree: DraftTree, kept: Kept, top_tokens: Sequence[TopTokens]) -> None:
        pass

    def run_pass(self, trees: Sequence[DraftTree], *, pass_ms: float) -> Pass:
        """Return the chain with a token after each of its branches, as far as the grant goes."""
        result = Pass(took_part=list(trees))
        for tree in trees:
            token_ids: list[int] = []
            parents: list[int] = []
            path, above = tuple(tree.committed[len(PROMPT) :]), ROOT
            for _ in range(tree.room(ROOT)):
                first, *others = self._ranked(path)
                token_ids.append(first)
                parents.append(above)
                first_node = len(token_ids)
                for other in others[:1]:
                    token_ids += [other, self._ranked((*path, other))[0]]
                    parents += [above, len(token_ids) - 1]
                path, above = (*path, first), first_node
            new = tree.unknown_part(token_ids, parents)
            result.drafts.append(Draft(tree, new, grant_used=True))
        return result

    def check_integrity(self, trees: Sequence[DraftTree]) -> None:
        pass

    def _ranked(self, path: Prefix) -> list[int]:
        """Tokens with a positive probability at the drafter, the likeliest first."""
        sparse = self._models.draft(path)
        order = np.argsort(-sparse.probs_M, stable=True)
        return [int(sparse.token_ids_M[index]) for index in order]
