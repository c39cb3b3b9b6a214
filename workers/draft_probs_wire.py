"""Draft probabilities between the wire (types.proto, DraftDistribution) and arrays."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from paceline.errors import ProtocolError
from paceline.v1 import types_pb2
from workers.verification.draft_probs import DraftProbs, SparseProbs

MAX_PAIRS = 1024
"""Most pairs of one node."""


def distributions_to_wire(
    of_node: Mapping[int, SparseProbs],
) -> list[types_pb2.DraftDistribution]:
    """The messages for the pairs of nodes, by node."""
    return [
        types_pb2.DraftDistribution(
            node=node,
            token_ids=pairs.token_ids_M.tolist(),
            probabilities=pairs.probs_M.tolist(),
        )
        for node, pairs in sorted(of_node.items())
    ]


def distributions_from_wire(
    messages: Iterable[types_pb2.DraftDistribution],
) -> DraftProbs | None:
    """The pairs of nodes; None where there are none.

    Raises ProtocolError for a node that comes twice or has too many pairs. Whether the pairs are
    probabilities is checked with their candidates (rules.check_proposal).
    """
    of_node: dict[int, SparseProbs] = {}
    for message in messages:
        node = message.node
        if node in of_node:
            raise ProtocolError(f"expected one distribution a node, got two of node {node}")
        count = len(message.token_ids)
        if count > MAX_PAIRS or len(message.probabilities) != count:
            raise ProtocolError(
                f"expected at most {MAX_PAIRS} pairs under node {node}, got {count} token ids and "
                f"{len(message.probabilities)} probabilities"
            )
        of_node[node] = SparseProbs(
            np.array(message.token_ids, dtype=np.int64),
            np.array(message.probabilities, dtype=np.float32),
        )
    return DraftProbs(of_node) if of_node else None
