"""Whose fault an exception in a step is: one slice's, the whole step's, or the device's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
import torch

from paceline.errors import InternalError, ProtocolError, WorkerLostError
from paceline.sampling import SamplingParams, SequenceSpec
from paceline.v1 import target_pb2
from paceline.wire.sequences import spec_to_wire
from tests.workers.grpc_peers import Stepper, open_channel
from tests.workers.target.test_device_verdicts import random_tasks
from workers.engine.cpu.engine import CpuEngine
from workers.engine.cpu.kv_cache import BLOCK_SIZE
from workers.engine.slices import Slice, blocks_begun
from workers.process.server import RunningServer
from workers.target.faults import MOST_FAILED_STEPS, Part, SliceFault, StepFailures, judge_each
from workers.target.step_sequences import VerdictTask
from workers.target.verdicts import device_verdicts, verdicts_of
from workers.verification.verify import Verdict

NAN = float("nan")
RULES = ("coupled", "one-hot")
CULPRITS = {3, 8, 83}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def rows_of(tasks: Sequence[VerdictTask], index: int) -> slice:
    first = sum(task.num_rows for task in tasks[:index])
    return slice(first, first + tasks[index].num_rows)


@pytest.mark.parametrize("bad", [NAN, float("inf"), -float("inf")])
def test_rows_that_cannot_be_chosen_from_leave_the_others_theirs(bad: float) -> None:
    """This holds for every rule in the same step."""
    tasks, logits_TV = random_tasks(RULES)
    tasks = [replace(task, sequence_id=100 + i) for i, task in enumerate(tasks)]
    expected = verdicts_of(logits_TV, tasks)
    assert not any(verdict.error for verdict in expected)
    for index in CULPRITS:
        logits_TV[rows_of(tasks, index)] = bad
    found = verdicts_of(logits_TV, tasks)
    assert {i for i, verdict in enumerate(found) if verdict.error} == CULPRITS
    for i, (now, before) in enumerate(zip(found, expected, strict=True)):
        assert now.sequence_id == before.sequence_id == 100 + i
        if i in CULPRITS:
            assert "expected a token that can" in now.error or "expected finite" in now.error
        else:
            assert now == before


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bad", [NAN, float("inf"), -float("inf")])
def test_the_same_by_tensors_of_a_device(bad: float, device: str) -> None:
    tasks, logits_TV = random_tasks(RULES)
    parts = [(task, rows_of(tasks, index)) for index, task in enumerate(tasks)]

    def judge(some: Sequence[Part[slice]]) -> list[Verdict]:
        spans = [(rows.start, rows.stop) for _, rows in some]
        return device_verdicts(logits_TV.to(device), [task for task, _ in some], spans)[0]

    expected = judge(parts)
    for index in CULPRITS:
        logits_TV[rows_of(tasks, index)] = bad
    found = judge_each(judge, parts)
    assert {i for i, one in enumerate(found) if isinstance(one, SliceFault)} == CULPRITS
    for i, (now, before) in enumerate(zip(found, expected, strict=True)):
        assert i in CULPRITS or now == before


def numbered(count: int) -> list[Part[int]]:
    (task, *_), _ = random_tasks(RULES)
    return [(replace(task, sequence_id=number), number) for number in range(count)]


def test_who_is_at_fault_is_found_in_few_tries() -> None:
    tries: list[int] = []

    def judge(parts: Sequence[Part[int]]) -> list[int]:
        tries.append(len(parts))
        if any(number == 40 for _, number in parts):
            raise KeyError("a defect")
        return [number for _, number in parts]

    found = judge_each(judge, numbered(64))
    assert found[:40] + found[41:] == [*range(40), *range(41, 64)]
    assert isinstance(found[40], SliceFault)
    assert "an unexpected KeyError" in found[40].reason
    assert "a defect" not in found[40].reason, "what it says is for the log"
    assert len(tries) == 1 + 2 * 6


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory"),
        torch.AcceleratorError("CUDA error: unspecified launch failure"),
        RuntimeError("Triton Error [CUDA]: device-side assert triggered"),
    ],
)
def test_what_is_no_slices_fault_is_raised(error: Exception) -> None:
    def judge(parts: Sequence[Part[int]]) -> list[int]:
        raise error

    with pytest.raises(type(error)):
        judge_each(judge, numbered(1))


def counting(check: Callable[[], None] = lambda: None) -> tuple[StepFailures, list[str]]:
    reasons: list[str] = []
    return StepFailures(reasons.append, check), reasons


def test_three_failed_steps_in_a_row_are_the_end() -> None:
    failures, reasons = counting()
    for _ in range(3):
        for _ in range(MOST_FAILED_STEPS - 1):
            told = failures.step_failed(7, ValueError("no such layer"))
            assert isinstance(told, InternalError)
            assert str(told) == "step 7 failed: ValueError: no such layer"
        failures.step_answered()
    assert not reasons
    for _ in range(MOST_FAILED_STEPS):
        failures.step_failed(8, torch.OutOfMemoryError("CUDA out of memory"))
    (reason,) = reasons
    assert reason.startswith("3 steps in a row failed")
    assert "CUDA out of memory" in reason


@pytest.mark.parametrize("lost", [ProtocolError("step: expected 2"), WorkerLostError("rank 1")])
def test_what_others_did_is_no_failure_of_this_process(lost: Exception) -> None:
    failures, reasons = counting()
    for _ in range(2 * MOST_FAILED_STEPS):
        assert failures.step_failed(7, lost) is None
    assert not reasons


def test_a_device_that_can_compute_nothing_is_the_end_at_once() -> None:
    def check() -> None:
        raise ValueError("the weights are gone")

    failures, reasons = counting(check)
    failures.step_failed(7, ValueError("the weights are gone"))
    (reason,) = reasons
    assert reason.startswith("the device does not work any more: step 7 failed: ValueError")


def test_a_device_error_is_the_end_at_once_though_it_comes_as_another_error() -> None:
    """A collective that fails because of it says that another rank is lost."""
    failures, reasons = counting()
    lost = WorkerLostError("rank 0 lost another shard")
    lost.__cause__ = torch.AcceleratorError("CUDA error: an illegal memory access")
    failures.step_failed(7, lost)
    (reason,) = reasons
    assert reason.startswith("the device does not work any more: step 7 failed")


def test_what_a_sequence_left_in_a_block_does_not_reach_the_next(checkpoint: Path) -> None:
    """Masked slots have weight 0, but 0 times NaN is NaN."""
    engine = CpuEngine(checkpoint, threads=1, kv_memory_bytes=4 << 20)
    token_ids = [5, 6, 7, 8, 9]
    expected_TV = engine.step([Slice([3, 4], 0, token_ids, 5)])
    for layer in engine._cache.layers:
        layer.keys_NHBD.fill_(NAN)
        layer.values_NHBD.fill_(NAN)
    found_TV = engine.step([Slice([3, 4], 0, token_ids, 5)])
    assert torch.equal(found_TV, expected_TV)


def test_blocks_are_begun_where_their_first_slot_is_written() -> None:
    table = [7, 8, 9]

    def begun(start: int, count: int) -> list[int]:
        return blocks_begun([Slice(table, start, [1] * count, 0)], BLOCK_SIZE)

    assert begun(0, 1) == [7]
    assert begun(1, 127) == []
    assert begun(1, 128) == [8]
    assert begun(128, 129) == [8, 9]
    assert begun(255, 2) == [9]


async def test_a_masked_row_and_a_bad_spec_leave_the_stream_to_others(shard: RunningServer) -> None:
    """The step goes straight to the shard, without a driver's checks."""
    good = SequenceSpec(SamplingParams(temperature=0.0), seed=0, prompt_length=3)
    masked = replace(good, sampling=SamplingParams(min_tokens=1), end_token_ids=tuple(range(384)))
    bad = replace(good, sampling=SamplingParams(temperature=-1.0))
    specs = {1: good, 2: masked, 3: good, 4: bad}
    async with open_channel(shard.address) as channel:
        stepper = Stepper(channel)
        first = await stepper.send(
            open=[
                target_pb2.TargetSequence(sequence_id=i, spec=spec_to_wire(spec))
                for i, spec in specs.items()
            ],
            slices=[
                target_pb2.Slice(sequence_id=i, token_ids=[5, 6, 7], verdict=True, new_blocks=[i])
                for i in specs
            ],
        )
        assert [one.sequence_id for one in first.verdicts] == [1, 2, 3, 4]
        told = {one.sequence_id: one.error for one in first.verdicts}
        assert told[1] == told[3] == ""
        assert "rule out the whole vocabulary" in told[2]
        assert "refuses its parameters: temperature: expected" in told[4]
        token_id = first.verdicts[0].token_id
        after = await stepper.send(
            close=[2, 4],
            slices=[
                target_pb2.Slice(sequence_id=i, start=3, token_ids=[token_id], verdict=True)
                for i in (1, 3)
            ],
        )
        assert after.verdicts[0].token_id == after.verdicts[1].token_id
        await stepper.end()


@pytest.mark.parametrize(
    ("raised", "told"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), "step 2 failed: OutOfMemoryError: CUDA out"),
        (ZeroDivisionError("division by zero"), "step 2 failed: ZeroDivisionError"),
    ],
)
async def test_a_failed_step_ends_its_stream_with_the_reason(
    shard: RunningServer, monkeypatch: pytest.MonkeyPatch, raised: Exception, told: str
) -> None:
    """The next stream finds the shard in order."""
    spec = SequenceSpec(SamplingParams(temperature=0.0), seed=0, prompt_length=3)
    step_part = CpuEngine.step_part
    fails = [True]

    def failing(engine: CpuEngine, slices: Sequence[Slice]) -> torch.Tensor:
        if fails and fails.pop():
            raise raised
        return step_part(engine, slices)

    async with open_channel(shard.address) as channel:
        with monkeypatch.context() as patch:
            patch.setattr(CpuEngine, "step_part", failing)
            stepper = Stepper(channel)
            with pytest.raises(grpc.aio.AioRpcError) as refusal:
                await stepper.open(spec, [5, 6, 7], [0], chunk=3)
        assert refusal.value.code() is grpc.StatusCode.INTERNAL
        assert (refusal.value.details() or "").startswith(told)
        again = Stepper(channel)
        await again.open(spec, [5, 6, 7], [0], chunk=3)
        await again.end()


async def test_a_defect_beside_the_steps_ends_the_stream_with_a_status(
    shard: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: object) -> None:
        raise KeyError("a secret")

    monkeypatch.setattr("workers.target.servicer.StepParts.__init__", broken)
    async with open_channel(shard.address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await Stepper(channel).call.read()
    assert refusal.value.code() is grpc.StatusCode.INTERNAL
    assert refusal.value.details() == "a defect ended the stream: KeyError"
