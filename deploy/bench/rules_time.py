"""Part (a) of `bench rules`: how long each rule takes to verify a window on this CPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from paceline.rules import Rule
from paceline.sampling import SamplingParams, SequenceSpec
from workers.verification.candidates import CandidateTree, merge_paths
from workers.verification.draft_probs import DraftProbs, SparseProbs
from workers.verification.draws import (
    cut_draft_probs,
    draw_chain_token,
    draw_independent,
    draw_without_replacement,
    top_children,
)
from workers.verification.rules import FACTS
from workers.verification.verify import Window, verify_batch

VOCAB_SIZES = (49_152, 131_072)
WINDOWS = (1, 8, 16, 64)
BATCHES = (1, 16)

_FALL = 2.0
"""Probabilities fall as rank^-2: the 64 likeliest tokens hold 99 %, and no token is out of reach
of the noise, so that all of it is computed."""


@dataclass(frozen=True, slots=True)
class RuleTime:
    """Milliseconds to verify the windows of a batch, noise included.

    `ms` is the median of the repeats, `best_ms` and `worst_ms` the shortest and the longest.
    `accepted` is the mean number of accepted candidates: the walk looks at one row more than that.
    """

    rule: str
    candidates: str
    vocab_size: int
    window: int
    batch: int
    ms: float
    best_ms: float
    worst_ms: float
    accepted: float


def time_rules(
    *,
    vocab_sizes: Sequence[int] = VOCAB_SIZES,
    windows: Sequence[int] = WINDOWS,
    batches: Sequence[int] = BATCHES,
    repeats: int = 5,
    temperature: float = 1.0,
    on_row: Callable[[RuleTime], None] = lambda row: None,
) -> list[RuleTime]:
    """Every rule on a chain of each window, and the rules for trees on one of the same size.

    The drafter's logits are the target's, so the rules with draft probabilities and the coupled
    one accept nearly all of a chain: the most rows are looked at, which is the dearest case (the
    one-hot rule accepts by the target's probability alone). The windows of a batch share logits,
    not seeds.
    """
    rows: list[RuleTime] = []
    for vocab_size in vocab_sizes:
        rng = np.random.default_rng(vocab_size)
        ranks_V = 1 + rng.permutation(vocab_size)
        logits_V = torch.from_numpy((-_FALL * np.log(ranks_V)).astype(np.float32))
        for window in windows:
            logits_RV = logits_V.repeat(window + 1, 1)
            for rule in Rule:
                for width in (1, 4):
                    if width > 1 and (window < width or FACTS[rule].chain_only):
                        continue
                    for batch in batches:
                        row = _time_rule(rule, logits_RV, width, batch, repeats, temperature)
                        rows.append(row)
                        on_row(row)
    return rows


def _time_rule(
    rule: Rule,
    logits_RV: torch.Tensor,
    width: int,
    batch: int,
    repeats: int,
    temperature: float,
) -> RuleTime:
    window = logits_RV.shape[0] - 1
    drafted = [_draft(rule, logits_RV, width, temperature, seed) for seed in range(batch)]
    seconds: list[float] = []
    accepted = 0
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        verdicts = verify_batch(drafted)
        seconds.append(time.perf_counter() - begin)
        accepted = sum(verdict.num_accepted for verdict in verdicts)
    counted = seconds[1:]  # the first warms caches up
    return RuleTime(
        rule=rule.value,
        candidates="chain" if width == 1 else f"{width} wide",
        vocab_size=logits_RV.shape[1],
        window=window,
        batch=batch,
        ms=statistics.median(counted) * 1e3,
        best_ms=min(counted) * 1e3,
        worst_ms=max(counted) * 1e3,
        accepted=accepted / batch,
    )


def _draft(
    rule: Rule, logits_RV: torch.Tensor, width: int, temperature: float, seed: int
) -> Window:
    """Candidates as the rule wants them: `width` branches at the root, chains below them."""
    logits_V, window = logits_RV[0], logits_RV.shape[0] - 1
    spec = SequenceSpec(SamplingParams(temperature=temperature), seed=seed, prompt_length=1)
    prefix = (1, 2, 3)
    cut = cut_draft_probs(logits_V, spec, prefix)
    depth = window // width
    positions = range(len(prefix) + 1, len(prefix) + depth)
    if rule is Rule.KSEQ:
        tree = merge_paths(
            [
                [draw_independent(cut, spec, at, (n,))[0] for at in (len(prefix), *positions)]
                for n in range(width)
            ]
        )
    else:
        first = _first_tokens(rule, logits_V, cut, spec, prefix, width)
        below = [
            top_children(logits_V, spec, (0,) * at, 1)[0]
            if rule is Rule.COUPLED
            else draw_chain_token(cut, spec, at)
            for at in positions
        ]
        tree = _branches(first, below)
    probs = None
    if FACTS[rule].needs_draft_probs:
        probs = DraftProbs({n: cut for n in range(len(tree) + 1) if tree.children(n)})
    return Window(rule, logits_RV[: len(tree) + 1], tree, spec, prefix, probs)


def _first_tokens(
    rule: Rule,
    logits_V: torch.Tensor,
    cut: SparseProbs,
    spec: SequenceSpec,
    prefix: tuple[int, ...],
    width: int,
) -> tuple[int, ...]:
    if rule is Rule.COUPLED:
        return top_children(logits_V, spec, prefix, width)
    if rule is Rule.MCSD:
        return draw_independent(cut, spec, len(prefix), range(width))
    return draw_without_replacement(cut, spec, len(prefix), width)


def _branches(first: Sequence[int], below: Sequence[int]) -> CandidateTree:
    """Every first token, each with the same chain below it."""
    token_ids, parents = list(first), [0] * len(first)
    for number in range(len(first)):
        parent = number + 1
        for token_id in below:
            token_ids.append(token_id)
            parents.append(parent)
            parent = len(token_ids)
    return CandidateTree(tuple(token_ids), tuple(parents))
