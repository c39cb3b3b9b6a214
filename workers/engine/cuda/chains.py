"""Chains of a drafter that grow by several passes without the host in between.

A captured pass feeds the last token of each chain, chooses the next one, notes it, and writes the
inputs of the pass after it: token, position, slot and number of keys. So passes are replayed back
to back, and the host reads all tokens at the end. It need not know a token to launch the next pass.

A chain that has fewer passes than others then feeds into the scratch page, as padding does.

Shapes: R rows, one for each chain and the others padding; K passes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.sampling import SamplingParams, SequenceSpec
from workers.engine.cuda.graphs import Recorder, Run
from workers.engine.cuda.kv_cache import PAGE_SIZE
from workers.engine.cuda.step import Layout, Shape, lay_out, split
from workers.engine.slices import Slice
from workers.verification.device_choice import (
    POSITIONS,
    Row,
    choose_rows,
    filters,
    packed_params,
    params_in,
)
from workers.verification.staging import to_device

BATCHES = (1, 4, 16)
"""Numbers of chains for which a pass is captured. For more chains, the host's part of a pass is
small, and the memory of choosing tokens is not.
"""
MOST_PASSES = 16
"""The most passes of one call."""


@dataclass(frozen=True, slots=True)
class Chain:
    """A sequence that `passes` passes extend by one token each.

    The first pass feeds a token at the position, and slot, `start`. `block_table` has the blocks of
    all tokens that are fed. The sampling parameters change no logits (device_choice.adjusts).
    """

    spec: SequenceSpec
    block_table: Sequence[int]
    start: int
    passes: int


@dataclass(frozen=True, slots=True)
class _Pass:
    """A captured pass and its memory. `packed_9R`: packed_params, then the passes left.

    `number_1`: the row of the results that the next pass writes.
    """

    shape: Shape
    array: Tensor
    packed_9R: Tensor
    number_1: Tensor
    token_ids_KR: Tensor
    largest_KR: Tensor
    replay: Callable[[], None]


class Chains:
    """The captured passes of one engine. As in Graphs, the function of a step is not stored."""

    def __init__(
        self,
        recorder: Recorder,
        *,
        table_pages: int,
        scratch_block: int,
        vocab_size: int,
        device: torch.device,
    ) -> None:
        self._recorder = recorder
        self._sizes = {"table_pages": table_pages, "scratch_block": scratch_block}
        self.vocab_size = vocab_size
        self._device = device
        self._captured: dict[tuple[int, bool], _Pass] = {}

    @property
    def most(self) -> int:
        """The most chains that `extend` takes."""
        return max((batch for batch, _ in self._captured), default=0)

    def capture(self, run: Run, shape: Shape, batch: int) -> None:
        """Capture passes over up to `batch` chains in a shape that holds them.

        There is one for chains of which some have top-k, top-p or min-p, and one for all others.
        """
        for cuts in (False, True):
            self._captured[batch, cuts] = self._capture(run, shape, batch, cuts=cuts)

    def _capture(self, run: Run, shape: Shape, batch: int, *, cuts: bool) -> _Pass:
        padding = lay_out([], shape, **self._sizes)
        array = to_device(padding.array, self._device)
        rows = [_row(SequenceSpec(SamplingParams(), seed=0, prompt_length=1), 1)] * batch
        packed_9R = to_device(self._packed(rows, [0] * batch), self._device)
        number_1 = torch.zeros(1, dtype=torch.int64, device=self._device)
        results = (MOST_PASSES, batch)
        token_ids_KR = torch.zeros(results, dtype=torch.int32, device=self._device)
        largest_KR = torch.zeros(results, dtype=torch.float32, device=self._device)

        def work() -> None:
            logits_RV = run(array, padding)[:batch].to(torch.float32)
            params = params_in(packed_9R[:8], draws=True, filters=cuts)
            chosen_R, largest_R = choose_rows(logits_RV, params)
            token_ids_KR.index_copy_(0, number_1, chosen_R[None])
            largest_KR.index_copy_(0, number_1, largest_R[None])
            number_1.add_(1)
            self._advance(array, padding, packed_9R, chosen_R)

        replay = self._recorder.record(work)
        return _Pass(shape, array, packed_9R, number_1, token_ids_KR, largest_KR, replay)

    def _advance(self, array: Tensor, layout: Layout, packed_9R: Tensor, chosen_R: Tensor) -> None:
        """Make the chosen tokens the input of the next pass."""
        parts = split(array, layout.shape, self._sizes["table_pages"])
        batch = chosen_R.shape[0]
        left_R = packed_9R[8].sub_(1).clamp_min_(0)
        goes_on_R = (left_R > 0).to(torch.int32)
        position_R = parts["positions"][:batch].add_(goes_on_R)
        parts["token_ids"][:batch].copy_(chosen_R)
        parts["chain_used"][:batch].add_(goes_on_R)
        packed_9R[POSITIONS].add_(goes_on_R)
        page_R1 = (position_R[:, None] // PAGE_SIZE).to(torch.int64)
        block_R = parts["chain_table"][:batch].gather(1, page_R1)[:, 0]
        slot_R = block_R * PAGE_SIZE + position_R % PAGE_SIZE
        scratch_slot = self._sizes["scratch_block"] * PAGE_SIZE
        parts["slots"][:batch].copy_(torch.where(goes_on_R > 0, slot_R, scratch_slot))

    @torch.inference_mode()
    def extend(self, chains: Sequence[Chain], token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Feed `token_ids` (on the device, one for each chain), and then what each pass chooses.

        Returns int32 token ids [K, chains] and the largest logits of their rows, float32, as
        choose_rows does. K is the most passes of a chain, at most MOST_PASSES. What is after a
        chain's own passes has no meaning. Both are on the device, and valid until the next call.
        """
        assert 0 < len(chains) <= self.most
        assert all(0 < chain.passes <= MOST_PASSES for chain in chains)
        cuts = any(filters(chain.spec.sampling, self.vocab_size) for chain in chains)
        batch = min(size for size, _ in self._captured if size >= len(chains))
        captured = self._captured[batch, cuts]
        slices = [Slice(chain.block_table, chain.start, [0], 1) for chain in chains]
        layout = lay_out(slices, captured.shape, **self._sizes)
        tables = split(layout.array, layout.shape, self._sizes["table_pages"])["chain_table"]
        for number, chain in enumerate(chains):
            tables[number, : len(chain.block_table)] = chain.block_table
        missing = batch - len(chains)
        rows = [_row(chain.spec, chain.start + 1) for chain in chains]
        packed_9R = self._packed(
            rows + rows[:1] * missing, [chain.passes for chain in chains] + [0] * missing
        )
        captured.array.copy_(to_device(layout.array, self._device))
        parts = split(captured.array, captured.shape, self._sizes["table_pages"])
        parts["token_ids"][: len(chains)].copy_(token_ids)
        captured.packed_9R.copy_(to_device(packed_9R, self._device))
        captured.number_1.zero_()
        count = max(chain.passes for chain in chains)
        for _ in range(count):
            captured.replay()
        results = captured.token_ids_KR, captured.largest_KR
        return results[0][:count, : len(chains)], results[1][:count, : len(chains)]

    def _packed(self, rows: Sequence[Row], passes: Sequence[int]) -> NDArray[np.int64]:
        packed_8R = packed_params(rows, self.vocab_size)
        return np.concatenate((packed_8R, np.array([passes], dtype=np.int64)))


def _row(spec: SequenceSpec, position: int) -> Row:
    """A row at this position. Only penalties would need the tokens before it."""
    return Row(spec, range(position))
