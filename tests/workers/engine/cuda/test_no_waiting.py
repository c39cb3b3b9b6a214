"""No part of a step makes the host wait, except one small copy at its end."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.sampling import SamplingParams, SequenceSpec
from tests.tiny import make_tiny_checkpoint
from tests.workers.engine.cuda.engines import DEVICES, make_engine
from tests.workers.engine.trees import random_tree
from workers.engine.cuda.engine import CudaEngine
from workers.engine.slices import Slice
from workers.target import verdicts
from workers.target.step_sequences import Candidates, VerdictTask
from workers.verification.candidates import CandidateTree
from workers.verification.device_choice import Row, choose_tokens

VOCAB = 384
SAMPLED = SamplingParams(
    temperature=0.8, top_k=50, top_p=0.9, min_p=0.01, repetition_penalty=1.2, min_tokens=400
)
_WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "equal", "is_nonzero")
"""Operations whose result or shape the host must know, so it would wait for the device."""
_BY_INDICES = ("index", "index_put", "index_put_")
"""Masks among their indices are counted first, so the host would wait too."""


class RefuseWaiting(TorchDispatchMode):
    """Raises at the first operation that would make the host wait for a device."""

    def __init__(self) -> None:
        TorchDispatchMode.__init__(self)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        name = func.overloadpacket.__name__
        indices = args[1] if name in _BY_INDICES else ()
        by_mask = any(one is not None and one.dtype == torch.bool for one in indices)
        if name.startswith(_WAITING) or by_mask:
            raise AssertionError(f"{func} makes the host wait")
        return func(*args, **(kwargs or {}))


@contextmanager
def no_waiting(device: str) -> Iterator[None]:
    """Refuse waiting: on a GPU torch does, on a CPU RefuseWaiting."""
    if device == "cuda":
        with warnings.catch_warnings():  # torch warns that this is a prototype.
            warnings.simplefilter("ignore", UserWarning)
            torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
    else:
        with RefuseWaiting():
            yield


@pytest.fixture(scope="module", params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def engine(device: str, tmp_path_factory: pytest.TempPathFactory) -> CudaEngine:
    folder: Path = make_tiny_checkpoint(tmp_path_factory.mktemp("waits"), architecture="qwen3")
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    return make_engine(folder, device, dtype=dtype)


def test_no_step_waits_for_the_device(engine: CudaEngine, device: str) -> None:
    """Prefill, chains, trees, moved KV, and tokens drawn with every filter."""
    tree = random_tree(1, prefix_length=250, num_nodes=8, vocab_size=VOCAB)
    spec = SequenceSpec(SAMPLED, seed=3, prompt_length=100, end_token_ids=(0, 2))
    prompt = list(range(3, 103))
    # The first time captures graphs, loads kernels and allocates pinned memory.
    for guard in (nullcontext(), no_waiting(device)):
        with guard:
            engine.step([Slice([1], 0, prompt, 0), Slice([3, 4], 0, tree.prefix, 0)])
            chains = engine.step([Slice([1], 100, [5, 6, 7], 3), Slice([2], 0, [9], 1)])
            engine.step([tree.piece([3, 4], 249, 8, 9)])
            engine.move_kv([([3, 4], [(251, 250), (253, 251)])])
            rows = [Row(spec, prompt, tuple([5, 6, 7][:depth])) for depth in range(3)]
            choose_tokens(chains, [*rows, Row(spec, [9])])


def test_what_waits_is_noticed() -> None:
    """Negative control of RefuseWaiting."""
    values = torch.arange(4)
    for waits in (
        lambda: values.sum().item(),
        lambda: values[values > 1],
        lambda: values.nonzero(),
        lambda: bool(values.max() > 2),
    ):
        with pytest.raises(AssertionError, match="makes the host wait"), RefuseWaiting():
            waits()


def test_eight_bytes_a_row_come_back_in_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[tuple[torch.Tensor, ...]] = []

    def to_host(*tensors: torch.Tensor) -> list[torch.Tensor]:
        copies.append(tensors)
        return [tensor.cpu() for tensor in tensors]

    monkeypatch.setattr(verdicts, "to_host", to_host)
    tasks: list[VerdictTask] = []
    spans: list[tuple[int, int]] = []
    for number, window in enumerate((0, 8, 3)):
        spec = SequenceSpec(SamplingParams(), seed=number, prompt_length=5)
        tree = CandidateTree(tuple(range(3, 3 + window)), tuple(range(window)))
        tasks.append(
            VerdictTask(
                number,
                spec,
                [4] * 9,
                Candidates(tree),
                names_path=False,
                has_verdict=True,
                fed=(),
                top_tokens=[],
            )
        )
        first = spans[-1][1] if spans else 0
        spans.append((first, first + 1 + window))
    logits_TV = torch.randn(spans[-1][1], VOCAB, generator=torch.Generator().manual_seed(1))
    verdicts.device_verdicts(logits_TV, tasks, spans)
    (copied,) = copies
    assert sum(tensor.nbytes for tensor in copied) == 8 * logits_TV.shape[0]
