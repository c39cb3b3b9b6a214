"""Computes the verdicts of a step's slices from its logits.

If the logits are on a GPU, the coupled rule's tokens are chosen there. One small copy goes to the
host: a token id per row, and the top ids if they are requested. The host then follows the
candidates by comparing ids. For rules that toss coins, whole rows are copied to the host, so that
the arithmetic of a rule exists once.

Log probabilities: on a CPU numpy adds up each row by itself, with one thread, so the same row gives
the same bits in any batch and with any number of threads; torch's sums depend on both. On a GPU
torch does, in blocks of one shape; whether the last bits depend on the batch there is not measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, MutableSequence, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from paceline.limits import MAX_LOGPROBS
from paceline.v1 import target_pb2, types_pb2
from workers.target.faults import Part, SliceFault, judge_each
from workers.target.step_sequences import VerdictTask
from workers.verification.candidates import CandidateTree, end_of
from workers.verification.device_choice import Row, choose_tokens
from workers.verification.distribution import Logits, check_likeliest
from workers.verification.rule import rule_named
from workers.verification.staging import to_device, to_host
from workers.verification.verify import Verdict, Window, WindowPath, follow, verify_batch

NUM_TOP_IDS = 8
"""Number of likeliest next tokens that are sent for each token fed, if requested."""


def verdicts_of(logits_TV: torch.Tensor, tasks: Sequence[VerdictTask]) -> list[target_pb2.Verdict]:
    """A verdict for each task that has one. The rows of `logits_TV` are in the order of the tasks.

    Verification runs on the device that has the logits. A task that cannot be verified has an error
    in its verdict. Raises an error that is not the fault of a single task (faults.judge_each).
    """
    top_ids_TK = None
    if any(task.fed for task in tasks):
        count = min(NUM_TOP_IDS, logits_TV.shape[1])
        top_ids_TK = torch.topk(logits_TV, count).indices
    ends = ends_of(tasks)
    decided = [i for i, task in enumerate(tasks) if task.has_verdict]
    parts = [(tasks[i], (ends[i] - 1 - len(tasks[i].candidates.tree), ends[i])) for i in decided]
    found, top_ids_TK = _judge(logits_TV, parts, top_ids_TK)
    verdicts = dict(zip(decided, found, strict=True))
    messages: dict[int, target_pb2.Verdict] = {}
    for i, task in enumerate(tasks):
        if task.fed:
            assert top_ids_TK is not None
            task.top_tokens.extend(top_tokens(top_ids_TK[ends[i] - task.num_rows :], task))
        if i in verdicts:
            messages[i] = message_of(verdicts[i], task)
    if any(task.wants_logprobs for task in tasks):
        wanted, places = wanted_logprobs(tasks, messages)
        for place, one in zip(places, logprobs_of(logits_TV, wanted), strict=True):
            place.append(one)
    return list(messages.values())


def wanted_logprobs(
    tasks: Sequence[VerdictTask], messages: Mapping[int, target_pb2.Verdict]
) -> tuple[list[WantedLogprobs], list[MutableSequence[types_pb2.TokenLogprobs]]]:
    """The log probabilities that tasks ask for, and for each where it belongs: tasks and verdicts.

    `messages`: the verdicts, by the index of their task.
    """
    ends = ends_of(tasks)
    wanted: list[WantedLogprobs] = []
    places: list[MutableSequence[types_pb2.TokenLogprobs]] = []
    for i, task in enumerate(tasks):
        top, first = task.spec.prompt_logprobs or 0, ends[i] - task.num_rows
        wanted += [WantedLogprobs(first + k, t, top) for k, t in enumerate(task.logprobs_of)]
        places += [task.prompt_logprobs] * len(task.logprobs_of)
        verdict = messages.get(i)
        if task.spec.logprobs is None or verdict is None or verdict.error:
            continue
        tree = task.candidates.tree
        root = ends[i] - 1 - len(tree)
        accepted = verdict.accepted or range(verdict.num_accepted)
        rows = [root, *(root + 1 + candidate for candidate in accepted)]
        token_ids = [*(tree.token_ids[candidate] for candidate in accepted), verdict.token_id]
        wanted += [
            WantedLogprobs(row, token_id, task.spec.logprobs)
            for row, token_id in zip(rows, token_ids, strict=True)
        ]
        places += [verdict.logprobs] * len(rows)
    return wanted, places


def _judge(
    logits_TV: torch.Tensor, parts: Sequence[Part[tuple[int, int]]], top_ids_TK: torch.Tensor | None
) -> tuple[list[Verdict | SliceFault], torch.Tensor | None]:
    """The verdict of each part (a task and the span of its rows), and `top_ids_TK` on the host."""
    if logits_TV.is_cpu:
        array_TV = logits_TV.numpy()

        def on_host(some: Sequence[Part[tuple[int, int]]]) -> list[Verdict]:
            rows = [array_TV[first:end] for _, (first, end) in some]
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


def ends_of(tasks: Sequence[VerdictTask]) -> list[int]:
    return list(accumulate(task.num_rows for task in tasks))


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


def top_tokens(top_ids_RK: torch.Tensor, task: VerdictTask) -> list[types_pb2.TopTokens]:
    """The top tokens of each fed token, from the first rows of `top_ids_RK`."""
    rows = top_ids_RK[: len(task.fed)].tolist()
    return [
        types_pb2.TopTokens(token_id=token_id, top_ids=ids, previous_id=previous_id)
        for token_id, previous_id, ids in zip(task.fed, task.fed_after(), rows, strict=True)
    ]


def device_verdicts(
    logits_TV: Tensor,
    tasks: Sequence[VerdictTask],
    spans: Sequence[tuple[int, int]],
    also: Tensor | None = None,
) -> tuple[list[Verdict], Tensor | None]:
    """A verdict for each task, from the rows of `logits_TV` in its span [first, end).

    Waits for the device. `also`, if given, is copied to the host in the same transfer. Raises
    InternalError as verify does.
    """
    shares_noise = [rule_named(task.spec.rule).shares_noise for task in tasks]
    coupled = [i for i, shares in enumerate(shares_noise) if shares]
    tossing = [i for i, shares in enumerate(shares_noise) if not shares]
    wanted = [logits_TV[slice(*spans[i])] for i in tossing]
    wanted += [] if also is None else [also]
    rows = [row for i in coupled for row in rows_of(tasks[i])]
    if rows:
        chosen_TV = pick_rows(logits_TV, [row for i in coupled for row in range(*spans[i])])
        wanted += choose_tokens(chosen_TV, rows)
    copies = to_host(*wanted) if wanted else []
    verdicts = dict(
        zip(
            tossing,
            verify_on_host(copies[: len(tossing)], [tasks[i] for i in tossing]),
            strict=True,
        )
    )
    if rows:
        trees = [tasks[i].candidates.tree for i in coupled]
        chosen = ChosenTokens(copies[-2].tolist(), copies[-1].tolist(), trees, logits_TV.shape[1])
        verdicts.update(zip(coupled, follow(trees, chosen.tokens_after), strict=True))
    ordered = [verdicts[i] for i in range(len(tasks))]
    return ordered, None if also is None else copies[len(tossing)]


class ChosenTokens:
    """The chosen tokens of the rows of several trees, on the host."""

    def __init__(
        self,
        token_ids: list[int],
        largest: list[float],
        trees: Sequence[CandidateTree],
        vocab_size: int,
    ) -> None:
        self._token_ids = token_ids
        self._largest = largest
        self._first_rows = list(accumulate((1 + len(tree) for tree in trees), initial=0))
        self._vocab_size = vocab_size

    def tokens_after(self, places: Sequence[WindowPath]) -> list[int]:
        """The token chosen at each place. Raises InternalError if a place has no valid token.

        As on the host, rows that no accepted path reaches are not checked.
        """
        rows = [self._first_rows[index] + end_of(path) for index, path in places]
        for row in rows:
            check_likeliest(self._token_ids[row], self._largest[row], self._vocab_size)
        return [self._token_ids[row] for row in rows]


def rows_of(task: VerdictTask) -> list[Row]:
    """The row after the prefix, then one row after each candidate and its ancestors."""
    tree = task.candidates.tree
    paths: list[tuple[int, ...]] = [()]
    for token_id, parent in zip(tree.token_ids, tree.parents, strict=True):
        paths.append((*paths[parent], token_id))
    return [Row(task.spec, task.prefix, path) for path in paths]


def verify_on_host(rows: Sequence[Logits], tasks: Sequence[VerdictTask]) -> list[Verdict]:
    """The verdicts of `tasks` from their float32 logits, by any rule."""
    return verify_batch(
        [
            Window(
                task.spec.rule,
                logits_RV,
                task.candidates.tree,
                task.spec,
                task.prefix,
                task.candidates.draft_probs,
            )
            for logits_RV, task in zip(rows, tasks, strict=True)
        ]
    )


def pick_rows(logits_TV: Tensor, rows: list[int]) -> Tensor:
    """These rows; the tensor itself if they are all of its rows, in order."""
    if rows == list(range(logits_TV.shape[0])):
        return logits_TV
    return logits_TV.index_select(0, to_device(np.array(rows), logits_TV.device))


_LOGPROB_ROWS = 32
"""Rows of logits that are copied at a time. With 262,144 tokens these have 32 MiB."""


class WantedLogprobs(NamedTuple):
    """The log probability of a token after a row of logits, and of the `top` likeliest tokens."""

    row: int
    token_id: int
    top: int


def logprobs_of(
    logits_TV: Tensor, wanted: Sequence[WantedLogprobs]
) -> Iterator[types_pb2.TokenLogprobs]:
    """The log probabilities for each of `wanted`, by the softmax of its row as it is."""
    for first in range(0, len(wanted), _LOGPROB_ROWS):
        yield from _of_block(logits_TV, wanted[first : first + _LOGPROB_ROWS])


def _of_block(
    logits_TV: Tensor, wanted: Sequence[WantedLogprobs]
) -> Iterator[types_pb2.TokenLogprobs]:
    count = len(wanted)
    device = logits_TV.device
    # The same number of rows in each block, so that a GPU divides each row in the same way.
    padding = (0, 0 if device.type == "cpu" else _LOGPROB_ROWS - count)
    rows = np.pad(np.array([one.row for one in wanted]), padding)
    ids = np.pad(np.array([one.token_id for one in wanted]), padding)
    logits_RV = logits_TV.index_select(0, to_device(rows, device)).float()
    # Always as many: equal logits come in an order that depends on how many are asked for.
    top = min(MAX_LOGPROBS, logits_RV.shape[1])
    values_RK, ids_RK = logits_RV.topk(top)
    chosen_R1 = logits_RV.gather(1, to_device(ids, device)[:, None])
    ranks_R = 1 + (logits_RV > chosen_R1).sum(dim=1)
    if device.type == "cpu":
        logs_R = torch.tensor([_log_sum_exp(row_V) for row_V in logits_RV], dtype=torch.float64)
    else:
        logs_R = logits_RV.double().logsumexp(dim=1)
    columns = chosen_R1[:, 0].double() - logs_R, ranks_R, values_RK - logs_R[:, None], ids_RK
    own_R, ranks_R, values_RK, ids_RK = to_host(*columns)
    own, ranks = own_R.tolist(), ranks_R.tolist()
    for i, one in enumerate(wanted):
        yield types_pb2.TokenLogprobs(
            logprob=own[i],
            rank=ranks[i],
            top_ids=ids_RK[i, : one.top].tolist(),
            top_logprobs=values_RK[i, : one.top].tolist(),
        )


def _log_sum_exp(logits_V: Tensor) -> float:
    """NaN for a row with a NaN or an infinity. Its verdict is then an error, now or later."""
    row_V = logits_V.numpy()
    largest = row_V.max()
    with np.errstate(invalid="ignore"):
        return float(largest) + math.log(np.exp(row_V - largest).sum(dtype=np.float64))
