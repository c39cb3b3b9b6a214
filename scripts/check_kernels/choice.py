"""The choice of tokens from logits: `python -m scripts.check_kernels choice`.

The words of its lines:

- `noise`: the entries of some rows' noise whose bits differ from torch's. There may be a few, which
  differ by rounding.
- `ids KIND R`: R rows are sampled in the way KIND. Shown are the ids that differ from torch's, and
  whether the last row alone gets the same id. If two scores are equal up to rounding, the ids may
  differ, so a difference alone is not WRONG.
- `numpy`: the same, compared with the rule on the host.
- `hard rows`: ties, zeros of both signs, NaN and infinities.
- `time KIND R`: the time of the choice alone; then (`host`) the median time from the host's call to
  the arrival of its tokens.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.sampling import SamplingParams, SequenceSpec
from scripts.check_kernels.cases import Case, by_torch, measures_times, times, verdict
from workers.verification import choice_kernels
from workers.verification.choice import choose_token
from workers.verification.choice_kernels import INTERPRETED, choose_by_kernels
from workers.verification.device_choice import (
    Row,
    RowParams,
    choose_by_torch,
    choose_tokens,
    gumbel_noise_RV,
    pack_rows,
)
from workers.verification.staging import to_host

KINDS = {
    "greedy": [SamplingParams(temperature=0.0)],
    "drawn": [SamplingParams()],
    "temperatures": [SamplingParams(temperature=heat) for heat in (0.0, 0.3, 1.0, 2.5)],
    "top-k and top-p": [SamplingParams(top_k=50, top_p=0.9)],
    "top-p": [SamplingParams(top_p=0.95)],
    "min-p": [SamplingParams(min_p=0.05)],
}
TIMED = ("greedy", "drawn", "temperatures", "top-k and top-p")
_HOST_CALLS = 15
_ROWS_OF_A_SEQUENCE = 9
"""The rows of a window of eight candidates. They share a seed."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """The size of the vocabulary, and numbers of rows."""

    vocab: int
    noise_rows: int
    compared: tuple[int, ...]
    timed: tuple[int, ...]


LARGE = Sizes(vocab=128_256, noise_rows=32, compared=(1, 33), timed=(1, 64, 144))
SMALL = Sizes(vocab=2500, noise_rows=2, compared=(1, 10), timed=(2,))


def make_cases(device: torch.device, *, small: bool) -> Iterator[Case]:
    """The cases of this check. `small`: with tiny sizes, and no times."""
    check = ChoiceCheck(device, SMALL if small else LARGE)
    yield Case("noise", check.noise)
    for kind in KINDS:
        for count in check.sizes.compared:
            yield Case(f"ids {kind} {count}", lambda given=(kind, count): check.ids(*given))
    yield Case("numpy", check.numpy)
    for kind in ("greedy", "drawn", "top-k and top-p"):
        yield Case(f"hard rows {kind}", lambda kind=kind: check.hard_rows(kind))
    for kind in TIMED:
        for count in check.sizes.timed:
            yield Case(f"time {kind} {count}", lambda given=(kind, count): check.time(*given))


class ChoiceCheck:
    """The cases, for some sizes on some device."""

    def __init__(self, device: torch.device, sizes: Sizes) -> None:
        self.sizes = sizes
        self._device = device

    def noise(self) -> str:
        count, vocab = self.sizes.noise_rows, self.sizes.vocab
        params = self._packed(make_rows("drawn", count))
        rows = (params.keys_2R, params.positions_R, params.sample_indices_R)
        torchs_RV = gumbel_noise_RV(*rows, vocab_size=vocab)
        padded = triton.next_power_of_2(vocab)
        found_RV = torch.empty(count, padded, device=self._device)
        block = min(padded, 2048)
        _write_noise[(count, padded // block)](
            found_RV,
            padded,
            rows[0],
            rows[0].stride(0),
            *rows[1:],
            block,
            INTERPRETED,
        )
        found_RV = found_RV[:, :vocab]
        differ = int((found_RV != torchs_RV).sum())
        largest = float((found_RV - torchs_RV).abs().max())
        # Near 0 a logarithm has the absolute rounding error of an argument near 1.
        near = torch.allclose(found_RV, torchs_RV, rtol=2e-6, atol=5e-7)
        words = f"{differ} of {torchs_RV.numel()} differ, by at most {largest:.2g}"
        return f"{words}, {verdict(near, 'near')}"

    def ids(self, kind: str, count: int) -> str:
        logits_RV, rows = self._logits(count), make_rows(kind, count)
        params = self._packed(rows)
        ids_R, largest_R = self._by_kernels(logits_RV, params)
        torch_ids_R, torch_largest_R = choose_by_torch(logits_RV, params)
        alone, _ = self._by_kernels(logits_RV[-1:], self._packed(rows[-1:]))
        differ = int((ids_R != torch_ids_R).sum())
        same_largest = verdict(torch.equal(largest_R, torch_largest_R), "largest logits equal")
        return (
            f"{differ} of {count} differ from torch's, {same_largest}, "
            f"{verdict(torch.equal(alone, ids_R[-1:]), 'row alone equal')}"
        )

    def numpy(self) -> str:
        differ = []
        for kind in KINDS:
            logits_RV, rows = self._logits(6), make_rows(kind, 6)
            ids_R, _ = self._by_kernels(logits_RV, self._packed(rows))
            expected = [
                choose_token(logits_V, row.spec, list(row.prefix))
                for logits_V, row in zip(logits_RV.cpu(), rows, strict=True)
            ]
            pairs = zip(ids_R.tolist(), expected, strict=True)
            differ += [kind for one, other in pairs if one != other]
        return (
            f"{len(differ)} of {6 * len(KINDS)} ids differ from the host's {differ or ''}".strip()
        )

    def hard_rows(self, kind: str) -> str:
        vocab = self.sizes.vocab
        places = [vocab // 2, vocab // 2 + 1, vocab - 1]
        logits_RV = torch.full((6, vocab), -3.0, device=self._device)
        logits_RV[0, places] = 5.0
        logits_RV[1] = -torch.inf
        logits_RV[1, places[:2]] = torch.tensor([-0.0, 0.0], device=self._device)
        logits_RV[2, places[1]] = torch.nan
        logits_RV[3, 5] = -torch.nan
        logits_RV[4, places[0]] = torch.inf
        logits_RV[5] = -torch.inf
        ids_R, largest_R = self._by_kernels(logits_RV, self._packed(make_rows(kind, 6)))
        token_ids, largest = ids_R.tolist(), largest_R.tolist()
        right = token_ids[2:] == [places[1], 5, places[0], 0]
        right &= bool(np.array_equal(
            largest, [5.0, 0.0, np.nan, np.nan, np.inf, -np.inf], equal_nan=True
        ))  # fmt: skip
        if kind == "greedy":
            right &= token_ids[:2] == [places[0], places[0]]
        return verdict(right, "as they should be") + ("" if right else f" {token_ids} {largest}")

    def time(self, kind: str, count: int) -> str:
        logits_RV, rows = self._logits(count), make_rows(kind, count)
        params = self._packed(rows)
        timed = times(
            kernels=lambda _: self._by_kernels(logits_RV, params),
            torch=lambda _: choose_by_torch(logits_RV, params),
        )
        if not measures_times():
            return timed
        kernels, torchs = (
            self._host_us(logits_RV, rows, way) for way in (nullcontext(), by_torch())
        )
        return f"{timed}; host: kernels {kernels:.0f} us, torch {torchs:.0f} us"

    def _host_us(
        self, logits_RV: Tensor, rows: list[Row], way: AbstractContextManager[None]
    ) -> float:
        """Median microseconds from a call to the arrival of its tokens."""
        took = []
        with way:
            to_host(*choose_tokens(logits_RV, rows))
            for _ in range(_HOST_CALLS):
                torch.cuda.synchronize()
                began = time.perf_counter()
                to_host(*choose_tokens(logits_RV, rows))
                took.append((time.perf_counter() - began) * 1e6)
        return statistics.median(took)

    def _by_kernels(self, logits_RV: Tensor, params: RowParams) -> tuple[Tensor, Tensor]:
        # numpy, which the interpreter uses, warns of overflow and NaN; a GPU does not.
        with np.errstate(over="ignore", invalid="ignore"):
            return choose_by_kernels(logits_RV, params)

    def _logits(self, count: int) -> Tensor:
        """Logits as from an LM head in bfloat16, with many ties."""
        generator = torch.Generator(self._device).manual_seed(count)
        logits_RV = torch.randn(count, self.sizes.vocab, device=self._device, generator=generator)
        return (logits_RV * 3).to(torch.bfloat16).to(torch.float32)

    def _packed(self, rows: list[Row]) -> RowParams:
        return pack_rows(rows, vocab_size=self.sizes.vocab, device=self._device)


def make_rows(kind: str, count: int) -> list[Row]:
    """The rows of one window after another, with small and large seeds and positions."""
    rows = []
    for index in range(count):
        sequence = index // _ROWS_OF_A_SEQUENCE
        seed = (sequence + 1) * 0x9E3779B97F4A7C15 % 2**64
        sampling = KINDS[kind][sequence % len(KINDS[kind])]
        spec = SequenceSpec(sampling, seed, 4, sample_index=sequence % 2)
        rows.append(Row(spec, [1] * (9 + index)))
    return rows


@triton.jit
def _write_noise(
    noise,
    stride,
    words,
    words_stride,
    positions,
    samples,
    BLOCK: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Program (r, i): block i of row r's noise."""
    row, block = tl.program_id(0), tl.program_id(1)
    counters = block * (BLOCK // 4) + tl.arange(0, BLOCK // 4)
    one, two, three, four = choice_kernels.philox(
        counters, row, words, words_stride, positions, samples
    )
    drawn = tl.interleave(tl.interleave(one, three), tl.interleave(two, four))
    places = row * stride + block * BLOCK + tl.arange(0, BLOCK)
    tl.store(noise + places, choice_kernels.gumbel(drawn, INTERPRETED))
