"""Candidates from logits that are on a GPU: chains of the coupled rule are drawn there.

For them a token id a row comes back. Rows of trees, of rules that need draft probabilities, and of
stopping rules that look at the distribution are copied to the host whole.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from workers.device_verdicts import choose_tokens
from workers.drafting.growth import Growth
from workers.drafting.tree import DraftTree
from workers.engine.cuda.staging import to_device, to_host
from workers.row_params import Row
from workers.verification.distribution import check_likeliest


def expand_on_device(logits_TV: Tensor, fed: Sequence[tuple[DraftTree, Growth, int]]) -> None:
    """Expand the node of each row. Waits for the device, once."""
    drawn = [row for row, (_, growth, _) in enumerate(fed) if growth.needs_token_alone]
    copied = [row for row, (_, growth, _) in enumerate(fed) if not growth.needs_token_alone]
    wanted: list[Tensor] = []
    if drawn:
        rows = [Row(fed[row][0].spec, fed[row][0].prefix(fed[row][2])) for row in drawn]
        wanted += choose_tokens(_pick(logits_TV, drawn), rows)
    if copied:
        wanted.append(_pick(logits_TV, copied))
    copies = to_host(*wanted) if wanted else []
    if drawn:
        for row, token_id, largest in zip(
            drawn, copies[0].tolist(), copies[1].tolist(), strict=True
        ):
            check_likeliest(token_id, largest, logits_TV.shape[1])
            fed[row][1].expand_chain(fed[row][2], token_id)
    for row, logits_V in zip(copied, copies[-1] if copied else (), strict=True):
        fed[row][1].expand(fed[row][2], logits_V)


def _pick(logits_TV: Tensor, rows: list[int]) -> Tensor:
    return logits_TV.index_select(0, to_device(np.array(rows), logits_TV.device))
