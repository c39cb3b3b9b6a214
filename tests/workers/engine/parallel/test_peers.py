"""Ranks that add and gather in kernels, through memory that all of them can read and write.

Triton's interpreter runs one kernel at a time in a process, so each rank is a process. Memory that
processes share stands for the memory of GPUs.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig

from paceline.errors import InternalError
from tests.tiny import make_tiny_checkpoint
from tests.workers.compiling import compile_launches
from tests.workers.engine.cuda.engines import make_engine, make_rank
from tests.workers.engine.cuda.rounding import round_as_devices_do
from tests.workers.engine.parallel.launches import launch_sums
from workers.engine.cuda import engine as engine_module
from workers.engine.cuda.linears import RoundedRows, Rounding, to_fp8
from workers.engine.parallel import group as group_module
from workers.engine.parallel import peer_kernels, peers
from workers.engine.parallel.cuts import Place
from workers.engine.parallel.group import Deadlines, RankGroup
from workers.engine.slices import Slice

interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="kernels are compiled"
)
SIZE = 24
TOKEN_IDS = (5, 6, 7, 8, 5, 6, 9, 11, 3, 4, 20, 7)
SLOTS = 4
ROWS = (1, 9)
"""9 rows are more than there are slots, and are added in two shots."""
Work = Callable[[RankGroup, str], Any]
"""What a rank does after a meeting; it gets its group and the address of the rendezvous."""


def _share(storage: torch.UntypedStorage) -> list[Any]:
    return list(storage._share_filename_cpu_())


def _attach(handle: list[Any], device: torch.device) -> torch.UntypedStorage:
    return torch.UntypedStorage._new_shared_filename_cpu(*handle)


def _run_rank(work: Work, rank: int, degree: int, host_name: Path | None, pipe: Any) -> None:
    torch.set_num_threads(1)
    peers.export, peers.attach = _share, _attach
    peers._BOOT = host_name or peers._BOOT
    peer_kernels.NUM_SLOTS = peer_kernels.GATHER_SLOT = SLOTS
    peer_kernels.TWO_SHOT_ROWS = max(ROWS)
    patch = pytest.MonkeyPatch()
    round_as_devices_do(patch)
    patch.setattr(group_module, "can_run_kernels", lambda device: True)
    deadlines = Deadlines(meeting=60.0, collective=60.0)
    group = RankGroup(Place(rank, degree), host="127.0.0.1", deadlines=deadlines)
    group.make_memory(SIZE * 4)
    pipe.send(group.rendezvous)
    rendezvous = pipe.recv()
    group.meet("first", rendezvous)
    pipe.send(work(group, rendezvous))
    pipe.recv()  # all are done
    group.close()


def run_ranks(work: Work, degree: int, *, names: dict[int, Path] | None = None) -> list[Any]:
    """What `work` returns at each rank. `names`: files with the names of some ranks' hosts."""
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(degree)]
    ours = [one for one, _ in pipes]
    processes = [
        context.Process(
            target=_run_rank, args=(work, rank, degree, (names or {}).get(rank), pipes[rank][1])
        )
        for rank in range(degree)
    ]
    try:
        for process in processes:
            process.start()
        rendezvous, *_ = [_receive(one) for one in ours]
        for one in ours:
            one.send(rendezvous)
        results = [_receive(one) for one in ours]
        for one in ours:
            one.send(None)
        for process in processes:
            process.join(60)
        assert [process.exitcode for process in processes] == [0] * degree
        return results
    finally:
        for process in processes:
            process.kill()


def _receive(pipe: Any) -> Any:
    assert pipe.poll(120), "a rank did not answer"
    return pipe.recv()


def parts_of(seed: int, num_rows: int, degree: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    parts = [torch.randn(num_rows, SIZE, generator=generator) for _ in range(degree)]
    return [part.to(dtype) for part in parts]


def _sums(group: RankGroup, rendezvous: str) -> list[bool]:
    """Whether the sums of different sizes, one after another, have the bits of gathered sums."""
    rank, degree = group.place.rank, group.place.degree
    assert group.table is not None
    right = []
    for seed, num_rows in enumerate(ROWS):
        for dtype in (torch.float32, torch.bfloat16):
            parts = parts_of(seed, num_rows, degree, dtype)
            total = parts[0].float()
            for other in parts[1:]:
                total = total + other.float()
            total = total.to(dtype)
            right.append(torch.equal(group.sum(parts[rank]), total))
            hidden, weight = parts_of(seed + 50, num_rows, 1, dtype)[0], torch.rand(SIZE).to(dtype)
            expected = hidden + total
            before, others = peer_kernels.TWO_SHOT_ROWS, hidden.clone()
            normed = group.sum_add_and_norm(hidden, parts[rank], weight, 1e-5)
            assert isinstance(normed, Tensor)
            # One shot for all rows, and the norm in float8.
            peer_kernels.TWO_SHOT_ROWS = 100
            for rounding in (Rounding(), Rounding(8), Rounding(None, torch.tensor(0.02))):
                again = others.clone()
                rows = group.sum_add_and_norm(again, parts[rank], weight, 1e-5, rounding)
                assert isinstance(rows, RoundedRows)
                same = zip(rows, to_fp8(normed, rounding), strict=True)
                right.append(all(torch.equal(a.float(), b.float()) for a, b in same))
                right.append(torch.equal(again, hidden))
            peer_kernels.TWO_SHOT_ROWS = before
            norm = torch.rms_norm(expected.float(), (SIZE,), weight.float(), 1e-5)
            right.append(torch.equal(hidden, expected))
            right.append(torch.allclose(normed.float(), norm, rtol=0.01, atol=1e-5))
        numbers = torch.arange(num_rows % 12) + 1000 * rank
        gathered = group.gather_numbers(numbers).tolist()
        wanted = [[1000 * r + i for i in range(num_rows % 12)] for r in range(degree)]
        right.append(gathered == wanted)
    # Padding is not added.
    group.num_rows = 2
    part = parts_of(9, 4, degree, torch.float32)
    total = sum(part[1:], start=part[0])
    found = group.sum(part[rank])
    right += [torch.equal(found[:2], total[:2]), torch.equal(found[2:], part[rank][2:])]
    return right


@pytest.mark.release
@interpreted
def test_sums_and_numbers_are_those_of_gathered_parts() -> None:
    for right in run_ranks(_sums, 3):
        assert len(right) == 2 * (2 * 9 + 1) + 2
        assert all(right), right


def _lose(group: RankGroup, rendezvous: str) -> list[str]:
    """Rank 1 stays away from a sum. Rank 0's kernel waits until it is released. They meet again."""
    found = []
    if group.place.rank == 0:
        threading.Timer(0.5, group._release).start()
        group.sum(torch.ones(6, SIZE))  # it returns, with a result that means nothing
        found.append("released")
    group.leave()
    try:
        group.sum(torch.ones(2, SIZE))
    except InternalError:
        found.append("has not met")
    group.meet("second", rendezvous)
    assert group.table is not None
    total = group.sum(torch.full((2, SIZE), 1.0 + group.place.rank))
    return [*found, f"sum {total.unique().tolist()}"]


@pytest.mark.long
@interpreted
def test_a_kernel_that_waits_in_vain_is_released_and_ranks_meet_again() -> None:
    first, second = run_ranks(_lose, 2)
    assert first == ["released", "has not met", "sum [3.0]"]
    assert second == ["has not met", "sum [3.0]"]


def _without_kernels(group: RankGroup, rendezvous: str) -> tuple[bool, list[float], object]:
    part, weight = torch.ones(2, SIZE), torch.ones(SIZE)
    return (
        group.table is None,
        group.sum(part)[0, :2].tolist(),
        group.sum_add_and_norm(part, part, weight, 1e-5),
    )


@pytest.mark.release
@interpreted
def test_ranks_of_several_hosts_do_without(tmp_path: Path) -> None:
    other = tmp_path / "name"
    other.write_text("another host")
    found = run_ranks(_without_kernels, 2, names={1: other})
    assert found == [(True, [2.0, 2.0], None)] * 2


def _rows_of_engine(
    folder: Path, group: RankGroup, rendezvous: str
) -> tuple[list[list[float]], int, int]:
    """Rows of a prefill, then of a window; and the numbers of both kinds of sums in the latter."""
    group.leave()
    pytest.MonkeyPatch().setattr(engine_module, "can_run_kernels", lambda device: True)
    engine = make_rank(folder, group, batch_invariant=False)
    group.meet("second", rendezvous)
    engine.agree()
    rows = [engine.step([Slice([1], 0, TOKEN_IDS[:9], 1)])]
    with (
        mock.patch.object(group, "sum", wraps=group.sum) as sums,
        mock.patch.object(group, "sum_add_and_norm", wraps=group.sum_add_and_norm) as fused,
    ):
        rows.append(engine.step([Slice([1], 9, TOKEN_IDS[9:12], 3)]))
    return torch.cat(rows).tolist(), sums.call_count, fused.call_count


@pytest.mark.release
@interpreted
def test_a_model_of_two_ranks_has_two_sums_a_layer_and_the_rows_of_one(tmp_path: Path) -> None:
    """Each sum includes the residual sum and the norm. One more sum is that of the embedding."""
    folder = make_tiny_checkpoint(tmp_path)
    engine = make_engine(folder, "cpu", batch_invariant=False)
    expected = [engine.step([Slice([1], 0, TOKEN_IDS[:9], 1)])]
    expected.append(engine.step([Slice([1], 9, TOKEN_IDS[9:12], 3)]))
    num_layers = int(AutoConfig.from_pretrained(folder).num_hidden_layers)
    (rows, *counts), (others, *_) = run_ranks(partial(_rows_of_engine, folder), 2)
    assert counts == [1, 2 * num_layers]
    assert others == [[]] * 4
    assert (torch.tensor(rows) - torch.cat(expected)).abs().max() < 2e-4


@pytest.mark.release
def test_the_kernels_fit_an_h100(tmp_path: Path) -> None:
    """No registers are kept in memory, and a thread reads 16 bytes of a row at once."""
    found = compile_launches(launch_sums, tmp_path)
    assert found.keys() == {"sum_kernel", "gather_kernel"}
    for variants in found.values():
        assert not any(one.spills for one in variants)
    # A part of each of four ranks, and one's own: each thread reads its 16 elements in two loads.
    # A row is added up in one order, in one shot and in two, rounded or not.
    sums = {one.row_sum for one in found["sum_kernel"]} - {""}
    assert len(sums) == 2, sums
    whole, normed, shared, *_ = [one.wide_loads for one in found["sum_kernel"]]
    assert (whole, normed) == (10, 14)
    # In two shots: one's own row in two loads, a quarter of each of four ranks in half a load,
    # and then each thread looks for its 16 elements at all four, of which one has them.
    assert shared == 10
