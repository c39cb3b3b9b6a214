"""The target's own token at a position: argmax(log probabilities + Gumbel noise).

Plain decoding and the coupled rule choose this token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.sampling import SequenceSpec
from workers.verification.candidates import CandidateTree, end_of
from workers.verification.distribution import (
    Distribution,
    WindowRows,
    distribution_of,
    likeliest_token,
)
from workers.verification.noise import (
    GUMBEL_SPAN,
    LANES,
    Purpose,
    Stream,
    best_scores,
    gumbel,
    words_of,
    words_of_all,
)

_LOGITS_AT_ONCE = 100_000
"""Maximum number of logits in one call. With more, intermediate results do not fit the caches."""


def choose_token(logits_V: torch.Tensor, spec: SequenceSpec, prefix: Sequence[int]) -> int:
    """The token after `prefix`, which is all token ids before it, prompt included.

    `logits_V` is a float32 CPU tensor [V], the target's or a drafter's own; it is not changed.
    Raises InternalError if a logit is NaN or +inf, or if every token is masked.
    """
    no_candidates = CandidateTree((), ())
    return choose_tokens([(WindowRows(logits_V[None], no_candidates, spec, prefix), ())])[0]


def choose_tokens(places: Sequence[tuple[WindowRows, Sequence[int]]]) -> list[int]:
    """The target's own token after each path of accepted candidates."""
    tokens: list[int] = []
    begin = 0
    while begin < len(places):
        end = begin + max(_LOGITS_AT_ONCE // places[begin][0].vocab_size, 1)
        tokens += _choose_together(places[begin:end])
        begin = end
    return tokens


def _choose_together(places: Sequence[tuple[WindowRows, Sequence[int]]]) -> list[int]:
    tokens: dict[int, int] = {}
    draws: dict[int, Draw] = {}
    for index, (window, path) in enumerate(places):
        adjusted_V = window.adjusted_V(end_of(path), path)
        if window.spec.sampling.greedy:
            tokens[index] = likeliest_token(adjusted_V)
        else:
            kept = distribution_of(adjusted_V, window.spec.sampling)
            stream = Stream(window.spec.seed, window.position(path), window.spec.sample_index)
            draws[index] = Draw(kept, adjusted_V.size, stream)
    tokens.update(zip(draws, choose_all(list(draws.values())), strict=True))
    return [tokens[index] for index in range(len(places))]


_FEW = 4096
"""Up to this number of tokens all scores are computed; above it, a cheap bound selects some."""


@dataclass(frozen=True, slots=True)
class Draw:
    """One token to draw: `kept`, the tokens that can be chosen, and `stream`, its noise."""

    kept: Distribution
    vocab_size: int
    stream: Stream


def choose_all(draws: Sequence[Draw]) -> list[int]:
    """A token for each draw: an exact sample, and a pure function of that draw alone.

    Draws that need noise for a large part of their vocabulary share one computation of it per
    vocabulary size.
    """
    draws = [replace(one, kept=_that_can_win(one.kept)) for one in draws]
    together: dict[int, list[int]] = {}
    for index, one in enumerate(draws):
        if not _takes_few(one.kept, one.vocab_size):
            together.setdefault(one.vocab_size, []).append(index)
    words: dict[int, NDArray[np.uint32]] = {}
    for vocab_size, indices in together.items():
        words_AV = words_of_all([draws[index].stream for index in indices], vocab_size)
        words.update(zip(indices, words_AV, strict=True))
    return [_winner(one.kept, _words(one, words.get(i))) for i, one in enumerate(draws)]


def choose_from(
    kept: Distribution,
    vocab_size: int,
    spec: SequenceSpec,
    position: int,
    *,
    purpose: Purpose = Purpose.COUPLED,
    candidate: int = 0,
) -> int:
    """A token of one distribution: `choose_all` with a single draw."""
    stream = Stream(spec.seed, position, spec.sample_index, purpose, candidate)
    return choose_all([Draw(kept, vocab_size, stream)])[0]


def _winner(kept: Distribution, words_N: NDArray[np.uint32]) -> int:
    if words_N.size > _FEW:
        best = best_scores(kept.log_weights, words_N)
        kept, words_N = kept.at(best), words_N[best]
    scores_N = kept.log_weights + gumbel(words_N)
    winner = int(scores_N.argmax())  # ids ascend, so the lowest id wins a tie
    return winner if kept.token_ids is None else int(kept.token_ids[winner])


def draw(
    probs_V: NDArray[np.float64],
    spec: SequenceSpec,
    position: int,
    *,
    purpose: Purpose,
) -> int:
    """A token drawn from float64 probabilities [V], which need not be normalized."""
    token_ids = np.flatnonzero(probs_V > 0)
    weights_N = probs_V[token_ids]
    log_weights_N = np.log(weights_N / weights_N.max()).astype(np.float32)
    return choose_from(
        Distribution(token_ids, log_weights_N),
        probs_V.size,
        spec,
        position,
        purpose=purpose,
    )


def noise_of(
    kept: Distribution,
    vocab_size: int,
    spec: SequenceSpec,
    position: int,
    *,
    purpose: Purpose = Purpose.COUPLED,
) -> NDArray[np.float32]:
    stream = Stream(spec.seed, position, spec.sample_index, purpose)
    return gumbel(_words(Draw(kept, vocab_size, stream)))


def _words(one: Draw, words_V: NDArray[np.uint32] | None = None) -> NDArray[np.uint32]:
    """The random words of the kept tokens. `words_V`: those of the vocabulary, if computed."""
    ids_N = one.kept.token_ids
    if ids_N is not None and _takes_few(one.kept, one.vocab_size):
        return words_of(one.stream, ids_N)
    if words_V is None:
        (words_V,) = words_of_all([one.stream], one.vocab_size)
    return words_V if ids_N is None else words_V[ids_N]


def _takes_few(kept: Distribution, vocab_size: int) -> bool:
    """Whether the words of the kept tokens cost less than those of the whole vocabulary."""
    return kept.token_ids is not None and LANES * kept.token_ids.size < vocab_size


def _that_can_win(kept: Distribution) -> Distribution:
    """Drop the tokens that no noise can lift above the likeliest, if that saves noise."""
    reachable_N = kept.log_weights >= -GUMBEL_SPAN
    if LANES * int(np.count_nonzero(reachable_N)) < kept.log_weights.size:
        return kept.where(reachable_N)
    return kept
