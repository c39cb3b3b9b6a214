"""Candidates from logits on a GPU. The chains of the coupled rule are drawn on the GPU.

For these, one token id per row is copied to the host. Rows of trees, of rules that need draft
probabilities, and of stopping rules that look at the distribution are copied whole.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from workers.drafting.growth import Growth
from workers.drafting.tree import DraftTree
from workers.verification.device_choice import Row, choose_tokens
from workers.verification.distribution import check_likeliest
from workers.verification.staging import to_device, to_host

Failure = tuple[DraftTree, Exception]
_Fed = tuple[DraftTree, Growth, int]


def expand_on_device(logits_TV: Tensor, fed: Sequence[_Fed]) -> list[Failure]:
    """Expand the node of each row. Returns the failures, each of which concerns one tree only.

    Waits for the device, once per distinct target vocabulary size.
    """
    sizes = {tree.vocab_size for tree, _, _ in fed}
    if len(sizes) == 1:
        return _expand(logits_TV[:, : fed[0][0].vocab_size], fed)
    failures: list[Failure] = []
    for size in sizes:
        rows = [row for row, (tree, _, _) in enumerate(fed) if tree.vocab_size == size]
        failures += _expand(_pick(logits_TV, rows)[:, :size], [fed[row] for row in rows])
    return failures


def _expand(logits_TV: Tensor, fed: Sequence[_Fed]) -> list[Failure]:
    drawn = [row for row, (_, growth, _) in enumerate(fed) if growth.needs_token_alone]
    copied = [row for row, (_, growth, _) in enumerate(fed) if not growth.needs_token_alone]
    wanted: list[Tensor] = []
    if drawn:
        rows = [Row(fed[row][0].spec, fed[row][0].prefix(fed[row][2])) for row in drawn]
        wanted += choose_tokens(_pick(logits_TV, drawn), rows)
    if copied:
        wanted.append(_pick(logits_TV, copied))
    copies = to_host(*wanted) if wanted else []
    failures: list[Failure] = []
    if drawn:
        for row, token_id, largest in zip(
            drawn, copies[0].tolist(), copies[1].tolist(), strict=True
        ):
            tree, growth, node = fed[row]
            try:
                check_likeliest(token_id, largest, logits_TV.shape[1])
                growth.expand_chain(node, token_id)
            except Exception as error:
                failures.append((tree, error))
    for row, logits_V in zip(copied, copies[-1] if copied else (), strict=True):
        tree, growth, node = fed[row]
        try:
            growth.expand(node, logits_V)
        except Exception as error:
            failures.append((tree, error))
    return failures


def _pick(logits_TV: Tensor, rows: list[int]) -> Tensor:
    return logits_TV.index_select(0, to_device(np.array(rows), logits_TV.device))
