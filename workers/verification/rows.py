"""The logits of one window, each row with the hypothetical prefix of its own node."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.errors import InternalError
from paceline.sampling import SequenceSpec
from workers.verification.candidates import CandidateTree
from workers.verification.distribution import adjusted_logits, depends_on_tokens
from workers.verification.prefix import Prefix


class WindowRows:
    """Rows of a float32 CPU tensor [1 + candidates, V]: row n follows `prefix` and node n's path.

    The tensor is not changed. Raises InternalError if it has another shape or dtype, or if
    penalties apply and a token id is outside the vocabulary.
    """

    def __init__(
        self,
        logits_RV: torch.Tensor,
        tree: CandidateTree,
        spec: SequenceSpec,
        prefix: Sequence[int],
    ) -> None:
        self._rows_RV = _as_numpy(logits_RV, len(tree))
        self.tree = tree
        self.spec = spec
        self._prefix = Prefix.of(prefix, prompt_length=spec.prompt_length)
        if depends_on_tokens(spec.sampling):
            own = np.array((*self._prefix.path, *tree.token_ids), dtype=np.int64)
            for ids in (self._prefix.counts.ids_N, own):
                _check_ids(ids, self.vocab_size)

    @property
    def vocab_size(self) -> int:
        """V."""
        return int(self._rows_RV.shape[1])

    def position(self, accepted: Sequence[int]) -> int:
        """The position of the token after these candidates."""
        return len(self._prefix) + len(accepted)

    def adjusted_V(self, node: int, accepted: Sequence[int]) -> NDArray[np.float32]:
        """A node's logits after bias, penalties and min_tokens.

        `accepted` are the candidates from the root to the node, including the node's own. A
        function of this row only, so it is equal in every window and batch.
        """
        prefix = self._prefix.followed_by(self.tree.tokens_of(accepted))
        return adjusted_logits(self._rows_RV[node], self.spec, prefix)


def _as_numpy(logits_RV: torch.Tensor, num_candidates: int) -> NDArray[np.float32]:
    """The logits as a numpy view, after checks of what a caller could get wrong."""
    if logits_RV.dtype != torch.float32 or logits_RV.dim() != 2 or logits_RV.shape[1] == 0:
        raise InternalError(
            f"expected float32 logits [1 + window, V], got {logits_RV.dtype} "
            f"{list(logits_RV.shape)}: convert them after the LM head"
        )
    if logits_RV.shape[0] != 1 + num_candidates:
        raise InternalError(
            f"expected {1 + num_candidates} rows of logits for {num_candidates} candidates, got "
            f"{logits_RV.shape[0]}: ask the engine for 1 + window rows"
        )
    rows_RV: NDArray[np.float32] = logits_RV.detach().numpy()
    return rows_RV


def _check_ids(ids: NDArray[np.int64], vocab_size: int) -> None:
    """Raise InternalError if a token id is outside the vocabulary."""
    outside = ids[(ids < 0) | (ids >= vocab_size)]
    if outside.size:
        raise InternalError(
            f"expected token ids below {vocab_size}, got {int(outside[0])}: drafter and target "
            "must share one vocabulary"
        )
