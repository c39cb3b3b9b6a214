"""Ranks that each have a part of the vocabulary choose the tokens of whole rows, bit for bit."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from torch import Tensor

from paceline.sampling import SamplingParams, SequenceSpec
from workers.engine.parallel.cuts import vocabulary_part, vocabulary_width
from workers.verification import choice_kernels
from workers.verification.candidates import CandidateTree
from workers.verification.choice import choose_token, draw
from workers.verification.device_choice import Row, choose_tokens
from workers.verification.distribution import WindowRows, probabilities_of
from workers.verification.noise import Purpose
from workers.verification.row_sums import RowSums
from workers.verification.split_choice import (
    VocabularyPart,
    best_in_parts,
    choose_in_parts,
    ids_of,
    keys_of,
    make_ready,
    sums_of,
    values_of,
)

Result = TypeVar("Result")

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
END_IDS = (3, 20)
GREEDY = SamplingParams(temperature=0.0)
TEMPERATURES = (0.0, 0.7, 1e-40)
CUTS: list[dict[str, Any]] = [
    {},
    {"top_k": 3},
    {"top_p": 0.6},
    {"min_p": 0.2},
    {"top_k": 9, "top_p": 0.8, "min_p": 0.05},
]
CHANGES: list[dict[str, Any]] = [
    {},
    {"logit_bias": {0: 4.0, 9: -3.0, 20: 2.5}},
    {"repetition_penalty": 1.5, "presence_penalty": 0.4, "frequency_penalty": -0.3},
    {"min_tokens": 12, "logit_bias": {20: 50.0, 2: 3.0}},
]
SAMPLINGS = [
    SamplingParams(temperature=temperature, **cuts, **changes)
    for temperature, cuts, changes in itertools.product(TEMPERATURES, CUTS, CHANGES)
]


class Exchanges:
    """The exchanges of ranks that are threads of this process."""

    def __init__(self, degree: int) -> None:
        self._degree = degree
        self._barrier = threading.Barrier(degree, timeout=60)
        self._given: list[Tensor] = [torch.empty(0)] * degree
        self.num_gathered = 0

    def gather(self, rank: int, mine: Tensor) -> Tensor:
        self.num_gathered += rank == 0
        return torch.stack(self._all(rank, mine))

    def share_out(self, rank: int, rows_RN: Tensor) -> Tensor:
        parts = self._all(rank, rows_RN)
        share = -(-rows_RN.shape[0] // self._degree)
        whole = torch.nn.functional.pad(torch.cat(parts, dim=1), (0, 0, 0, share * self._degree))
        return whole[rank * share : (rank + 1) * share]

    def _all(self, rank: int, mine: Tensor) -> list[Tensor]:
        self._given[rank] = mine
        self._barrier.wait()
        given = list(self._given)
        self._barrier.wait()
        return given


def choose_split(
    logits_RV: Tensor, rows: list[Row], degree: int, exchanges: Exchanges | None = None
) -> list[tuple[list[int], list[float]]]:
    """The ids and largest logits that each rank finds."""

    def choose(part: VocabularyPart, logits_RN: Tensor) -> tuple[list[int], list[float]]:
        found = choose_in_parts(logits_RN, rows, part)
        assert (found.token_ids_R.dtype, found.largest_R.dtype) == (torch.int32, torch.float32)
        return found.token_ids_R.tolist(), found.largest_R.tolist()

    return on_ranks(choose, logits_RV, degree, exchanges)


def on_ranks(
    do: Callable[[VocabularyPart, Tensor], Result],
    logits_RV: Tensor,
    degree: int,
    exchanges: Exchanges | None = None,
) -> list[Result]:
    """What each rank finds with its columns."""
    vocab_size = logits_RV.shape[1]
    exchanges = exchanges or Exchanges(degree)
    width = vocabulary_width(vocab_size, degree=degree)
    # A rank's columns after its last token id are padding, which no rank may choose.
    padded_RV = torch.nn.functional.pad(
        logits_RV, (0, degree * width - vocab_size), value=1e30 if degree > 1 else 0.0
    )

    def work(rank: int) -> Result:
        def bound(exchange: Callable[[int, Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
            return lambda mine: exchange(rank, mine)

        part = VocabularyPart(
            vocabulary_part(vocab_size, degree=degree, rank=rank),
            vocab_size,
            rank,
            bound(exchanges.gather),
            bound(exchanges.share_out),
        )
        return do(part, padded_RV[:, rank * width : (rank + 1) * width])

    with ThreadPoolExecutor(degree) as threads:
        return list(threads.map(work, range(degree)))


def rows_of_all_samplings(vocab_size: int) -> tuple[Tensor, list[Row]]:
    """A few rows of each sampling: some on a path, with ties, and with tokens ruled out."""
    generator = torch.Generator().manual_seed(vocab_size)
    chance = random.Random(vocab_size)
    rows = []
    for index, sampling in enumerate(SAMPLINGS):
        seed = chance.randrange(2**64)
        prefix = [chance.randrange(vocab_size) for _ in range(5 + index % 4)]
        words: list[tuple[int, ...]] = [
            (one,) for one in chance.sample(range(vocab_size), index % 4)
        ]
        words += [(prefix[-1], one) for one in chance.sample(range(vocab_size), index % 3)]
        spec = SequenceSpec(
            sampling, seed, 3, index % 2, end_token_ids=END_IDS, bad_words=tuple(words)
        )
        for depth in range(3):
            rows.append(Row(spec, prefix, tuple(chance.choices(range(vocab_size), k=depth))))
    logits_RV = torch.randn(len(rows), vocab_size, generator=generator) * 2
    logits_RV[::2] = logits_RV[::2].round()  # ties
    logits_RV[1::5, : vocab_size // 2] = -torch.inf
    logits_RV[3::5, vocab_size // 2 :] = -torch.inf
    return logits_RV, rows


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("degree", [1, 2, 3, 8])
@pytest.mark.parametrize("vocab_size", [21, 64])
def test_tokens_are_those_of_the_numpy_rule(vocab_size: int, degree: int, device: str) -> None:
    """For each combination of parameters; with 21 ids, some of 8 ranks have none."""
    logits_RV, rows = rows_of_all_samplings(vocab_size)
    expected = [
        choose_token(logits_V, row.spec, [*row.prefix, *row.path])
        for logits_V, row in zip(logits_RV, rows, strict=True)
    ]
    whole_ids, whole_largest = choose_tokens(logits_RV.to(device), rows)
    assert whole_ids.tolist() == expected
    for token_ids, largest in choose_split(logits_RV.to(device), rows, degree):
        assert token_ids == expected
        assert largest == whole_largest.tolist()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("degree", [1, 2, 8])
@pytest.mark.parametrize("vocab_size", [21, 64])
def test_sums_are_those_of_whole_rows(vocab_size: int, degree: int, device: str) -> None:
    """For some named tokens of each row: their probabilities, and the best of all others."""
    logits_RV, rows = rows_of_all_samplings(vocab_size)
    named = {i: np.arange(i % 3, vocab_size, 2 + i % 5) for i in range(len(rows)) if i % 7}

    def choose(part: VocabularyPart, logits_RN: Tensor) -> dict[int, RowSums]:
        sums: dict[int, RowSums] = {}
        for names, numbers in choose_in_parts(logits_RN, rows, part, named).sums:
            sums |= sums_of(names, numbers.cpu())
        return sums

    found, *others = on_ranks(choose, logits_RV.to(device), degree)
    assert found.keys() == named.keys()
    for i, ids in named.items():
        row, sums = rows[i], found[i]
        window = WindowRows(logits_RV[i : i + 1], CandidateTree((), ()), row.spec, row.whole_prefix)
        probs_V = probabilities_of(window.adjusted_V(0, ()), row.spec.sampling)
        rest = np.setdiff1d(np.arange(vocab_size), ids)
        np.testing.assert_allclose(sums.probs()[:-1], probs_V[ids], rtol=1e-5, atol=1e-12)
        np.testing.assert_allclose(sums.probs()[-1], probs_V[rest].sum(), rtol=1e-5, atol=1e-12)
        if probs_V[rest].any():
            without_V = probs_V.copy()
            without_V[ids] = 0
            best = draw(without_V, row.spec, row.position, purpose=Purpose.RESIDUAL)
            assert sums.best_id == best
        for other in others:
            assert other[i].probs().tolist() == sums.probs().tolist()
            assert (other[i].best, other[i].best_id) == (sums.best, sums.best_id)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("degree", [1, 2, 8])
@pytest.mark.parametrize("count", [3, 30])
def test_the_best_of_all_parts_are_those_of_a_row(count: int, degree: int, device: str) -> None:
    """The lowest of equal ones first; all 21 of them if more are asked for."""
    logits_RV = torch.randn(70, 21, generator=torch.Generator().manual_seed(2)).round().to(device)
    expected = logits_RV.cpu().sort(dim=1, descending=True, stable=True)
    for keys_RK in on_ranks(
        lambda part, logits_RN: best_in_parts(logits_RN, count, part).cpu(), logits_RV, degree
    ):
        assert ids_of(keys_RK).tolist() == expected.indices[:, :count].tolist()
        assert torch.equal(values_of(keys_RK), expected.values[:, :count])


@pytest.mark.parametrize("degree", [2, 3])
def test_of_equal_scores_the_lowest_id_wins(degree: int) -> None:
    logits_RV = torch.full((3, 40), -1.0)
    logits_RV[1, [13, 14, 39]] = 2.0
    logits_RV[2, [30, 31]] = torch.tensor([-0.0, 0.0])
    rows = [Row(SequenceSpec(GREEDY, 1, 1), [1])] * 3
    assert [ids for ids, _ in choose_split(logits_RV, rows, degree)] == [[0, 13, 30]] * degree


@pytest.mark.parametrize("degree", [2, 3])
@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(), SamplingParams(top_k=4)])
def test_what_is_not_finite_is_told_with_its_token(sampling: SamplingParams, degree: int) -> None:
    logits_RV = torch.randn(5, 40, generator=torch.Generator().manual_seed(1))
    rows = [Row(SequenceSpec(sampling, 9, 1), [1, index]) for index in range(5)]
    expected = choose_split(logits_RV, rows, degree)[0]
    logits_RV[0, [17, 35]] = torch.nan
    logits_RV[1, 30] = torch.inf
    logits_RV[2] = -torch.inf
    for token_ids, largest in choose_split(logits_RV, rows, degree):
        assert token_ids == [17, 30, 0, *expected[0][3:]]
        assert np.isnan(largest[0])
        assert largest[1:] == [torch.inf, -torch.inf, *expected[1][3:]]


@pytest.mark.parametrize(("sampling", "exchanges"), [(GREEDY, 1), (SamplingParams(), 2)])
def test_two_small_exchanges_suffice(sampling: SamplingParams, exchanges: int) -> None:
    counted = Exchanges(2)
    rows = [Row(SequenceSpec(sampling, 9, 1), [1, index]) for index in range(5)]
    choose_split(torch.randn(5, 40), rows, 2, counted)
    assert counted.num_gathered == exchanges


def test_a_rank_is_made_ready_without_the_others() -> None:
    for rank in range(3):
        held = vocabulary_part(17, degree=3, rank=rank)
        make_ready(held, 17, torch.device("cpu"))


def test_keys_order_by_value_and_then_by_the_lowest_id() -> None:
    ordered = [-torch.inf, -3e38, -1.5, -1e-45, 0.0, 1e-45, 2.0, 3e38, torch.inf, torch.nan]
    values = torch.tensor(ordered)
    keys = keys_of(values.repeat_interleave(2), torch.tensor([2**31 - 1, 7] * len(ordered)))
    assert torch.equal(keys, keys.sort().values)
    assert len(set(keys.tolist())) == len(keys)
    assert torch.equal(values_of(keys)[::2].nan_to_num(5.0), values.nan_to_num(5.0))
    assert ids_of(keys).tolist() == [2**31 - 1, 7] * len(ordered)
    zeros = keys_of(torch.tensor([0.0, -0.0]), torch.tensor([5, 5]))
    assert zeros[0] == zeros[1]


@pytest.mark.skipif(not choice_kernels.INTERPRETED, reason="kernels are compiled")
def test_kernels_choose_the_same_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the interpreter, one rank after the other: it runs one kernel at a time."""
    from workers.verification import device_choice, split_choice

    lock = threading.Lock()

    def alone(work: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def locked(*args: Tensor) -> Tensor:
            with lock, np.errstate(over="ignore", invalid="ignore"):
                return work(*args)

        return locked

    logits_RV, rows = rows_of_all_samplings(21)
    logits_RV, rows = logits_RV[::5], rows[::5]
    expected = choose_tokens(logits_RV, rows)[0].tolist()
    for module in (device_choice, split_choice):
        monkeypatch.setattr(module, "can_run_kernels", lambda device: True)
    for name in ("likeliest_keys", "draw_keys", "choose_by_kernels"):
        monkeypatch.setattr(choice_kernels, name, alone(getattr(choice_kernels, name)))
    for token_ids, _ in choose_split(logits_RV, rows, 3):
        assert token_ids == expected
