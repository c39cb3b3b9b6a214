"""From the logits of a step to the verdicts of its slices."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.v1 import target_pb2, types_pb2
from workers.target_session import VerdictTask
from workers.verification.verify import verify

NUM_TOP_IDS = 8
"""Likeliest next tokens that a verdict tells of each token fed, where it is asked to."""


def verdicts_of(logits_TV: torch.Tensor, tasks: Sequence[VerdictTask]) -> list[target_pb2.Verdict]:
    """A verdict for each task that has one. Their rows stand in `logits_TV` in the same order."""
    verdicts = []
    row = 0
    for task in tasks:
        logits_RV = logits_TV[row : row + task.num_rows]
        row += task.num_rows
        if task.fed:
            task.top_tokens.extend(_top_tokens(logits_RV, task.fed))
        if task.has_verdict:
            verdicts.append(_verdict(logits_RV[-1 - len(task.candidates.tree) :], task))
            task.top_tokens.clear()
    return verdicts


def _verdict(logits_RV: torch.Tensor, task: VerdictTask) -> target_pb2.Verdict:
    candidates = task.candidates
    verdict = verify(
        task.spec.rule,
        logits_RV,
        candidates.tree,
        task.spec,
        task.prefix,
        candidates.draft_probs,
    )
    message = target_pb2.Verdict(
        sequence_id=task.sequence_id,
        num_accepted=verdict.num_accepted,
        token_id=verdict.token_id,
    )
    if task.names_path:
        message.accepted.extend(verdict.accepted)
    message.top_tokens.extend(task.top_tokens)
    return message


def _top_tokens(logits_RV: torch.Tensor, fed: Sequence[int]) -> list[types_pb2.TopTokens]:
    top_ids = torch.topk(logits_RV, min(NUM_TOP_IDS, logits_RV.shape[1])).indices.tolist()
    return [
        types_pb2.TopTokens(token_id=token_id, top_ids=ids)
        for token_id, ids in zip(fed, top_ids, strict=True)
    ]
