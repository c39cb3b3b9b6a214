"""Our kernels choose the ids of the numpy rule for any vocabulary and any rows beside."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from paceline.sampling import SamplingParams, SequenceSpec
from tests.release import at_release
from tests.workers.compiling import compile_launches
from tests.workers.verification.launches import launch_choices
from workers.verification import choice_kernels
from workers.verification.choice import choose_token
from workers.verification.choice_kernels import BLOCK, INTERPRETED, choose_by_kernels
from workers.verification.device_choice import Row, choose_by_torch, pack_rows
from workers.verification.noise import Stream, gumbel, key_of_seed, words_of_all

DEVICES = [
    pytest.param("cpu", marks=pytest.mark.skipif(not INTERPRETED, reason="kernels are compiled")),
    pytest.param("cuda", marks=pytest.mark.gpu),
]
# One block that is not full, with a part of a counter; one that is; several, the last with one id.
VOCABS = [509, BLOCK, 2 * BLOCK + 1]

GREEDY = SamplingParams(temperature=0.0)
SAMPLINGS = {
    "greedy": [GREEDY],
    "plain": [SamplingParams()],
    "temperatures": [SamplingParams(temperature=heat) for heat in (0.3, 1.7, 1e-40, 1e38)],
    "some greedy": [GREEDY, SamplingParams()],
    "top-k": [SamplingParams(top_k=5), SamplingParams(top_k=1), SamplingParams(top_k=400)],
    "top-p": [SamplingParams(top_p=0.6, temperature=1.5), SamplingParams(top_p=0.999)],
    "min-p": [SamplingParams(min_p=0.05), SamplingParams(min_p=1.0)],
    "all cuts": [
        SamplingParams(temperature=1.7, top_k=40, top_p=0.8, min_p=0.01),
        GREEDY,
        SamplingParams(top_k=10**6),
    ],
}


def random_rows(
    samplings: list[SamplingParams], count: int, vocab_size: int
) -> tuple[torch.Tensor, list[Row]]:
    """Rows of different seeds, positions and samples; logits [R, V], some coarse, some -inf."""
    generator = torch.Generator().manual_seed(vocab_size)
    logits_RV = torch.randn(count, vocab_size, generator=generator) * 3
    logits_RV[::2] = (logits_RV[::2] * 4).round() / 4
    logits_RV[1::3, 5:] = -torch.inf
    logits_RV[2::3, : vocab_size // 2] = -torch.inf
    rows = []
    for index in range(count):
        seed = random.Random(index).randrange(2**64)
        spec = SequenceSpec(samplings[index % len(samplings)], seed, 2, sample_index=index % 3)
        rows.append(Row(spec, [1] * (2 + 7 * index)))
    return logits_RV, rows


def choose(logits_RV: torch.Tensor, rows: list[Row], device: str) -> tuple[list[int], list[float]]:
    params = pack_rows(rows, vocab_size=logits_RV.shape[1], device=torch.device(device))
    # The interpreter's numpy would warn of what a GPU does silently.
    with np.errstate(over="ignore", invalid="ignore"):
        token_ids_R, largest_R = choose_by_kernels(logits_RV.to(device), params)
    assert token_ids_R.dtype == torch.int32
    assert largest_R.dtype == torch.float32
    return token_ids_R.tolist(), largest_R.tolist()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("vocab_size", [VOCABS[0], *at_release(VOCABS[1:])])
@pytest.mark.parametrize("name", SAMPLINGS)
def test_tokens_are_those_of_the_numpy_rule(name: str, vocab_size: int, device: str) -> None:
    logits_RV, rows = random_rows(SAMPLINGS[name], 16, vocab_size)
    untouched_RV = logits_RV.clone()
    token_ids, largest = choose(logits_RV, rows, device)
    assert token_ids == [
        choose_token(logits_V, row.spec, list(row.prefix))
        for logits_V, row in zip(logits_RV, rows, strict=True)
    ]
    assert largest == logits_RV.amax(dim=1).tolist()
    assert torch.equal(logits_RV, untouched_RV)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("change", ["seed", "position", "sample"])
def test_other_noise_gives_other_tokens(change: str, device: str) -> None:
    """Negative control: every argument of the noise matters."""
    _, rows = random_rows([SamplingParams()], 8, VOCABS[-1])
    flat_RV = torch.zeros(8, VOCABS[-1])
    others = [
        Row(
            replace(
                row.spec,
                seed=row.spec.seed ^ (1 << 40 if change == "seed" else 0),
                sample_index=row.spec.sample_index + (change == "sample"),
            ),
            row.prefix,
            (1,) if change == "position" else (),
        )
        for row in rows
    ]
    pairs = zip(choose(flat_RV, rows, device)[0], choose(flat_RV, others, device)[0], strict=True)
    assert all(one != other for one, other in pairs)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["some greedy", "all cuts"])
def test_a_row_alone_gives_what_it_gives_among_others(name: str, device: str) -> None:
    logits_RV, rows = random_rows(SAMPLINGS[name], 7, VOCABS[-1])
    alone = [choose(logits_RV[i : i + 1], rows[i : i + 1], device) for i in range(7)]
    token_ids, largest = choose(logits_RV, rows, device)
    assert token_ids == [one for (one,), _ in alone]
    assert largest == [one for _, (one,) in alone]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["greedy", "plain", "all cuts"])
def test_torch_and_kernels_agree_on_rows_of_a_wider_tensor(name: str, device: str) -> None:
    """If the device's torch has the kernels' logarithms, ids agree despite rounding."""
    logits_RV, rows = random_rows(SAMPLINGS[name], 9, 2 * BLOCK + 7)
    wider_RV = logits_RV.to(device)
    part_RV = wider_RV[1:, :-4]
    params = pack_rows(rows[1:], vocab_size=part_RV.shape[1], device=torch.device(device))
    for ours, torchs in zip(
        choose_by_kernels(part_RV, params), choose_by_torch(part_RV, params), strict=True
    ):
        assert torch.equal(ours, torchs)


@pytest.mark.parametrize("device", DEVICES)
def test_of_equal_logits_the_lowest_id_wins(device: str) -> None:
    logits_RV = torch.full((4, VOCABS[-1]), -3.0)
    logits_RV[1, [7, BLOCK + 3, 2 * BLOCK]] = 2.5
    logits_RV[2, [BLOCK + 3, 2 * BLOCK]] = torch.tensor([-0.0, 0.0])
    logits_RV[3, 2 * BLOCK] = -2.9
    rows = [Row(SequenceSpec(GREEDY, 1, 2), [1, 2])] * 4
    assert choose(logits_RV, rows, device)[0] == [0, 7, BLOCK + 3, 2 * BLOCK]
    assert choose(logits_RV, rows, device)[0] == logits_RV.numpy().argmax(axis=1).tolist()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["greedy", "plain", "all cuts"])
def test_what_is_not_finite_is_told_with_its_token(name: str, device: str) -> None:
    """NaN of either sign counts as the largest wherever it is, and harms no other row."""
    logits_RV, rows = random_rows(SAMPLINGS[name], 7, VOCABS[-1])
    expected = choose(logits_RV, rows, device)
    logits_RV[0, [BLOCK + 1, BLOCK + 2]] = torch.nan
    logits_RV[1, 2 * BLOCK] = -torch.nan
    logits_RV[2, 40] = torch.inf
    logits_RV[3] = -torch.inf
    token_ids, largest = choose(logits_RV, rows, device)
    assert token_ids == [BLOCK + 1, 2 * BLOCK, 40, 0, *expected[0][4:]]
    assert np.isnan(largest[:2]).all()
    assert largest[2:] == [torch.inf, -torch.inf, *expected[1][4:]]


@triton.jit
def _write_noise(
    all_words,
    noise,
    words,
    stride,
    positions,
    samples,
    SIZE: tl.constexpr,
    IS_INTERPRETED: tl.constexpr,
):
    row = tl.program_id(0)
    counters = tl.arange(0, SIZE // 4)
    first, second, third, fourth = choice_kernels.philox(
        counters, row, words, stride, positions, samples
    )
    drawn = tl.interleave(tl.interleave(first, third), tl.interleave(second, fourth))
    places = row * SIZE + tl.arange(0, SIZE)
    tl.store(all_words + places, drawn.to(tl.int64))
    tl.store(noise + places, choice_kernels.gumbel(drawn, IS_INTERPRETED))


@pytest.mark.parametrize("device", DEVICES)
def test_noise_is_that_of_numpy(device: str) -> None:
    """The same integers, and floats that differ at most by rounding."""
    streams = [Stream(0, 5, 0), Stream(7, 0, 3), Stream(2**64 - 1, 70_000, 1)]
    words_RV = torch.empty(3, 1024, dtype=torch.int64, device=device)
    noise_RV = torch.empty(3, 1024, device=device)
    keys_2R = torch.tensor([key_of_seed(one.seed) for one in streams], device=device).T.contiguous()
    _write_noise[(3,)](
        words_RV,
        noise_RV,
        keys_2R,
        3,
        torch.tensor([one.position for one in streams], device=device),
        torch.tensor([one.sample_index for one in streams], device=device),
        1024,
        INTERPRETED,
    )
    expected_RV = words_of_all(streams, 1024)
    assert words_RV.tolist() == expected_RV.tolist()
    # Rounding of two logarithms: where -log(E) is near 0, it is that of values near 1.
    np.testing.assert_allclose(noise_RV.cpu().numpy(), gumbel(expected_RV), rtol=2e-6, atol=5e-7)


@pytest.mark.release
def test_kernels_compile_once_and_read_sixteen_bytes_at_once(tmp_path: Path) -> None:
    """This holds for all numbers of rows."""
    found = compile_launches(launch_choices, tmp_path)
    assert found.keys() == {name for name in vars(choice_kernels) if name.endswith("_kernel")}
    # A thread of 128 reads 16 of 2048 tokens. The last kernel reads keys, which are few.
    loads = {name: [one.wide_loads for one in variants] for name, variants in found.items()}
    assert loads == {name: [0 if name == "finish_kernel" else 4] for name in found}
