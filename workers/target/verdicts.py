"""From the logits of a step to the verdicts of its slices."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.v1 import target_pb2, types_pb2
from workers.target.device_verdicts import device_verdicts, verify_on_host
from workers.target.faults import Part, SliceFault, judge_each
from workers.target.session import VerdictTask
from workers.verification.verdict import Verdict

NUM_TOP_IDS = 8
"""Number of likeliest next tokens that are told for each token fed, if requested."""


def verdicts_of(logits_TV: torch.Tensor, tasks: Sequence[VerdictTask]) -> list[target_pb2.Verdict]:
    """A verdict for each task that has one. The rows of `logits_TV` are in the order of the tasks.

    Verification runs on the device that has the logits. A task that cannot be verified has an error
    in its verdict. Raises what is not a single task's fault (faults.judge_each).
    """
    top_ids_TK = None
    if any(task.fed for task in tasks):
        count = min(NUM_TOP_IDS, logits_TV.shape[1])
        top_ids_TK = torch.topk(logits_TV, count).indices
    ends = _ends(tasks)
    decided = [i for i, task in enumerate(tasks) if task.has_verdict]
    parts = [(tasks[i], (ends[i] - 1 - len(tasks[i].candidates.tree), ends[i])) for i in decided]
    found, top_ids_TK = _judge(logits_TV, parts, top_ids_TK)
    verdicts = dict(zip(decided, found, strict=True))
    messages = []
    for i, task in enumerate(tasks):
        if task.fed:
            assert top_ids_TK is not None
            task.top_tokens.extend(_top_tokens(top_ids_TK[ends[i] - task.num_rows :], task))
        if i in verdicts:
            messages.append(message_of(verdicts[i], task))
    return messages


def _judge(
    logits_TV: torch.Tensor, parts: Sequence[Part[tuple[int, int]]], top_ids_TK: torch.Tensor | None
) -> tuple[list[Verdict | SliceFault], torch.Tensor | None]:
    """The verdict of each part (a task and the span of its rows), and `top_ids_TK` on the host."""
    if logits_TV.device.type == "cpu":

        def on_host(some: Sequence[Part[tuple[int, int]]]) -> list[Verdict]:
            rows = [logits_TV[first:end] for _, (first, end) in some]
            return verify_on_host(rows, [task for task, _ in some])

        return judge_each(on_host, parts), top_ids_TK
    copied: torch.Tensor | None = None

    def on_device(some: Sequence[Part[tuple[int, int]]]) -> list[Verdict]:
        nonlocal copied
        tasks, spans = [task for task, _ in some], [span for _, span in some]
        also = top_ids_TK if copied is None else None
        verdicts, also_copied = device_verdicts(logits_TV, tasks, spans, also)
        copied = also_copied if copied is None else copied
        return verdicts

    found = judge_each(on_device, parts)
    if top_ids_TK is not None and copied is None:
        copied = top_ids_TK.cpu()
    return found, copied


def _ends(tasks: Sequence[VerdictTask]) -> list[int]:
    """The end of each task's rows."""
    ends = []
    row = 0
    for task in tasks:
        row += task.num_rows
        ends.append(row)
    return ends


def message_of(verdict: Verdict | SliceFault, task: VerdictTask) -> target_pb2.Verdict:
    """A verdict as a message, with the top tokens of its task."""
    if isinstance(verdict, SliceFault):
        return target_pb2.Verdict(sequence_id=task.sequence_id, error=verdict.reason)
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
    """The top tokens of each fed token, from the first rows of `top_ids_RK`."""
    rows = top_ids_RK[: len(task.fed)].tolist()
    return [
        types_pb2.TopTokens(token_id=token_id, top_ids=ids, previous_id=previous_id)
        for token_id, previous_id, ids in zip(task.fed, task.fed_after(), rows, strict=True)
    ]
