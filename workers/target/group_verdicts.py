"""Computes the verdicts of a step in a tensor-parallel group, at rank 0.

Each rank has the logits of one part of the vocabulary. Where the parts suffice to choose a row's
token, ranks exchange a few bytes per row: on a GPU by verification/split_choice.py, on CPUs by
numpy, as without a group (verification/choice.py, parts_suffice). The logits of all other rows are
gathered at rank 0: those of rules that toss coins, of structures, of log probabilities and of top
ids. All ranks run the same collectives, since all have the same tasks. Only rank 0 returns
verdicts.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.sampling import SequenceSpec
from paceline.v1 import target_pb2
from workers.engine.engine import Engine
from workers.engine.parallel.group import RankGroup
from workers.target.faults import Part, judge_each
from workers.target.session import VerdictTask
from workers.target.verdicts import ChosenTokens, message_of, pick_rows, rows_of, verdicts_of
from workers.verification.choice import best_score, parts_suffice
from workers.verification.rule import rule_named
from workers.verification.split_choice import VocabularyPart, choose_in_parts
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
    row = 0
    for task in tasks:
        rows = range(row, row + task.num_rows)
        row = rows.stop
        suffices = _device_suffices if on_device else parts_suffice
        needs_whole_rows = task.fed or task.wants_logprobs or not suffices(task.spec)
        if task.has_verdict and not needs_whole_rows:
            short.append(task)
            short_rows += rows
        else:
            long.append(task)
            long_rows += rows
    found: dict[int, target_pb2.Verdict] = {}
    if short:
        choose = _choose_on_device if on_device else _choose_on_host
        chosen, largest = choose(group, pick_rows(part_TV, short_rows), engine, short)
        if not group.place.rank:
            found |= _judge(short, chosen, largest, engine.info.vocab_size)
    if long:
        logits_TV = group.settle(engine.whole_rows(pick_rows(part_TV, long_rows)))
        if not group.place.rank:
            found |= {verdict.sequence_id: verdict for verdict in verdicts_of(logits_TV, long)}
    return [found[task.sequence_id] for task in tasks if task.sequence_id in found]


def _chooses_on_device(group: RankGroup) -> bool:
    """Whether torch or our kernels choose tokens; else numpy does, with the bits of a CPU."""
    return group.queues


def _device_suffices(spec: SequenceSpec) -> bool:
    """Whether ranks can choose a row's token on their devices, each with its part of the row."""
    return rule_named(spec.rule).shares_noise and spec.structure is None


def _choose_on_device(
    group: RankGroup, part_RV: Tensor, engine: Engine, tasks: Sequence[VerdictTask]
) -> tuple[list[int], list[float]]:
    """The token and the largest logit of each row of the tasks."""
    part = VocabularyPart(
        engine.token_ids_held,
        engine.info.vocab_size,
        group.place.rank,
        group.gather_numbers,
        group.share_out,
    )
    rows = [row for task in tasks for row in rows_of(task)]
    token_ids_R, largest_R = choose_in_parts(part_RV, rows, part)
    group.settle(token_ids_R)
    token_ids, largest = to_host(token_ids_R, largest_R)
    return token_ids.tolist(), largest.tolist()


def _choose_on_host(
    group: RankGroup, part_RV: Tensor, engine: Engine, tasks: Sequence[VerdictTask]
) -> tuple[list[int], list[float]]:
    """As _choose_on_device, for tasks whose parts_suffice."""
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
    tasks: Sequence[VerdictTask], chosen: list[int], largest: list[float], vocab_size: int
) -> dict[int, target_pb2.Verdict]:
    """Verdicts by sequence id, from the token and the largest logit of each row."""
    ends = list(accumulate(task.num_rows for task in tasks))
    parts = [(task, slice(end - task.num_rows, end)) for task, end in zip(tasks, ends, strict=True)]

    def judge(some: Sequence[Part[slice]]) -> list[Verdict]:
        trees = [task.candidates.tree for task, _ in some]
        ids = [token_id for _, rows in some for token_id in chosen[rows]]
        logits = [logit for _, rows in some for logit in largest[rows]]
        return follow(trees, ChosenTokens(ids, logits, trees, vocab_size).tokens_after)

    judged = zip(tasks, judge_each(judge, parts), strict=True)
    return {task.sequence_id: message_of(verdict, task) for task, verdict in judged}


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
