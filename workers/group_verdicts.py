"""Verdicts of a tensor-parallel group, each rank with the logits of its part of the vocabulary.

Where the coupled rule alone decides (verification/vocabulary_parts.py), ranks tell each other their
best token of each row and its score, some bytes a row. Other rows' logits are gathered at rank 0.
All ranks do the same collectives, since all have the same tasks; rank 0 alone has verdicts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from paceline.v1 import target_pb2
from workers.device_verdicts import ChosenTokens
from workers.engine.tensor_parallel.group import Group
from workers.engine.tensor_parallel.ranked import RankedEngine
from workers.target_session import VerdictTask
from workers.verdicts import message_of, verdicts_of
from workers.verification.coupled import follow
from workers.verification.vocabulary_parts import best_score, parts_suffice


@dataclass(frozen=True, slots=True)
class _Best:
    """Each row's best tokens by rank: [degree, R] scores (float64) and ids."""

    scores: Tensor
    ids: Tensor

    def over_ranks(self) -> tuple[list[float], list[int]]:
        """Each row's best; of equal ones the lowest id, which lies with the lowest rank."""
        best = torch.from_numpy(self.scores.numpy().argmax(axis=0))[None]  # Stops at a NaN.
        return self.scores.gather(0, best)[0].tolist(), self.ids.gather(0, best)[0].tolist()


def group_verdicts(
    engine: RankedEngine, part_TV: Tensor, tasks: Sequence[VerdictTask]
) -> list[target_pb2.Verdict]:
    """What verdicts_of gives for the whole logits, at rank 0; an empty list at the others.

    `part_TV` is what Engine.step_part returned. Raises InternalError at rank 0 as verify does.
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
    """Verdicts by sequence; empty at ranks other than 0."""
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
            best_score(rows_NV[row], np.float32(largest[row]), held, task.spec, position)
            if held
            else (-np.inf, 0)
            for row, task, position in drawn
        ]
        scores = torch.tensor([score for score, _ in best], dtype=torch.float64)
        ids = torch.tensor([token_id for _, token_id in best], dtype=torch.float64)
        _, ids_drawn = _exchange(group, scores, ids).over_ranks()
        for (row, _, _), token_id in zip(drawn, ids_drawn, strict=True):
            chosen[row] = token_id
    if group.place.rank:
        return {}
    trees = [task.candidates.tree for task in tasks]
    tokens = ChosenTokens(chosen, largest, trees, engine.info.vocab_size)
    verdicts = {}
    for task, verdict in zip(tasks, follow(trees, tokens.tokens_after), strict=True):
        verdicts[task.sequence_id] = message_of(verdict, task)
    return verdicts


def _likeliest(part_RV: Tensor, held: range) -> tuple[Tensor, Tensor]:
    """The largest logit of each row's part, and its token id; -inf where the part is empty."""
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
    """Of the node before the candidates, and of each candidate."""
    depths = [0]
    for parent in task.candidates.tree.parents:
        depths.append(depths[parent] + 1)
    return depths


def _pick(part_TV: Tensor, rows: list[int]) -> Tensor:
    if rows == list(range(part_TV.shape[0])):
        return part_TV
    return part_TV[torch.tensor(rows, device=part_TV.device)]
