"""Computes the verdicts of a step's slices from its logits.

If the logits are on a GPU, the coupled rule's tokens are chosen there. One small copy goes to the
host: a token id per row, and the top ids if they are requested. The host then follows the
candidates by comparing ids. For rules that toss coins, whole rows are copied to the host, so that
the arithmetic of a rule exists once.

In a tensor-parallel group each rank has the logits of one part of the vocabulary. If the parts
suffice to choose a row's token (verification/choice.py, parts_suffice), ranks exchange their best
token of the row and its score, a few bytes per row. The logits of all other rows are gathered at
rank 0. All ranks run the same collectives, since all have the same tasks. Only rank 0 returns
verdicts.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, MutableSequence, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.v1 import target_pb2, types_pb2
from workers.engine.engine import Engine
from workers.engine.parallel.group import RankGroup
from workers.target.faults import Part, SliceFault, judge_each
from workers.target.logprobs import WantedLogprobs, logprobs_of
from workers.target.session import VerdictTask
from workers.verification.candidates import CandidateTree, end_of
from workers.verification.choice import best_score, parts_suffice
from workers.verification.device_choice import Row, choose_tokens
from workers.verification.distribution import check_likeliest
from workers.verification.rule import rule_named
from workers.verification.staging import to_device, to_host
from workers.verification.verify import Verdict, Window, WindowPath, follow, verify_batch

_log = logging.getLogger(__name__)

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
    ends = _ends(tasks)
    decided = [i for i, task in enumerate(tasks) if task.has_verdict]
    parts = [(tasks[i], (ends[i] - 1 - len(tasks[i].candidates.tree), ends[i])) for i in decided]
    found, top_ids_TK = _judge(logits_TV, parts, top_ids_TK)
    verdicts = dict(zip(decided, found, strict=True))
    messages: dict[int, target_pb2.Verdict] = {}
    for i, task in enumerate(tasks):
        if task.fed:
            assert top_ids_TK is not None
            task.top_tokens.extend(_top_tokens(top_ids_TK[ends[i] - task.num_rows :], task))
        if i in verdicts:
            messages[i] = message_of(verdicts[i], task)
    if any(task.wants_logprobs for task in tasks):
        _add_logprobs(logits_TV, tasks, ends, messages)
    return list(messages.values())


def _add_logprobs(
    logits_TV: torch.Tensor,
    tasks: Sequence[VerdictTask],
    ends: Sequence[int],
    messages: Mapping[int, target_pb2.Verdict],
) -> None:
    """Add the log probabilities that tasks ask for: to the tasks, and to their verdicts."""
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
    for place, one in zip(places, logprobs_of(logits_TV, wanted), strict=True):
        place.append(one)


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
    rows = [row for i in coupled for row in _rows(tasks[i])]
    if rows:
        chosen_TV = _pick(logits_TV, [row for i in coupled for row in range(*spans[i])])
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


def _rows(task: VerdictTask) -> list[Row]:
    """The row after the prefix, then one row after each candidate and its ancestors."""
    tree = task.candidates.tree
    paths: list[tuple[int, ...]] = [()]
    for token_id, parent in zip(tree.token_ids, tree.parents, strict=True):
        paths.append((*paths[parent], token_id))
    return [Row(task.spec, task.prefix, path) for path in paths]


def verify_on_host(rows: Sequence[Tensor], tasks: Sequence[VerdictTask]) -> list[Verdict]:
    """The verdicts of `tasks` from their float32 CPU logits, by any rule."""
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


@dataclass(frozen=True, slots=True)
class _Best:
    """The best token of each row at each rank: [degree, R] scores (float64) and ids."""

    scores: Tensor
    ids: Tensor

    def over_ranks(self) -> tuple[list[float], list[int]]:
        """Each row's best score and its id. The lowest rank, and so the lowest id, wins a tie."""
        best = torch.from_numpy(self.scores.numpy().argmax(axis=0))[None]  # argmax stops at a NaN
        return self.scores.gather(0, best)[0].tolist(), self.ids.gather(0, best)[0].tolist()


def group_verdicts(
    engine: Engine, part_TV: Tensor, tasks: Sequence[VerdictTask]
) -> list[target_pb2.Verdict]:
    """At rank 0, the verdicts that verdicts_of returns for whole rows; at other ranks, none.

    `part_TV` is what step_part returned. An error of one task goes into its verdict: no rank may
    skip a collective in which others wait.
    """
    group = engine.group
    assert group is not None
    short, long = [], []
    short_rows: list[int] = []
    long_rows: list[int] = []
    row = 0
    for task in tasks:
        rows = range(row, row + task.num_rows)
        row = rows.stop
        needs_whole_rows = task.fed or task.wants_logprobs or not parts_suffice(task.spec)
        if task.has_verdict and not needs_whole_rows:
            short.append(task)
            short_rows += rows
        else:
            long.append(task)
            long_rows += rows
    found: dict[int, target_pb2.Verdict] = {}
    if short:
        part_RV = _pick(part_TV, short_rows)[:, : len(engine.token_ids_held)]
        found |= _by_parts(group, part_RV, engine, short)
    if long:
        logits_TV = group.settle(engine.whole_rows(_pick(part_TV, long_rows)))
        if not group.place.rank:
            found |= {verdict.sequence_id: verdict for verdict in verdicts_of(logits_TV, long)}
    return [found[task.sequence_id] for task in tasks if task.sequence_id in found]


def _by_parts(
    group: RankGroup, part_RV: Tensor, engine: Engine, tasks: Sequence[VerdictTask]
) -> dict[int, target_pb2.Verdict]:
    """Verdicts by sequence id; empty at ranks other than 0."""
    held = engine.token_ids_held
    largest, chosen = _exchange(group, *_likeliest(part_RV, held)).over_ranks()
    drawn: list[tuple[int, VerdictTask, int]] = []
    row = 0
    for task in tasks:
        if not task.spec.sampling.greedy:
            depths = _depths(task)
            drawn += [(row + node, task, len(task.prefix) + d) for node, d in enumerate(depths)]
        row += task.num_rows
    if drawn:
        rows_NV = group.settle(part_RV).cpu().numpy()
        best = [
            _best_drawn(rows_NV[row], largest[row], held, task, position)
            for row, task, position in drawn
        ]
        scores = torch.tensor([score for score, _ in best], dtype=torch.float64)
        ids = torch.tensor([token_id for _, token_id in best], dtype=torch.float64)
        best_scores, ids_drawn = _exchange(group, scores, ids).over_ranks()
        for (row, _, _), token_id, score in zip(drawn, ids_drawn, best_scores, strict=True):
            chosen[row] = token_id
            if math.isnan(score):  # a rank could not draw from its part
                largest[row] = score
    if group.place.rank:
        return {}
    ends = list(accumulate(task.num_rows for task in tasks))
    parts = [(task, slice(end - task.num_rows, end)) for task, end in zip(tasks, ends, strict=True)]

    def judge(some: Sequence[Part[slice]]) -> list[Verdict]:
        trees = [task.candidates.tree for task, _ in some]
        ids = [token_id for _, rows in some for token_id in chosen[rows]]
        logits = [logit for _, rows in some for logit in largest[rows]]
        return follow(trees, ChosenTokens(ids, logits, trees, engine.info.vocab_size).tokens_after)

    verdicts = {}
    for task, verdict in zip(tasks, judge_each(judge, parts), strict=True):
        verdicts[task.sequence_id] = message_of(verdict, task)
    return verdicts


def _best_drawn(
    logits_N: NDArray[np.float32], largest: float, held: range, task: VerdictTask, position: int
) -> tuple[float, int]:
    """Score and id of the best token of this rank's part; the score is NaN if drawing fails."""
    if not held:
        return -np.inf, 0
    try:
        return best_score(logits_N, np.float32(largest), held, task.spec, position)
    except Exception:  # the other ranks will exchange scores, so this one must do so, too
        _log.exception("a defect left a row of sequence %d without a token", task.sequence_id)
        return np.nan, held.start


def _likeliest(part_RV: Tensor, held: range) -> tuple[Tensor, Tensor]:
    """The largest logit of each row's part, and its token id; -inf if the part is empty."""
    if not held:
        empty = torch.full((part_RV.shape[0],), -torch.inf, dtype=torch.float64)
        return empty, torch.zeros_like(empty)
    values_R, columns_R = part_RV.max(dim=1)
    return values_R.to(torch.float64), columns_R.to(torch.float64) + held.start


def _exchange(group: RankGroup, scores_R: Tensor, ids_R: Tensor) -> _Best:
    mine_2R = torch.stack([scores_R, ids_R]).to(group.device)
    all_N2R = group.settle(group.all_gather(mine_2R)).cpu()
    return _Best(all_N2R[:, 0], all_N2R[:, 1].to(torch.int64))


def _depths(task: VerdictTask) -> list[int]:
    """The depth of the node before the candidates (0), and of each candidate."""
    depths = [0]
    for parent in task.candidates.tree.parents:
        depths.append(depths[parent] + 1)
    return depths


def _pick(logits_TV: Tensor, rows: list[int]) -> Tensor:
    if rows == list(range(logits_TV.shape[0])):
        return logits_TV
    return logits_TV.index_select(0, to_device(np.array(rows), logits_TV.device))
