"""Verdicts of a tensor-parallel group, in which each rank has its part of the vocabulary's logits.

Where the coupled rule decides and the parts suffice (verification/vocabulary_parts.py), ranks
exchange their best token of each row and its score, a few bytes per row. The logits of other rows
are gathered at rank 0. All ranks run the same collectives, since all have the same tasks. Only rank
0 returns verdicts.
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

from paceline.v1 import target_pb2
from workers.engine.engine import RankedEngine
from workers.engine.parallel.group import Group
from workers.target.device_verdicts import ChosenTokens
from workers.target.faults import Part, judge_each
from workers.target.session import VerdictTask
from workers.target.verdicts import message_of, verdicts_of
from workers.verification.coupled import follow
from workers.verification.verdict import Verdict
from workers.verification.vocabulary_parts import best_score, parts_suffice

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Best:
    """Each row's best tokens by rank: [degree, R] scores (float64) and ids."""

    scores: Tensor
    ids: Tensor

    def over_ranks(self) -> tuple[list[float], list[int]]:
        """Each row's best score and id. The lowest id wins a tie; it is at the lowest rank."""
        best = torch.from_numpy(self.scores.numpy().argmax(axis=0))[None]  # argmax stops at a NaN
        return self.scores.gather(0, best)[0].tolist(), self.ids.gather(0, best)[0].tolist()


def group_verdicts(
    engine: RankedEngine, part_TV: Tensor, tasks: Sequence[VerdictTask]
) -> list[target_pb2.Verdict]:
    """At rank 0, what verdicts_of gives for the whole logits; an empty list at the others.

    `part_TV` is what step_part returned. If anything is wrong with one task, rank 0 says so in its
    verdict: no rank may skip a collective in which others wait.
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
        if task.has_verdict and not task.fed and parts_suffice(task.spec):
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
    group: Group, part_RV: Tensor, engine: RankedEngine, tasks: Sequence[VerdictTask]
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
    except Exception:  # the other ranks are about to exchange scores, so this one must, too
        _log.exception("a defect left a row of sequence %d without a token", task.sequence_id)
        return np.nan, held.start


def _likeliest(part_RV: Tensor, held: range) -> tuple[Tensor, Tensor]:
    """The largest logit of each row's part, and its token id; -inf if the part is empty."""
    if not held:
        empty = torch.full((part_RV.shape[0],), -torch.inf, dtype=torch.float64)
        return empty, torch.zeros_like(empty)
    values_R, columns_R = part_RV.max(dim=1)
    return values_R.to(torch.float64), columns_R.to(torch.float64) + held.start


def _exchange(group: Group, scores_R: Tensor, ids_R: Tensor) -> _Best:
    mine_2R = torch.stack([scores_R, ids_R]).to(group.device)
    all_N2R = group.settle(torch.stack(group.all_gather(mine_2R))).cpu()
    return _Best(all_N2R[:, 0], all_N2R[:, 1].to(torch.int64))


def _depths(task: VerdictTask) -> list[int]:
    """The depth of the node before the candidates (0), and of each candidate."""
    depths = [0]
    for parent in task.candidates.tree.parents:
        depths.append(depths[parent] + 1)
    return depths


def _pick(part_TV: Tensor, rows: list[int]) -> Tensor:
    if rows == list(range(part_TV.shape[0])):
        return part_TV
    return part_TV[torch.tensor(rows, device=part_TV.device)]
