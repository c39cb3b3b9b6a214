"""A drafter whose distributions are TinyModels', with production's growth and stopping."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from tests.workers.verification.enumeration import Prefix, TinyModels
from workers.drafting.chances import RankChances, drawn_prior
from workers.drafting.draw import MODEL_RULES
from workers.drafting.growth import Growth
from workers.drafting.nodes import Kept, NewNodes
from workers.drafting.proposer import Draft, DrafterInfo, Pass, TopTokens
from workers.drafting.stopper import Stopper
from workers.drafting.stopping import DrafterStopping
from workers.drafting.tree import DraftTree
from workers.verification.draft_probs import SparseProbs

PROMPT = (0,)


class BegunModels(TinyModels):
    """Target and drafter are sure of the first token: a prompt's step needs not be summed over."""

    def target_V(self, prefix: Prefix) -> NDArray[np.float64]:
        return super().target_V(prefix) if prefix else np.eye(self.vocab_size)[0]

    def draft(self, prefix: Prefix) -> SparseProbs:
        sure = SparseProbs(np.array([0]), np.ones(1, dtype=np.float32))
        return super().draft(prefix) if prefix else sure


class EnumeratedProposer:
    """Drafts as a model drafter does, from the distributions of TinyModels."""

    def __init__(self, models: TinyModels) -> None:
        self._models = models
        self._grown: dict[DraftTree, Growth] = {}
        self._chances = RankChances(drawn_prior)

    @property
    def info(self) -> DrafterInfo:
        return DrafterInfo("model", "tiny", self._models.vocab_size, b"", 1000, MODEL_RULES)

    def open(self, tree: DraftTree) -> None:
        self._grown[tree] = Growth(tree, self._chances, Stopper(tree.stopping, DrafterStopping()))

    def close(self, tree: DraftTree) -> None:
        del self._grown[tree]

    def committed(self, tree: DraftTree, kept: Kept, top_tokens: Sequence[TopTokens]) -> None:
        self._grown[tree].committed(kept)

    def known(self, tree: DraftTree) -> NewNodes:
        return self._grown[tree].known()

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
            over = not fed and not new.token_ids
            if new.token_ids or over:
                last = growth.stopped and (over or growth.as_chain)
                result.drafts.append(Draft(tree, new, last=last, grant_used=over))
        return result

    def check_integrity(self, trees: Sequence[DraftTree]) -> None:
        assert set(self._grown) == set(trees)

    def _logits_V(self, prefix: Sequence[int]) -> torch.Tensor:
        sparse = self._models.draft(tuple(prefix[len(PROMPT) :]))
        logits_V = torch.full((self._models.vocab_size,), -torch.inf)
        logits_V[torch.from_numpy(sparse.token_ids_M)] = torch.from_numpy(sparse.probs_M).log()
        return logits_V
