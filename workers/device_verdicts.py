"""Verdicts from logits on a GPU: the coupled rule runs there, with one small copy to the host.

The GPU returns one token id per row (and top ids where they are requested). The host follows the
candidates by comparing ids. For rules that toss coins, whole rows are copied to the host: these
rules are offered for comparison, and their arithmetic stays in one place (verification/verify.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from paceline.rules import Rule
from paceline.sampling import SamplingParams, SequenceSpec
from workers.engine.cuda.staging import to_device, to_host
from workers.kernels import can_run_kernels
from workers.row_params import Row, needs_room, pack_rows
from workers.target_session import VerdictTask
from workers.verification.candidates import CandidateTree
from workers.verification.coupled import Place, end_of, follow
from workers.verification.device_choice import choose_rows
from workers.verification.distribution import check_likeliest
from workers.verification.verdict import Verdict
from workers.verification.verify import Window, verify_batch

ROWS_AT_ONCE = 64
"""Rows for which tokens are chosen at once where choosing needs extra memory. Filters, adjusted
logits and noise in torch take up to some hundred bytes per row and vocabulary entry, which the
profile run does not account for.
"""


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
    coupled = [i for i, task in enumerate(tasks) if task.spec.rule is Rule.COUPLED]
    tossing = [i for i, task in enumerate(tasks) if task.spec.rule is not Rule.COUPLED]
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


def choose_tokens(logits_RV: Tensor, rows: Sequence[Row]) -> tuple[Tensor, Tensor]:
    """The coupled rule's token and the largest logit of each row, both still on the device."""
    spares = can_run_kernels(logits_RV.device) and not needs_room(rows, logits_RV.shape[1])
    size = len(rows) if spares else ROWS_AT_ONCE
    parts = [
        _choose(logits_RV[first : first + size], rows[first : first + size])
        for first in range(0, len(rows), size)
    ]
    if len(parts) == 1:
        return parts[0]
    token_ids, largest = zip(*parts, strict=True)
    return torch.cat(token_ids), torch.cat(largest)


def _choose(logits_RV: Tensor, rows: Sequence[Row]) -> tuple[Tensor, Tensor]:
    params = pack_rows(rows, vocab_size=logits_RV.shape[1], device=logits_RV.device)
    return choose_rows(logits_RV, params)


def make_ready(vocab_size: int, device: torch.device) -> None:
    """Choose a token in each way, so that kernels are compiled before the first request."""
    logits_1V = torch.zeros(1, vocab_size, device=device)
    for sampling in (SamplingParams(temperature=0.0), SamplingParams(), SamplingParams(top_p=0.5)):
        row = Row(SequenceSpec(sampling, seed=0, prompt_length=1), [0])
        to_host(*choose_tokens(logits_1V, [row]))


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
