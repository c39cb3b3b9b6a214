"""Ranks of the GPU engine: on CPUs over gloo, and over NCCL where there are enough GPUs."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

import pytest
import torch
from torch.nn.functional import linear as linear_of
from transformers import AutoModelForCausalLM

from paceline.errors import CheckpointError, ConfigError, WorkerLostError
from paceline.sampling import SamplingParams, SequenceSpec
from paceline.structure import Structure
from paceline.v1 import target_pb2
from paceline.wire.sequences import spec_to_wire
from tests.release import at_release
from tests.tiny import Architecture, make_tiny_checkpoint
from tests.workers.engine.cuda.engines import make_engine, make_rank
from tests.workers.engine.parallel.ranks import Ranks
from tests.workers.engine.trees import multiply_row_by_row, random_tree
from workers.engine import engine as engine_module
from workers.engine.cuda import attention
from workers.engine.cuda import engine as cuda_engine_module
from workers.engine.cuda import step as step_module
from workers.engine.cuda.engine import CudaEngine
from workers.engine.forward import LayerOperations, choose_forward
from workers.engine.parallel.group import Deadlines, RankGroup
from workers.engine.parallel.sharding import Sharding
from workers.engine.slices import Slice
from workers.process import kernels
from workers.process.threads import WorkerClock
from workers.target.stepper import Stepper
from workers.target.verdicts import verdicts_of
from workers.verification.grammars import Grammars

pytestmark = pytest.mark.long

VOCAB, LENGTH = 302, 300
TOKEN_IDS = torch.randint(VOCAB, (LENGTH,), generator=torch.Generator().manual_seed(2)).tolist()
ARCHITECTURES: tuple[Architecture, ...] = ("llama", "qwen2", "qwen3")
TOLERANCE = 2e-4


@pytest.fixture(scope="module", params=[ARCHITECTURES[0], *at_release(ARCHITECTURES[1:])])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(
        tmp_path_factory.mktemp(request.param),
        architecture=request.param,
        vocab_size=VOCAB,
        num_attention_heads=8,
        intermediate_size=100,
    )


@pytest.fixture(scope="module")
def expected_TV(folder: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logits_TV: torch.Tensor = model(torch.tensor([TOKEN_IDS])).logits[0]
    return logits_TV


@pytest.mark.parametrize("degree", [2, 3])
def test_logits_are_those_of_transformers(
    folder: Path, expected_TV: torch.Tensor, degree: int
) -> None:
    """At once, and the end in windows. On a CPU, the reference attention is not invariant."""

    def work(group: RankGroup) -> tuple[torch.Tensor, torch.Tensor, bool | None]:
        engine = make_rank(folder, group)
        ranks.join(group)
        engine.agree()
        whole = engine.step([Slice([5, 2], 0, TOKEN_IDS, LENGTH)])
        pieces = [
            engine.step([Slice([5, 2], start, TOKEN_IDS[start : start + 10], 10)])
            for start in range(200, LENGTH, 10)
        ]
        return whole, torch.cat(pieces), engine.batch_invariant

    with Ranks(degree) as ranks:
        (whole_TV, windows_TV, invariant), *others = ranks.together(work)
    assert (whole_TV - expected_TV).abs().max() < TOLERANCE
    assert (windows_TV - expected_TV[200:]).abs().max() < TOLERANCE
    assert invariant is not None
    assert all(found is invariant for _, _, found in others), "all ranks say the same"
    assert all(rows.shape == (LENGTH, 0) for rows, _, _ in others)


def _row_by_row(linear: torch.nn.Linear, rows: torch.Tensor) -> torch.Tensor:
    made = linear_of(rows, linear.weight, linear.bias)
    for index, row in enumerate(rows.flatten(0, -2)):
        made.flatten(0, -2)[index] = linear_of(row, linear.weight, linear.bias)
    return made


@pytest.mark.parametrize("with_kernels", [False, True])
def test_ranks_say_together_whether_trees_keep_the_text(
    with_kernels: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """With our kernels' attention they do. torch's is the negative control: rank 0 logs it once."""
    pytest.importorskip("triton")
    if with_kernels and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("there is a GPU, so nothing is interpreted")
    folder = make_tiny_checkpoint(tmp_path, num_attention_heads=8)
    # On a CPU, whether the reference's rows are invariant depends on the machine.
    monkeypatch.setattr(engine_module, "rows_are_invariant", lambda engine: True)
    if with_kernels:
        # So does whether a row of torch's product depends on how many rows there are.
        monkeypatch.setattr(torch.nn.Linear, "forward", _row_by_row)
        multiply_row_by_row(monkeypatch)
        for name in ("can_use_kernel", "can_run_kernels"):
            monkeypatch.setattr(attention, name, lambda *_: True)
        one_at_a_time = Lock()  # Triton's interpreter is not made for threads.
        for name in ("attend", "attend_trees"):

            def locked(run: Any, *args: Any, **options: Any) -> Any:
                with one_at_a_time:
                    return run(*args, **options)

            monkeypatch.setattr(step_module, name, partial(locked, getattr(step_module, name)))

    def work(group: RankGroup) -> bool | None:
        engine = make_rank(folder, group)
        ranks.join(group)
        engine.agree()
        return engine.batch_invariant

    with Ranks(2) as ranks:
        assert ranks.together(work) == [True, True]
    lines = [one for one in caplog.messages if "trees of candidates keep the law" in one]
    assert len(lines) == int(not with_kernels)


PROMPT = [5, 6, 7, 8, 5, 6, 9]
GREEDY = SamplingParams(temperature=0.0)
SAMPLED = SamplingParams(temperature=1.0)
FILTERED = SamplingParams(temperature=0.8, top_k=20, repetition_penalty=1.2)


def decode(engine: CudaEngine, sampling: SamplingParams) -> list[int]:
    """Tokens as a shard's step stream decodes them; none at ranks other than 0."""
    stepper = Stepper(engine, verdicts_of, WorkerClock())
    spec = SequenceSpec(sampling, seed=4, prompt_length=len(PROMPT))
    opened = target_pb2.TargetSequence(sequence_id=1, spec=spec_to_wire(spec))
    piece = target_pb2.Slice(sequence_id=1, token_ids=PROMPT, verdict=True, new_blocks=[0])
    request = target_pb2.StepRequest(step=1, open=[opened], slices=[piece])
    found: list[int] = []
    for step in range(2, 30):
        found += [verdict.token_id for verdict in stepper.step(request).verdicts]
        fed = [TOKEN_IDS[step]]  # Ranks other than 0 do not know the result.
        start = len(PROMPT) + step - 2
        piece = target_pb2.Slice(sequence_id=1, start=start, token_ids=fed, verdict=True)
        request = target_pb2.StepRequest(step=step, slices=[piece])
    return found


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED, FILTERED])
def test_verdicts_are_those_of_one_rank(folder: Path, sampling: SamplingParams) -> None:
    """Rank 0 chooses from whole rows."""

    def work(group: RankGroup) -> list[int]:
        engine = make_rank(folder, group)
        ranks.join(group)
        engine.agree()
        return decode(engine, sampling)

    with Ranks(2) as ranks:
        found, others = ranks.together(work)
    assert found == decode(make_engine(folder, "cpu"), sampling)
    assert others == []


STRUCTURE = Structure.regex("[a-z ]{200,300}")


def follow_structure(
    engine: CudaEngine, folder: Path, fed: Sequence[int] = ()
) -> list[target_pb2.Verdict]:
    """As `decode`, with a structure and log probabilities. Feeds `fed`, else the tokens found."""
    grammars = Grammars(folder, vocab_size=VOCAB, end_token_ids=(0, 2))
    stepper = Stepper(engine, verdicts_of, WorkerClock(), grammars)
    spec = SequenceSpec(
        SAMPLED, 4, len(PROMPT), end_token_ids=(0, 2), structure=STRUCTURE, logprobs=3
    )
    opened = target_pb2.TargetSequence(sequence_id=1, spec=spec_to_wire(spec))
    piece = target_pb2.Slice(sequence_id=1, token_ids=PROMPT, verdict=True, new_blocks=[0])
    request = target_pb2.StepRequest(step=1, open=[opened], slices=[piece])
    found: list[target_pb2.Verdict] = []
    for step in range(2, 20):
        found += stepper.step(request).verdicts
        tokens = [fed[step - 2] if fed else found[-1].token_id]
        start = len(PROMPT) + step - 2
        piece = target_pb2.Slice(sequence_id=1, start=start, token_ids=tokens, verdict=True)
        request = target_pb2.StepRequest(step=step, slices=[piece])
    return found


def test_masks_and_log_probabilities_are_those_of_one_rank(folder: Path) -> None:
    expected = follow_structure(make_engine(folder, "cpu"), folder)
    tokens = [verdict.token_id for verdict in expected]

    def work(group: RankGroup) -> list[target_pb2.Verdict]:
        engine = make_rank(folder, group)
        ranks.join(group)
        engine.agree()
        return follow_structure(engine, folder, tokens)

    with Ranks(2) as ranks:
        found, others = ranks.together(work)
    assert others == []
    assert [verdict.token_id for verdict in found] == tokens
    assert len(set(tokens)) > 5
    for verdict, other in zip(found, expected, strict=True):
        ((one,), (two,)) = verdict.logprobs, other.logprobs
        assert one.top_ids == two.top_ids
        assert one.rank == two.rank
        assert one.logprob == pytest.approx(two.logprob, abs=TOLERANCE)
        assert list(one.top_logprobs) == pytest.approx(list(two.top_logprobs), abs=TOLERANCE)


def test_a_rank_reads_only_its_part_and_says_how_far_it_is(folder: Path) -> None:
    told: list[tuple[int, int]] = []

    with Ranks(2) as ranks:
        ranks.together(
            lambda group: make_rank(folder, group, progress=lambda *now: told.append(now))
        )
    done, total = told[-1]
    assert 0 < done <= total
    whole = sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(folder).parameters())
    assert total < 0.7 * whole * 4


def test_ranks_that_were_asked_for_different_things_are_refused(folder: Path) -> None:
    def work(group: RankGroup) -> None:
        engine = make_rank(folder, group, batch_invariant=group.place.rank == 0)
        ranks.join(group)
        engine.agree()

    with Ranks(2) as ranks:
        errors = ranks.errors(work)
    for error in errors:
        assert isinstance(error, CheckpointError)
        assert "differ in their form of weights" in str(error)


def test_ranks_on_one_device_are_refused_with_the_numbers() -> None:
    with Ranks(3, device_names=["GPU-a", "GPU-b", "GPU-a"]) as ranks:
        errors = ranks.errors(ranks.join)
    for error in errors:
        assert isinstance(error, ConfigError)
        assert "3 shards have 2 devices: rank 0 has GPU-a, rank 1 has GPU-b" in str(error)


def test_a_group_on_gpus_needs_nccl() -> None:
    if torch.distributed.is_nccl_available():
        pytest.skip("this build of torch has NCCL")
    with pytest.raises(ConfigError, match="needs NCCL, which torch"):
        Ranks(2, device_of=lambda rank: f"cuda:{rank}")


def rows_of(engine: CudaEngine) -> torch.Tensor:
    """A prefill's row, a plain step's, those of a window, and those of a tree."""
    tree = random_tree(3, prefix_length=20, num_nodes=5, vocab_size=VOCAB)
    found = [engine.step([Slice([1], 0, TOKEN_IDS[:20], 1), Slice([2], 0, tree.prefix, 0)])]
    found.append(engine.step([Slice([1], 20, TOKEN_IDS[20:21], 1)]))
    found.append(engine.step([Slice([1], 21, TOKEN_IDS[21:25], 2), Slice([3], 0, [5], 1)]))
    found.append(engine.step([tree.piece([2], 20, 5, 5)]))
    return torch.cat(found)


class MarkedOperations(LayerOperations):
    """Takes the place of our kernels."""


def test_all_ranks_run_our_kernels_or_none(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The check fails on rank 1. Each rank is a thread here, and has kernels of its own."""
    here = threading.local()
    failed = {1}
    chosen: dict[int, list[bool]] = {0: [], 1: []}

    def give_up(device: torch.device, why: str) -> None:
        failed.add(here.rank)
        kernels.give_up_kernels(device, why)

    def choose(model: Any, step: Any, operations: LayerOperations) -> Any:
        chosen[here.rank].append(isinstance(operations, MarkedOperations))
        return choose_forward(model, step, operations)

    def operations(engine: CudaEngine) -> LayerOperations:
        return LayerOperations() if here.rank in failed else MarkedOperations()

    monkeypatch.setattr(kernels, "_failed", set())
    monkeypatch.setattr(cuda_engine_module, "can_run_kernels", lambda _: here.rank not in failed)
    monkeypatch.setattr(cuda_engine_module, "check_kernels", lambda *_: None)
    monkeypatch.setattr(cuda_engine_module, "give_up_kernels", give_up)
    monkeypatch.setattr(cuda_engine_module, "choose_forward", choose)
    monkeypatch.setattr(CudaEngine, "_operations", operations)

    def work(group: RankGroup) -> torch.Tensor:
        here.rank = group.place.rank
        engine = make_rank(folder, group)
        ranks.join(group)
        engine.agree()
        return rows_of(engine)

    with Ranks(2) as ranks:
        rows, _ = ranks.together(work)
    assert chosen == {0: [True, False], 1: [False]}
    assert failed == {0, 1}
    assert caplog.text.count("they do not run on rank 1, whose log says why") == 1
    here.rank = 0
    monkeypatch.undo()
    assert (rows - rows_of(make_engine(folder, "cpu"))).abs().max() < TOLERANCE


@pytest.mark.gpu
def test_one_rank_on_a_gpu_meets_again_after_an_abort(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every layer has sums of NCCL."""
    monkeypatch.setattr(Sharding, "adds_up", lambda self, module: module.endswith("_proj"))
    with Ranks(1, device_of=lambda rank: "cuda:0") as ranks:

        def load(group: RankGroup) -> CudaEngine:
            return make_rank(folder, group, dtype=torch.bfloat16)

        (engine,) = ranks.together(load)

        def work(group: RankGroup) -> torch.Tensor:
            ranks.join(group, f"meeting {len(found)}")
            engine.agree()
            rows = group.settle(rows_of(engine)).cpu()
            group.leave()
            engine.check_computes()
            return rows

        found: list[torch.Tensor] = []
        for _ in range(3):
            found += ranks.together(work)
    assert all(torch.equal(rows, found[0]) for rows in found)
    plain = rows_of(make_engine(folder, "cuda", dtype=torch.bfloat16, graphs=False)).cpu()
    assert (found[0] - plain).abs().max() < 0.02 * plain.abs().max()


needs_two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def cuda_of(rank: int) -> str:
    return f"cuda:{rank}"


@pytest.mark.gpu
@needs_two_gpus
def test_ranks_on_gpus(folder: Path, expected_TV: torch.Tensor) -> None:
    """Never run yet, because no machine with two GPUs was available."""

    def work(group: RankGroup) -> tuple[torch.Tensor, torch.Tensor, bool | None]:
        torch.cuda.set_device(group.device)
        engine = make_rank(folder, group, dtype=torch.bfloat16)
        ranks.join(group)
        engine.agree()
        whole = engine.step([Slice([5, 2], 0, TOKEN_IDS, LENGTH)])
        last = engine.step([Slice([5, 2], LENGTH - 1, TOKEN_IDS[-1:], 1)])
        return group.settle(whole).cpu(), group.settle(last).cpu(), engine.batch_invariant

    with Ranks(2, device_of=cuda_of) as ranks:
        (whole_TV, last_TV, invariant), _ = ranks.together(work)
    assert invariant
    assert torch.equal(last_TV, whole_TV[-1:])
    assert (whole_TV - expected_TV).abs().max() < 0.05 * expected_TV.abs().max()


@pytest.mark.gpu
@needs_two_gpus
def test_a_gpu_whose_partner_is_gone_does_not_wait_for_ever() -> None:
    """Never run yet, as the test above."""
    with Ranks(2, device_of=cuda_of, deadlines=Deadlines(collective=5.0)) as ranks:
        ranks.meet()
        errors = ranks.errors(
            lambda group: (
                group.place.rank and group.settle(group.sum(torch.ones(2, device=group.device)))
            )
        )
        assert errors[0] is None
        assert isinstance(errors[1], WorkerLostError)
        ranks.meet("again")
        assert ranks.together(lambda group: group.exchange([group.place.rank])) == [[[0], [1]]] * 2
