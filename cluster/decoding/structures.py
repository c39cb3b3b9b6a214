"""What a request's structure tells ahead: forced tokens become candidates, refused ones are cut.

Neither changes the text: the target verifies candidates under the same structure. A sequence whose
matcher fails here goes on without this help; the target reports the failure if it has it too.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as TokenIds
from dataclasses import replace

from cluster.decoding.events import Proposal
from cluster.decoding.sequence import Sequence
from workers.verification.rule import rule_named

_log = logging.getLogger(__name__)


def note_committed(sequence: Sequence, token_ids: TokenIds[int]) -> None:
    """Follow newly committed tokens of a sequence that goes on, and hold what they force.

    k-SEQ counts paths, which forced tokens are not part of, so under it nothing is held.
    """
    matcher = sequence.matcher
    if matcher is None:
        return
    try:
        if matcher.advance(token_ids) < len(token_ids):
            sequence.matcher = None
            return
        rule = rule_named(sequence.request.spec.rule)
        most = min(sequence.window, sequence.max_length - 1 - sequence.tree.num_committed)
        if rule.counts_paths or not sequence.policy.drafts or most <= 0:
            return
        ahead, num = sequence.forced_ahead, len(token_ids)
        # A long text that is forced is asked for once, not again after each verdict.
        goes_on = len(ahead) > num and list(ahead[:num]) == list(token_ids)
        ahead = sequence.forced_ahead = ahead[num:] if goes_on else matcher.forced()
        forced = ahead[:most]
    except Exception as error:  # of one sequence: it must not end the scheduler
        _forget(sequence, error)
        return
    sequence.forced_until = sequence.tree.num_committed + len(forced)
    if forced:
        sequence.tree.force(forced, with_probs=rule.needs_draft_probs)


def without_refused(sequence: Sequence, proposal: Proposal) -> Proposal:
    """The proposal without candidates that the structure refuses, and what follows them.

    For drafters that do not know structures. A proposal that begins before the last committed token
    stays as it is.
    """
    matcher, token_ids = sequence.matcher, proposal.token_ids
    if matcher is None or not token_ids or proposal.distributions:
        return proposal
    above = sequence.tree.path_to(proposal.base_length, proposal.base_hash)
    if above is None:
        return proposal
    parents = proposal.parents or range(len(token_ids))
    # By number of node: its path, and its number among the nodes that are kept.
    paths: list[list[int] | None] = [above]
    numbers = [0]
    kept_ids: list[int] = []
    kept_parents: list[int] = []
    try:
        for token_id, parent in zip(token_ids, parents, strict=True):
            before = paths[parent]
            path = None if before is None else [*before, token_id]
            if path is not None and matcher.accepts(path) < len(path):
                path = None
            paths.append(path)
            if path is not None:
                kept_ids.append(token_id)
                kept_parents.append(numbers[parent])
            numbers.append(len(kept_ids))
    except Exception as error:  # as above
        _forget(sequence, error)
        return proposal
    if len(kept_ids) == len(token_ids):
        return proposal
    in_line = kept_parents == list(range(len(kept_ids)))
    return replace(
        proposal,
        token_ids=tuple(kept_ids),
        parents=() if in_line else tuple(kept_parents),
        multiplicities=(),
    )


def _forget(sequence: Sequence, error: Exception) -> None:
    _log.warning("the structure of sequence %d: %s", sequence.sequence_id, error)
    sequence.matcher = None
