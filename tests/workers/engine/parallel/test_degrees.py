"""Every architecture at degrees 1 to 4 gives the logits and tokens of transformers' own model.

Degree 3 divides neither the heads nor the widths of these models; degree 4 does not divide the KV
heads.
"""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.tiny import Architecture, make_tiny_checkpoint
from tests.workers.engine.parallel.ranks import Ranks
from workers.engine.cpu.engine import CpuEngine
from workers.engine.parallel.group import RankGroup
from workers.engine.slices import Slice

DEGREES = (1, 2, 3, 4)
LENGTH = 150
"""Tokens in two blocks of KV."""
KV_BYTES = 1 << 21


@pytest.fixture(scope="module", params=get_args(Architecture))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(
        tmp_path_factory.mktemp(request.param),
        architecture=request.param,
        tie_word_embeddings=request.param == "llama",
        num_layers=2,
        **SIZES,
    )


SIZES = {
    "vocab_size": 302,
    "hidden_size": 64,
    "intermediate_size": 100,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}


@pytest.fixture(scope="module")
def token_ids() -> list[int]:
    return torch.randint(300, (LENGTH,), generator=torch.Generator().manual_seed(4)).tolist()


@pytest.fixture(scope="module")
def expected_TV(folder: Path, token_ids: list[int]) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        logits_TV: torch.Tensor = model(torch.tensor([token_ids])).logits[0]
    return logits_TV


def make_engine(folder: Path, group: RankGroup | None) -> CpuEngine:
    return CpuEngine(folder, threads=1, kv_memory_bytes=KV_BYTES, group=group)


@pytest.mark.parametrize("degree", DEGREES)
def test_logits_and_tokens_are_those_of_transformers(
    folder: Path, token_ids: list[int], expected_TV: torch.Tensor, degree: int
) -> None:
    piece = Slice([0, 1], 0, token_ids, LENGTH)

    def work(group: RankGroup) -> tuple[torch.Tensor, bool | None, int]:
        engine = make_engine(folder, group)
        ranks.join(group)
        engine.agree()
        return engine.step([piece]), engine.batch_invariant, engine.num_blocks

    if degree == 1:
        engine = make_engine(folder, None)
        logits_TV, invariant = engine.step([piece]), engine.batch_invariant
    else:
        with Ranks(degree) as ranks:
            results = ranks.together(work)
        logits_TV, invariant, _ = results[0]
        assert all(rows.shape == (LENGTH, 0) for rows, _, _ in results[1:])
        assert len({num_blocks for _, _, num_blocks in results}) == 1
    assert invariant
    assert logits_TV.shape == expected_TV.shape
    assert (logits_TV - expected_TV).abs().max() < 1e-5 * float(expected_TV.abs().max()) + 1e-5
    assert torch.equal(logits_TV.argmax(dim=1), expected_TV.argmax(dim=1))
