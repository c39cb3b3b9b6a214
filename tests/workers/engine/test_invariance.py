"""A row's logits have the same bits in any batch, split or thread count."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import AutoModelForCausalLM

from tests.processor import NEEDS_BFLOAT16
from tests.tiny import Architecture, make_tiny_checkpoint
from workers.engine.cpu.engine import CpuEngine
from workers.engine.cpu.native import runs_natively
from workers.engine.cpu.step_plan import make_plan
from workers.engine.load.checkpoint import read_config
from workers.engine.load.model import load_on_cpu
from workers.engine.modules import SlabActivation
from workers.engine.options import WeightForm
from workers.engine.slices import Slice

LENGTH = 300
VOCAB = 384
MODELS: tuple[tuple[Architecture, WeightForm], ...] = (
    ("llama", "float32"),
    ("mistral", "float32"),
    ("qwen2", "float32"),
    ("qwen3", "float32"),
    ("llama", "bfloat16"),
    ("mistral", "bfloat16"),
    ("qwen2", "float16"),
    ("qwen3", "int8"),
)
SIZES: dict[str, Any] = {"hidden_size": 96, "intermediate_size": 160, "head_dim": 32}
NATIVE: dict[Architecture, dict[str, Any]] = {
    "mistral": {**SIZES, "sliding_window": None},
    "qwen3": SIZES,
}
"""Models whose whole steps our own kernels compute, where the processor has them."""
TABLES = ([5, 9, 7], [12, 13, 14], [20, 3, 4])


def make_engine(folder: Path, weights: WeightForm = "float32") -> CpuEngine:
    return CpuEngine(folder, weights=weights, threads=1, kv_memory_bytes=8 << 20)


@pytest.fixture(autouse=True)
def keep_thread_count() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(
            model,
            id="-".join(model),
            marks=NEEDS_BFLOAT16 if model == ("llama", "bfloat16") else (),
        )
        for model in MODELS
    ],
)
def model(request: pytest.FixtureRequest) -> tuple[Architecture, WeightForm]:
    chosen: tuple[Architecture, WeightForm] = request.param
    return chosen


@pytest.fixture(scope="module")
def folder(
    model: tuple[Architecture, WeightForm], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    architecture, _ = model
    return make_tiny_checkpoint(
        tmp_path_factory.mktemp(architecture),
        architecture=architecture,
        vocab_size=VOCAB,
        tie_word_embeddings=architecture == "llama",
        **NATIVE.get(architecture, {}),
    )


@pytest.fixture(scope="module")
def engine(folder: Path, model: tuple[Architecture, WeightForm]) -> CpuEngine:
    return make_engine(folder, model[1])


@pytest.fixture(scope="module")
def token_ids() -> list[int]:
    return torch.randint(VOCAB, (LENGTH,), generator=torch.Generator().manual_seed(1)).tolist()


@pytest.fixture(scope="module")
def expected(engine: CpuEngine, token_ids: list[int]) -> torch.Tensor:
    """The rows of the whole sequence, computed at once."""
    return engine.step([Slice([0, 1, 2], 0, token_ids, LENGTH)])


def feed(engine: CpuEngine, token_ids: list[int], widths: Sequence[int]) -> torch.Tensor:
    rows, start = [], 0
    for width in widths:
        end = min(start + width, len(token_ids))
        rows.append(engine.step([Slice(TABLES[0], start, token_ids[start:end], end - start)]))
        start = end
    return torch.cat(rows)


def test_the_self_test_agrees(
    engine: CpuEngine, folder: Path, model: tuple[Architecture, WeightForm]
) -> None:
    assert engine.batch_invariant
    has_kernels = runs_natively(read_config(folder), model[1])
    assert (engine._native is not None) == has_kernels
    assert not has_kernels or model[0] in NATIVE


def test_rows_are_close_to_transformers(
    folder: Path,
    model: tuple[Architecture, WeightForm],
    token_ids: list[int],
    expected: torch.Tensor,
) -> None:
    logits_TV = _theirs(folder, token_ids, torch.float32)
    if model[1] == "float32":
        bound = 2e-4
    elif model[1] == "bfloat16":  # As imprecise as transformers itself is in bfloat16.
        bound = 1.5 * float((logits_TV - _theirs(folder, token_ids, torch.bfloat16)).abs().max())
    else:  # int8 has weights in 127 steps, and activations in bfloat16.
        bound = 0.05 * float(logits_TV.abs().max())
    assert (logits_TV - expected).abs().max() < bound


def _theirs(folder: Path, token_ids: list[int], dtype: torch.dtype) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    with torch.no_grad():
        logits_TV: torch.Tensor = model(torch.tensor([token_ids])).logits[0].float()
    return logits_TV


@pytest.mark.parametrize(
    "widths",
    [[1] * LENGTH, [2] * 150, [100, 1, 1, 1, 25, 3, 2, 167], [128, 128, 44], [33] * 10, [17] * 18],
    ids=lambda widths: f"{widths[0]}x{len(widths)}",
)
def test_any_split_of_the_prompt(
    engine: CpuEngine, token_ids: list[int], expected: torch.Tensor, widths: list[int]
) -> None:
    assert torch.equal(feed(engine, token_ids, widths), expected)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    cuts=st.tuples(*[st.tuples(st.integers(0, 290), st.integers(1, 40)) for _ in TABLES]),
    threads=st.sampled_from([1, 2, 3]),
)
def test_any_batch(
    engine: CpuEngine,
    token_ids: list[int],
    expected: torch.Tensor,
    cuts: tuple[tuple[int, int], ...],
    threads: int,
) -> None:
    slices, wanted = [], []
    for table, (start, width) in zip(TABLES, cuts, strict=True):
        if start:
            engine.step([Slice(table, 0, token_ids[:start], 0)])
        end = min(start + width, LENGTH)
        slices.append(Slice(table, start, token_ids[start:end], end - start))
        wanted.append(expected[start:end])
    torch.set_num_threads(threads)
    assert torch.equal(engine.step(slices), torch.cat(wanted))


@pytest.mark.parametrize(
    ("tables", "num_runs"),
    [
        pytest.param(([4, 2, 7], [3, 6, 5]), 1, id="neighbors of each other, in no order"),
        pytest.param(([4, 2, 7], [8, 0, 5]), 4, id="apart"),
        pytest.param(([4, 5, 6], [4, 5, 7]), 2, id="a shared prefix"),
        pytest.param(([4], [5, 6, 7]), 1, id="of one chunk and of three"),
    ],
)
def test_where_blocks_lie(
    engine: CpuEngine,
    token_ids: list[int],
    expected: torch.Tensor,
    tables: tuple[list[int], list[int]],
    num_runs: int,
) -> None:
    """One call reads neighboring blocks, whichever sequence owns them. Bits stay the same."""
    lengths = [min(LENGTH, 128 * len(table)) for table in tables]
    for table, length in zip(tables, lengths, strict=True):
        engine.step([Slice(table, 0, token_ids[: length - 1], 0)])
    slices = [
        Slice(table, length - 1, token_ids[length - 1 : length], 1)
        for table, length in zip(tables, lengths, strict=True)
    ]
    rows = engine.step(slices)
    for row, length in zip(rows, lengths, strict=True):
        assert torch.equal(row, expected[length - 1])
    (group,) = make_plan(slices, num_query_heads=6, num_kv_heads=2, min_tokens=2).groups
    assert len(group.runs) == num_runs


def test_rejected_candidates_leave_no_trace(
    engine: CpuEngine, token_ids: list[int], expected: torch.Tensor
) -> None:
    table = TABLES[1]
    engine.step([Slice(table, 0, token_ids[:140], 1)])
    wrong = [(token + 1) % VOCAB for token in token_ids[140:150]]
    engine.step([Slice(table, 140, wrong, len(wrong))])
    rows = engine.step([Slice(table, 140, token_ids[140:146], 6)])
    assert torch.equal(rows, expected[140:146])


def test_logits_only_where_asked(
    engine: CpuEngine, token_ids: list[int], expected: torch.Tensor
) -> None:
    rows = engine.step(
        [
            Slice(TABLES[0], 0, token_ids[:50], 2),
            Slice(TABLES[1], 0, token_ids[:7], 0),
            Slice(TABLES[2], 0, token_ids[:1], 1),
        ]
    )
    assert torch.equal(rows, torch.cat([expected[48:50], expected[:1]]))
    assert engine.step([Slice(TABLES[1], 7, token_ids[7:9], 0)]).shape == (0, VOCAB)
    assert rows.dtype == torch.float32
    assert engine.forward_seconds > 0


class RoundsByBatch(nn.Module):
    """Exaggerates a kernel that rounds differently for other batch shapes."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.inner(rows)
        return result * (1 + 1e-6 * (rows.shape[-2] % 2))


def test_the_self_test_rejects_an_engine_whose_rows_depend_on_the_batch(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load_perturbed(*arguments: Any, **options: Any) -> nn.Module:
        model = load_on_cpu(*arguments, **options)
        mlp = model.get_submodule("model.layers.1.mlp")
        mlp.down_proj = RoundsByBatch(mlp.get_submodule("down_proj"))
        return model

    monkeypatch.setattr("workers.engine.cpu.engine.load_on_cpu", load_perturbed)
    assert not make_engine(folder).batch_invariant


def test_plain_activations_depend_on_where_they_lie_and_slabs_do_not() -> None:
    # On CPUs with vector units, silu's scalar remainder rounds differently from its vector code.
    values = torch.randn(100_003, generator=torch.Generator().manual_seed(3)) * 3

    def in_pieces(activation: nn.Module) -> torch.Tensor:
        return torch.cat([activation(piece) for piece in values.split(7)])

    slab = SlabActivation(nn.SiLU())
    assert torch.equal(in_pieces(slab), slab(values))


def test_an_engine_may_take_fewer_threads_than_it_has(
    folder: Path, model: tuple[Architecture, WeightForm]
) -> None:
    engine = CpuEngine(folder, weights=model[1], threads=2, kv_memory_bytes=8 << 20)
    rows, threads = [], set()
    for _ in range(40):
        rows.append(engine.step([Slice(TABLES[0], 0, [3, 1, 2], 3)]))
        threads.add(torch.get_num_threads())
    assert threads == {1, 2}
    assert all(torch.equal(one, rows[0]) for one in rows)
