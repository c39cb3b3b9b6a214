"""Verdicts of logits that are on a GPU: the coupled rule there, with one small copy to the host.

What comes back is a token id for each row (and top ids where they are asked for); the host follows
the candidates by comparing ids. Rules that toss coins get their rows copied to the host whole: they
are offered for comparison, and their arithmetic stays in one place (verification/verify.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from paceline.rules import Rule
from workers.engine.cuda.staging import to_device, to_host
from workers.row_params import Row, pack_rows
from workers.target_session import VerdictTask
from workers.verification.candidates import CandidateTree
from workers.verification.coupled import follow
from workers.verification.device_choice import choose_rows
from workers.verification.distribution import check_likeliest
from workers.verification.verdict import Verdict
from workers.verification.verify import verify


def device_verdicts(
    logits_TV: Tensor,
    tasks: Sequence[VerdictTask],
    spans: Sequence[tuple[int, int]],
    also: Tensor | None = None,
) -> tuple[list[Verdict], Tensor | None]:
    """A verdict for each task, from the rows of `logits_TV` from its span's first to its end.

    Waits for the device. `also`, if given, is copied to the host at the same time. Raises
    InternalError as verify does.
    """
    coupled = [i for i, task in enumerate(tasks) if task.spec.rule is Rule.COUPLED]
    tossing = [i for i, task in enumerate(tasks) if task.spec.rule is not Rule.COUPLED]
    wanted = [logits_TV[slice(*spans[i])] for i in tossing]
    wanted += [] if also is None else [also]
    rows = [row for i in coupled for row in _rows(tasks[i])]
    if rows:
        chosen_TV = _pick(logits_TV, [row for i in coupled for row in range(*spans[i])])
        wanted += choose_tokens(chosen_TV, rows)
    copies = to_host(*wanted) if wanted else []
    verdicts = {
        i: verify_on_host(copy, tasks[i])
        for i, copy in zip(tossing, copies[: len(tossing)], strict=True)
    }
    if rows:
        chosen = _Chosen(copies[-2].tolist(), copies[-1].tolist(), logits_TV.shape[1])
        first_row = 0
        for i in coupled:
            tree = tasks[i].candidates.tree
            verdicts[i] = chosen.verdict(tree, first_row)
            first_row += 1 + len(tree)
    ordered = [verdicts[i] for i in range(len(tasks))]
    return ordered, None if also is None else copies[len(tossing)]


def _pick(logits_TV: Tensor, rows: list[int]) -> Tensor:
    if rows == list(range(logits_TV.shape[0])):
        return logits_TV
    return logits_TV.index_select(0, to_device(np.array(rows), logits_TV.device))


def choose_tokens(logits_RV: Tensor, rows: Sequence[Row]) -> tuple[Tensor, Tensor]:
    """The coupled rule's token of each row, and the row's largest logit, still on the device."""
    params = pack_rows(rows, vocab_size=logits_RV.shape[1], device=logits_RV.device)
    token_ids_R, largest_R = choose_rows(logits_RV, params)
    return token_ids_R.to(torch.int32), largest_R


class _Chosen:
    """The tokens of a step's rows, on the host."""

    def __init__(self, token_ids: list[int], largest: list[float], vocab_size: int) -> None:
        self._token_ids = token_ids
        self._largest = largest
        self._vocab_size = vocab_size

    def verdict(self, tree: CandidateTree, first_row: int) -> Verdict:
        """Rows off the accepted path are not looked at, as on the host."""

        def token_of(node: int, _accepted: Sequence[int]) -> int:
            token_id = self._token_ids[first_row + node]
            check_likeliest(token_id, self._largest[first_row + node], self._vocab_size)
            return token_id

        return follow(tree, token_of)


def _rows(task: VerdictTask) -> list[Row]:
    """The row after the prefix, then those after each candidate with its ancestors."""
    tree = task.candidates.tree
    paths: list[tuple[int, ...]] = [()]
    for token_id, parent in zip(tree.token_ids, tree.parents, strict=True):
        paths.append((*paths[parent], token_id))
    return [Row(task.spec, task.prefix, path) for path in paths]


def verify_on_host(logits_RV: Tensor, task: VerdictTask) -> Verdict:
    """The verdict of a task from a float32 CPU tensor, by whatever rule."""
    candidates = task.candidates
    return verify(
        task.spec.rule, logits_RV, candidates.tree, task.spec, task.prefix, candidates.draft_probs
    )
