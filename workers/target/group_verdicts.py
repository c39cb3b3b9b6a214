"""Computes the verdicts of a step in a tensor-parallel group, at rank 0.

Each rank has the logits of one part of the vocabulary. On GPUs, ranks exchange a few numbers per
row for everything that is asked of it: tokens, what rules that toss coins read, log probabilities
and top ids (verification/split_choice.py, logprobs.py). Rows are gathered at rank 0 only for rules
of other packages that need them whole (Rule.others_as_one).

On CPUs numpy chooses, as without a group. Ranks exchange a few bytes per row where the parts
suffice for its token (verification/choice.py, parts_suffice); all other rows are gathered at rank
0. All ranks run the same collectives, since all have the same tasks. Only rank 0 returns verdicts.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.v1 import target_pb2
from workers.engine.engine import Engine
from workers.engine.parallel.group import RankGroup
from workers.target.faults import Part, judge_each
from workers.target.logprobs import joined_logprobs, logprobs_in_parts
from workers.target.session import VerdictTask
from workers.target.verdicts import (
    NUM_TOP_IDS,
    ChosenTokens,
    ends_of,
    message_of,
    pick_rows,
    rows_of,
    top_tokens,
    verdicts_of,
    wanted_logprobs,
)
from workers.verification.choice import best_score, parts_suffice
from workers.verification.device_choice import Row
from workers.verification.row_sums import RowSums, named_tokens, walk_sums
from workers.verification.rule import rule_named
from workers.verification.split_choice import (
    VocabularyPart,
    best_in_parts,
    choose_in_parts,
    ids_of,
    sums_of,
)
from workers.verification.staging import to_host
from workers.verification.verify import Verdict, follow

_log = logging.getLogger(__name__)


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
    on_device = _chooses_on_device(group)
    short, long = [], []
    short_rows: list[int] = []
    long_rows: list[int] = []
    for task, end in zip(tasks, ends_of(tasks), strict=True):
        rows = range(end - task.num_rows, end)
        if _device_suffices(task) if on_device else _host_suffices(task):
            short.append(task)
            short_rows += rows
        else:
            long.append(task)
            long_rows += rows
    found: dict[int, target_pb2.Verdict] = {}
    if short:
        judge = _verdicts_on_device if on_device else _verdicts_on_host
        found |= judge(group, pick_rows(part_TV, short_rows), engine, short)
    if long:
        logits_TV = group.settle(engine.whole_rows(pick_rows(part_TV, long_rows)))
        if not group.place.rank:
            found |= {verdict.sequence_id: verdict for verdict in verdicts_of(logits_TV, long)}
    return [found[task.sequence_id] for task in tasks if task.sequence_id in found]


def _chooses_on_device(group: RankGroup) -> bool:
    """Whether torch or our kernels choose tokens; else numpy does, with the bits of a CPU."""
    return group.queues


def _device_suffices(task: VerdictTask) -> bool:
    """Whether ranks can do a task on their devices, each with its part of the rows."""
    rule = rule_named(task.spec.rule)
    return rule.shares_noise or rule.others_as_one or not task.has_verdict


def _host_suffices(task: VerdictTask) -> bool:
    """The same, on CPUs."""
    return task.has_verdict and not (task.fed or task.wants_logprobs) and parts_suffice(task.spec)


def _verdicts_on_device(
    group: RankGroup, part_RV: Tensor, engine: Engine, tasks: Sequence[VerdictTask]
) -> dict[int, target_pb2.Verdict]:
    """Verdicts by sequence id, at rank 0, for tasks for which _device_suffices."""
    part = VocabularyPart(
        engine.token_ids_held,
        engine.info.vocab_size,
        group.place.rank,
        group.all_gather,
        group.share_out,
    )
    ends = ends_of(tasks)
    top_ids = None
    if any(task.fed for task in tasks):
        fed_rows = [
            row
            for task, end in zip(tasks, ends, strict=True)
            if task.fed
            for row in range(end - task.num_rows, end)
        ]
        top_ids = ids_of(best_in_parts(pick_rows(part_RV, fed_rows), NUM_TOP_IDS, part))
    judged = [(task, end) for task, end in zip(tasks, ends, strict=True) if task.has_verdict]
    choices = None
    if judged:
        rows = [
            row for task, end in judged for row in range(end - len(task.candidates.tree) - 1, end)
        ]
        choices = _choose_on_device(
            group, pick_rows(part_RV, rows), [task for task, _ in judged], part
        )
    is_first = not group.place.rank
    verdicts: dict[int, target_pb2.Verdict] = {}
    if is_first:
        if top_ids is not None:
            _add_top_tokens(tasks, to_host(group.settle(top_ids))[0])
        if choices is not None:
            verdicts = _judge([task for task, _ in judged], choices, part.vocab_size)
    if any(task.wants_logprobs for task in tasks):
        messages = {
            i: verdicts[task.sequence_id]
            for i, task in enumerate(tasks)
            if task.sequence_id in verdicts
        }
        wanted, places = wanted_logprobs(tasks, messages) if is_first else ([], [])
        partial = logprobs_in_parts(part_RV, wanted, sum(map(_most_logprobs, tasks)), part)
        group.settle(partial.numbers_WSN)
        if is_first:
            for place, one in zip(places, joined_logprobs(partial, wanted), strict=True):
                place.append(one)
    return verdicts


def _most_logprobs(task: VerdictTask) -> int:
    """The most log probabilities that a task may want, whatever its verdict."""
    wants_verdict = task.has_verdict and task.spec.logprobs is not None
    return len(task.logprobs_of) + wants_verdict * (1 + len(task.candidates.tree))


def _add_top_tokens(tasks: Sequence[VerdictTask], top_ids_FK: Tensor) -> None:
    """Put the top ids of all tokens fed, in order, into their tasks."""
    first = 0
    for task in tasks:
        if task.fed:
            task.top_tokens.extend(top_tokens(top_ids_FK[first:], task))
            first += task.num_rows


@dataclass(frozen=True, slots=True)
class _Chosen:
    """As Choices, on the host."""

    token_ids: list[int]
    largest: list[float]
    sums: Mapping[int, RowSums]
    faults: Mapping[int, Exception]


def _choose_on_device(
    group: RankGroup, part_RV: Tensor, tasks: Sequence[VerdictTask], part: VocabularyPart
) -> _Chosen:
    """What is chosen, or else needed, of each row of the tasks."""
    rows: list[Row] = []
    named: dict[int, NDArray[np.int64]] = {}
    for task in tasks:
        if not rule_named(task.spec.rule).shares_noise:
            of_node = named_tokens(
                task.spec.rule, task.candidates.tree, task.candidates.draft_probs
            )
            named |= {len(rows) + node: ids for node, ids in of_node.items()}
        rows += rows_of(task)
    choices = choose_in_parts(part_RV, rows, part, named)
    if group.place.rank:
        for error in choices.faults.values():
            _log.error("a row's structure was not followed, so it has no token", exc_info=error)
    group.settle(choices.token_ids_R)
    numbers = [numbers_WQM for _, numbers_WQM in choices.sums]
    token_ids, largest, *copies = to_host(choices.token_ids_R, choices.largest_R, *numbers)
    sums: dict[int, RowSums] = {}
    for (names, _), copied in zip(choices.sums, copies, strict=True):
        sums |= sums_of(names, copied)
    return _Chosen(token_ids.tolist(), largest.tolist(), sums, choices.faults)


def _verdicts_on_host(
    group: RankGroup, part_RV: Tensor, engine: Engine, tasks: Sequence[VerdictTask]
) -> dict[int, target_pb2.Verdict]:
    """Verdicts by sequence id, at rank 0, for tasks for which _host_suffices."""
    chosen, largest = _choose_on_host(group, part_RV, engine, tasks)
    if group.place.rank:
        return {}
    return _judge(tasks, _Chosen(chosen, largest, {}, {}), engine.info.vocab_size)


def _choose_on_host(
    group: RankGroup, part_RV: Tensor, engine: Engine, tasks: Sequence[VerdictTask]
) -> tuple[list[int], list[float]]:
    """The token and the largest logit of each row of tasks whose parts_suffice."""
    held = engine.token_ids_held
    part_RV = part_RV[:, : len(held)]
    largest, chosen = _exchange(group, *_likeliest(part_RV, held)).over_ranks()
    drawn: list[tuple[int, VerdictTask, int]] = []
    row = 0
    for task in tasks:
        if not task.spec.sampling.greedy:
            depths = _depths(task)
            drawn += [(row + node, task, len(task.prefix) + d) for node, d in enumerate(depths)]
        row += task.num_rows
    if drawn:
        rows_NV = part_RV.numpy()
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
    return chosen, largest


def _judge(
    tasks: Sequence[VerdictTask], chosen: _Chosen, vocab_size: int
) -> dict[int, target_pb2.Verdict]:
    """Verdicts by sequence id, from what is known of each row."""
    ends = list(accumulate(1 + len(task.candidates.tree) for task in tasks))
    parts = [
        (task, range(end - 1 - len(task.candidates.tree), end))
        for task, end in zip(tasks, ends, strict=True)
    ]

    def judge(some: Sequence[Part[range]]) -> list[Verdict]:
        return [_verdict_of(task, rows, chosen, vocab_size) for task, rows in some]

    judged = zip(tasks, judge_each(judge, parts), strict=True)
    return {task.sequence_id: message_of(verdict, task) for task, verdict in judged}


def _verdict_of(task: VerdictTask, rows: range, chosen: _Chosen, vocab_size: int) -> Verdict:
    """The verdict of a task from its rows. Raises the error of a row that has none."""
    for row in rows:
        if row in chosen.faults:
            raise chosen.faults[row]
    tree, spec = task.candidates.tree, task.spec
    span = slice(rows.start, rows.stop)
    tokens = ChosenTokens(chosen.token_ids[span], chosen.largest[span], [tree], vocab_size)
    if rule_named(spec.rule).shares_noise:
        return follow([tree], tokens.tokens_after)[0]

    def sums_at(node: int, accepted: Sequence[int]) -> RowSums:
        tokens.tokens_after([(0, accepted)])  # It raises if the row is not finite.
        return chosen.sums[rows.start + node]

    accepted, token_id = walk_sums(
        spec.rule, tree, spec, len(task.prefix), task.candidates.draft_probs, sums_at
    )
    if token_id is None:
        (token_id,) = tokens.tokens_after([(0, accepted)])
    return Verdict(len(accepted), token_id, accepted)


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
    all_N2R = group.all_gather(torch.stack([scores_R, ids_R]))
    return _Best(all_N2R[:, 0], all_N2R[:, 1].to(torch.int64))


def _depths(task: VerdictTask) -> list[int]:
    """The depth of the node before the candidates (0), and of each candidate."""
    depths = [0]
    for parent in task.candidates.tree.parents:
        depths.append(depths[parent] + 1)
    return depths
