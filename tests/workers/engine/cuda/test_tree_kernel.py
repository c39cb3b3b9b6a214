"""Our kernel for what a tree's tokens see beside their stem, against float64."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from tests.workers.engine.cuda.test_attention_kernel import (
    KINDS,
    SCALING,
    TOLERANCE,
    random_layer,
    random_queries,
)
from workers.engine.cuda.tree_kernel import attend_beside_stems

pytestmark = pytest.mark.long


@pytest.mark.parametrize(("width", "num_keys", "group"), [(4, 6, 3), (33, 70, 3), (2, 2, 70)])
@pytest.mark.parametrize(("device", "dtype"), KINDS)
def test_stem_and_own_keys_together(
    device: torch.device, dtype: torch.dtype, width: int, num_keys: int, group: int
) -> None:
    """Random masks beside stems of 40 and 7 keys, and of none; slots in any order."""
    stems, heads, head_size = [40, 0, 7], 2, 16
    layer = random_layer(device, dtype, pages=2, heads=heads, head_size=head_size)
    queries = random_queries(3 * width, heads * group, layer)
    generator = torch.Generator().manual_seed(7)
    slots_BK = torch.stack([torch.randperm(400, generator=generator)[:num_keys] for _ in stems])
    seen_BWK = torch.rand(3, width, num_keys, generator=generator) < 0.4
    seen_BWK[:, :, 0] = True

    keys_SAD, values_SAD = (
        one.double().cpu().repeat_interleave(group, dim=1)
        for one in (layer.keys_SHD, layer.values_SHD)
    )

    def exact(token: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores_AK = (
            torch.einsum("ad,kad->ak", queries[token].double().cpu(), keys_SAD[slots]) * SCALING
        )
        weights_AK = scores_AK.softmax(-1)
        return torch.einsum("ak,kad->ad", weights_AK, values_SAD[slots]), scores_AK.logsumexp(-1)

    # What must not be read is NaN.
    stem_TAD = torch.full(queries.shape, torch.nan, dtype=torch.float64)
    stem_lse_AT = torch.full((heads * group, 3 * width), torch.nan)
    for token in range(3 * width):
        if stem := stems[token // width]:
            stem_TAD[token], stem_lse_AT[:, token] = exact(token, torch.arange(stem))
    output_TAD = attend_beside_stems(
        queries,
        layer,
        slots_BK.to(device),
        seen_BWK.to(device),
        stem_TAD.to(queries),
        stem_lse_AT.to(device),
        torch.tensor(stems, dtype=torch.int32, device=device),
        SCALING,
    )
    assert output_TAD.dtype == dtype
    for token in range(3 * width):
        tree = token // width
        own = slots_BK[tree][seen_BWK[tree, token % width]]
        wanted_AD, _ = exact(token, torch.cat([torch.arange(stems[tree]), own]))
        assert (output_TAD[token].double().cpu() - wanted_AD).abs().max() < TOLERANCE[dtype]


@pytest.mark.parametrize(("device", "dtype"), KINDS)
def test_a_key_more_is_noticed(device: torch.device, dtype: torch.dtype) -> None:
    """Negative control: another mask changes the output, only of that token."""
    layer = random_layer(device, dtype, pages=1, heads=1, head_size=16)
    queries = random_queries(3, 2, layer)
    seen_BWK = torch.ones(1, 3, 4, dtype=torch.bool, device=device)
    outputs = []
    for sees in (True, False):
        seen_BWK[0, 1, 2] = sees
        outputs.append(
            attend_beside_stems(
                queries,
                layer,
                torch.tensor([[9, 4, 5, 200]], device=device),
                seen_BWK,
                torch.zeros_like(queries),
                torch.zeros(2, 3, device=device),
                torch.zeros(1, dtype=torch.int32, device=device),
                SCALING,
            )
        )
    differs_T = (outputs[0] - outputs[1]).abs().amax((1, 2)) > TOLERANCE[dtype]
    assert differs_T.tolist() == [False, True, False]
