"""Converts draft probabilities between the wire (types.proto, DraftDistribution) and arrays."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from paceline.errors import ProtocolError
from paceline.v1 import types_pb2
from workers.verification.candidates import DraftProbs, SparseProbs

MAX_PAIRS = 1024
"""Maximum number of pairs for one node."""


def distributions_to_wire(
    of_node: Mapping[int, SparseProbs],
) -> list[types_pb2.DraftDistribution]:
    """One message per node, in ascending order of nodes."""
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
    """The pairs of each node, or None if there are no messages.

    Raises ProtocolError if a node comes twice or has too many pairs. Whether the pairs are
    probabilities is checked together with the candidates (rules.check_proposal).
    """
    of_node: dict[int, SparseProbs] = {}
    for message in messages:
        node = message.node
        if node in of_node:
            raise ProtocolError(f"expected one distribution per node, got two for node {node}")
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
