"""Verdicts from logits on a GPU: the coupled rule runs there, with one small copy to the host.

The GPU returns one token id per row (and top ids where they are requested). The host follows the
candidates by comparing ids. For rules that toss coins, whole rows are copied to the host: these
rules are offered for comparison, and their arithmetic stays in one place (verification/verify.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
from torch import Tensor

from workers.target.session import VerdictTask
from workers.verification.candidates import CandidateTree
from workers.verification.coupled import Place, end_of, follow
from workers.verification.distribution import check_likeliest
from workers.verification.row_params import Row, choose_tokens
from workers.verification.rule import rule_named
from workers.verification.staging import to_device, to_host
from workers.verification.verdict import Verdict
from workers.verification.verify import Window, verify_batch


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


def _pick(logits_TV: Tensor, rows: list[int]) -> Tensor:
    if rows == list(range(logits_TV.shape[0])):
        return logits_TV
    return logits_TV.index_select(0, to_device(np.array(rows), logits_TV.device))


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

    def tokens_after(self, places: Sequence[Place]) -> list[int]:
        """The token chosen at each place. Raises InternalError if the row of a place has no valid
        one.

        Rows off the accepted paths are not checked, as on the host.
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
