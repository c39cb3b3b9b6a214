"""From the logits of a step to the verdicts of its slices."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.v1 import target_pb2, types_pb2
from workers.device_verdicts import device_verdicts, verify_on_host
from workers.target_session import VerdictTask
from workers.verification.verdict import Verdict

NUM_TOP_IDS = 8
"""Likeliest next tokens that a verdict tells of each token fed, where it is asked to."""


def verdicts_of(logits_TV: torch.Tensor, tasks: Sequence[VerdictTask]) -> list[target_pb2.Verdict]:
    """A verdict for each task that has one. Their rows stand in `logits_TV` in the same order.

    Verified on the device that has the logits. Raises InternalError as verify does.
    """
    top_ids_TK = None
    if any(task.fed for task in tasks):
        count = min(NUM_TOP_IDS, logits_TV.shape[1])
        top_ids_TK = torch.topk(logits_TV, count).indices
    ends = _ends(tasks)
    decided = [i for i, task in enumerate(tasks) if task.has_verdict]
    spans = [(ends[i] - 1 - len(tasks[i].candidates.tree), ends[i]) for i in decided]
    judged = [tasks[i] for i in decided]
    if logits_TV.device.type == "cpu":
        found = verify_on_host([logits_TV[first:end] for first, end in spans], judged)
    else:
        found, top_ids_TK = device_verdicts(logits_TV, judged, spans, top_ids_TK)
    verdicts = dict(zip(decided, found, strict=True))
    messages = []
    for i, task in enumerate(tasks):
        if task.fed:
            assert top_ids_TK is not None
            task.top_tokens.extend(_top_tokens(top_ids_TK[ends[i] - task.num_rows :], task))
        if i in verdicts:
            messages.append(message_of(verdicts[i], task))
    return messages


def _ends(tasks: Sequence[VerdictTask]) -> list[int]:
    """The row after the last one of each task."""
    ends = []
    row = 0
    for task in tasks:
        row += task.num_rows
        ends.append(row)
    return ends


def message_of(verdict: Verdict, task: VerdictTask) -> target_pb2.Verdict:
    """A verdict as the wire has it, with the top tokens of its task."""
    message = target_pb2.Verdict(
        sequence_id=task.sequence_id,
        num_accepted=verdict.num_accepted,
        token_id=verdict.token_id,
    )
    if task.names_path:
        message.accepted.extend(verdict.accepted)
    message.top_tokens.extend(task.top_tokens)
    return message


def _top_tokens(top_ids_RK: torch.Tensor, task: VerdictTask) -> list[types_pb2.TopTokens]:
    """For each fed token, from the first rows of `top_ids_RK`, which may have more."""
    rows = top_ids_RK[: len(task.fed)].tolist()
    return [
        types_pb2.TopTokens(token_id=token_id, top_ids=ids, previous_id=previous_id)
        for token_id, previous_id, ids in zip(task.fed, task.fed_after(), rows, strict=True)
    ]
